"""The gRPC door in front of a toy Triton: what becomes of a call when its client leaves, and what is not passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.server.frontend.test_grpc_checks import SCHEMAS, request
from tests.support.waiting import until
from tritonclient.grpc import service_pb2

from kvseek.server.grpc.call import SERVICE
from kvseek.server.grpc.server import CLOSED, PASSED_ON, GrpcServer
from kvseek.server.requests.keys import Keys
from kvseek.server.requests.unread import UnreadAnswers

pytestmark = pytest.mark.anyio
SECONDS = 30.0
OF_CLIENTS = ("kvseek_owner", "kvseek_secret")
KEYS = ("the-first-key-of-tests", "the-second-key-of-tests")
CLIENT = [  # a client that does not take more on its own than 64 KiB of what nobody reads
    ("grpc.max_receive_message_length", -1),
    ("grpc.http2.bdp_probe", 0),
]
FLOOD = "a" * (1 << 20)
LARGE_BYTES = 16 << 20  # more than a client takes on its own that does not read
LARGE = service_pb2.ModelStreamInferResponse(
    infer_response=service_pb2.ModelInferResponse(
        outputs=[service_pb2.ModelInferResponse.InferOutputTensor(name="logits")],
        raw_output_contents=[bytes(LARGE_BYTES)],
    )
).SerializeToString()


class ToyTriton:
    """Answers a request once, and ends its stream when a model would: its client has said so, or has left."""

    def __init__(self) -> None:
        self.calls = 0  # opened
        self.flooding = False  # whether requests are answered without end
        self.whole = False  # whether requests have one large answer, and streams end by themselves
        self.ends: list[str] = []  # how streams with requests of clients have ended
        self.owners = list[tuple[str, ...]]()  # what requests say of their clients
        self._left: dict[str, asyncio.Event] = {}

    async def infer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.calls += 1
        names = []
        try:
            async for data in requests:
                request = service_pb2.ModelInferRequest.FromString(data)
                name = request.parameters["kvseek_call"].string_param
                self.owners.append(tuple(request.parameters[name].string_param for name in OF_CLIENTS))
                left = self._left.setdefault(name, asyncio.Event())
                if request.parameters["kvseek_leave"].bool_param:
                    left.set()
                    return
                if self.whole:
                    await context.write(LARGE)
                    continue
                names.append(name)
                await context.write(service_pb2.ModelStreamInferResponse().SerializeToString())
                while self.flooding and not left.is_set():
                    await context.write(service_pb2.ModelStreamInferResponse(error_message=FLOOD).SerializeToString())
                if self.flooding:
                    break
            for name in names:
                await self._left[name].wait()
            self.ends.append("told")
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise

    async def config(self, _: bytes, __: Any) -> bytes:
        response = service_pb2.ModelConfigResponse()
        response.config.name = "tensorrt_llm"
        response.config.parameters["socket"].string_value = "/somewhere/private.sock"
        return bytes(response.SerializeToString())


@pytest.fixture(scope="module", autouse=True)
async def one_loop() -> AsyncIterator[None]:
    """Keep one event loop for all tests of the module: gRPC calls a loop that a test has closed about what came late."""
    yield  # noqa: PT022  # a fixture that returns would let go of the loop


class Ready:
    def obstacles(self) -> list[str]:
        return []


@asynccontextmanager
async def doors(
    unread: UnreadAnswers | None = None, max_connections: int = 100, keys: tuple[str, ...] = ()
) -> AsyncIterator[tuple[ToyTriton, grpc.aio.Channel, GrpcServer]]:
    toy, server = ToyTriton(), grpc.aio.server()
    handlers = {
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(toy.infer),
        "ModelConfig": grpc.unary_unary_rpc_method_handler(toy.config),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    unread = unread or UnreadAnswers(1 << 30)
    door = GrpcServer(f"127.0.0.1:{port}", Ready(), SCHEMAS, unread, max_connections, keys=Keys(keys))  # type: ignore[arg-type]
    own = await door.start("127.0.0.1", 0, 1 << 20)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{own}", options=CLIENT)
    try:
        yield toy, channel, door
    finally:
        await channel.close()
        await door.close()
        await server.stop(0)


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("half_closed", [False, True])
async def test_the_call_of_a_client_that_leaves_is_told_and_not_cancelled(half_closed: bool) -> None:
    """Triton 2.51 crashes of cancelled calls."""
    async with doors() as (toy, channel, door):
        for _ in range(20):
            call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
            await call.write(request().SerializeToString())
            await call.read()
            if half_closed:
                await call.done_writing()
            call.cancel()
        await until(lambda: len(toy.ends) == 20)
        assert set(toy.ends) == {"told"}
        await until(lambda: not door.open)


def infer(channel: grpc.aio.Channel) -> Any:
    """A call of ModelInfer whose answer is not read, unless the caller reads it."""
    return channel.unary_stream(f"/{SERVICE}/ModelInfer")(request().SerializeToString())


async def next_call(channel: grpc.aio.Channel) -> None:
    """gRPC lets go of the last call with the next one."""
    for _ in range(2):
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")


async def test_a_client_that_does_not_read_its_stream_counts_as_gone() -> None:
    async with doors(UnreadAnswers(1 << 30, seconds=0.2)) as (toy, channel, door):
        toy.flooding = True
        call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
        await call.write(request().SerializeToString())
        await call.read()
        await until(lambda: toy.ends == ["told"])
        await until(lambda: not door.open)
        await next_call(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="CANCELLED"):
            await read_all(call)


async def test_a_client_that_does_not_read_its_answer_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseek.server.requests.unread.WRITE_BYTES_PER_SECOND", 1 << 30)
    unread = UnreadAnswers(1 << 30, seconds=0.2)
    async with doors(unread) as (toy, channel, _):
        toy.whole = True
        call = infer(channel)
        await until(lambda: unread.bytes >= LARGE_BYTES)
        await until(lambda: not unread.bytes)
        await next_call(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="CANCELLED"):
            await read_all(call)


async def test_answers_that_nobody_reads_end_when_others_need_the_room() -> None:
    """Within the limit at any time; who reads gets everything."""
    unread = UnreadAnswers(5 * LARGE_BYTES)
    async with doors(unread) as (toy, channel, _):
        toy.whole = True
        calls = list[Any]()
        for _ in range(2):
            calls += [infer(channel) for _ in range(4)]
            await until(lambda: unread.bytes >= 4 * LARGE_BYTES)
            for _ in range(2):
                answer = service_pb2.ModelInferResponse.FromString(await infer(channel).read())
                assert len(answer.raw_output_contents[0]) == LARGE_BYTES
                assert unread.bytes <= unread.limit
        assert len(calls) == 8


async def test_connections_have_a_limit_and_the_rest_is_served() -> None:
    async with doors(max_connections=4) as (toy, channel, door):
        await channel.channel_ready()
        streams = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(20)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in streams]
        await until(lambda: sum(end.done() for end in ends) == 17)
        toy.whole = True
        assert await infer(channel).read()
        for end in ends:
            end.cancel()


async def test_a_client_that_sends_nothing_opens_no_call() -> None:
    async with doors() as (toy, channel, door):
        idle, empty = (channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")() for _ in range(2))
        await empty.done_writing()
        assert await empty.read() is grpc.aio.EOF
        await until(lambda: door.open == 1)
        idle.cancel()
        await until(lambda: not door.open)
        assert not toy.calls


async def test_a_models_configuration_names_no_files() -> None:
    async with doors() as (_, channel, __):
        question = service_pb2.ModelConfigRequest(name="tensorrt_llm").SerializeToString()
        answer = await channel.unary_unary(f"/{SERVICE}/ModelConfig")(question)
        config = service_pb2.ModelConfigResponse.FromString(answer).config
        assert config.name == "tensorrt_llm"
        assert not config.parameters


def with_key(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def test_every_method_asks_for_a_key_but_for_health() -> None:
    async with doors(keys=KEYS) as (toy, channel, _):

        async def code(method: str, metadata: Any) -> grpc.StatusCode:
            call = channel.unary_unary(f"/{SERVICE}/{method}")(request().SerializeToString(), metadata=metadata)
            return await call.code()

        wrong = [None, with_key("another key of any"), with_key(KEYS[0][:-1]), (("authorization", KEYS[0]),)]
        wrong.append(with_key(KEYS[0]) + with_key("another key of any"))
        for method in (*PASSED_ON, *CLOSED, "ModelInfer", "ModelStreamInfer", "NoSuchMethod"):
            for metadata in wrong:
                assert await code(method, metadata) is grpc.StatusCode.UNAUTHENTICATED, method
        assert not toy.calls
        assert await code("ModelConfig", with_key(KEYS[1])) is grpc.StatusCode.OK
        assert await code("TraceSetting", with_key(KEYS[1])) is grpc.StatusCode.PERMISSION_DENIED
        for method in ("ServerLive", "ServerReady"):
            call = channel.unary_unary(f"/{SERVICE}/{method}")(b"")
            assert await call.code() is grpc.StatusCode.OK
        assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"


@pytest.mark.parametrize("keys", [KEYS, ()])
async def test_models_are_told_whose_requests_they_are(keys: tuple[str, ...]) -> None:
    """Those of a key are one client's, whatever the connection; without keys those of a connection are."""

    async def ask(channel: grpc.aio.Channel, key: str) -> None:
        call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(metadata=with_key(key))
        await call.write(request().SerializeToString())
        await call.read()
        call.cancel()

    async with doors(keys=keys) as (toy, channel, _):
        for key in (*KEYS, KEYS[0]):
            await ask(channel, key)
        first, second, third = [told for told in toy.owners if told[0]]  # else it tells that a client has left
        assert first == third
        assert (first != second) == bool(keys)
        assert bool(first[1]) == bool(keys)
        assert not any(key in word for key in KEYS for told in toy.owners for word in told)
