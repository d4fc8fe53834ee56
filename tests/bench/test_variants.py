"""Variants of methods: what their labels say, the flags that build them, and what methods offer to measurements."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from importlib import import_module

import pytest
from tests.plugins.cases import CASES

from kvseek.bench.budgets import read_budgets
from kvseek.bench.methods import costs_of
from kvseek.bench.variants import parse_variants
from kvseek.core.config import WEIGHT_GROUP, BlockSparseConfig, CacheConfig, EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.plugins.registry import METHODS, PEERS
from kvseek.plugins.sources import package_roots

SPARSE = "full:prefill_attention=block_sparse"


def test_labels_fields_and_flags() -> None:
    full, plain, other, paged = parse_variants("full,ctkvr,ctkvr:execution=cpu,top_k=1024,prkv:cache.local=128")
    assert [v.label for v in (full, plain, other, paged)] == [
        "full",
        "ctkvr",
        "ctkvr:execution=cpu,top_k=1024",
        "prkv:cache.local=128",
    ]
    assert other.fields == {"execution": "cpu", "top_k": 1024}
    assert other.flags() == ["--method", "ctkvr", "--ctkvr.execution", "cpu", "--ctkvr.top_k", "1024"]
    assert (other.settings.execution, plain.settings.execution) == ("cpu", "codes")
    assert (paged.cache.local, paged.cache.sink) == (128, CacheConfig().sink)
    assert full.laid_out_as(paged.cache).cache == paged.cache


@pytest.mark.parametrize("budget", [256, 1024])
def test_all_methods_attend_to_equal_tokens(budget: int) -> None:
    """Rows are of whole pages, and a label says all that makes the variant."""
    asked = Namespace(methods="all", top_k=None, budget=str(budget))
    variants = [variant for listed in read_budgets(asked) for variant in listed]
    assert variants[0].label == "full"
    assert {variant.method for variant in variants} == {*METHODS, *PEERS}
    for variant in variants[1:]:
        tokens = variant.settings.top_k + variant.cache.sink + variant.cache.local
        assert budget - getattr(variant.settings, "page", 1) < tokens <= budget
    again = parse_variants(",".join(variant.label for variant in variants))
    assert [(one.settings, one.cache) for one in again] == [(one.settings, one.cache) for one in variants]
    with pytest.raises(ConfigError, match="--budget = '256': must be left out with --top_k"):
        read_budgets(Namespace(methods="full", top_k="100", budget="256"))


def test_a_variant_may_have_sparse_prompts() -> None:
    dense, usual, own = parse_variants(f"full,{SPARSE},{SPARSE},block_sparse.budget=1024")
    assert dense.prompt_attention == ("dense", BlockSparseConfig())
    assert usual.prompt_attention == ("block_sparse", BlockSparseConfig())
    assert own.prompt_attention == ("block_sparse", BlockSparseConfig(1024))
    expected = ["--method", "full", "--prefill_attention", "block_sparse", "--block_sparse.budget", "1024"]
    assert own.flags() == expected
    assert dense.flags() == expected[:2]


def test_a_variant_may_have_a_head_of_8_bits() -> None:
    (variant,) = parse_variants("full:weight_only_precision=int8,quantize_lm_head=true")
    assert variant.weights == ("int8", WEIGHT_GROUP, True)
    assert variant.flags() == ["--method", "full", "--weight_only_precision", "int8", "--quantize_lm_head"]


def test_a_variant_may_read_prompts_in_other_chunks() -> None:
    usual, own = parse_variants("full,full:prefill_chunk_tokens=4096")
    assert [one.engine["prefill_chunk_tokens"] for one in (usual, own)] == [EngineConfig.prefill_chunk_tokens, 4096]
    assert own.flags() == [*usual.flags(), "--prefill_chunk_tokens", "4096"]


def test_sizes_have_units() -> None:
    (variant,) = parse_variants("full:cache.kv_cache_host_memory_bytes=2GiB")
    assert variant.cache.kv_cache_host_memory_bytes == 2 << 30
    assert variant.flags()[-2:] == ["--cache.kv_cache_host_memory_bytes", str(2 << 30)]


def test_a_variant_may_begin_with_the_settings_of_its_paper() -> None:
    usual, paper, fewer = parse_variants("clusterkv,clusterkv:paper,clusterkv:paper,top_k=256,cache.sink=8")
    assert (usual.settings.tokens_per_cluster, paper.settings.tokens_per_cluster) == (40, 80)
    assert (paper.settings.top_k, paper.cache.sink) == (1024, 16)
    assert dataclasses.replace(paper.settings, top_k=256) == fewer.settings
    assert fewer.cache == dataclasses.replace(paper.cache, sink=8)
    (words,) = (variant.flags() for variant in parse_variants("pariskv:paper"))
    assert words[words.index("--cache.update") + 1] == "512"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "full:prefill_attention=sparse",
            r"--methods: prefill_attention = 'sparse': must be one of \('dense', 'block_sparse'\)",
        ),
        (
            "full:block_sparse.budget=1024",
            r"--methods: block_sparse = {'budget': 1024}: must be left out with dense prompts",
        ),
        (f"{SPARSE},block_sparse.budget=100", r"block_sparse.budget = 100: must be a multiple of 64"),
        (f"{SPARSE},block_sparse.tokens=100", r"block_sparse: unknown key 'tokens'"),
        ("full:quantize_lm_head=1", "--methods: quantize_lm_head = 1: must be true or false"),
        ("full:prefill_chunk_tokens=0", "--methods: prefill_chunk_tokens = 0: must be a whole number > 0"),
        (
            "full:cache.reuse_host_bytes=2Gb1",
            "--methods: cache.reuse_host_bytes = '2Gb1': must be a number > 0 and a unit",
        ),
        ("nested:paper", "preset = 'paper': method nested has none of that name"),
        ("pariskv:top_k=1,paper", "method = 'paper': unknown"),
        ("full,full", "must name each once"),
        ("ctkvr:cache.speed=7", "unknown key 'speed'"),
        ("ctkvr:execution", "must be all, NAME, NAME:field=value"),
        ("nothing", "choose one of"),
    ],
)
def test_fields_that_do_not_fit_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_variants(text)


@pytest.mark.parametrize("method", CASES)
def test_offers_are_those_of_the_methods_folder(method: str) -> None:
    written = (package_roots()[0] / "plugins" / method / "measurements.py").exists()
    module = import_module(f"kvseek.plugins.{method}.measurements") if written else None
    assert costs_of(method) == getattr(module, "costs", None)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="method = 'nothing': unknown"):
        costs_of("nothing")
