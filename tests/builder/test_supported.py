"""Models that kernels do not support are refused when an engine is built, and when it is loaded."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel

from kvseek.builder import build
from kvseek.core.config import read_config
from kvseek.core.errors import ConfigError
from kvseek.core.index_context import ShapeLimits
from kvseek.engine.engine import Engine
from kvseek.engine.leading.leader import load_decoder
from kvseek.kernels.cpu.attention.attend import LIMITS
from kvseek.plugins import registry
from kvseek.plugins.sources import package_roots

(ROOT,) = package_roots()
CUDA = ("--device", "cuda", "--cuda_archs", "90")
NO_OTHER = "with kernels = 'native'; build with --kernels reference"
REFUSED = [
    ("full", {"head_dim": 320}, (), f"head_dim = 320: must be at most 256 {NO_OTHER}"),
    (
        "prkv",
        {"num_key_value_heads": 1, "num_attention_heads": 24},
        (),
        f"num_kv_heads = 24: must be at most 16 {NO_OTHER}",
    ),
    ("toy", {}, CUDA, "method = 'toy' does not run with device = 'cuda'; choose one of full"),
    ("full", {"intermediate_size": 100}, CUDA, "intermediate_size = 100: must be a multiple of 8 on a GPU; build with"),
    ("full", {"head_dim": 100}, CUDA, "head_dim = 100: must be a multiple of 32 up to 256 with device = 'cuda'; build"),
    (
        "prkv",
        {},
        CUDA,
        "head_dim = 32: must be >= 64 with page_score = 'codes' on the GPU; build with page_score = \"box\"",
    ),
    (
        "clusterkv",
        {},
        CUDA,
        "head_dim = 32: must be at least 64 for rerank_bits = 2 on the GPU; set rerank_bits to 0",
    ),
    ("ctkvr", {}, CUDA, "head_dim = 32: must be a multiple of 32 from 64 to 256 with execution = 'codes'"),
    ("pariskv", {}, CUDA, "head_dim = 32: must be a multiple of 32 from 64 to 256 for ParisKV on the GPU"),
    ("full", {}, (*CUDA, "--max_batch_size", "65"), "max_batch_size = 65: must be <= 64 with device = 'cuda'"),
]


@pytest.mark.parametrize(("method", "shape", "flags", "message"), REFUSED)
def test_a_build_refuses_what_could_not_be_served(
    method: str,
    shape: dict[str, int],
    flags: tuple[str, ...],
    message: str,
    random_model: RandomModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry.METHODS, "toy", "tests.plugins.toy_method")
    where = ("--model", str(random_model("llama", **shape)), "--output_dir", str(tmp_path / "engine"))
    assert build.main([*where, "--method", method, "--quiet", *flags]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_loading_refuses_it_too(random_model: RandomModel, build_engine: BuildEngine) -> None:
    """As an engine that an earlier version has built."""
    directory = build_engine(random_model("llama", head_dim=320), "full", "--kernels", "reference")
    assert Engine.load(str(directory)).config.model.head_dim == 320, "PyTorch has no limit; a path may be a str"
    config = dataclasses.replace(read_config(directory), kernels="native")
    with pytest.raises(ConfigError, match="head_dim = 320: must be at most 256"):
        load_decoder(directory, config)


@pytest.mark.parametrize(
    ("file", "dim", "group"),
    [
        ("kernels/cpu/attention/tile.h", "MAX_DIM", "MAX_GROUP"),
        ("kernels/cpu/codes/rotation.h", "MAX_PADDED_DIM", None),
        ("kernels/cpu/codes/estimate.h", None, "MAX_QUERIES"),
        ("plugins/ctkvr/cpu/lists.cpp", None, "MAX_GROUP"),
    ],
)
def test_limits_are_those_of_the_kernels_sources(file: str, dim: str | None, group: str | None) -> None:
    source = (ROOT / file).read_text()
    for name, value in ((dim, LIMITS.max_head_dim), (group, LIMITS.max_group_size)):
        assert name is None or f"constexpr int {name} = {value};" in source


def test_limits_name_the_field() -> None:
    limits = ShapeLimits(max_head_dim=64, max_group_size=2, head_dim_step=32)
    assert limits.fault(64, 2) is None
    assert limits.fault(48, 2) == "head_dim = 48: must be a multiple of 32 up to 64"
    assert limits.fault(96, 3) == "head_dim = 96: must be a multiple of 32 up to 64"
    assert limits.fault(32, 3) == "num_heads / num_kv_heads = 3: must be at most 2"
