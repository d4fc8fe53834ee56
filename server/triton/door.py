"""A Triton model as a door: passes requests on to the engine process, and the engine's outputs back to Triton.

No thread waits for a request. Worker threads translate requests (tokenising takes long), the engine client's thread sends
responses. The gRPC door tells when a client has left. Triton is not asked about that: once in some ten thousand requests, 2.51
crashes if the last response is sent while it looks whether the client has left.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvseek.core.config_file import read_config
from kvseek.core.errors import ErrorCode, KvseekError, QueueFullError, RequestError, code_of
from kvseek.core.request import FinishReason, StepOutput
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.requests.engine_client import EngineClient
from kvseek.server.requests.served_request import MAX_ID_CHARACTERS, Chunk, RequestFactory, ServedRequest, after
from kvseek.server.requests.status import INTERNAL, TRITON_CODE
from kvseek.server.requests.translation import Tensors, read_parameters, scalar

from .stub import require_readable_arrays

OUTPUT_DTYPES = {
    "text_output": object,
    "finish_reason": object,
    "output_ids": np.int32,
    "sequence_length": np.int32,
    "num_input_tokens": np.int32,
    "num_output_tokens": np.int32,
    "cached_tokens": np.int32,
    "attended_tokens": np.float32,
    "prefill_progress": np.float32,
    "cum_log_probs": np.float32,
    "output_log_probs": np.float32,
    "batch_index": np.int32,
    "sequence_index": np.int32,
    "kv_cache_alloc_new_blocks": np.int32,
    "kv_cache_reused_blocks": np.int32,
    "kv_cache_alloc_total_blocks": np.int32,
    "arrival_time_ns": np.int64,
    "first_scheduled_time_ns": np.int64,
    "first_token_time_ns": np.int64,
    "last_token_time_ns": np.int64,
    "acceptance_rate": np.float32,
    "total_accepted_draft_tokens": np.int32,
    "total_draft_tokens": np.int32,
}
LISTS = ("output_ids", "output_log_probs")  # [1, 1, n]: request, beam, tokens
TRANSLATORS = 2  # threads that translate requests: more would take the engine's cores
REMEMBERED_CALLS = 4096
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Part:
    """One sequence of one prompt of a request.

    Attributes
    ----------
    index : dict
        The outputs `batch_index` and `sequence_index`.
    number : int or None
        Number of the part at the engine, once it has been submitted.
    """

    served: ServedRequest
    index: Chunk
    number: int | None = None
    ended: bool = False


class Stream:
    """Sends the responses of one request to its client, and nothing after the last one, whichever threads send."""

    def __init__(self, triton: Any, sender: Any, request_id: str) -> None:
        self._triton, self._sender = triton, sender
        self.request_id = request_id
        self.call = ""  # the gRPC door's name of the client's call
        self.parts: list[Part] = []
        self.left = False  # whether the client has left
        self.stopped = False  # whether another request has stopped this one
        self.arrived = time.monotonic()
        self.closed = False  # the last response has been sent
        self._sending = threading.Lock()

    def send(self, chunk: Chunk) -> None:
        """Send a response that is not the last."""
        with self._sending:
            if not self.closed:
                self._sender.send(self._response(chunk))

    def close(self, chunk: Chunk | None = None) -> None:
        """Send the last response, with `chunk` if there is one."""
        self._send_last(None if chunk is None else self._response(chunk))

    def fail(self, message: str, code: ErrorCode) -> None:
        """End the stream with an error."""
        name = TRITON_CODE[code]
        if code is not ErrorCode.INVALID:  # clients of a stream see only the message, not the code
            message = f"{name}: {message}"
        error = self._triton.TritonError(message, getattr(self._triton.TritonError, name))
        self._send_last(self._triton.InferenceResponse(error=error))

    def _send_last(self, response: Any) -> None:
        with self._sending:
            if self.closed:
                return
            self.closed = True
            final = self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            if response is None:
                self._sender.send(flags=final)
            else:
                self._sender.send(response, flags=final)

    def _response(self, chunk: Chunk) -> Any:
        return self._triton.InferenceResponse(
            [self._triton.Tensor(name, as_tensor(name, value)) for name, value in chunk.items()]
        )


def as_tensor(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Make the array of an output for Triton, of TensorRT-LLM's shape: [1, 1, n] for LISTS, [1] for text, else [1, 1]."""
    dtype: Any = OUTPUT_DTYPES[name]
    if name in LISTS:
        return np.asarray(value, dtype=dtype).reshape(1, 1, -1)
    array = np.array([[str(value).encode("utf-8") if dtype is object else value]], dtype=dtype)
    return array[0] if name == "text_output" else array


class TritonDoor:
    """Serves one Triton model with the engine process.

    Parameters
    ----------
    triton : module
        triton_python_backend_utils, which exists only inside the server.
    arguments : mapping
        Arguments of the model's `initialize`. The model's parameters are `engine_dir`, `socket` and `max_queue_size`.
    """

    def __init__(self, triton: Any, arguments: Mapping[str, str]) -> None:
        require_readable_arrays(triton)
        config = json.loads(arguments["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._triton, self._model = triton, config["name"]
        directory = Path(parameters["engine_dir"])
        tokenizer = Tokenizer(directory)
        engine_config = read_config(directory)
        self._factory = RequestFactory(engine_config, tokenizer)
        if self._model != "tensorrt_llm":
            tokenizer.encode("")  # reads the files now rather than in the first request
        self._client = EngineClient(Path(parameters["socket"]))
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()  # streams that have not been closed
        self._translating, self._max_translating = 0, int(parameters["max_queue_size"]) + engine_config.max_batch_size
        self._left: dict[str, None] = {}  # calls whose clients have left, oldest first: requests of them may still come
        self._pool = ThreadPoolExecutor(TRANSLATORS, thread_name_prefix="translate")

    def execute(self, requests: list[Any]) -> None:
        """Take requests from Triton; returns soon."""
        for request in requests:
            stream = Stream(self._triton, request.get_response_sender(), request.request_id())
            try:
                self._accept(stream, request)
            except Exception as error:
                self._fail(stream, error)

    def _accept(self, stream: Stream, request: Any) -> None:
        if len(stream.request_id) > MAX_ID_CHARACTERS:
            size = len(stream.request_id)
            raise RequestError(f"id has {size} characters: must be <= {MAX_ID_CHARACTERS}; choose a shorter one")
        # Copied, because the memory of a tensor belongs to Triton again when this call has returned.
        tensors = {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
        parameters = read_parameters(request.parameters(), self._model)
        stream.call = parameters.kvseek_call
        if parameters.kvseek_leave:
            self._leave_call(stream.call)
        elif scalar(tensors, "stop", False):
            self._stop(stream.request_id)
        elif not stream.call or stream.call not in self._left:
            self._enqueue(stream, tensors, parameters.traceparent)
            return
        stream.close()

    def _enqueue(self, stream: Stream, tensors: Tensors, trace: str) -> None:
        """Queue a request for translation; raises QueueFullError."""
        with self._lock:
            if self._translating >= self._max_translating:
                raise QueueFullError(
                    f"{self._translating} requests are being tokenised: at most max_queue_size + max_batch_size = "
                    f"{self._max_translating} may; send the request again later"
                )
            self._translating += 1
            self._streams.add(stream)
        self._pool.submit(self._start, stream, tensors, trace)

    def _start(self, stream: Stream, tensors: Tensors, trace: str) -> None:
        """Translate a request and submit it."""
        try:
            if stream.left:
                self._end(stream)
                return
            made = self._factory.make(self._model, tensors)
            stream.parts = [
                Part(served, {"batch_index": row, "sequence_index": number})
                for row, sequences in enumerate(made)
                for number, served in enumerate(sequences)
            ]
            for part in stream.parts:
                if not stream.closed:  # else an earlier part has failed
                    self._submit(stream, part, trace)
        except Exception as error:
            self._fail(stream, error)
        finally:
            with self._lock:
                self._translating -= 1

    def _submit(self, stream: Stream, part: Part, trace: str) -> None:
        request = after(part.served.request, time.monotonic() - stream.arrived)
        part.number = self._client.submit(request, lambda output: self._pass_on(stream, part, output), trace)
        if stream.left or stream.stopped or stream.closed or part.ended:  # this happened before the number was known
            self._client.cancel(part.number)

    def _pass_on(self, stream: Stream, part: Part, output: StepOutput) -> None:
        """Send the responses for an output of the engine; runs on the engine client's thread."""
        if stream.closed or part.ended:
            return
        try:
            self._send(stream, part, output)
        except Exception:
            logger.exception("an output could not be passed on; its request ends")
            if not stream.closed:
                self._forget(stream)
                stream.fail("the answer could not be passed on; the server's log says why", ErrorCode.INTERNAL)
            raise  # makes the engine client cancel the request

    def _send(self, stream: Stream, part: Part, output: StepOutput) -> None:
        served, last = part.served, output.finish_reason is not None
        if output.finish_reason is FinishReason.ERROR:
            self._forget(stream)
            stream.fail(output.error, output.code)
            self._cancel(stream)  # the other parts
            return
        chunks = [chunk | part.index for chunk in served.push(output)]
        if served.ended and not last and part.number is not None:
            self._client.cancel(part.number)
        part.ended = last or served.ended
        if all(other.ended for other in stream.parts):
            for chunk in chunks[:-1]:
                stream.send(chunk)
            self._end(stream, chunks[-1] if chunks else None)
            return
        for chunk in chunks:
            stream.send(chunk)

    def _end(self, stream: Stream, chunk: Chunk | None = None) -> None:
        self._forget(stream)
        stream.close(chunk)

    def _fail(self, stream: Stream, error: Exception) -> None:
        """End a request of which the engine has not taken every part."""
        if not isinstance(error, KvseekError):
            logger.exception("a request could not be translated")
        code = code_of(error)
        self._client.refused(code)
        self._forget(stream)
        stream.fail(str(error) if isinstance(error, KvseekError) else INTERNAL, code)
        self._cancel(stream)  # the parts that it has taken

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)

    def _open_streams(self) -> list[Stream]:
        with self._lock:
            return list(self._streams)

    def _stop(self, request_id: str) -> None:
        """End the requests with an id, as TensorRT-LLM does for a request with `stop`; an empty id matches none."""
        for stream in self._open_streams():
            if request_id and stream.request_id == request_id:
                stream.stopped = True
                self._cancel(stream)

    def _leave_call(self, call: str) -> None:
        """End the requests of a call whose client has left, also those that are still on their way to this model."""
        self._left[call] = None
        while len(self._left) > REMEMBERED_CALLS:
            del self._left[next(iter(self._left))]
        for stream in self._open_streams():
            if stream.call == call:
                stream.left = True
                self._cancel(stream)

    def _cancel(self, stream: Stream) -> None:
        for part in stream.parts:
            if part.number is not None:  # else `_submit` cancels
                self._client.cancel(part.number)

    def finalize(self) -> None:
        """End all requests, because Triton unloads the model."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()
        for stream in self._open_streams():
            stream.fail("the server is shutting down; send the request to another one", ErrorCode.UNAVAILABLE)
