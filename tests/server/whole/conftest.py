"""One server of each layout for all tests of this folder, whose engine and settings have what any of them needs.

The tests of the folder run in one process (see tests/conftest.py): a server takes five seconds of a processor to start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel

from kvseek.server.launch import RunningServer, running_server
from kvseek.server.settings import ServeSettings

# Sparse from 48 tokens on, in chunks of prefill that a prompt of a line has several of.
CACHE = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "48")
LIMITS = ("--max_batch_size", "4", "--max_seq_len", "20000", "--max_input_len", "1000", "--prefill_chunk_tokens", "50")
MAX_LOGITS = 100 * 384  # of 100 tokens


@pytest.fixture(scope="package")
def checkpoint(random_model: RandomModel) -> Path:
    return random_model("llama", max_position_embeddings=20_000)


@pytest.fixture(scope="package")
def directory(checkpoint: Path, build_engine: BuildEngine) -> Path:
    return build_engine(checkpoint, "pariskv", *CACHE, *LIMITS, "--pariskv.top_k", "20")


@pytest.fixture(scope="package")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `inflight_server`."""
    return tmp_path_factory.mktemp("log") / "server.log"


@pytest.fixture(scope="package")
def inflight_server(directory: Path, log: Path) -> Iterator[RunningServer]:
    """With the layout inflight_batcher_llm, and --log_verbose."""
    settings = ServeSettings(threads=1, max_queue_size=40, max_logits=MAX_LOGITS)
    with running_server(directory, settings=settings, log=log, verbose=True) as server:
        yield server
    assert "Traceback" not in log.read_text(errors="replace"), "nothing here is the server's fault"


@pytest.fixture(scope="package")
def llmapi_server(directory: Path) -> Iterator[RunningServer]:
    """With the layout llmapi."""
    with running_server(directory, settings=ServeSettings(threads=1, layout="llmapi")) as server:
        yield server


@pytest.fixture(scope="module")
def server(inflight_server: RunningServer) -> RunningServer:
    """The server of a module that does not say which."""
    return inflight_server
