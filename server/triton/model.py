"""A Triton model as a frontend: passes requests on to the engine process, and the engine's outputs back to Triton.

No thread waits for a request. Worker threads translate requests (tokenising takes long), the engine client's thread sends
responses. Behind `kvseek serve`, the gRPC port tells when a client has left. Triton is asked only where there is no such port,
and never while a response is sent: once in some ten thousand requests, 2.51 crashes if it looks whether the client has left
while the last response is being sent.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvseek.core.config_file import read_config
from kvseek.core.errors import ErrorCode, KvseekError, QueueFullError, RequestError, code_of, renamed
from kvseek.core.liveness import answer_from_thread
from kvseek.core.request import FinishReason, StepOutput
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.engine.shared import SharedEngine
from kvseek.server.errors import INTERNAL, ServerError
from kvseek.server.requests.engine_client import EngineClient
from kvseek.server.requests.keys import Keys, Tenant
from kvseek.server.requests.models import LAYOUTS, MAX_ID_CHARACTERS, SEVERAL, Chunk, RequestFactory, ServedRequest
from kvseek.server.requests.translation import read_parameters, scalar
from kvseek.server.scratch import alive_socket
from kvseek.server.settings import ServeSettings

from .outputs import rows_of
from .stream import ReturnSequence, Stream
from .stub import require_readable_arrays

TRANSLATORS = 2  # threads that translate requests: more would take the engine's cores
REMEMBERED_CALLS = 4096
OF_FRONTENDS = "kvseek_"  # how parameters begin that the gRPC port sends
KEY_REFUSAL = (
    "authorization: has none of the repository's API keys; send Bearer KEY as this parameter of the request, or over gRPC as a "
    "header that tritonserver is told to forward"
)
logger = logging.getLogger(__name__)
Tensors = Mapping[str, np.ndarray[Any, Any]]


def _connect(engine_dir: Path, settings: ServeSettings, socket: str) -> EngineClient:
    """Connect to the engine process at a socket; without one find or start the process, and wait until it is ready.

    Raises ServerError if the process cannot be started.
    """
    if socket:
        return EngineClient(Path(socket))
    engine = SharedEngine(engine_dir, settings)
    client = EngineClient(engine.socket, absent=engine.start_if_absent)
    try:
        engine.wait(client)
    except ServerError:
        client.close()
        raise
    return client


class TritonModel:
    """Serves one Triton model with the engine process.

    Parameters
    ----------
    triton : module
        triton_python_backend_utils, which exists only inside the server.
    arguments : mapping
        Arguments of the model's `initialize`. The parameters of its configuration are those of config.pbtxt.
    """

    def __init__(self, triton: Any, arguments: Mapping[str, str]) -> None:
        config = json.loads(arguments["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._triton, self._name, self._model = triton, config["name"], parameters["model"]
        self._decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        directory, settings = Path(parameters["engine_dir"]), ServeSettings.from_json(parameters["settings"])
        tokenizer = Tokenizer(directory)
        engine_config = read_config(directory)
        require_readable_arrays(triton)
        layout = LAYOUTS[settings.layout]
        self._served = layout.models[self._model]
        self._factory = RequestFactory(layout, engine_config, tokenizer)
        if self._served.takes_text:
            tokenizer.encode("")  # reads the files now rather than in the first request
        # Whether clients reach the model without a frontend of kvseek in between.
        self._for_anyone = not parameters["socket"]
        self._keys = settings.keys if self._for_anyone else Keys(())
        self._client = _connect(directory, settings, parameters["socket"])
        if parameters["socket"]:
            answer_from_thread(alive_socket(Path(parameters["socket"]).parent, self._name))
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()  # streams that have not been closed
        self._unread = settings.unread_answers(engine_config)  # what Triton has taken is out of sight
        self._translating, self._max_translating = 0, settings.most_requests(engine_config)
        self._left: dict[str, None] = {}  # calls whose clients have left, oldest first: requests of them may still come
        self._pool = ThreadPoolExecutor(TRANSLATORS, thread_name_prefix="translate")

    def execute(self, requests: list[Any]) -> None:
        """Take requests from Triton; returns soon."""
        for request in requests:
            stream = Stream(
                self._triton, request.get_response_sender(), request.request_id(), self._served.batched, self._decoupled
            )
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
        if not self._served.batched:
            tensors = {name: tensor[np.newaxis] for name, tensor in tensors.items()}
        parameters = read_parameters(request.parameters(), self._name)
        own = {name: value for name, value in vars(parameters).items() if name.startswith(OF_FRONTENDS) and value}
        if self._for_anyone and own:
            raise RequestError(
                f"{', '.join(own)}: {self._name} has no such inputs, which only kvseek's gRPC port sends; leave them out"
            )
        tenant = self._keys.tenant(parameters.authorization)
        if tenant is None:
            raise RequestError(KEY_REFUSAL)
        if not self._for_anyone:  # the frontend has asked for a key
            tenant = Tenant(bytes.fromhex(parameters.kvseek_secret), parameters.kvseek_owner)
        stream.call, stream.tenant, stream.owner = parameters.kvseek_call, tenant, tenant.owner
        if parameters.kvseek_leave:
            self._leave_call(stream.call)
        elif scalar({"stop": tensors["stop"].ravel().tolist()} if "stop" in tensors else {}, "stop", False):
            self._stop(stream.request_id, stream.owner)
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
            made = self._make(tensors)
            stream.sequences = [
                ReturnSequence(served, {"batch_index": row, "sequence_index": number} if self._served.batched else {})
                for row, sequences in enumerate(made)
                for number, served in enumerate(sequences)
            ]
            for sequence in stream.sequences:
                if not stream.closed:  # else an earlier sequence has failed
                    self._submit(stream, sequence, trace)
        except Exception as error:
            self._fail(stream, error)
        finally:
            with self._lock:
                self._translating -= 1

    def _make(self, tensors: Tensors) -> list[list[ServedRequest]]:
        """Make the requests that tensors ask for, of each prompt its sequences; raises RequestError."""
        asked = next((name for name in SEVERAL if name in tensors and tensors[name].any()), None)
        if not self._decoupled and asked is not None:  # Triton would wait for ever after a second response
            raise RequestError(
                f"{asked} = true: must be false, because {self._name} has one response a request (decoupled_mode false); "
                "leave it out, or write the repository with --decoupled_mode true"
            )
        made = self._factory.make(self._model, rows_of(tensors))
        count = sum(len(sequences) for sequences in made)
        if not self._decoupled and count != 1:
            raise RequestError(
                f"{len(made)} prompts, {count} sequences: must be 1, because {self._name} has one response a request "
                "(decoupled_mode false); send several requests, or write the repository with --decoupled_mode true"
            )
        return made

    def _submit(self, stream: Stream, sequence: ReturnSequence, trace: str) -> None:
        request = sequence.served.request
        request = replace(request, cache_salt=stream.tenant.salt(request.cache_salt))
        with self._lock:
            if stream in self._streams:  # else it has ended, and nothing would give the room back
                sequence.reserved = self._unread.reserve(request)
        sequence.number = self._client.submit(
            request, lambda outputs: self._pass_on(stream, sequence, outputs), trace, stream.arrived
        )
        if (
            stream.left or stream.stopped or stream.closed or sequence.ended
        ):  # this happened before the number was known
            self._client.cancel(sequence.number)

    def _pass_on(self, stream: Stream, sequence: ReturnSequence, outputs: Sequence[StepOutput]) -> None:
        """Send the responses for outputs of the engine; runs on the engine client's thread."""
        if stream.closed or sequence.ended:
            return
        try:
            if not stream.left and stream.has_left():
                self._leave(stream)
            self._send(stream, sequence, outputs)
        except Exception:
            logger.exception("outputs could not be passed on; their request ends")
            self._forget(stream)
            self._cancel(stream)
            stream.fail("the answer could not be passed on; the server's log says why", ErrorCode.INTERNAL)

    def _send(self, stream: Stream, sequence: ReturnSequence, outputs: Sequence[StepOutput]) -> None:
        served, end = sequence.served, outputs[-1]
        last = end.finish_reason is not None
        if end.finish_reason is FinishReason.ERROR:  # the last output comes alone
            self._forget(stream)
            stream.fail(renamed(end.error, served.names), end.code)
            self._cancel(stream)  # the other sequences
            return
        # One by one, because perf_analyzer takes each response of a stream for a token.
        chunks = [chunk | sequence.index for output in outputs for chunk in served.push([output])]
        if served.ended and not last and sequence.number is not None:
            self._client.cancel(sequence.number)
        sequence.ended = last or served.ended
        if all(other.ended for other in stream.sequences):
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
        """End a request of which the engine has not taken every sequence."""
        if not isinstance(error, KvseekError):
            logger.exception("a request could not be translated")
        code = code_of(error)
        self._forget(stream)
        stream.fail(str(error) if isinstance(error, KvseekError) else INTERNAL, code)
        self._cancel(stream)  # the sequences that it has taken
        self._client.refused(code)

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)
            for sequence in stream.sequences:
                self._unread.release(sequence.reserved)
                sequence.reserved = 0

    def _open_streams(self) -> list[Stream]:
        with self._lock:
            return list(self._streams)

    def _stop(self, request_id: str, owner: str) -> None:
        """End an owner's requests with an id, as TensorRT-LLM does for a request with `stop`; an empty id matches none."""
        for stream in self._open_streams():
            if request_id and (stream.request_id, stream.owner) == (request_id, owner):
                stream.stopped = True
                self._cancel(stream)

    def _leave_call(self, call: str) -> None:
        """End the requests of a call whose client has left, also those that are still on their way to this model."""
        self._left[call] = None
        while len(self._left) > REMEMBERED_CALLS:
            del self._left[next(iter(self._left))]
        for stream in self._open_streams():
            if stream.call == call:
                self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        stream.left = True
        self._cancel(stream)

    def _cancel(self, stream: Stream) -> None:
        for sequence in stream.sequences:
            if sequence.number is not None:  # else `_submit` cancels
                self._client.cancel(sequence.number)

    def finalize(self) -> None:
        """End all requests, because Triton unloads the model."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()
        for stream in self._open_streams():
            stream.fail("the server is shutting down; send the request to another one", ErrorCode.UNAVAILABLE)
