"""One matrix for all methods: what the contract of plugins/base.py promises, whatever the method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine
from tests.engine.model.test_logits import engine_logits
from tests.support.random_models import ARCHITECTURES, save_random_model

from kvseek.core.request import Request, SamplingParams
from kvseek.engine.engine import Engine
from kvseek.plugins.registry import METHODS

# Flags with which a method keeps every row of a short context.
KEEP_EVERYTHING: dict[str, tuple[str, ...]] = {
    "full": (),
    "flat": ("--flat.top_k", "4096"),
    "pariskv": ("--pariskv.top_k", "4096"),
    "ctkvr": ("--ctkvr.top_k", "4096"),
    "clusterkv": ("--clusterkv.top_k", "4096"),
    "prkv": ("--prkv.top_k", "4096"),
}
# Flags with which it is sparse on one.
SPARSE: dict[str, tuple[str, ...]] = {
    "full": (),
    "flat": ("--flat.top_k", "12"),
    "pariskv": ("--pariskv.top_k", "12"),
    "ctkvr": ("--ctkvr.top_k", "12", "--ctkvr.centroids", "16"),
    "clusterkv": ("--clusterkv.top_k", "12", "--clusterkv.tokens_per_cluster", "8", "--clusterkv.dense_layers", "1"),
    "prkv": ("--prkv.top_k", "32", "--prkv.page", "8"),
}
WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
PROMPT = torch.arange(230).mul(13).remainder(101).tolist()


def test_the_matrix_has_every_method() -> None:
    assert set(KEEP_EVERYTHING) == set(SPARSE) == set(METHODS)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("method", set(METHODS) - {"full"})
def test_exact_when_everything_is_kept(model: Path, method: str, kernels: str, build_engine: BuildEngine) -> None:
    forced = torch.arange(40).mul(17).remainder(101).tolist()
    full = engine_logits(Engine.load(build_engine(model, "full", *WINDOW)), PROMPT, forced)
    flags = (*WINDOW, *KEEP_EVERYTHING[method], "--kernels", kernels)
    found = engine_logits(Engine.load(build_engine(model, method, *flags)), PROMPT, forced)
    assert (found - full).abs().max() <= 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_tokens_do_not_depend_on_the_batch(model: Path, method: str, build_engine: BuildEngine) -> None:
    engine = Engine.load(build_engine(model, method, *WINDOW, *SPARSE[method]))
    requests = [
        Request(tuple(PROMPT), 40),
        Request(tuple(PROMPT[:25]), 60),  # dense at first
        Request(tuple(PROMPT[3:]), 30, SamplingParams(temperature=0.8, top_k=20, seed=5)),
        Request(tuple(PROMPT[::-1]), 50),
        Request((7,), 45),
    ]
    alone = [engine.generate([request])[0] for request in requests]
    assert engine.generate(requests) == alone
    assert engine.generate(requests[::-1]) == alone[::-1], "other slots, other order"


@pytest.mark.parametrize("method", METHODS)
def test_native_and_reference_agree(model: Path, method: str, build_engine: BuildEngine) -> None:
    forced = torch.arange(40).mul(17).remainder(101).tolist()
    flags = (*WINDOW, *SPARSE[method])
    native = engine_logits(Engine.load(build_engine(model, method, *flags)), PROMPT, forced)
    flags = (*flags, "--kernels", "reference")
    reference = engine_logits(Engine.load(build_engine(model, method, *flags)), PROMPT, forced)
    assert (native - reference).abs().max() <= 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_runs_close_to_float32(model: Path, method: str, build_engine: BuildEngine) -> None:
    flags = (*WINDOW, *KEEP_EVERYTHING[method])
    exact = engine_logits(Engine.load(build_engine(model, method, *flags)), PROMPT, [1, 2, 3])
    found = engine_logits(Engine.load(build_engine(model, method, *flags, "--dtype", "bfloat16")), PROMPT, [1, 2, 3])
    assert (found - exact).norm() <= 0.03 * exact.norm()
