"""A GPU that fails under a server or `LLM`: a kernel that never ends, an illegal address, memory that another process takes.

Every request ends once, with an error that says what happened; the engine process ends, and the one that is started in its place
serves, or it goes on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.gpu.server.failing_gpu_engine import DONE, HANGING, HUNG_SECONDS, ILLEGAL, IN_STEP
from tests.server.test_engine_errors import asked
from tests.support.door_processes import doors, engine_process
from tests.support.metrics import metric
from tests.support.waiting import wait_for

from kvseek.server.engine.process import STATUS_FAILED
from kvseek.server.settings import ServeSettings

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.slow]

MODULE = "tests.gpu.server.failing_gpu_engine"
FAULTS = {HANGING: f"EngineHungError: a step has not ended for {HUNG_SECONDS:g} s", ILLEGAL: "illegal"}
LIMITS = ("--max_batch_size", "4", "--max_seq_len", "16000", "--max_input_len", "15000")
ANSWER_SECONDS = 60.0
ROUTES = ("generate", "generate_stream")
TAKER = """
import sys, torch
taken, size = [], 1 << 30
while size >= 1 << 20:
    try:
        taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, on_gpu: BuildEngine) -> Path:
    shape = {"intermediate_size": 4096, "head_dim": 64, "max_position_embeddings": 16384}
    return on_gpu(random_model("llama", **shape), "full", *LIMITS)


def prompt(tokens: int, in_step: bool) -> list[int]:
    return [IN_STEP if in_step else 9, *range(10, 9 + tokens)]


@pytest.mark.parametrize("in_step", [False, True], ids=["prompt", "step"])
@pytest.mark.parametrize("tokens", FAULTS)
def test_an_engine_whose_gpu_fails_ends_its_process_by_name(
    tokens: int, in_step: bool, directory: Path, tmp_path: Path
) -> None:
    where = (directory, tmp_path / "engine.sock", ServeSettings(threads=1))
    with doors(*where) as door, ThreadPoolExecutor() as pool:
        with engine_process(*where, MODULE) as process:
            wait_for(lambda: not asked(door, "generate", (5,)), "the door has found the engine", 120)
            beside = pool.submit(asked, door, "generate_stream", (5, 6), 14000)
            first = pool.submit(asked, door, "generate", prompt(tokens, in_step))
            assert FAULTS[tokens] in first.result(ANSWER_SECONDS)
            assert FAULTS[tokens] in beside.result(ANSWER_SECONDS)
            assert process.wait(ANSWER_SECONDS) == STATUS_FAILED
        with engine_process(*where, MODULE):
            wait_for(lambda: not asked(door, "generate", (5,)), "the door has found the next engine", 120)


@pytest.mark.parametrize("tokens", FAULTS)
def test_a_program_that_uses_llm_is_told_and_ends(tokens: int, directory: Path) -> None:
    command = [sys.executable, "-m", MODULE, "--llm", str(directory), str(tokens), str(IN_STEP)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    told = [line for line in result.stdout.splitlines() if line.startswith(DONE)]
    assert len(told) == 2, result.stdout + result.stderr
    assert all(FAULTS[tokens] in line for line in told), told


@contextmanager
def memory_taken() -> Iterator[None]:
    """Another process has all memory of the GPU that is free."""
    process = subprocess.Popen([sys.executable, "-c", TAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        yield
    finally:
        process.kill()
        process.wait()


def test_memory_that_another_process_takes_ends_what_needs_it(directory: Path, tmp_path: Path) -> None:
    """A long prompt is refused for want of memory, or the engine process ends; then it, or the next one, serves all."""
    where = (directory, tmp_path / "engine.sock", ServeSettings(threads=1))
    short, long = tuple(range(5, 45)), tuple((7 * i) % 380 for i in range(14000))
    with doors(*where) as door, ThreadPoolExecutor() as pool, ExitStack() as engines:
        engine = engines.enter_context(engine_process(*where))
        wait_for(lambda: not asked(door, "generate", short, 8), "the door has found the engine", 120)
        with memory_taken():
            asks = [pool.submit(asked, door, path, ids, 8) for ids in (long, short) for path in ROUTES]
            for error in (ask.result(ANSWER_SECONDS) for ask in asks):
                assert not error or "memory" in error or "engine process" in error, error
        if engine.poll() is not None:
            engines.enter_context(engine_process(*where))
        wait_for(lambda: not asked(door, "generate", short, 8), "served again", 120)
        assert [asked(door, path, long, 8) for path in ROUTES] == ["", ""]
        for name in ("kvseek:num_requests_running", "kvseek:extents_used"):
            assert metric(f"127.0.0.1:{door.metrics_port}", name) == 0
