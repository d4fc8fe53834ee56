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
from kvseek.server.doorbell import PARAMETER, Doorbell, paced
from kvseek.server.ended_iterators import EndedIterators
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


def is_last(response):
    """Whether tensorrt_llm sends nothing after this: an error, an empty end, or outputs with a reason to finish."""
    if response.has_error():
        return True
    outputs = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
    return not outputs or bool(outputs["finish_reason"].item())


class TritonPythonModel:
    def initialize(self, args):
        logging.basicConfig(level=logging.INFO)
        parameters = json.loads(args["model_config"])["parameters"]
        engine_dir = Path(parameters["engine_dir"]["string_value"])
        slots = EngineConfig.load(engine_dir).max_batch_size  # first: it says so if the engine is of another format
        self.tokenizer = Tokenizer(engine_dir)
        self.tokenizer.encode("")  # reads the files now rather than in the first request
        self.iterators = EndedIterators()
        self.doorbell = Doorbell()
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
        if self.iterators.is_cancelled(sender):
            return  # its client left while it waited here: nothing has begun
        inner_id = uuid.uuid4().hex
        stopped, failure = False, None
        for response in self.token_responses(inner_id, request.token_tensors()):
            if response.has_error():
                failure = KvseekError(response.error().message())
                continue  # the iterator must be used up: one that is left keeps the server from shutting down
            outputs = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            if not outputs or stopped:
                continue  # the empty end of the stream, or tokens drawn before the stop arrived
            try:
                stopped = self.pass_on(sender, request, outputs)
            except Exception as error:  # raised when the iterator is used up
                stopped, failure = True, error
            if stopped:
                self.stop(inner_id)
        self.iterators.is_cancelled(sender)  # asked again because that lets go of what ended above
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback has this frame and so the sender, which is to be freed now, not by a collection

    def pass_on(self, sender, request, outputs):
        """Send what one response of tensorrt_llm gives; True if the request needs no more of them."""
        for chunk in request.push(outputs):
            self.send(sender, chunk)
        return request.ended or self.iterators.is_cancelled(sender)

    def token_responses(self, request_id, tensors):
        """Responses of tensorrt_llm to one request, which the caller uses up; EndedIterators says why they are kept."""
        with self.doorbell.expecting(request_id) as rings:
            responses = self.ask(request_id, tensors, OUTPUTS, {PARAMETER: self.doorbell.name})
            try:
                yield from paced(responses, rings, is_last)
            finally:
                self.iterators.keep(responses)

    def ask(self, request_id, tensors, outputs, parameters):
        inputs = [pb_utils.Tensor(name, value) for name, value in tensors.items()]
        return pb_utils.InferenceRequest(
            request_id=request_id,
            model_name="tensorrt_llm",
            inputs=inputs,
            requested_output_names=outputs,
            parameters=parameters,
        ).exec(decoupled=True)

    def stop(self, inner_id):
        """End the inner request by TensorRT-LLM's own means: a request of the same id with `stop`."""
        tensors = {
            "input_ids": np.zeros((1, 1), dtype=np.int32),
            "request_output_len": np.ones((1, 1), dtype=np.int32),
            "stop": np.array([[True]]),
        }
        responses = self.ask(inner_id, tensors, ["output_ids"], {})
        for _ in responses:
            pass  # there is but one
        self.iterators.keep(responses)

    def send(self, sender, chunk):
        text = np.array([[chunk.pop("text_output").encode("utf-8")]], dtype=object)
        tensors = [pb_utils.Tensor("text_output", text)]
        tensors += [pb_utils.Tensor(name, np.array([[v]], dtype=CHUNK_DTYPES[name])) for name, v in chunk.items()]
        sender.send(pb_utils.InferenceResponse(tensors))

    def finalize(self):
        self.pool.shutdown(wait=True)
