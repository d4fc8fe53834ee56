"""kvseek.AsyncLLM: what LLM gives, from coroutines; tasks that are cancelled cancel their requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from tests.conftest import BuildEngine
from tests.support.random_models import save_random_model

from kvseek import LLM, AsyncLLM, GenerationError, OutputPiece, RequestError, RequestOutput, SamplingParams
from kvseek.core.errors import UnavailableError

PROMPTS = ["the harbour master wrote the log", "one ship", "the light was lit at dusk", "1931"]
CONVERSATION = [{"role": "user", "content": "who wrote the log"}]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, build_engine: BuildEngine) -> Path:
    return build_engine(save_random_model(tmp_path_factory.mktemp("model") / "llama", "llama"), "full")


def run(directory: Path, use: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    """Call a coroutine function with an LLM; no thread may be left."""

    async def main() -> None:
        async with AsyncLLM(directory) as llm:
            await use(llm)
            await settle(llm)

    before = threading.enumerate()
    asyncio.run(asyncio.wait_for(main(), 60))
    assert set(threading.enumerate()) <= set(before)


async def settle(llm: AsyncLLM) -> None:
    while llm.engine.running or llm.engine.waiting:
        await asyncio.sleep(0.01)


async def last(pieces: AsyncIterator[OutputPiece]) -> RequestOutput:
    found = [piece async for piece in pieces]
    output = found[-1].output
    assert output is not None
    assert output.text == "".join(piece.text for piece in found)
    return output


def test_outputs_are_those_of_an_llm(directory: Path) -> None:
    with LLM(directory) as llm:
        expected = [(output.prompt, output.text, output.token_ids) for output in llm.generate(PROMPTS, GREEDY)]
        (answer,) = llm.chat(CONVERSATION, GREEDY)

    async def use(llm: AsyncLLM) -> None:
        loop, before, calls = asyncio.get_running_loop(), llm.engine.step_report.number, list[object]()
        call_soon = loop.call_soon_threadsafe
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", lambda *a, **k: (calls.append(a), call_soon(*a, **k))[1])
            found = await asyncio.gather(*(last(llm.generate(prompt, GREEDY)) for prompt in PROMPTS))
            await settle(llm)
        assert [(output.prompt, output.text, output.token_ids) for output in found] == expected
        steps = llm.engine.step_report.number - before
        assert len(calls) <= steps + len(PROMPTS), "one for the outputs of a step, one for each prompt's tokens"
        assert (await last(llm.chat(CONVERSATION, GREEDY))).text == answer.text

    run(directory, use)


def test_sessions_and_prefixes(directory: Path) -> None:
    document = [i * i % 97 + 3 for i in range(600)]

    async def use(llm: AsyncLLM) -> None:
        with await llm.prefix(document) as prefix:
            questions = (last(llm.generate([number], GREEDY, prefix=prefix)) for number in range(3))
            for output in await asyncio.gather(*questions):
                assert output.reused_tokens >= len(document)
        with await llm.prefix(CONVERSATION) as prefix:
            output = await last(llm.chat([{"role": "user", "content": "why?"}], GREEDY, prefix=prefix))
            assert output.prompt == llm.tokenizer.apply_chat_template(
                [*prefix.messages, {"role": "user", "content": "why?"}]
            )
        await last(llm.generate(document, GREEDY, session="talk", cache_salt="a"))
        assert await llm.end_session("talk") is None
        ended = await llm.end_session("talk", cache_salt="a")
        assert ended is not None
        assert ended.freed_tokens == len(document) + 19

    run(directory, use)


def test_a_cancelled_task_cancels_its_request(directory: Path) -> None:
    async def use(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(last(llm.generate(prompt, LONG))) for prompt in PROMPTS * 2]
        while not (llm.engine.running and llm.engine.waiting):
            await asyncio.sleep(0.01)
        for task in tasks[1:]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in done] == [RequestOutput, *[asyncio.CancelledError] * 7]
        assert len(done[0].token_ids) == 900  # type: ignore[union-attr]

    run(directory, use)


def test_leaving_the_iteration_cancels_the_request(directory: Path) -> None:
    async def use(llm: AsyncLLM) -> None:
        async with aclosing(llm.generate(PROMPTS[0], LONG)) as pieces:
            async for _ in pieces:
                break
        await settle(llm)
        (output,) = [piece.output async for piece in llm.generate("one", SamplingParams(max_tokens=1))]
        assert output is not None

    run(directory, use)


def test_a_loop_that_has_been_closed_ends_its_requests(directory: Path) -> None:
    llm, closed = AsyncLLM(directory), threading.Event()
    llm.engine.on_step = lambda report: report.number < 20 or closed.wait(60)

    async def begin() -> AsyncIterator[OutputPiece]:
        pieces = llm.generate(PROMPTS[0], LONG)
        await anext(pieces)
        return pieces

    first = asyncio.new_event_loop()
    kept = first.run_until_complete(begin())  # noqa: F841  nobody reads it any more, and nobody leaves it
    first.close()
    closed.set()

    async def go_on() -> None:
        async with llm:
            await settle(llm)
            assert llm.engine.step_report.number < 30
            assert (await last(llm.generate(PROMPTS[0], GREEDY))).finish_reason == "length"

    asyncio.run(asyncio.wait_for(go_on(), 60))


def test_errors(directory: Path) -> None:
    async def use(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="prompt = '0 tokens'"):
            await last(llm.generate([]))
        with pytest.raises(GenerationError, match="timeout = 1e-06 s: passed"):
            await last(llm.generate("log", timeout=1e-6))
        going_on = asyncio.create_task(last(llm.generate("log", LONG)))
        while not llm.engine.running:
            await asyncio.sleep(0.01)
        await llm.close()
        await llm.close()
        with pytest.raises(GenerationError, match="the LLM was closed"):
            await going_on
        with pytest.raises(UnavailableError, match="the LLM is closed"):
            await last(llm.generate("log"))

    run(directory, use)


def test_closing_twice_at_once_waits_for_the_end(directory: Path) -> None:
    before = threading.enumerate()

    async def main() -> None:
        llm = AsyncLLM(directory)
        first = asyncio.create_task(llm.close())
        await asyncio.sleep(0)
        await llm.close()
        assert first.done()

    asyncio.run(main())
    assert set(threading.enumerate()) <= set(before)
