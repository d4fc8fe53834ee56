"""Fixtures that more than one test file uses: the real models, engine directories, the compiled kernels."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# One thread a process, those of test servers too: tensors are small, and OpenMP's threads busily wait for each other where
# they share cores with another process (a test of 1 s takes 11 s). To be set before anything loads OpenMP.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch
from tests.support.checkpoint_files import install_quick_gguf
from tests.support.instruction_levels import limited
from tests.support.random_models import save_random_model

from kvseek.builder import build
from kvseek.builder.compile.cpu import cached_cpu_library, instruction_levels
from kvseek.core.cpu_library import CpuLibrary
from kvseek.engine.model.cpu import bfloat16_works

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = ROOT / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDLE = ROOT.parent / "shared/needle"
LEVELS = (*instruction_levels(), 5) if 4 in instruction_levels() else instruction_levels()  # 5: kernels/cpu/level.cpp
THREADS = torch.get_num_threads()
WHOLE = ROOT / "tests/server/whole"
GPU = ROOT / "tests/gpu"
BuildEngine = Callable[..., Path]
RandomModel = Callable[..., Path]

if not Path(str(build.__file__)).resolve().is_relative_to(ROOT):
    pytest.exit(f"kvseek.builder.build is {build.__file__}, not this checkout's: run make install, or make links", 3)
install_quick_gguf(SMOLLM2)
bfloat16_works()  # before any test multiplies matrices
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs ignore Ctrl-C; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run, so that a change is what turns a test red. `--hypothesis-profile=default` looks for new ones.
# A draw or an example that takes long says that the machine is busy, not that the test is wrong.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """As many threads as at first, where the test before chose another number."""
    torch.set_num_threads(THREADS)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without a GPU no process imports tests/gpu to skip all of it; tests/test_gpu_imports.py imports it once."""
    return True if collection_path == GPU and not torch.cuda.is_available() else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    asked = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    if not torch.cuda.is_available() and any(path in GPU.parents for path in asked):
        terminalreporter.write_line(
            "GPU tests (tests/gpu) were not collected: PyTorch finds no CUDA device", yellow=True
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():  # files of tests/gpu that the command line names are collected
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if torch.cuda.device_count() < 2:
        for item in items:
            if item.get_closest_marker("multi_gpu"):
                item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))
    items[:] = in_turns(items)


def in_turns(items: list[pytest.Item]) -> list[pytest.Item]:
    """Order the files of tests so that `make test`'s processes, which take them in this order, are busy to the end.

    Tests of servers wait most of their time, and all others compute: so files of both kinds take turns, the long ones first.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(WHOLE if WHOLE in item.path.parents else item.path, []).append(item)

    def has(mark: str, own: list[pytest.Item]) -> bool:
        return any(item.get_closest_marker(mark) for item in own)

    order = []
    for waits in (True, False):
        kind = [own for own in files.values() if has("server", own) == waits]
        kind.sort(key=lambda own: (not has("slow", own), -len(own)))
        order += [((place + 0.5) / len(kind), own) for place, own in enumerate(kind)]
    return [item for _, own in sorted(order, key=lambda one: one[0]) for item in own]


def pytest_collection_finish() -> None:
    """Leave what was collected, some million objects, out of every garbage collection to come."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, one process runs all of the files that share servers."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return str(WHOLE) if WHOLE in (ROOT / file).parents else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, a real Llama checkpoint."""
    if not SMOLLM2.exists():
        pytest.skip(f"{SMOLLM2.relative_to(ROOT)} is absent: run make model")
    return SMOLLM2


@pytest.fixture(scope="session")
def needle_folder() -> Path:
    """The retrieval tasks and the tiny Qwen3 model trained on them."""
    if not (NEEDLE / "tasks.py").exists():
        pytest.skip("../shared/needle is absent: it is not part of the repository")
    return NEEDLE


@pytest.fixture(scope="session")
def document() -> str:
    """A long English text."""
    return (ROOT / "examples/harbour_log.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def library() -> CpuLibrary:
    """The compiled CPU kernels of this checkout."""
    return CpuLibrary(cached_cpu_library())


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, library: CpuLibrary) -> Iterator[int]:
    """Run the kernels at one instruction level, or at the processor's best if that is lower."""
    with limited(library, request.param):
        yield request.param


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """A tiny random checkpoint, saved once per set of arguments: `random_model(architecture, **config)`. Not to be changed."""
    saved: dict[str, Path] = {}

    def make(architecture: str, **config: Any) -> Path:
        key = repr((architecture, sorted(config.items())))
        if key not in saved:
            saved[key] = save_random_model(tmp_path_factory.mktemp("models") / architecture, architecture, **config)
        return saved[key]

    return make


@pytest.fixture(scope="session")
def build_engine(tmp_path_factory: pytest.TempPathFactory) -> BuildEngine:
    """Build an engine directory, once per set of arguments: `build_engine(model, method, *flags)`."""
    built: dict[tuple[object, ...], Path] = {}
    numbers = itertools.count()

    def make(model: Path, method: str, *flags: str) -> Path:
        key = (model, method, *flags)
        if key not in built:
            directory = tmp_path_factory.mktemp("engines") / f"{method}-{next(numbers)}"
            arguments = ["--model", str(model), "--method", method, "--output_dir", str(directory), "--quiet", *flags]
            if "--check" not in flags:  # hundreds of engines, whose logits the tests that need them compare themselves
                arguments.append("--no-check")
            assert build.main(arguments) == 0
            built[key] = directory
        return built[key]

    return make
