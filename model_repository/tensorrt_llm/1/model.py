"""tensorrt_llm: token ids to token ids. Translates requests; the engine runs in its own thread.

The engine hands every output to one responder thread, which talks to Triton: sending a response must not hold up the
engine's next step.
"""

import json
import logging
import queue
import threading
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from kvseek.engine.errors import KvseekError
from kvseek.engine.request import FinishReason
from kvseek.engine.service import EngineService
from kvseek.server.doorbell import PARAMETER, Ringer, is_name
from kvseek.server.metrics import ServerMetrics
from kvseek.server.tensors import read_tensors
from kvseek.server.translation import engine_request, one_row, refuse_parameters, scalar

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def send_error(sender, message):
    """End a stream with an error: in one response, for a BLS caller never sees an end that follows an error."""
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message)), flags=FINAL)


class Stream:
    """One request's way back to its client."""

    def __init__(self, sender, request_id, tensors, prompt_ids):
        self.sender = sender
        self.request_id = request_id
        self.streaming = bool(scalar(tensors, "streaming", False))
        self.wants_progress = bool(scalar(tensors, "return_prefill_progress", False))
        excluded = self.streaming or scalar(tensors, "exclude_input_in_output", False)
        self.ids = [] if excluded else list(prompt_ids)  # a complete answer begins with its prompt unless excluded
        self.handle = None
        self.doorbell = None  # where to ring after every response but the only one of a refusal
        self.sent = 0  # responses
        self.ended = False

    def send(self, output):
        """Send what an output gives; False if that is nothing."""
        if output.token_id is not None:
            self.ids.append(output.token_id)
        last = output.finish_reason is not None
        progress = output.token_id is None and not last
        if not (last or (self.streaming and not progress) or (self.wants_progress and progress)):
            return False
        ids = [] if progress else self.ids
        tensors = [
            pb_utils.Tensor("output_ids", one_row(ids)),
            pb_utils.Tensor("sequence_length", np.array([[len(ids)]], dtype=np.int32)),
            pb_utils.Tensor("finish_reason", np.array([[output.finish_reason or ""]], dtype=object)),
            pb_utils.Tensor("cached_tokens", np.array([[output.cached_tokens]], dtype=np.int32)),
            pb_utils.Tensor("attended_tokens", np.array([[output.attended_tokens]], dtype=np.float32)),
            pb_utils.Tensor("prefill_progress", np.array([[output.prefill_progress]], dtype=np.float32)),
        ]
        # The last one is the end too, so that a BLS caller need not wait for another one.
        self.sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if last else 0)
        if self.streaming and not progress:
            self.ids = []
        return True


class TritonPythonModel:
    def initialize(self, args):
        logging.basicConfig(level=logging.INFO)
        parameters = json.loads(args["model_config"])["parameters"]
        threads = int(parameters["threads"]["string_value"])
        self.service = EngineService.load(Path(parameters["engine_dir"]["string_value"]), threads or None)
        self.metrics = ServerMetrics(pb_utils)
        self.ringer = Ringer()
        self.streams = {}  # request id given by the client → stream, for `stop`
        self.outputs = queue.SimpleQueue()
        self.responder = threading.Thread(target=self.respond, name="responder", daemon=True)
        self.responder.start()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                self.start(request, sender)
            except Exception as error:  # one request's fault must not end the others
                if not isinstance(error, KvseekError):
                    logging.exception("a token request failed")
                send_error(sender, str(error))

    def start(self, request, sender):
        parameters = json.loads(request.parameters() or "{}")
        doorbell = parameters.pop(PARAMETER) if is_name(parameters.get(PARAMETER)) else None
        refuse_parameters(json.dumps(parameters), "tensorrt_llm")
        tensors = read_tensors(request)
        if scalar(tensors, "stop", False):
            self.stop(request.request_id())
            sender.send(flags=FINAL)
            return
        engine = engine_request(tensors, self.service.config.model.eos_token_ids)
        stream = Stream(sender, request.request_id(), tensors, engine.prompt_ids)
        stream.doorbell = doorbell
        self.streams[stream.request_id] = stream  # before the first output, which may be the last
        try:
            stream.handle = self.service.submit(engine, lambda output: self.outputs.put((stream, output)))
        except KvseekError:
            self.forget(stream)
            raise

    def stop(self, request_id):
        """A request with `stop` ends the running one that has the same request id, as in TensorRT-LLM."""
        running = self.streams.get(request_id) if request_id else None
        if running is not None and running.handle is not None:
            self.service.cancel(running.handle)

    def forget(self, stream):
        if self.streams.get(stream.request_id) is stream:
            del self.streams[stream.request_id]

    def respond(self):
        while (item := self.outputs.get()) is not None:
            stream, output = item
            self.metrics.record(output)
            if stream.ended:
                continue
            try:
                self.pass_on(stream, output)
            except Exception:
                logging.exception("a response could not be sent; its request is cancelled")
                self.service.cancel(stream.handle)

    def pass_on(self, stream, output):
        if output.finish_reason is None and stream.sender.is_cancelled():
            self.service.cancel(stream.handle)
            return
        if output.finish_reason is not None:
            self.forget(stream)
            stream.ended = True
        if output.finish_reason is FinishReason.ERROR:
            send_error(stream.sender, output.error)
            sent = True
        else:
            sent = stream.send(output)
        stream.sent += sent
        if sent and stream.doorbell:
            self.ringer.ring(stream.doorbell, stream.request_id, stream.sent)

    def finalize(self):
        self.service.close()
        self.outputs.put(None)
        self.responder.join()
        self.metrics.close()
