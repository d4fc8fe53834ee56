"""tensorrt_llm_bls: text to text. Tokenises, calls tensorrt_llm through BLS, and turns its tokens into text."""

import json
import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from kvseek.engine.config import EngineConfig
from kvseek.engine.errors import KvseekError
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.tensors import read_tensors
from kvseek.server.text_request import TextRequest
from kvseek.server.translation import refuse_parameters

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
OUTPUTS = ["output_ids", "finish_reason", "cached_tokens", "attended_tokens", "prefill_progress"]
CHUNK_DTYPES = {
    "num_input_tokens": np.int32,
    "num_output_tokens": np.int32,
    "finish_reason": object,
    "cached_tokens": np.int32,
    "attended_tokens": np.float32,
    "prefill_progress": np.float32,
}
WAITING_PER_SLOT = 64  # requests that may wait in tensorrt_llm for each one that runs; more wait here


def token_request(request_id, tensors, outputs):
    return pb_utils.InferenceRequest(
        request_id=request_id, model_name="tensorrt_llm", inputs=tensors, requested_output_names=outputs
    )


class TritonPythonModel:
    def initialize(self, args):
        logging.basicConfig(level=logging.INFO)
        parameters = json.loads(args["model_config"])["parameters"]
        engine_dir = Path(parameters["engine_dir"]["string_value"])
        slots = EngineConfig.load(engine_dir).max_batch_size  # first: it says so if the engine is of another format
        self.tokenizer = Tokenizer(engine_dir)
        self.tokenizer.encode("")  # reads the files now rather than in the first request
        self.pool = ThreadPoolExecutor(slots * WAITING_PER_SLOT, thread_name_prefix="stream")

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            self.pool.submit(self.serve, sender, read_tensors(request), request.parameters())

    def serve(self, sender, tensors, parameters):
        """One request from its first to its last response; whatever fails ends this stream only."""
        try:
            refuse_parameters(parameters, "tensorrt_llm_bls")
            self.answer(sender, TextRequest(tensors, self.tokenizer))
        except Exception as error:
            if not isinstance(error, KvseekError):
                logging.exception("a text request failed")
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))), flags=FINAL)
        else:
            sender.send(flags=FINAL)

    def answer(self, sender, request):
        inner_id = uuid.uuid4().hex
        tensors = [pb_utils.Tensor(name, value) for name, value in request.token_tensors().items()]
        inner = token_request(inner_id, tensors, OUTPUTS)
        stopped, error = False, ""
        for response in inner.exec(decoupled=True):
            if response.has_error():
                error = response.error().message()
                continue  # the iterator must be used up: one that is left keeps the server from shutting down
            outputs = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            if not outputs or stopped:
                continue  # the empty end of the stream, or tokens drawn before the stop arrived
            for chunk in request.push(outputs):
                self.send(sender, chunk)
            if request.ended or sender.is_cancelled():
                stopped = True
                self.stop(inner_id)
        if error:
            raise KvseekError(error)

    def stop(self, inner_id):
        """End the inner request by TensorRT-LLM's own means: a request of the same id with `stop`."""
        tensors = {"input_ids": np.zeros((1, 1)), "request_output_len": np.ones((1, 1))}
        inputs = [pb_utils.Tensor(name, value.astype(np.int32)) for name, value in tensors.items()]
        inputs.append(pb_utils.Tensor("stop", np.array([[True]])))
        for _ in token_request(inner_id, inputs, ["output_ids"]).exec(decoupled=True):
            pass

    def send(self, sender, chunk):
        text = np.array([[chunk.pop("text_output").encode("utf-8")]], dtype=object)
        tensors = [pb_utils.Tensor("text_output", text)]
        tensors += [pb_utils.Tensor(name, np.array([[v]], dtype=CHUNK_DTYPES[name])) for name, v in chunk.items()]
        sender.send(pb_utils.InferenceResponse(tensors))

    def finalize(self):
        self.pool.shutdown(wait=True)
