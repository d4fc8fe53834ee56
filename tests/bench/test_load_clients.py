"""Load testers and kvseek's own client against a server of which every event is known: the same answers give the same figures."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.conftest import ROOT

from kvseek.bench.engines import END, make_vocabulary
from kvseek.bench.load import aiperf, main
from kvseek.bench.load.cells import Answer, Cell, LoadTestError
from kvseek.bench.load.client import Client, send
from kvseek.engine.chat_template import SETTINGS_FILE
from kvseek.engine.tokenizer import TOKENIZER_FILE

AIPERF = ROOT / main.INSTALLED / "aiperf/bin/aiperf"
CELL = Cell(((5, 7),) * 3, concurrency=3)
PROMPTS = ["one two three", "four five six", "seven eight nine"]
# Seconds before each event, and its text; without text it is none of the answer. 7 tokens in 3 pieces.
EVENTS = ((0.6, ""), (0.4, "a few"), (0.7, " words"), (0.3, " and more"), (1.0, None))
REFUSED = "sixteen"  # a prompt that ends with an error in its stream


class ScriptedServer:
    """An OpenAI port that answers every prompt with EVENTS.

    Attributes
    ----------
    answers : list of Answer
        When requests came and texts were sent: what the figures are to be.
    """

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.bodies: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    async def _start(self) -> int:
        application = web.Application()
        application.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return int(runner.addresses[0][1])

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        came, sent = time.perf_counter(), list[float]()
        body = await request.json()
        self.bodies.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        common = {"id": "one", "object": "text_completion", "created": 1, "model": "kvseek"}
        if body["prompt"] == REFUSED:
            await response.write(b'data: {"error": {"message": "it is too much"}}\n\n')
            return response
        for pause, text in EVENTS:
            await asyncio.sleep(pause)
            event: dict[str, Any] = {**common, "choices": [{"index": 0, "text": text, "finish_reason": None}]}
            if text is None:
                usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
                event = {**common, "choices": [], "usage": usage}
            elif text:
                sent.append(time.perf_counter())
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        self.answers.append(Answer(came, tuple(sent), 7))
        return response


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


def own_client(server: ScriptedServer, prompts: list[str] = PROMPTS, cell: Cell = CELL) -> list[Answer]:
    async def ask() -> list[Answer]:
        async with Client(f"http://127.0.0.1:{server.port}/v1", {"model": "kvseek", "top_k": 20}) as client:
            return await send(cell, lambda number: client.answer(prompts[number], 7), 60)

    return asyncio.run(ask())


def check(found: list[Answer], server: ScriptedServer) -> None:
    """Figures are those of the server's own clock: nothing but pieces of text is counted, and tokens are the server's.

    A busy machine may delay an event by half a second; events without text are further away than that.
    """
    assert len(found) == len(server.answers) == 3
    for own, true in zip(sorted(found, key=lambda one: one.sent), server.answers, strict=True):
        assert own.tokens == 7
        assert own.ttft == pytest.approx(true.ttft, abs=0.5)
        assert own.gaps == pytest.approx(true.gaps, abs=0.5)
        assert own.tpot == pytest.approx(true.tpot, abs=0.1)


def test_the_figures_of_the_own_client(server: ScriptedServer) -> None:
    check(own_client(server), server)
    wanted = {"model": "kvseek", "top_k": 20, "max_tokens": 7, "ignore_eos": True, "stream": True}
    assert all(body.items() >= wanted.items() for body in server.bodies)


@pytest.mark.slow
@pytest.mark.skipif(not AIPERF.exists(), reason="aiperf is absent: run make load-tools (1.2 GB)")
def test_the_figures_of_aiperf(server: ScriptedServer, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    text = (ROOT / "examples/harbour_log.txt").read_text(encoding="utf-8")
    (tokenizer / TOKENIZER_FILE).write_text(make_vocabulary(text, 3000))
    settings = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tokenizer / SETTINGS_FILE).write_text(json.dumps(settings))
    url = f"http://127.0.0.1:{server.port}"
    check(aiperf.measure(AIPERF, url, "kvseek", tokenizer, CELL, PROMPTS, tmp_path), server)


def test_an_error_in_a_stream(server: ScriptedServer) -> None:
    with pytest.raises(LoadTestError, match="completions: it is too much"):
        own_client(server, [REFUSED], Cell(((1, 7),)))


def test_a_server_that_refuses_or_is_gone(server: ScriptedServer) -> None:
    async def ask(url: str) -> Answer:
        async with Client(url, {}) as client:
            return await client.answer("one", 7)

    with pytest.raises(LoadTestError, match="status 404: "):
        asyncio.run(ask(f"http://127.0.0.1:{server.port}/v2"))
    with pytest.raises(LoadTestError, match="Cannot connect to host"):
        asyncio.run(ask("http://127.0.0.1:1/v1"))
