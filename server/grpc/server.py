"""The gRPC port: serves Triton's inference protocol in front of Triton, whose own port is for this machine alone.

Requests are parsed, checked (checks.py) and passed on; responses go back as they are. Health is the whole server's, and
what has no use for clients of a model (repository, shared memory, trace, logging) is not passed on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc._cython import cygrpc
from tritonclient.grpc import service_pb2

from kvseek.core.errors import ErrorCode, QueueFullError, RequestError
from kvseek.server.errors import ServerError
from kvseek.server.http.health import ServerState
from kvseek.server.kserve.inputs import ModelSchema
from kvseek.server.requests.keys import NO_KEYS, REFUSAL, Keys, Tenant
from kvseek.server.requests.unread import UnreadAnswer, UnreadAnswers, UnreadError
from kvseek.server.triton.relay import TO_TRITON, clear_durations

from .call import SERVICE, Collected, GrpcCall, asks_for_several, describe
from .checks import admit

HEALTH_SERVICE = "grpc.health.v1.Health"
PASSED_ON = ("ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics")
CLOSED = (
    *("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"),
    *(f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")),
)
WITHOUT_KEY = frozenset(
    (f"/{HEALTH_SERVICE}/Check", *(f"/{SERVICE}/{method}" for method in ("ServerLive", "ServerReady", "ModelReady")))
)
MAX_CALLS = 4096  # most calls that are open at a time
MAX_STREAMS = 2048  # of the MAX_CALLS, those that may be inference streams; the rest stays free for health and metadata
CONNECTIONS = [  # when they are closed
    ("grpc.keepalive_time_ms", 60_000),  # whose client's machine is gone,
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.server_handshake_timeout_ms", 20_000),  # whose client does not begin to speak gRPC,
    ("grpc.max_connection_idle_ms", 300_000),  # and those without a call
]
CLOSE_SECONDS = 1.0  # most time for sent responses to leave this process
MAX_OTHER_BYTES = 64 << 10  # most bytes of a message that is no inference request
ANSWER_SECONDS = 10.0  # most time for Triton to answer a call that is no inference
NOT_RUNNING = "Triton does not run: it is being started or restarted; send the request again in some seconds"
ENDED = "Triton ended while the request was with it, and is being restarted; send the request again"
logger = logging.getLogger(__name__)
Handler = Callable[..., Any]


# grpc.aio has no way to end the call of a client that does not read: a status waits behind the response, and gRPC keeps both for
# as long as the client likes. It lets go of a call, which resets it, when it need not wait any more for the client to leave and
# the next call has come.
_resets: dict[Any, asyncio.Future[None]] = {}  # by the task that runs a call's handler: ends that waiting
_wait_until_left = cygrpc._handle_cancellation_from_core


async def _wait_until_left_or_reset(handling: Any, call: Any, loop: asyncio.AbstractEventLoop) -> None:
    left = asyncio.ensure_future(_wait_until_left(handling, call, loop))
    reset = _resets[handling] = loop.create_future()
    try:
        await asyncio.wait((left, reset), return_when=asyncio.FIRST_COMPLETED)
    finally:
        del _resets[handling]
        left.cancel()


cygrpc._handle_cancellation_from_core = _wait_until_left_or_reset


def _reset() -> NoReturn:
    """Reset the call whose handler calls this, which must not use its context any more; its client gets status CANCELLED."""
    reset = _resets.get(asyncio.current_task())
    if reset is not None and not reset.done():  # else the client has left
        reset.set_result(None)
    raise asyncio.CancelledError


def _not_a_client_that_left(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


# gRPC logs an error when a client leaves while its status is sent. Any client can cause that, so it must not fill the log.
logging.getLogger("grpc._cython.cygrpc").addFilter(_not_a_client_that_left)


class GrpcServer:
    """Serves gRPC clients.

    Parameters
    ----------
    triton : str or None
        Triton's own gRPC endpoint, as gRPC names it; without one the server cannot be started.
    unread : UnreadAnswers
        Counts answers to inference requests.
    max_connections : int
        Most connections open at once; further ones are closed.
    refused : callable
        Counts a request that is refused here.
    keys : Keys
        Of which calls have to send one as metadata `authorization`, but for questions of health.

    Attributes
    ----------
    open : int
        Inference calls that have not ended.
    port : int
        Where it listens; 0 before.
    """

    def __init__(
        self,
        triton: str | None,
        state: ServerState,
        schemas: Mapping[str, ModelSchema],
        unread: UnreadAnswers,
        max_connections: int,
        refused: Callable[[ErrorCode], None] = lambda _: None,
        keys: Keys = NO_KEYS,
    ) -> None:
        self._keys = keys
        self._state, self._schemas, self._refused = state, schemas, refused
        self._unread, self._max_connections = unread, max_connections
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(triton or "", options=[*unlimited, *TO_TRITON])
        self._stream_infer = self._channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        self._leaving: set[asyncio.Task[None]] = set()  # calls of clients that have left
        self._server: grpc.aio.Server | None = None
        self.open = self.port = 0

    async def start(self, host: str, port: int, max_message_bytes: int, held: bool = False) -> int:
        """Listen on a port, or, if it is 0, on a free port; returns the port. Raises ServerError if it is taken.

        A message may have `max_message_bytes`; gRPC itself refuses larger messages with RESOURCE_EXHAUSTED. `held`: the
        launcher holds the port (Ports.hold).
        """
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(held)),  # 1 would let a second server take a port that is not held
            ("grpc.max_allowed_incoming_connections", self._max_connections),
            *CONNECTIONS,
        ]
        gates = [Gate(self._keys)]
        server = grpc.aio.server(interceptors=gates, options=options, maximum_concurrent_rpcs=MAX_CALLS)
        health = {"Check": grpc.unary_unary_rpc_method_handler(self._health)}
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, self._handlers()),
                grpc.method_handlers_generic_handler(HEALTH_SERVICE, health),
            )
        )
        try:
            chosen = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            message = f"--grpc_port = {port}: cannot listen on {host}; choose another port, or 0 for a free one"
            raise ServerError(message) from None
        await server.start()
        self._server, self.port = server, int(chosen)
        return self.port

    async def close(self) -> None:
        """End all calls and stop listening."""
        if self._server is not None:
            await self._server.stop(CLOSE_SECONDS)
        for task in self._leaving:
            task.cancel()
        await self._channel.close()

    def _handlers(self) -> dict[str, Any]:
        """Make the handlers by method. They take bytes, so that a malformed message is the client's fault, no internal error."""
        handlers = {
            "ServerLive": self._answer(service_pb2.ServerLiveRequest, self._live),
            "ServerReady": self._answer(service_pb2.ServerReadyRequest, self._ready),
            "ModelReady": self._answer(service_pb2.ModelReadyRequest, self._model_ready),
            # The client's side is the same as for a method with one response, but here its writing can be awaited.
            "ModelInfer": grpc.unary_stream_rpc_method_handler(self._model_infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._model_stream_infer),
        }
        handlers |= {method: grpc.unary_unary_rpc_method_handler(self._relay(method)) for method in PASSED_ON}
        handlers |= {method: grpc.unary_unary_rpc_method_handler(_refuse) for method in CLOSED}
        return handlers

    def _answer(self, kind: type[Message], make: Callable[[Any], Message]) -> Any:
        async def handler(data: bytes, context: Any) -> bytes:
            return bytes(make(await _parse(kind, data, context)).SerializeToString())

        return grpc.unary_unary_rpc_method_handler(handler)

    def _live(self, _: Any) -> Message:
        return service_pb2.ServerLiveResponse(live=True)

    def _ready(self, _: Any) -> Message:
        return service_pb2.ServerReadyResponse(ready=not self._state.obstacles())

    def _model_ready(self, request: Any) -> Message:
        known = request.name in self._schemas and request.version in ("", "1")
        return service_pb2.ModelReadyResponse(ready=known and not self._state.obstacles())

    async def _health(self, _: bytes, __: Any) -> bytes:
        """grpc.health.v1.Health/Check: HealthCheckResponse with status SERVING (1) or NOT_SERVING (2)."""
        return b"\x08\x02" if self._state.obstacles() else b"\x08\x01"

    def _relay(self, method: str) -> Handler:
        call = self._channel.unary_unary(f"/{SERVICE}/{method}")
        kind: type[Message] = getattr(service_pb2, f"{method}Request")

        async def handler(data: bytes, context: Any) -> bytes:
            if len(data) > MAX_OTHER_BYTES:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, f"{len(data)} bytes: must be <= {MAX_OTHER_BYTES}"
                )
            message = await _parse(kind, data, context)
            schema = self._schemas.get(getattr(message, "name", ""))
            if schema is not None and message.name != schema.model:
                message.name = schema.model
                data = message.SerializeToString()
            answer = await _passed_on(call(data, timeout=ANSWER_SECONDS), context)
            return REWRITTEN[method](answer) if method in REWRITTEN else answer

        return handler

    async def _model_infer(self, data: bytes, context: Any) -> None:
        """Answer a request that has one response, by a stream of its own, the only way in which Triton serves these models."""
        request = await _parse(service_pb2.ModelInferRequest, data, context)
        several = asks_for_several(request, self._schemas)
        reason = f"{several}: ModelInfer has one response for one prompt; use ModelStreamInfer" if several else ""
        model = request.model_name  # as the client calls it; `admit` may rename it
        try:  # here, so that the text of a refusal, which a client can choose in part, is not taken for a code
            admit(request, self._schemas)
        except RequestError as error:
            reason = str(error)
        if reason:
            self._refused(ErrorCode.INVALID)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        async with self._answering(context) as answer:
            collected = Collected(answer)
            await self._stream(_only(data), collected.write, answer, context, keeps=True)
            response = await collected.answer(request.id, model, context)
            await answer.deliver(len(response), partial(context.write, response))

    async def _model_stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with self._answering(context) as answer:
            await self._stream(requests, context.write, answer, context)

    @asynccontextmanager
    async def _answering(self, context: Any) -> AsyncIterator[UnreadAnswer]:
        """Count an answer until the context ends; ends a call for which there is no room, and resets one that is not read."""
        with self._unread.answer() as answer:
            try:
                yield answer
            except QueueFullError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            except UnreadError:
                _reset()

    async def _stream(
        self,
        requests: AsyncIterator[bytes],
        write: Callable[[bytes], Awaitable[object]],
        answer: UnreadAnswer,
        context: Any,
        keeps: bool = False,
    ) -> None:
        """Pass requests of one client on to Triton, and give Triton's responses and refusals to `write`.

        `keeps`: see GrpcCall.deliver.
        """
        if self.open >= MAX_STREAMS:
            message = f"{self.open} streams are open: at most {MAX_STREAMS} may; close some, or try again later"
            await context.abort(grpc.StatusCode.UNAVAILABLE, message)
        tenant = _tenant(self._keys, context.invocation_metadata()) or Tenant()  # the gate has let it through
        owner = tenant.owner or context.peer()
        upstream = GrpcCall(self._stream_infer, self._schemas, self._refused, owner, tenant.secret.hex(), answer)
        forward = asyncio.create_task(upstream.forward(requests))
        back = asyncio.create_task(upstream.back())
        unread = False
        failure: grpc.aio.AioRpcError | None = None
        self.open += 1
        try:
            # If the client leaves, this handler is cancelled, but not `back`: see GrpcCall.
            if await upstream.deliver(write, keeps):
                await back
                await forward
        except grpc.aio.AioRpcError as error:
            failure = error
        except (UnreadError, QueueFullError):
            unread = True
            raise
        finally:
            self.open -= 1
            if back.done():
                forward.cancel()
                leaving = forward
            else:
                leaving = asyncio.create_task(upstream.leave(forward, back, unread))
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)
            if unread:  # nothing may use the client's call any more when it is reset
                await asyncio.wait((leaving,))
        if failure is not None:
            await _abort(context, failure.code(), failure.details())


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls without a key before anything of their messages is read."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Return the handler of a call, or one that refuses it."""
        if details.method in WITHOUT_KEY or _tenant(self._keys, details.invocation_metadata) is not None:
            return await continuation(details)
        return REFUSED


async def _refuse_call(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)


REFUSED = grpc.stream_stream_rpc_method_handler(_refuse_call)


def _tenant(keys: Keys, metadata: Any) -> Tenant | None:
    """Return whose call it is; None if it has none of the keys."""
    given = [value for name, value in metadata or () if name == "authorization"]
    return keys.tenant(given[0] if len(given) == 1 and isinstance(given[0], str) else "")


async def _only(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _parse(kind: type[Message], data: bytes, context: Any) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, describe(error))


async def _passed_on(call: Any, context: Any) -> bytes:
    try:
        return bytes(await call)
    except grpc.aio.AioRpcError as error:
        await _abort(context, error.code(), error.details())
        raise  # not reached: abort raises


async def _abort(context: Any, code: grpc.StatusCode, details: str | None) -> None:
    """End a call as Triton ended it; if Triton does not run any more, the message says so."""
    if code is grpc.StatusCode.UNAVAILABLE:
        details = NOT_RUNNING if "connect" in (details or "") else ENDED
    await context.abort(code, details or "")


def without_parameters(answer: bytes) -> bytes:
    """Remove the parameters from a model's configuration: they name this machine's files and the server's shared memory."""
    response = service_pb2.ModelConfigResponse.FromString(answer)
    response.config.parameters.clear()
    return bytes(response.SerializeToString())


def without_durations(answer: bytes) -> bytes:
    """Set the durations of models' statistics to 0."""
    response = service_pb2.ModelStatisticsResponse.FromString(answer)
    clear_durations(response)
    return bytes(response.SerializeToString())


REWRITTEN = {"ModelConfig": without_parameters, "ModelStatistics": without_durations}


async def _refuse(_: bytes, context: Any) -> bytes:
    message = "this part of Triton is closed to clients; docs/security.md says why"
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)
    return b""  # not reached: abort raises
