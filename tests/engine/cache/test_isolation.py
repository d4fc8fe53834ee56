"""Rows and index entries that one request leaves behind are never read by another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.plugins.cases import CASES, method_flags
from tests.plugins.test_methods import WINDOW
from torch import Tensor

from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.plugins.registry import METHODS

LIMITS = ("--max_batch_size", "2", "--max_seq_len", "600", "--prefill_chunk_tokens", "100")
FIRST = torch.arange(430).mul(11).remainder(97).tolist()
SECOND = torch.arange(230).mul(13).remainder(101).tolist()
TOKENS = {"native": 40, "reference": 24}  # some updates of 8 tokens leave the window
POISONS = ("nan", "huge", "random")
# Of an index's objects: what it is given, the pool, and what kernels and host cores hand to each other within a step.
NOT_KEPT = ("HostBuffers", "IndexContext", "LayerRows", "Reranker", "Workspace")


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Path:
    return random_model("qwen3")


def requests(kernels: str, *prompts: list[int]) -> list[Request]:
    return [Request(tuple(prompt), TOKENS[kernels]) for prompt in prompts]


def arrays_of(engine: Engine) -> list[Tensor]:
    """Windows, the row pool, and what the indexes keep by extent or by slot."""
    cache = engine._cache
    counts = {cache.extents.capacity, len(cache.lengths)}
    found = [cache.window, cache.rows.pool.rows]
    constants = {
        id(tensor) for index in engine.decoder.retrieval.indexes for tensor in index.context.codebooks.values()
    }
    shared = {id(tensor) for tensor in (cache.extents.table, cache.extents.device_table)}
    for index in engine.decoder.retrieval.indexes:
        for tensor in tensors_in(vars(index), set()):
            if id(tensor) not in constants | shared and tensor.ndim and tensor.shape[0] in counts:
                found.append(tensor)
    return found


def tensors_in(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors that an index keeps, in containers, and in objects of the plugins and the kernels."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors_in(value, seen)
    elif (
        type(thing).__module__.startswith(("kvseek.plugins.", "kvseek.kernels."))
        and type(thing).__name__ not in NOT_KEPT
    ):
        yield from tensors_in(getattr(thing, "__dict__", {}), seen)


def poison(tensor: Tensor, kind: str, generator: torch.Generator) -> None:
    """Overwrite a tensor with what would show in every result that reads it."""
    if tensor.is_floating_point():
        if kind == "random":
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 10)
        else:
            tensor.fill_(torch.nan if kind == "nan" else torch.finfo(tensor.dtype).max / 4)
    elif tensor.dtype is torch.bool:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) < 0.5)
    else:
        # Numbers of rows, tokens or bytes: any that the type has, but small where they may be used as an address.
        high = 256 if tensor.dtype is torch.uint8 else 100
        tensor.copy_(torch.randint(0, high, tensor.shape, generator=generator).to(tensor.dtype))


@pytest.mark.parametrize(
    ("method", "kernels"), [*((method, "native") for method in CASES), *((method, "reference") for method in METHODS)]
)  # competing systems have one implementation
def test_a_freed_slot_tells_nothing(method: str, kernels: str, model: Path, build_engine: BuildEngine) -> None:
    flags = (*WINDOW, *LIMITS, *method_flags(method, CASES[method].sparse), "--kernels", kernels)
    directory = build_engine(model, method, *flags, "--cache.reuse", "false")  # which would keep rows on purpose
    second = requests(kernels, SECOND, SECOND[:30])
    expected = Engine.load(directory).generate(second)
    engine, generator = Engine.load(directory), torch.Generator().manual_seed(3)
    engine.generate(requests(kernels, FIRST, FIRST[40:]))
    for kind in POISONS if kernels == "native" else POISONS[:1]:
        assert engine._cache.extents.used == 0
        arrays = arrays_of(engine)
        keeping = [index for index in engine.decoder.retrieval.indexes if index.bytes_per_token]
        assert len(arrays) >= 2 + len(keeping), "each of them some"
        with torch.inference_mode():
            for tensor in arrays:
                poison(tensor, kind, generator)
        assert engine.generate(second) == expected, kind


@pytest.mark.parametrize("method", CASES)
def test_what_a_cancelled_prompt_left_tells_nothing(method: str, model: Path, build_engine: BuildEngine) -> None:
    """A prompt that was read half-way has rows and index entries in some layers only."""
    directory = build_engine(model, method, *WINDOW, *LIMITS, *method_flags(method, CASES[method].sparse))
    (first, second) = requests("native", FIRST, SECOND)
    expected = Engine.load(directory).generate([second])
    engine = Engine.load(directory, max_num_tokens=100)
    for steps in (1, 3):
        half = engine.submit(first)
        for _ in range(steps):
            engine.step()
        engine.cancel(half)
        assert engine.generate([second]) == expected
