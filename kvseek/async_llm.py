"""AsyncLLM: LLM for programs on asyncio, such as servers."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack

from kvseek.core.request import EndedSession, StepOutput

from .arguments import CHAT_NAMES, Message, Prompt, check_conversation
from .base_llm import BaseLLM, RequestOptions, template_arguments
from .generation import Generation, GenerationError
from .outputs import OutputPiece
from .prefix import Prefix
from .sampling_params import SamplingParams

MAKERS = 2  # threads that tokenise, beside the event loop: more would take the engine's cores


class _Outbox:
    """Outputs on their way from the engine's thread to a loop, which is woken once for those of a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._outputs: deque[tuple[asyncio.Queue[StepOutput], StepOutput]] = deque()  # safe between threads

    def put(self, arrived: asyncio.Queue[StepOutput], output: StepOutput) -> None:
        """Add an output for whoever reads `arrived`; `wake` follows. Raises RuntimeError when the loop has ended."""
        if self.loop.is_closed():
            raise RuntimeError("the event loop of the request has been closed")
        self._outputs.append((arrived, output))

    def wake(self) -> None:
        """Let the loop hand out what has been put."""
        self.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        while self._outputs:
            arrived, output = self._outputs.popleft()
            arrived.put_nowait(output)


class AsyncLLM(BaseLLM):
    """LLM for programs on asyncio: one prompt a call, any number of calls at once, computed together in batches.

    The request of a task that is cancelled, or that leaves the iteration, is cancelled. Parameters and errors of the constructor
    are those of LLM. The constructor takes seconds, or minutes if it builds, so call it before the loop starts or with
    `asyncio.to_thread`.
    """

    _closing: asyncio.Task[None] | None = None  # once `close` has been called
    _outbox: _Outbox | None = None  # of the loop on which a request was last submitted

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[OutputPiece, None]:
        """Continue a prompt, a text or token ids: yields pieces as they come; the last piece has the whole `output`.

        Parameters and errors are those of LLM.generate.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._run(functools.partial(self._generation, 0, prompt, params, options))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[OutputPiece, None]:
        """Answer one conversation, as `generate` does with a prompt; see LLM.chat."""
        params = SamplingParams() if sampling_params is None else sampling_params
        template = template_arguments(add_generation_prompt, continue_final_message, chat_template_kwargs)
        conversation = check_conversation(messages)
        return self._run(functools.partial(self._generation, 0, conversation, params, options, CHAT_NAMES, template))

    async def prefix(self, beginning: Prompt | Sequence[Message], *, cache_salt: str | None = None) -> Prefix:
        """Read the beginning of many prompts once; see LLM.prefix."""
        self._check_open()
        make = functools.partial(self._prefix, beginning, cache_salt)
        prefix, reading = await asyncio.get_running_loop().run_in_executor(self._makers, make)
        async for _ in self._pieces(reading):
            pass
        return prefix

    async def end_session(self, session_id: str, *, cache_salt: str | None = None) -> EndedSession | None:
        """Forget a session and free what only it has used; see LLM.end_session."""
        return await asyncio.wrap_future(self._end_session(session_id, cache_salt))

    async def close(self) -> None:
        """End all requests and free the engine; no thread is left. May be called again, also while it is under way."""
        if self._service.forked:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close_once())
        await asyncio.shield(self._closing)

    async def _close_once(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._makers, self._close)
        self._makers.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @functools.cached_property
    def _makers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(MAKERS, thread_name_prefix="kvseek-tokenise")

    async def _run(self, make: Callable[[], Generation]) -> AsyncGenerator[OutputPiece, None]:
        """Make a request in a thread, and yield its pieces."""
        self._check_open()
        generation = await asyncio.get_running_loop().run_in_executor(self._makers, make)
        async with aclosing(self._pieces(generation)) as pieces:
            async for piece in pieces:
                yield piece

    async def _pieces(self, generation: Generation) -> AsyncGenerator[OutputPiece, None]:
        """Submit a request and yield its pieces; leaving the iteration before its end cancels it."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[StepOutput]()
        if self._outbox is None or self._outbox.loop is not loop:
            self._outbox = _Outbox(loop)
        on_output = functools.partial(self._outbox.put, arrived)
        handle = self._service.start(generation.sequence, on_output, self._outbox.wake)
        try:
            while generation.output is None:
                self._service.check_process()
                piece = generation.push(await arrived.get())
                if piece is not None:
                    yield piece
        finally:
            self._service.cancel(handle)  # nothing happens if it has ended
        if generation.output.error:
            raise GenerationError([generation.output])
