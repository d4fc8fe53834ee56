"""Every request that is submitted gets exactly one end, and the next request is served, whatever raises on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.support.waiting import until

from kvseek.core.errors import ErrorCode
from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.engine.service import EngineService
from kvseek.server.engine import process
from kvseek.server.engine.metrics import EngineMetrics
from kvseek.server.engine.process import EngineServer
from kvseek.server.requests import engine_client
from kvseek.server.requests.engine_client import EngineClient
from kvseek.server.requests.messages import Outputs
from kvseek.server.settings import ServeSettings

pytestmark = pytest.mark.anyio
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
