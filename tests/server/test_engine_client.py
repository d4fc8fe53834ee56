"""A frontend's connection to an engine: what is counted without one, and that each request gets one end, whatever raises."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.support.door_processes import engine_process
from tests.support.waiting import SECONDS, until

from kvseek.core.errors import ErrorCode, TimeoutExpiredError, UnavailableError
from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.engine.service import EngineService
from kvseek.server.engine import process
from kvseek.server.engine.metrics import EngineMetrics
from kvseek.server.engine.process import EngineServer
from kvseek.server.requests import engine_client
from kvseek.server.requests.engine_client import EngineClient, FromFrontend, Outputs, Submit, frame, read_frame
from kvseek.server.settings import ServeSettings

pytestmark = pytest.mark.anyio
SETTINGS = ServeSettings(threads=1)
LENGTH_BYTES = 4  # before each message


def submit(client: EngineClient, request: Request, on_output: Callable[[Sequence[StepOutput]], object]) -> int:
    number, data = client.encoded(request)
    client.start(number, data, on_output)  # type: ignore[arg-type]
    return number


def test_requests_that_met_no_engine_are_counted_by_the_next_one(
    tmp_path: Path, random_model: RandomModel, build_engine: BuildEngine
) -> None:
    directory = build_engine(random_model("llama"), "full")
    path = tmp_path / "engine.sock"

    async def run() -> str:
        client = EngineClient(path, asyncio.get_running_loop())
        ends: list[StepOutput] = []
        with engine_process(directory, path, SETTINGS) as process:
            await until(lambda: client.connected)
            await asyncio.sleep(0.2)
            assert client.connected_seconds >= 0.2
            first = asyncio.Event()
            submit(client, Request((1, 2, 3), 400), lambda outputs: (first.set(), ends.extend(outputs)))
            await first.wait()
            process.kill()
            await until(lambda: not client.connected)
            assert client.connected_seconds == 0
        assert (ends[-1].finish_reason, ends[-1].code) == (FinishReason.ERROR, ErrorCode.UNAVAILABLE)
        with pytest.raises(UnavailableError):
            submit(client, Request((1, 2, 3), 4), ends.extend)
        client.refused(ErrorCode.UNAVAILABLE)  # as the door does with what `submit` raises
        client.refused(ErrorCode.INVALID)
        await asyncio.sleep(0)
        with engine_process(directory, path, SETTINGS):
            await until(lambda: client.connected)
            text = await client.read_metrics()
        client.close()
        return text

    text = asyncio.run(run())
    counts = dict(re.findall(r'kvseek:requests_total\{.*outcome="(\w+)"\} (\S+)', text))
    assert (counts["unavailable"], counts["invalid"]) == ("2.0", "1.0")


async def test_time_at_a_frontend_counts_towards_the_time_limit(tmp_path: Path) -> None:
    client = EngineClient(tmp_path / "engine.sock", asyncio.get_running_loop())

    def waited(seconds: float, limit: float | None) -> Request:
        request = Request((1,), 4, timeout_seconds=limit)
        data = client.encoded(request, "", time.monotonic() - seconds)[1]
        return msgspec.msgpack.decode(data[LENGTH_BYTES:], type=Submit).request

    found = waited(4.0, 5.0)
    assert found.timeout_seconds == 5.0, "errors tell the limit that the client has set"
    assert 4.0 <= found.waited_seconds < 5.0
    with pytest.raises(TimeoutExpiredError, match=r"timeout = 5 s: passed before .*, after 6\.\d s"):
        waited(6.0, 5.0)
    assert waited(1.0, -0.5).timeout_seconds == -0.5, "the engine says what is wrong with it"
    assert waited(1.0, None).waited_seconds >= 1.0
    client.close()


async def test_outputs_that_come_together_are_handed_over_together_and_the_last_alone(tmp_path: Path) -> None:
    """Two steps that the door finds at once, and the end of the connection behind them."""
    path = tmp_path / "engine.sock"
    token, end = StepOutput(1, 5), StepOutput(1, 6, FinishReason.LENGTH)
    steps = [
        Outputs([(1, token), (2, token)]),
        Outputs([(1, token), (2, token), (3, token)]),
        Outputs([(1, end), (9, end)]),  # of a request that nobody knows
    ]

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = msgspec.msgpack.Decoder(FromFrontend)
        for _ in range(3):
            await read_frame(reader, decoder)
        writer.write(b"".join(map(frame, steps)))
        writer.close()

    server = await asyncio.start_unix_server(engine, str(path))
    client, found = EngineClient(path, asyncio.get_running_loop()), dict[int, list[Sequence[StepOutput]]]()
    await until(lambda: client.connected)

    def take(name: int, outputs: Sequence[StepOutput]) -> None:
        found.setdefault(name, []).append(list(outputs))
        if name == 3:
            raise MemoryError("no room")

    for name in (1, 2, 3):
        assert submit(client, Request((1,), 9), partial(take, name)) == name
    await until(lambda: all(outputs[-1][-1].finish_reason is not None for outputs in found.values()) and found)
    assert found[1] == [[token, token], [end]]
    assert found[2][0] == [token, token]
    assert [[output.code for output in outputs] for outputs in found[2][1:]] == [[ErrorCode.UNAVAILABLE]]
    assert [[output.finish_reason for output in outputs] for outputs in found[3]] == [[None], [FinishReason.ERROR]]
    assert found[3][1][0].code is ErrorCode.INTERNAL
    client.close()
    server.close()


@pytest.fixture(scope="module")
def engine_socket(
    tmp_path_factory: pytest.TempPathFactory, random_model: RandomModel, build_engine: BuildEngine
) -> Iterator[Path]:
    """Of an engine process."""
    path = tmp_path_factory.mktemp("engine") / "engine.sock"
    with engine_process(build_engine(random_model("llama"), "full", "--max_batch_size", "4"), path, SETTINGS):
        yield path


async def test_a_door_that_goes_takes_no_outputs_of_another_along(engine_socket: Path) -> None:
    """Outputs of many requests are sent together: those of doors that have just gone must not stop the others."""
    kept = EngineClient(engine_socket, asyncio.get_running_loop())
    await until(lambda: kept.connected)
    for _ in range(30):
        tokens, ended = list[int](), asyncio.Event()

        def take(outputs: Sequence[StepOutput], tokens: list[int] = tokens, ended: asyncio.Event = ended) -> None:
            tokens += [output.token_id for output in outputs if output.token_id is not None]
            if outputs[-1].finish_reason is not None:
                ended.set()

        leaving = [await asyncio.open_unix_connection(str(engine_socket)) for _ in range(3)]
        for _, writer in leaving:
            writer.write(frame(Submit(1, Request((7, 8, 9), 400))))
        submit(kept, Request((1, 2, 3), 40), take)
        await asyncio.sleep(0.005)
        for _, writer in leaving:
            writer.transport.abort()
        async with asyncio.timeout(SECONDS):
            await ended.wait()
        assert len(tokens) == 40
    kept.close()


GOOD, BAD = Request((1, 2, 3), 6), Request((), 6)


def fail(*_: Any) -> Any:
    raise MemoryError("no memory left")


class Spans:
    """Stands for RequestTracer and its spans."""

    def start(self, *_: Any) -> Spans:
        return self

    def end(self, _: StepOutput) -> None:
        pass


@pytest.fixture(scope="module")
def service(random_model: RandomModel, build_engine: BuildEngine) -> Iterator[EngineService]:
    service = EngineService.load(build_engine(random_model("llama"), "full"), threads=1)
    yield service
    service.close()


@asynccontextmanager
async def served(service: EngineService, path: Path, spans: Spans) -> Any:
    metrics = EngineMetrics(service)
    service.on_step(metrics.record_step)
    server = EngineServer(service, ServeSettings(threads=1), metrics, spans)  # type: ignore[arg-type]
    serving = asyncio.create_task(server.serve(path))
    client = EngineClient(path, asyncio.get_running_loop())
    try:
        yield metrics, client
    finally:
        client.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def ask(
    client: EngineClient, request: Request, look: Callable[[StepOutput], None] = lambda _: None
) -> StepOutput:
    """The end of a request, of which there is one."""
    await until(lambda: client.connected)
    ends: list[StepOutput] = []

    def take(outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                ends.append(output)
            look(output)

    client.start(*client.encoded(request), take)
    await until(lambda: bool(ends))
    await asyncio.sleep(0.05)
    (end,) = ends
    return end


@pytest.mark.parametrize("name", ["record", "record_step", "refused", "text"])
async def test_metrics_that_raise_end_no_request(
    name: str, service: EngineService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineMetrics, name, fail)
    await _check_that_requests_end_as_ever(service, tmp_path, Spans())


@pytest.mark.parametrize("name", ["start", "end"])
async def test_tracing_that_raises_ends_no_request(
    name: str, service: EngineService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = Spans()
    monkeypatch.setattr(spans, name, fail)
    await _check_that_requests_end_as_ever(service, tmp_path, spans)


async def _check_that_requests_end_as_ever(service: EngineService, tmp_path: Path, spans: Spans) -> None:
    async with served(service, tmp_path / "engine.sock", spans) as (_, client):
        await until(lambda: client.connected)
        running = asyncio.create_task(ask(client, GOOD))
        asking = asyncio.create_task(client.read_metrics())  # answered or not, on the same connection
        assert (await running).finish_reason is FinishReason.LENGTH
        assert (await ask(client, BAD)).code is ErrorCode.INVALID
        assert (await ask(client, GOOD)).finish_reason is FinishReason.LENGTH
        asking.cancel()
        assert not service.failure


@pytest.mark.parametrize("last", [False, True])
async def test_a_doors_callback_that_raises_is_given_the_end(
    last: bool, service: EngineService, tmp_path: Path
) -> None:
    def look(output: StepOutput) -> None:
        if (output.finish_reason is not None) is last:
            fail()

    async with served(service, tmp_path / "engine.sock", Spans()) as (_, client):
        beside = asyncio.create_task(ask(client, GOOD))
        end = await ask(client, GOOD, look)
        assert (end.finish_reason, end.code) == (
            (FinishReason.LENGTH if last else FinishReason.ERROR),
            ErrorCode.INTERNAL,
        )
        assert (await beside).finish_reason is FinishReason.LENGTH
        assert (await ask(client, GOOD)).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("side", ["engine", "door"])
async def test_no_memory_for_a_message_ends_its_requests_and_not_the_connection_for_good(
    side: str, service: EngineService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding outputs fails in the engine process, or decoding them in the door's: once, while two requests run."""
    failing = [True]
    encode, read = process.frame, engine_client.read_frame

    def frame(message: Any) -> bytes:
        if side == "engine" and isinstance(message, Outputs) and failing.pop():
            fail()
        return encode(message)

    async def read_frame(*arguments: Any) -> Any:
        message = await read(*arguments)
        if side == "door" and isinstance(message, Outputs) and failing.pop():
            fail()
        return message

    monkeypatch.setattr(process, "frame", frame)
    monkeypatch.setattr(engine_client, "read_frame", read_frame)
    async with served(service, tmp_path / "engine.sock", Spans()) as (_, client):
        ends = await asyncio.gather(*(ask(client, GOOD) for _ in range(2)))
        assert {end.code for end in ends} == {ErrorCode.UNAVAILABLE}
        failing[:] = [False] * 1000
        assert (await ask(client, GOOD)).finish_reason is FinishReason.LENGTH
