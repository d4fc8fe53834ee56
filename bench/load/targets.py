"""What a load is sent to: `kvseek openai` over an engine directory, or the bare engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import requests

from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.engine.service import EngineService
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.launch import get
from kvseek.server.settings import ServeSettings
from kvseek.server.triton.repository import write_models

from .cells import Answer, Cell, LoadTestError
from .client import send

MODEL = "kvseek"  # the name that clients ask for
LISTENS = re.compile(r"^listening: OpenAI (?P<url>\S+)$", re.MULTILINE)
FAILED = re.compile(r"the engine process (ended|could not be started).*")
POLL_SECONDS, END_SECONDS = 0.1, 60.0
SHOWN_CHARACTERS = 4000


@contextlib.contextmanager
def openai_server(engine_dir: Path, settings: ServeSettings, ready_seconds: float) -> Iterator[tuple[str, int]]:
    """Start `kvseek repository` and `kvseek openai`, and end both and the engine process.

    Gives the URL with /v1, and the id of the process that clients reach.

    Raises LoadTestError, with the end of the log, if the server ends or is not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="kvseek-load-") as name:
        folder = Path(name)
        write_models(folder / "repository", engine_dir, settings)
        command = [sys.executable, "-m", "kvseek.cli.main", "openai", "--repository", str(folder / "repository")]
        command += ["--openai_port", "0", "--served_model_name", MODEL]
        log = folder / "log"
        with log.open("w") as file:
            # The engine process is another one's that has the same folder of temporary files: here it is this server's alone.
            environment = {**os.environ, "TMPDIR": name}
            server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            yield _ready(server, log, time.monotonic() + ready_seconds), server.pid
        finally:
            server.terminate()
            try:
                server.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()  # the engine process ends with its last client, however that ends
                server.wait()
            _wait_for_engine(folder)


def processor_seconds(pid: int) -> float:
    """Time that all threads of a process have computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ready(server: subprocess.Popen[bytes], log: Path, limit: float) -> str:
    while True:
        text = log.read_text(encoding="utf-8", errors="replace")
        failed = FAILED.search(text)
        if (status := server.poll()) is not None or failed or time.monotonic() > limit:
            what = (
                "has no engine"
                if failed
                else "is not ready in time"
                if status is None
                else f"ended with status {status}"
            )
            raise LoadTestError(f"kvseek openai {what}; the end of its log:\n{text[-SHOWN_CHARACTERS:].strip()}")
        if found := LISTENS.search(text):
            with contextlib.suppress(requests.RequestException):
                if get(found["url"].removesuffix("/v1") + "/health").status_code == 200:
                    return found["url"]
        time.sleep(POLL_SECONDS)


def _wait_for_engine(folder: Path) -> None:
    """Wait until the engine process has let go of its lock, which it does when it ends, so that a GPU's memory is free again."""
    limit = time.monotonic() + END_SECONDS
    for path in folder.glob("*/*.lock"):
        with path.open("w") as lock:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > limit:
                    raise LoadTestError(f"the engine process has not ended after {END_SECONDS:.0f} s; end it by hand")
                time.sleep(POLL_SECONDS)


def bare_answers(
    engine_dir: Path,
    settings: ServeSettings,
    cells: Sequence[tuple[Cell, Sequence[str]]],
    sampling: Mapping[str, Any],
    seconds: float,
) -> list[list[Answer] | LoadTestError]:
    """Answers of the engine without a server to cells and their prompts, or why a cell has none.

    The engine is loaded once, in a process that ends with it, and asked as `client.send` asks a server. Raises as
    EngineService.load.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_bare_answers, engine_dir, settings, cells, sampling, seconds).result()


def _bare_answers(
    engine_dir: Path,
    settings: ServeSettings,
    cells: Sequence[tuple[Cell, Sequence[str]]],
    sampling: Mapping[str, Any],
    seconds: float,
) -> list[list[Answer] | LoadTestError]:
    end, tokenizer = time.monotonic() + seconds, Tokenizer(engine_dir)
    service = EngineService.load(engine_dir, settings.threads, settings.max_queue_size, settings.max_num_tokens)

    async def answers(cell: Cell, texts: Sequence[str]) -> list[Answer] | LoadTestError:
        prompts = [tuple(tokenizer.encode(text)) for text in texts]
        try:
            ask = partial(_ask, service, cell, prompts, sampling)
            await send(Cell(cell.lengths[:1]), ask, end - time.monotonic())  # warm
            return await send(cell, ask, end - time.monotonic())
        except LoadTestError as error:
            return error

    try:
        return [asyncio.run(answers(cell, texts)) for cell, texts in cells]
    finally:
        service.close()


def _set(future: asyncio.Future[StepOutput], output: StepOutput) -> None:
    if not future.done():  # nobody waits any more when the time has passed
        future.set_result(output)


async def _ask(
    service: EngineService, cell: Cell, prompts: Sequence[tuple[int, ...]], sampling: Mapping[str, Any], number: int
) -> Answer:
    loop, arrivals = asyncio.get_running_loop(), list[float]()
    ended: asyncio.Future[StepOutput] = loop.create_future()

    def on_output(output: StepOutput) -> None:  # in the engine's thread, which leaves the loop alone until the end
        if output.token_id is not None:
            arrivals.append(time.perf_counter())
        if output.finish_reason is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_set, ended, output)

    request = Request(prompts[number], cell.lengths[number][1], SamplingConfig(**sampling, seed=number))
    sent = time.perf_counter()
    handle = service.submit(request, on_output)
    try:
        output = await ended
    except asyncio.CancelledError:
        service.cancel(handle)
        raise
    if output.finish_reason is not FinishReason.LENGTH:
        raise LoadTestError(f"the engine ended a request with {output.finish_reason}: {output.error}")
    return Answer(sent, tuple(arrivals), len(arrivals))
