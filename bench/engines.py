"""Engine directories of a model's shape without a checkpoint: each rank makes its part of random weights when it loads."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvseek.builder.build import write_codebooks, write_kernels
from kvseek.core.config import EngineConfig
from kvseek.core.config_file import write_config
from kvseek.engine.decoder import Decoder
from kvseek.engine.engine import Engine
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.model.random_weights import write_random


def write_random_engine(directory: Path, config: EngineConfig, seed: int) -> None:
    """Write an engine directory that `load_decoder` loads. It has no manifest and no tokenizer, so nobody can serve it.

    On a GPU its kernels are those for the current one.
    """
    directory.mkdir()
    write_config(config, directory)
    write_codebooks(directory, config)
    archs = []
    if config.device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        archs = [10 * major + minor]
    write_kernels(directory, config, archs, lambda _: None)
    write_random(directory, seed)


@contextlib.contextmanager
def random_engine(config: EngineConfig, seed: int, threads: int) -> Iterator[Engine]:
    """Load an engine of random weights with all of its ranks, and end them at the end; raises as Engine.load.

    Parameters
    ----------
    threads : int
        CPU threads of all ranks together.
    """
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="kvseek-bench-") as folder:
        directory = Path(folder) / "engine"
        write_random_engine(directory, config, seed)
        try:
            with contextlib.closing(load_decoder(directory, config)) as decoder:  # which ends the ranks
                engine = bare_engine(config, decoder)
                with contextlib.closing(engine):
                    yield engine
            del engine, decoder
        finally:
            torch.set_num_threads(threads)


def bare_engine(config: EngineConfig, decoder: Decoder) -> Engine:
    """An engine without a tokenizer: its requests are token ids."""
    tokenizer: Any = SimpleNamespace(file=None)
    return Engine(config, decoder, tokenizer)


def free_memory() -> None:
    """Give back the memory of an engine that nothing refers to any more, so that the next one finds it."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def without_reuse(config: EngineConfig, **changes: Any) -> EngineConfig:
    """Change a configuration, and let the engine keep nothing of a prompt, which would take memory; `cache` has fields of it."""
    cache = dataclasses.replace(config.cache, reuse=False, **changes.pop("cache", {}))
    return dataclasses.replace(config, cache=cache, **changes)
