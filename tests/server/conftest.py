"""What tests of servers share: the servers' own event loop; a server, its clients and its engine for a module's `directory`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop
from openai import OpenAI
from tests.conftest import BuildEngine, RandomModel
from tests.support.waiting import SECONDS

from kvseek.core.config import EngineConfig, read_config
from kvseek.engine.engine import Engine
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.launch import RunningServer, running_server
from kvseek.server.settings import ServeSettings


@pytest.fixture(scope="session", autouse=True)
def _uvloop() -> Iterator[None]:
    """What holds on asyncio's loop need not hold on uvloop."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    yield
    asyncio.set_event_loop_policy(before)


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop of tests that are coroutines (pytest.mark.anyio)."""
    return "asyncio", {"use_uvloop": True}


@contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs until the context ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    """A tiny engine directory, unless the module has its own. Not to be changed."""
    return build_engine(random_model("llama"), "full", "--max_batch_size", "2", "--max_seq_len", "400")


@pytest.fixture(scope="module")
def settings() -> ServeSettings:
    """Of a module's server, unless the module has its own."""
    return ServeSettings(threads=1)


@pytest.fixture(scope="module")
def server(
    directory: Path, settings: ServeSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A whole server of the engine in the module's `directory`, which nothing that a client does makes fail."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    with running_server(directory, settings=settings, log=log) as server:
        yield server
    assert "Traceback" not in log.read_text(), "nothing here is the server's fault"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    """OpenAI's client of the server."""
    return OpenAI(base_url=server.openai_url, api_key="none", max_retries=0, timeout=SECONDS)


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    """Name under which the server has its model for clients of OpenAI's API."""
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    """The engine in this process, for what a server's answers have to be."""
    return Engine.load(directory)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    """The engine's tokenizer."""
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def config(directory: Path) -> EngineConfig:
    """The engine's configuration."""
    return read_config(directory)
