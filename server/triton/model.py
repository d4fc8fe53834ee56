"""A Triton model as a frontend: passes requests on to the engine process, and the engine's outputs back to Triton.

Triton's threads only hand requests over, to an event loop in a thread of its own; from there they go the way of all ports
(server/requests/). Behind `kvseek serve`, the gRPC port tells when a client has left. Triton is asked only where there is no such
port, and never while a response is sent: once in some ten thousand requests, 2.51 crashes if it looks whether the client has left
while the last response is being sent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from kvseek.core.config import read_config
from kvseek.core.errors import ErrorCode, KvseekError, RequestError, code_of
from kvseek.core.liveness import answer_from_thread
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.engine.shared import SharedEngine
from kvseek.server.errors import INTERNAL, TRITON_CODE, ServerError
from kvseek.server.requests.engine_client import EngineClient
from kvseek.server.requests.generations import Call, Generations, Submission
from kvseek.server.requests.keys import Keys, Tenant
from kvseek.server.requests.models import LAYOUTS, MAX_ID_CHARACTERS, SEVERAL, Chunk, Logits, RequestFactory
from kvseek.server.requests.translation import Inputs, Parameters, read_parameters, scalar
from kvseek.server.scratch import alive_socket
from kvseek.server.settings import ServeSettings

from .stub import require_readable_arrays

LISTS = ("output_ids", "output_log_probs")  # [1, 1, n]: request, beam, tokens
REMEMBERED_CALLS = 4096
ASK_SECONDS = 0.5  # between two looks whether clients have left
OF_FRONTENDS = "kvseek_"  # how parameters begin that the gRPC port sends
EVERYBODY = "everybody"  # the owner of requests without a key or a gRPC port: no name of a key, nor of a connection
KEY_REFUSAL = (
    "authorization: has none of the repository's API keys; send Bearer KEY as this parameter of the request, or over gRPC as a "
    "header that tritonserver is told to forward"
)
logger = logging.getLogger(__name__)


def as_tensor(name: str, value: Any, dtype: Any, batched: bool) -> np.ndarray[Any, Any]:
    """Make the array of an output for Triton, of the type that the model's configuration states and of TensorRT-LLM's shape.

    That is [1, 1, n] for LISTS, [1] for text and for outputs of a model without a batch dimension, [1, ...] for logits, else
    [1, 1].
    """
    if isinstance(value, Logits):
        return np.frombuffer(value.data, dtype).reshape(1, *value.shape)
    if name in LISTS:
        return np.asarray(value, dtype=dtype).reshape(1, 1, -1)
    array = np.array([[value.encode("utf-8") if isinstance(value, str) else value]], dtype=dtype)
    return array if batched and name != "text_output" else array[0]


def rows_of(tensors: Mapping[str, NDArray[Any]]) -> list[Inputs]:
    """Return the inputs of each prompt from tensors, [batch, ...] each; raises RequestError.

    A float32 becomes the shortest number that it can stand for, which is what the client has written: 0.1, not 0.10000000149.
    """
    batch = max(tensor.shape[0] for tensor in tensors.values())
    for name, tensor in tensors.items():
        if tensor.shape[0] != batch:
            raise RequestError(f"{name} has {tensor.shape[0]} rows: must be {batch}, one for each prompt; send as many")
    return [{name: _values(tensor[row : row + 1]) for name, tensor in tensors.items()} for row in range(batch)]


def _values(tensor: NDArray[Any]) -> list[Any]:
    flat = tensor.reshape(-1)
    return [float(str(value)) for value in flat] if flat.dtype == np.float32 else flat.tolist()


class Stream:
    """Sends the responses of one request to its client, and nothing after the last one. To be used by one thread alone.

    `dtypes` are NumPy's types of the model's outputs.
    """

    def __init__(self, triton: Any, sender: Any, dtypes: Mapping[str, Any], batched: bool, decoupled: bool) -> None:
        self._triton, self._sender, self._dtypes = triton, sender, dtypes
        self._batched, self._decoupled = batched, decoupled
        self._closed = False  # the last response has been sent

    def send(self, chunk: Chunk) -> None:
        """Send a response that is not the last."""
        if not self._closed:
            self._sender.send(self._response(chunk))

    def has_left(self) -> bool:
        """Ask Triton whether the client has left, which takes some 0.1 ms."""
        return not self._closed and bool(self._sender.is_cancelled())

    def close(self, chunk: Chunk | None = None) -> None:
        """Send the last response, with `chunk` if there is one."""
        self._send_last(None if chunk is None else self._response(chunk))

    def fail(self, message: str, code: ErrorCode) -> None:
        """End the stream with an error."""
        self._send_last(self._error(message, code))

    def _error(self, message: str, code: ErrorCode) -> Any:
        name = TRITON_CODE[code]
        if code is not ErrorCode.INVALID:  # clients of a stream see only the message, not the code
            message = f"{name}: {message}"
        return self._triton.InferenceResponse(
            error=self._triton.TritonError(message, getattr(self._triton.TritonError, name))
        )

    def _send_last(self, response: Any) -> None:
        if self._closed:
            return
        self._closed = True
        final = self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if response is None and self._decoupled:
            self._sender.send(flags=final)
            return
        try:  # a model that is not decoupled has to send a response, also for a request such as `stop`
            self._sender.send(response or self._triton.InferenceResponse([]), flags=final)
        except Exception:  # for want of shared memory, say, of which an error needs little
            logger.exception("the last response could not be sent; an error is sent instead")
            self._sender.send(self._error(INTERNAL, ErrorCode.INTERNAL), flags=final)

    def _response(self, chunk: Chunk) -> Any:
        arrays = {name: as_tensor(name, value, self._dtypes[name], self._batched) for name, value in chunk.items()}
        return self._triton.InferenceResponse([self._triton.Tensor(*each) for each in arrays.items()])


Tensors = Mapping[str, np.ndarray[Any, Any]]


def _connect(engine_dir: Path, settings: ServeSettings, socket: str, loop: asyncio.AbstractEventLoop) -> EngineClient:
    """Connect to the engine process at a socket; without one find or start the process, and wait until it is ready.

    Raises ServerError if the process cannot be started.
    """
    if socket:
        return EngineClient(Path(socket), loop)
    engine = SharedEngine(engine_dir, settings)
    client = EngineClient(engine.socket, loop, engine.start_if_absent)
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

    Raises
    ------
    ServerError
        If the engine process cannot be started, or Triton's Python backend misreads arrays.
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
        self._dtypes = {one["name"]: triton.triton_string_to_numpy(one["data_type"]) for one in config["output"]}
        layout = LAYOUTS[settings.layout]
        self._served = layout.models[self._model]
        self._factory = RequestFactory(layout, engine_config, tokenizer)
        if self._served.takes_text:
            tokenizer.encode("")  # reads the files now rather than in the first request
        # Whether clients reach the model without a frontend of kvseek in between.
        self._for_anyone = not parameters["socket"]
        self._keys = settings.keys if self._for_anyone else Keys(())
        self._open: dict[Call, tuple[str, Stream]] = {}  # with the gRPC port's name of the client's call, or empty
        self._left: dict[str, None] = {}  # calls whose clients have left, oldest first: requests of them may still come
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="triton-model", daemon=True)
        self._thread.start()
        self._client = _connect(directory, settings, parameters["socket"], self._loop)
        unread = settings.unread_answers(engine_config)  # what Triton has taken is out of sight
        self._generations = Generations(self._client, settings.most_requests(engine_config), unread)
        if self._for_anyone:
            asyncio.run_coroutine_threadsafe(self._look_for_leavers(), self._loop)
        else:
            answer_from_thread(alive_socket(Path(parameters["socket"]).parent, self._name))

    def execute(self, requests: list[Any]) -> None:
        """Take requests from Triton; returns soon."""
        for request in requests:
            sender, batched = request.get_response_sender(), self._served.batched
            stream = Stream(self._triton, sender, self._dtypes, batched, self._decoupled)
            # Copied, because the memory of a tensor belongs to Triton again when this call has returned.
            tensors = {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
            asked = request.request_id(), request.parameters(), tensors, time.monotonic()
            asyncio.run_coroutine_threadsafe(self._answer(stream, *asked), self._loop)

    async def _answer(self, stream: Stream, *asked: Any) -> None:
        try:
            await self._serve(stream, *asked)
        except Exception as error:
            if not isinstance(error, KvseekError):
                logger.exception("a request failed")
            stream.fail(str(error) if isinstance(error, KvseekError) else INTERNAL, code_of(error))

    async def _serve(self, stream: Stream, request_id: str, text: str, tensors: Tensors, arrived: float) -> None:
        """Do what a request asks for; `text` has its parameters."""
        with self._generations.counting_refusals():
            if len(request_id) > MAX_ID_CHARACTERS:
                raise RequestError(
                    f"id has {len(request_id)} characters: must be <= {MAX_ID_CHARACTERS}; choose a shorter one"
                )
            if not self._served.batched:
                tensors = {name: tensor[np.newaxis] for name, tensor in tensors.items()}
            parameters = read_parameters(text, self._name)
            tenant, name = self._tenant(parameters), parameters.kvseek_call
            stop = {"stop": tensors["stop"].ravel().tolist()} if "stop" in tensors else {}
            stops = scalar(stop, "stop", False) and not parameters.kvseek_leave
        call = Call(arrived, parameters.traceparent, tenant.owner or EVERYBODY, request_id)
        if parameters.kvseek_leave:
            self._leave(name)
        elif stops:
            self._generations.stop(request_id, call.owner)
        elif name not in self._left:
            self._open[call] = name, stream
            try:
                await self._generate(stream, tensors, tenant, call)
            finally:
                del self._open[call]
            return
        stream.close()

    def _tenant(self, parameters: Parameters) -> Tenant:
        """Return whose request it is; raises RequestError."""
        own = {name: value for name, value in vars(parameters).items() if name.startswith(OF_FRONTENDS) and value}
        if not self._for_anyone:  # the frontend has asked for a key
            return Tenant(bytes.fromhex(parameters.kvseek_secret), parameters.kvseek_owner)
        if own:
            raise RequestError(
                f"{', '.join(own)}: {self._name} has no such inputs, which only kvseek's gRPC port sends; leave them out"
            )
        tenant = self._keys.tenant(parameters.authorization)
        if tenant is None:
            raise RequestError(KEY_REFUSAL)
        return tenant

    async def _generate(self, stream: Stream, tensors: Tensors, tenant: Tenant, call: Call) -> None:
        """Have the engine serve what tensors ask for, and send its answer."""
        with self._generations.stoppable(call), self._generations.unread.answer() as answer:
            with self._generations.counting_refusals():
                make = partial(self._make, tensors, tenant, call)
                made = await self._generations.make(make, self._served.takes_text)
            submissions, left = [submission for submission, _ in made], set(range(len(made)))
            # One by one, because perf_analyzer takes each response of a stream for a token.
            async with self._generations.generate(submissions, call, answer, one_by_one=True) as chunks:
                async for place, chunk in chunks:
                    if submissions[place].served.ended:
                        left.discard(place)
                    (stream.send if left else stream.close)(chunk | made[place][1])

    def _make(self, tensors: Tensors, tenant: Tenant, call: Call) -> list[tuple[Submission, Chunk]]:
        """Make the requests that tensors ask for, each with the outputs that say which it is; runs in a worker thread."""
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
        submissions = list[tuple[Submission, Chunk]]()
        for row, sequences in enumerate(made):
            for number, served in enumerate(sequences):
                served.request = replace(served.request, cache_salt=tenant.salt(served.request.cache_salt))
                index = {"batch_index": row, "sequence_index": number} if self._served.batched else {}
                submissions.append((self._generations.submission(served, call), index))
        return submissions

    def _leave(self, name: str) -> None:
        """End the requests of a call whose client has left, also those that are still on their way to this model."""
        self._left[name] = None
        while len(self._left) > REMEMBERED_CALLS:
            del self._left[next(iter(self._left))]
        for call, (own, _) in self._open.items():
            if own == name:
                self._generations.cancel(call)

    async def _look_for_leavers(self) -> None:
        """Ask Triton again and again which clients have left, and end their requests."""
        while True:
            await asyncio.sleep(ASK_SECONDS)
            for call, (_, stream) in self._open.items():
                try:
                    if stream.has_left():
                        self._generations.cancel(call)
                except Exception:  # the others' clients are to be looked for, too
                    logger.exception("Triton could not be asked whether a client has left")

    def finalize(self) -> None:
        """End all requests, because Triton unloads the model."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for _, stream in self._open.values():
            stream.fail("the server is shutting down; send the request to another one", ErrorCode.UNAVAILABLE)
        self._client.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._generations.busy:  # a thread still tokenises
            await asyncio.sleep(0.01)
        self._generations.close()
