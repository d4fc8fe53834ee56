"""Requests of a door at the engine: how many may be tokenised at once, and that none goes on whose caller has gone."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ClassVar

import pytest
from tests.support.waiting import until

from kvseek.core.errors import ErrorCode, QueueFullError, RequestError
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.server.requests.generations import Call, CodedError, Generations, Submission, Workers
from kvseek.server.requests.unread import UnreadAnswer, UnreadAnswers, size_of

pytestmark = pytest.mark.anyio
UNREAD = UnreadAnswers(1 << 20)
ANSWER = UnreadAnswer(UNREAD)


class Client:
    """Stands for EngineClient: records what it is told."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.counted: list[ErrorCode] = []
        self.give: Callable[[list[StepOutput]], None] = lambda _: None
        self.takers: list[Callable[[list[StepOutput]], None]] = []

    def encoded(self, request: Any, trace: str, arrived: float) -> tuple[int, bytes]:
        return 7, b""

    def start(self, number: int, data: bytes, on_output: Callable[[list[StepOutput]], None]) -> None:
        self.give = on_output
        self.takers.append(on_output)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def refused(self, code: ErrorCode) -> None:
        self.counted.append(code)


class Served:
    """A request whose output number `stops_at` has a stop word."""

    request: Any = Request((1,), 4)
    names: ClassVar = {"input_ids": "prompt"}
    streaming = True
    ended = False

    def __init__(self, stops_at: int = -1, held_bytes: int = 0) -> None:
        self.stops_at, self.taken, self.held_bytes = stops_at, 0, held_bytes

    def push(self, outputs: list[StepOutput]) -> Any:
        tokens = []
        for output in outputs:
            if not self.ended:
                self.taken += 1
                self.ended = self.taken == self.stops_at
                tokens.append(output.token_id)
        yield {"tokens": tokens}


def make(client: Client, max_making: int = 4) -> Generations:
    return Generations(client, max_making, UNREAD)  # type: ignore[arg-type]


def call(request_id: str = "") -> Call:
    return Call(time.monotonic(), owner="owner", request_id=request_id)


def generate(
    generations: Generations, served: Any, answer: UnreadAnswer = ANSWER, own: Call | None = None
) -> AbstractAsyncContextManager[AsyncIterator[Any]]:
    own = call() if own is None else own
    return generations.generate([generations.submission(served, own)], own, answer)


async def test_too_many_that_wait_for_a_thread_are_refused() -> None:
    workers, gate = Workers(2, "test", max_open=4), threading.Event()
    under_way = [asyncio.create_task(workers.run(gate.wait)) for _ in range(4)]
    await until(lambda: workers.open == 4)
    message = r"4 requests are being tokenised: at most max_queue_size \+ max_batch_size = 4"
    with pytest.raises(QueueFullError, match=message):
        await workers.run(lambda: True)
    under_way[-1].cancel()  # its client leaves, and makes room
    await asyncio.wait(under_way[-1:])
    assert workers.open == 3
    last = asyncio.create_task(workers.run(lambda: True))
    gate.set()
    assert await last
    await asyncio.gather(*under_way[:-1])
    await until(lambda: not workers.open)
    workers.close()


async def test_data_of_clients_that_have_left_is_freed_while_others_hold_the_threads() -> None:
    class Body:
        pass

    workers, gate = Workers(1, "test", max_open=100), threading.Event()
    slow = asyncio.create_task(workers.run(gate.wait))
    await until(lambda: workers.open == 1)
    bodies: weakref.WeakSet[Body] = weakref.WeakSet()
    for _ in range(20):
        body = Body()
        bodies.add(body)
        left = asyncio.create_task(workers.run(partial(id, body)))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
    del body, left
    gc.collect()
    assert not bodies
    gate.set()
    await slow
    workers.close()


async def test_room_for_logits_is_reserved_until_they_arrive_or_the_request_ends() -> None:
    unread = UnreadAnswers(1 << 20, max_logits=100, vocabulary=10)
    client, served = Client(), Served()
    generations = Generations(client, 4, unread)  # type: ignore[arg-type]
    served.request = Request((1,), 4, SamplingConfig(return_generation_logits=True))
    with unread.answer() as answer:
        async with generate(generations, served, answer) as chunks:
            assert (unread.reserved, unread.bytes) == (160, 0)
            client.give([StepOutput(7, token_id=5, generation_logits=bytes(40))])
            assert (unread.reserved, unread.bytes) == (120, size_of(StepOutput(7)) + 40)
            await anext(chunks)
        assert unread.reserved == 0
        client.give([StepOutput(7, token_id=5, generation_logits=bytes(40))])  # before the engine knows
        assert unread.reserved == 0
    served.request = Request((1,), 40, served.request.sampling)
    with pytest.raises(RequestError, match="--max_logits"), unread.answer() as answer:
        async with generate(generations, served, answer):
            pass
    assert client.counted == [ErrorCode.INVALID]


async def test_a_request_that_is_stopped_while_it_is_tokenised_ends() -> None:
    client, gate, own = Client(), threading.Event(), call()
    generations = make(client)

    def read() -> Submission:
        own.request_id = "mine"
        gate.wait()
        return generations.submission(Served(), own)

    async def serve() -> None:
        with generations.stoppable(own):
            submission = await generations.make(read)
            async with generations.generate([submission], own, ANSWER):
                assert client.cancelled == [7]

    task = asyncio.create_task(serve())
    await until(lambda: own.request_id == "mine")
    generations.stop("mine", "owner")
    gate.set()
    await task
    generations.close()


ANSWERED = (StepOutput(1, 1), StepOutput(1, 2), StepOutput(1, None, FinishReason.LENGTH))


async def test_chunks_end_with_the_request_or_with_a_stop_word() -> None:
    client = Client()
    generations = make(client)
    for stops_at, expected in ((-1, [[1], [2], [None]]), (2, [[1], [2]])):
        async with generate(generations, Served(stops_at)) as chunks:
            for output, tokens in zip(ANSWERED, expected, strict=False):
                client.give([output])
                assert await anext(chunks) == (0, {"tokens": tokens})
            assert await anext(chunks, None) is None
    assert client.cancelled[-1] == 7, "after a stop word the engine would go on"
    assert generations.open == 0
    generations.close()


async def test_a_choice_that_a_stop_word_ends_is_cancelled_and_the_others_go_on() -> None:
    client, own = Client(), call()
    generations = make(client)
    submissions = [generations.submission(served, own) for served in (Served(1), Served())]
    async with generations.generate(submissions, own, ANSWER) as chunks:
        first, second = client.takers
        first([StepOutput(1, 1)])
        second([StepOutput(1, 11)])
        assert [await anext(chunks) for _ in range(2)] == [(0, {"tokens": [1]}), (1, {"tokens": [11]})]
        for token in (2, 3):  # drawn before the cancellation arrives
            first([StepOutput(1, token)])
            second([StepOutput(1, 10 + token)])
            assert await anext(chunks) == (1, {"tokens": [10 + token]})
            assert client.cancelled == [7]
        first([StepOutput(1, finish_reason=FinishReason.CANCELLED)])
        second([ANSWERED[2]])
        assert await anext(chunks) == (1, {"tokens": [None]})
        assert await anext(chunks, None) is None
    generations.close()


async def test_what_has_come_while_nobody_asked_is_one_chunk() -> None:
    unread = UnreadAnswers(1 << 20)
    client = Client()
    generations = Generations(client, 4, unread)  # type: ignore[arg-type]
    with unread.answer() as answer:
        async with generate(generations, Served(), answer) as chunks:
            for output in ANSWERED[:2]:
                client.give([output])
            assert unread.bytes == 2 * size_of(ANSWERED[0])
            assert await anext(chunks) == (0, {"tokens": [1, 2]})
            assert unread.bytes == 2 * size_of(ANSWERED[0]), "the client may not have read it yet"
            client.give(list(ANSWERED[2:]))
            assert await anext(chunks) == (0, {"tokens": [None]})
            assert unread.bytes == size_of(ANSWERED[2])
            assert await anext(chunks, None) is None
    assert unread.bytes == 0


async def test_a_prompt_that_an_answer_repeats_counts_until_the_client_has_read_it() -> None:
    unread, client = UnreadAnswers(2000), Client()
    generations = Generations(client, 4, unread)  # type: ignore[arg-type]
    with unread.answer() as answer:
        async with generate(generations, Served(held_bytes=400), answer) as chunks:
            assert unread.bytes == 400
            with unread.answer() as other, pytest.raises(QueueFullError, match=r"have 2,001 bytes: must be <= 2,000"):
                async with generate(generations, Served(held_bytes=1601), other):
                    pass
            assert len(client.takers) == 1, "the engine has not been asked"
            assert unread.bytes == 400
            client.give([ANSWERED[0]])
            await anext(chunks)
            client.give([ANSWERED[1]])
            await anext(chunks)
            assert unread.bytes == size_of(ANSWERED[1]), "what came before has been read"
    assert (generations.open, client.counted) == (0, [ErrorCode.QUEUE_FULL])
    generations.close()


async def test_requests_of_one_call_come_each_in_its_order_and_end_together_with_an_error() -> None:
    client, own = Client(), call()
    generations = make(client)
    submissions = [generations.submission(served, own) for served in (Served(), Served())]
    async with generations.generate(submissions, own, ANSWER) as chunks:
        first, second = client.takers
        first([StepOutput(1, 1)])
        second([StepOutput(1, 11)])
        first([StepOutput(1, 2)])
        assert [await anext(chunks) for _ in range(2)] == [(0, {"tokens": [1, 2]}), (1, {"tokens": [11]})]
        first([ANSWERED[2]])
        assert await anext(chunks) == (0, {"tokens": [None]})
        second([StepOutput(1, 12)])
        second([StepOutput(1, finish_reason=FinishReason.ERROR, error="broken", code=ErrorCode.INTERNAL)])
        assert await anext(chunks) == (1, {"tokens": [12]}), "what came before the error"
        with pytest.raises(CodedError, match="broken"):
            await anext(chunks)
    assert client.cancelled == [7, 7]
    assert generations.open == 0
    generations.close()


async def test_an_error_of_the_engine_keeps_its_code_and_gets_the_clients_names() -> None:
    client = Client()
    generations = make(client)
    async with generate(generations, Served()) as chunks:
        error = StepOutput(1, finish_reason=FinishReason.ERROR, error="input_ids: no", code=ErrorCode.TIMEOUT)
        client.give([error])
        with pytest.raises(CodedError, match=r"^prompt: no") as caught:
            await anext(chunks)
    assert caught.value.code is ErrorCode.TIMEOUT
    generations.close()


async def test_refusals_are_counted_by_their_code() -> None:
    client = Client()
    generations = make(client)
    for error in (RequestError("x"), CodedError(ErrorCode.UNAVAILABLE, "x")):
        with pytest.raises(type(error)), generations.counting_refusals():
            raise error
    assert client.counted == [ErrorCode.INVALID, ErrorCode.UNAVAILABLE]
    generations.close()
