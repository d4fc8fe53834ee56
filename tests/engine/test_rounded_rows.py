"""cache.row_dtype = "int8" in engines: answers stay near those of 16-bit rows, and all that moves rows moves them whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine.leading.test_ranks import check_equal
from tests.engine.test_preemption import REQUESTS, Told, ask
from tests.engine.test_prefix_reuse import HYBRID_SHAPE
from tests.engine.test_speculation import Make, answers, drafts_of
from tests.plugins.cases import CASES, method_flags
from tests.support.long_prompts import (
    DOCUMENT,
    HEADS,
    SHAPE,
    SINK,
    WINDOW,
    Load,
    ask_logits,
    load_changed,
)
from torch import Tensor

from kvseek.core.config import CacheConfig, read_config
from kvseek.core.errors import ConfigError
from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.engine import Engine
from kvseek.engine.loading.prefixes import DiskSettings, check_disk
from kvseek.engine.loading.supported import check_supported
from kvseek.engine.speculation import Speculation
from kvseek.plugins.registry import METHODS, method_traits

LIMITS = ("--max_batch_size", "4", "--max_seq_len", "3200", "--prefill_chunk_tokens", "512")
ROUNDED = ("full", "nested", "pariskv")
FORCED = tuple(i * 11 % 300 + 5 for i in range(40))


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Path:
    return random_model("llama", **SHAPE, **HEADS)


@pytest.fixture(scope="module")
def load(model: Path, build_engine: BuildEngine) -> Load:
    """Load an engine with rows in 8 bits, whose method attends to all rows; with fields of its cache's configuration changed."""

    def make(method: str, *flags: str, **cache: Any) -> Engine:
        everything = method_flags(method, CASES[method].everything)
        directory = build_engine(model, method, *WINDOW, *LIMITS, *everything, *flags)
        return load_changed(directory, {"row_dtype": "int8", **cache})

    return make


def near(found: Tensor, expected: Tensor, most: float = 0.02) -> bool:
    return bool((found - expected).norm() < most * expected.norm())


def logits_of(told: Told) -> Tensor:
    """Of all tokens that a client got, [tokens, vocabulary]."""
    parts = [one[-1] for one in told if one[-1]]
    return torch.stack([torch.frombuffer(bytearray(part), dtype=torch.float32) for part in parts])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ROUNDED)
def test_logits_are_near_those_of_rows_that_are_not_rounded(method: str, dtype: str, load: Load) -> None:
    """Of prompts and of the steps behind them, with forced tokens; not the same ones, as rows are rounded."""
    request = Request(DOCUMENT, len(FORCED), SamplingConfig(forced_tokens=FORCED, return_generation_logits=True))
    logits = []
    for row_dtype, kernels in (("auto", "native"), ("int8", "native"), ("int8", "reference")):
        engine = load(method, "--dtype", dtype, "--kernels", kernels, row_dtype=row_dtype)
        (told,), _ = ask(engine, [request])
        logits.append(logits_of(told))
    exact, native, reference = logits
    assert exact.shape[0] == len(FORCED)
    assert torch.equal(exact[0], native[0]), "a prompt's own tokens are not rounded for it"
    assert not torch.equal(exact, native)
    assert near(native, exact)
    assert near(native, reference, 1e-4 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("method", ROUNDED)
def test_a_reused_beginning_has_the_rows_that_were_written(method: str, load: Load) -> None:
    """Whole extents that are shared, a part of one that is copied, and the ring of a request that has ended."""
    engine, fresh = load(method), load(method, reuse=False, row_dtype="auto")
    for prompt, reused in (
        (DOCUMENT, 0),
        (DOCUMENT + (5,) * 40, len(DOCUMENT)),
        (DOCUMENT[:1500] + (7,) * 40, 1500),
        (DOCUMENT[: 1024 + SINK] + (9,) * 30, 1024 + SINK),
        (DOCUMENT[: SINK - 1] + (11,) * 60, SINK - 1),
    ):
        logits, _, found = ask_logits(engine, prompt)
        assert found == reused
        assert near(logits, ask_logits(fresh, prompt)[0])


@pytest.mark.parametrize("method", ROUNDED)
def test_rows_that_move_to_another_extent_keep_their_integers(method: str, load: Load) -> None:
    engine = load(method, "--dtype", "bfloat16")
    planes = engine._cache.rows.pool.planes
    for prompt in (DOCUMENT, DOCUMENT[:1500] + (7,) * 40):
        ask_logits(engine, prompt)
    first, second = (one for one in engine._prefixes._tree if one.parent is not None and one.parent.parent is None)
    moved = 1500 - 1024 - SINK
    for plane in planes:
        assert torch.equal(plane[first.extent, :, :, :moved], plane[second.extent, :, :, :moved])


@pytest.mark.parametrize("method", ROUNDED)
def test_a_preempted_request_goes_on(method: str, load: Load) -> None:
    extent = 2 * 1024 * 2 * 34  # bytes of two layers and one KV head of 32 channels
    sampling = SamplingConfig(forced_tokens=FORCED + FORCED, return_generation_logits=True)
    requests = [Request((number, *DOCUMENT[number : number + 1009]), 80, sampling) for number in range(4, 8)]
    many, few = (load(method, kv_cache_host_memory_bytes=count * extent) for count in (30, 5))
    assert few._cache.extents.capacity == 5
    (expected, none), (found, counts) = ask(many, requests), ask(few, requests)
    assert (sum(none), sum(counts) > 0) == (0, True)
    for one, other in zip(expected, found, strict=True):
        assert near(logits_of(other), logits_of(one))


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_have_the_tokens_of_one(random_model: RandomModel, build_engine: BuildEngine) -> None:
    model = random_model("llama", num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    flags = ("--max_batch_size", "3", "--max_seq_len", "1600", "--prefill_chunk_tokens", "200", *WINDOW)
    flags = (*flags, "--cache.row_dtype", "int8", *method_flags("nested", CASES["nested"].sparse))
    check_equal(build_engine(model, "nested", *flags), build_engine(model, "nested", *flags, "--tp_size", "2"))


def test_a_hybrid_rounds_the_rows_of_its_layers_that_have_some(
    random_model: RandomModel, build_engine: BuildEngine
) -> None:
    model = random_model("qwen3_next", **HYBRID_SHAPE, **HEADS)
    directory = build_engine(model, "full", *WINDOW, *LIMITS, "--dtype", "bfloat16")
    request = Request(DOCUMENT, len(FORCED), SamplingConfig(forced_tokens=FORCED, return_generation_logits=True))
    told = [ask(load_changed(directory, {"row_dtype": one}), [request])[0][0] for one in ("auto", "int8")]
    exact, rounded = (logits_of(one) for one in told)
    assert not torch.equal(exact, rounded)
    assert near(rounded, exact, 0.05)


@pytest.mark.parametrize("method", ROUNDED)
def test_drafts_change_no_answer(method: str, model: Path, build_engine: BuildEngine) -> None:
    make, flags = Make(model, build_engine), ("--cache.row_dtype", "int8")
    plain, engine = make(method, 40, None, *flags), make(method, 40, Speculation(), *flags)
    expected = answers(plain, REQUESTS)
    engine.make_drafter = drafts_of(REQUESTS, expected, 0.7)
    assert answers(engine, REQUESTS) == expected


def test_what_knows_no_such_rows_refuses_them_by_name(model: Path, build_engine: BuildEngine, tmp_path: Path) -> None:
    config = read_config(build_engine(model, "full", *WINDOW, *LIMITS))
    rounded = dataclasses.replace(config.cache, row_dtype="int8")
    for method in METHODS:
        own = dataclasses.replace(config, method=method, cache=rounded)
        assert method_traits(own).rounded_rows == (method in ROUNDED)
        if method not in ROUNDED:
            with pytest.raises(ConfigError, match=f"cache.row_dtype = 'int8': must be 'auto' with method = '{method}'"):
                check_supported(own)
    with pytest.raises(ConfigError, match=r"disk_dir = .* left out with cache.row_dtype = 'int8'"):
        check_disk(dataclasses.replace(config, cache=rounded), DiskSettings(tmp_path))
    with pytest.raises(ConfigError, match=r"cache.row_dtype = 'int8': must be 'auto' with dtype = 'float32' on cuda"):
        dataclasses.replace(config, cache=rounded, device="cuda")
    with pytest.raises(ConfigError, match=r"cache.row_dtype = 'int8': must be 'auto' with runtime = 'tensorrt'"):
        dataclasses.replace(config, cache=rounded, device="cuda", dtype="bfloat16", runtime="tensorrt")
    with pytest.raises(ConfigError, match=r"cache.row_dtype = 'fp8': must be one of \('auto', 'int8'\)"):
        CacheConfig(row_dtype="fp8")
