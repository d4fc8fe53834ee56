"""One call of a client at the gRPC port: passes its requests on to Triton, and Triton's responses back.

Triton serves these models by streams alone. ModelInfer is a stream of one request that has one response (`Collected`).
"""

from __future__ import annotations

import asyncio
import logging
import struct
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from kvseek.core.errors import ErrorCode, QueueFullError, RequestError
from kvseek.server.kserve.inputs import ModelSchema
from kvseek.server.requests.models import MAX_ID_CHARACTERS, SEVERAL
from kvseek.server.requests.unread import PIECE_BYTES, UnreadAnswer, UnreadError
from kvseek.server.scratch import SHARED_MEMORY_PREFIX

from .checks import ITEM_BYTES, WIRE_TYPES, admit

SERVICE = "inference.GRPCInferenceService"
# Most time for Triton to end the requests of a client that has left: much longer than a step of the engine
LEAVE_SECONDS = 60.0
NO_SHARED_MEMORY = (
    "the server has no shared memory left to pass the request on; try again later, or give it more (docs/deploy.md)"
)
logger = logging.getLogger(__name__)


class GrpcCall:
    """A call to Triton for a call of a client.

    The call is not cancelled when the client leaves, because cancelled calls crash Triton 2.51, about one in a thousand, and
    make it leak. Instead a separate call tells the models that the client has left; they end its requests, and so this call.
    gRPC cancels a call when a task that reads or writes it is cancelled, so these tasks are never cancelled.

    The call is opened with the client's first request, so that a client that sends none costs Triton nothing.

    Parameters
    ----------
    open_call : callable
        Opens a call of Triton's ModelStreamInfer that takes and gives bytes.
    refused : callable
        Counts a request that is not passed on.
    owner, secret : str
        See Parameters of server/requests/translation.py.
    answer : UnreadAnswer
        Counts the responses, which are taken from Triton at once, so that Triton keeps none.
    """

    def __init__(
        self,
        open_call: Callable[[], Any],
        schemas: Mapping[str, ModelSchema],
        refused: Callable[[ErrorCode], None],
        owner: str,
        secret: str,
        answer: UnreadAnswer,
    ) -> None:
        self._owner, self._secret = owner, secret
        self._open_call, self._schemas, self._refused, self._answer = open_call, schemas, refused, answer
        self._call: Any = None
        self._opened = asyncio.Event()  # set when there is a call, or there will be none
        self._left = False  # whether the client has left, or counts as gone
        self._name = uuid.uuid4().hex
        self._models: dict[str, str] = {}  # models that the client has asked, and the names by which it asked
        self._responses: asyncio.Queue[bytes | None] = asyncio.Queue()  # for the client; None: there are no more

    async def back(self) -> None:
        """Take all responses of Triton until it ends the call; raises AioRpcError if it ends the call with an error."""
        try:
            await self._opened.wait()
            while self._call is not None and (data := await self._call.read()) is not grpc.aio.EOF:
                self._respond(self._as_asked(without_names(bytes(data))))
                data = b""  # the next response may be long in coming
        finally:
            self._responses.put_nowait(None)

    def _respond(self, data: bytes) -> None:
        if not self._left:
            self._responses.put_nowait(data)
            self._answer.add(PIECE_BYTES + len(data))

    async def deliver(self, write: Callable[[bytes], Awaitable[object]], keeps: bool = False) -> bool:
        """Give the client all responses, by calling `write` with each; returns False as soon as the client is gone.

        `keeps`: `write` keeps the responses, which count on. Raises as UnreadAnswer.deliver.
        """
        while (data := await self._responses.get()) is not None:
            size, write_it, data = 0 if keeps else PIECE_BYTES + len(data), partial(write, data), b""
            self._answer.remove(size)
            try:
                await self._answer.deliver(size, write_it)
            except (UnreadError, QueueFullError):
                raise
            except (Exception, asyncio.CancelledError):  # gRPC raises various exceptions if the client is gone
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                return False
            del write_it  # the next response may be long in coming
        return True

    def _as_asked(self, data: bytes) -> bytes:
        """Give the model in a response the name by which the client asked for it."""
        if all(name == asked for name, asked in self._models.items()):
            return data
        response = service_pb2.ModelStreamInferResponse.FromString(data)
        name = response.infer_response.model_name
        if name in self._models:
            response.infer_response.model_name = self._models[name]
        return bytes(response.SerializeToString())

    async def forward(self, requests: AsyncIterator[bytes]) -> None:
        """Pass on all requests of the client that may reach Triton, and refuse the others."""
        try:
            async with aclosing(cast("AsyncGenerator[bytes, None]", aiter(requests))) as incoming:
                await self._forward(incoming)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # `back` reports how the call has ended
        except grpc.aio.InternalError:
            pass  # the client ended its requests and left at once, so that `leave` has ended them, too
        finally:
            self._opened.set()

    async def _forward(self, requests: AsyncIterator[bytes]) -> None:
        async for data in requests:
            if self._left:
                return
            refusal = service_pb2.ModelStreamInferResponse()
            try:
                request = service_pb2.ModelInferRequest.FromString(data)
                refusal.infer_response.id = request.id[:MAX_ID_CHARACTERS]
                asked = request.model_name
                admit(request, self._schemas)
            except (DecodeError, RequestError) as error:
                refusal.error_message = describe(error)
                self._refused(ErrorCode.INVALID)
                self._respond(refusal.SerializeToString())
            else:
                request.parameters["kvseek_call"].string_param = self._name
                request.parameters["kvseek_owner"].string_param = self._owner
                request.parameters["kvseek_secret"].string_param = self._secret
                self._models[request.model_name] = asked
                if self._call is None:
                    self._call = self._open_call()
                    self._opened.set()
                await self._call.write(request.SerializeToString())
        if self._call is not None:
            await self._call.done_writing()

    async def leave(self, forward: asyncio.Task[None], back: asyncio.Task[None], unread: bool) -> None:
        """Have Triton's models end the client's requests, and wait for the end of the call.

        `forward` and `back`, the tasks that run these methods, end by themselves when the client has left and Triton has
        ended the call. `unread`: the client has not left, but does not read.
        """
        self._left = True
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                # A client that does not read has not ended its call: `forward` may wait for its next request for ever.
                await asyncio.wait((forward,), timeout=0 if unread else None)
                if self._call is not None:
                    # The client has said that it sends no more, or does so at this moment.
                    with suppress(asyncio.InvalidStateError, grpc.aio.InternalError):
                        await self._call.done_writing()
                    await self._say_goodbye()
                await asyncio.wait((back,))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            pass  # Triton has ended, and the call with it; or the frontend ends, and has closed its channel to Triton
        except TimeoutError:
            logger.error("Triton has not ended a call %g s after its client left; it is cancelled", LEAVE_SECONDS)
        finally:
            forward.cancel()
            back.cancel()
            await asyncio.wait((forward, back))
            if not back.cancelled():
                back.exception()  # nobody is left to be told of it; else asyncio would write a traceback into the log

    async def _say_goodbye(self) -> None:
        own = self._open_call()
        for model in self._models:
            await own.write(self._goodbye(model))
        await own.done_writing()
        while await own.read() is not grpc.aio.EOF:
            pass

    def _goodbye(self, model: str) -> bytes:
        """Make the request that tells a model that the client has left; it has only the tensors that Triton insists on."""
        request = service_pb2.ModelInferRequest(model_name=model)
        request.parameters["kvseek_call"].string_param = self._name
        request.parameters["kvseek_leave"].bool_param = True
        schema = self._schemas[model]
        for name, field in schema.inputs.items():
            if not field.optional:
                datatype = WIRE_TYPES.get(field.datatype, field.datatype)
                request.inputs.add(name=name, datatype=datatype, shape=[1] * (schema.served.batched + len(field.dims)))
                request.raw_input_contents.append(
                    bytes(ITEM_BYTES.get(field.datatype, 4))
                )  # a zero, or an empty string
        return bytes(request.SerializeToString())


def describe(error: Exception) -> str:
    """Describe an error of parsing or admitting a message to the client."""
    return str(error) if isinstance(error, RequestError) else f"the message is no request ({error}); send a valid one"


def without_names(data: bytes) -> bytes:
    """Make a response fit for clients: errors of Triton's Python backend, which name shared memory, are replaced."""
    if SHARED_MEMORY_PREFIX.encode() not in data:
        return data
    response = service_pb2.ModelStreamInferResponse.FromString(data)
    if SHARED_MEMORY_PREFIX not in response.error_message:  # the prefix was part of a generated text
        return data
    logger.error("Triton: %s", response.error_message)
    response.error_message = NO_SHARED_MEMORY
    return bytes(response.SerializeToString())


SEQUENCES = "num_return_sequences"
STATUS = {  # of the models' codes (TRITON_CODE)
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "CANCELLED": grpc.StatusCode.DEADLINE_EXCEEDED,  # Triton has no code for a time limit that has passed
    "INTERNAL": grpc.StatusCode.INTERNAL,
}


def asks_for_several(request: Any, schemas: Mapping[str, ModelSchema]) -> str:
    """Say by which input and value a ModelInferRequest asks for more than one response; empty if it asks for one.

    Malformed tensors ask for one: they are refused later.
    """
    raw, schema = request.raw_input_contents, schemas.get(request.model_name)
    batched = schema is not None and schema.served.batched
    for number, tensor in enumerate(request.inputs):
        own = raw[number] if number < len(raw) else None
        if batched and tensor.shape and tensor.shape[0] > 1:
            return f"{tensor.name}: shape = {list(tensor.shape)[:8]}"
        if tensor.name in SEVERAL and (any(own) if own is not None else any(tensor.contents.bool_contents)):
            return f"{tensor.name} = true"
        if tensor.name == SEQUENCES:
            values = struct.unpack("<i", own) if own is not None and len(own) == 4 else tensor.contents.int_contents
            if any(value > 1 for value in values):
                return f"{SEQUENCES} = {max(values)}"
    return ""


class Collected:
    """Takes the responses of a stream in place of a client; they count in `answer` until they are forgotten."""

    def __init__(self, answer: UnreadAnswer) -> None:
        self._responses: list[Any] = []
        self._answer, self._size = answer, 0

    async def write(self, data: bytes) -> None:
        """Take one response, a ModelStreamInferResponse."""
        self._responses.append(service_pb2.ModelStreamInferResponse.FromString(data))
        self._size += PIECE_BYTES + len(data)

    async def answer(self, request_id: str, model: str, context: Any) -> bytes:
        """Return the ModelInferResponse and forget it; ends the client's call with an error if that is what the stream gave."""
        responses, self._responses = self._responses, []
        self._answer.remove(self._size)
        for response in responses:
            if response.error_message:  # the models put their code before all messages but those about bad input
                name, _, rest = response.error_message.partition(": ")
                if name in STATUS:
                    await context.abort(STATUS[name], rest)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, response.error_message)
        answers = [response.infer_response for response in responses if response.infer_response.outputs]
        # A request that stops another one has no outputs.
        last = (
            answers[-1]
            if answers
            else service_pb2.ModelInferResponse(model_name=model, model_version="1", id=request_id)
        )
        return bytes(last.SerializeToString())
