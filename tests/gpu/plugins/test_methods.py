"""One matrix for all methods on the GPU: engines against dense attention, against the CPU, and against themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine
from tests.plugins.cases import CASES, SELECTING, method_flags
from tests.support.prefill import run_all, run_to_end
from tests.support.random_models import save_random_model
from torch import Tensor

from kvseek.core.request import FinishReason, Request
from kvseek.engine.engine import Engine

pytestmark = pytest.mark.gpu

WINDOW = ("--cache.sink", "4", "--cache.local", "32", "--cache.update", "64", "--cache.full_threshold", "40")
LIMITS = ("--max_batch_size", "3", "--max_seq_len", "1000", "--max_input_len", "900", "--prefill_chunk_tokens", "150")
PROMPT = torch.arange(500).mul(7).remainder(100).tolist()
SLOTS = {0: PROMPT, 2: PROMPT[:25], 1: PROMPT[30:430]}  # one below full_threshold, evictions at different steps
STEPS = 150  # beyond one static update of prkv and several evictions
TOKENS = [[(step * 31 + slot * 17) % 100 for slot in SLOTS] for step in range(STEPS)]
# cuBLAS rounds a product of float32 by the number of rows. A query of codes has integers, one of which may come out otherwise,
# and one token in hundreds after it: seen once, at the 128th, and with the graph of retrievalattention at the 90th.
LIKELY_EQUAL = 80
MAX_DIFFERENCE = 5e-4  # of float32 logits of size 1: sums in another order

# A method and the flags with which it is sparse.
CONTESTANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    name: (method, method_flags(method, settings))
    for method in SELECTING
    for name, settings in CASES[method].on_gpu.items()
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", head_dim=64)


def logits_of(directory: Path) -> tuple[Tensor, list[list[float]]]:
    """Logits of the prompts and of every step of an engine, and what each step attended to."""
    return run_all(Engine.load(directory).decoder, SLOTS, TOKENS)


@pytest.mark.parametrize("offload", ["always", "never"])
@pytest.mark.parametrize("name", CONTESTANTS)
def test_keeping_everything_is_dense(name: str, offload: str, model: Path, on_gpu: BuildEngine) -> None:
    method, sparse = CONTESTANTS[name]
    flags = (*WINDOW, *LIMITS, "--cache.offload", offload)
    expected, _ = logits_of(on_gpu(model, "full", *flags))
    found, attended = logits_of(on_gpu(model, method, *flags, *sparse, *method_flags(method, CASES[method].everything)))
    assert (found - expected).abs().max() <= MAX_DIFFERENCE
    assert max(attended[-1]) == len(PROMPT) + STEPS


@pytest.mark.parametrize("offload", ["always", "never"])
@pytest.mark.parametrize("name", CONTESTANTS)
def test_sparse_logits_are_close_to_the_cpu(
    name: str, offload: str, model: Path, build_engine: BuildEngine, on_gpu: BuildEngine
) -> None:
    method, sparse = CONTESTANTS[name]
    flags = (*WINDOW, *LIMITS, *sparse)
    expected, expected_attended = logits_of(build_engine(model, method, *flags, "--kernels", "reference"))
    found, attended = logits_of(on_gpu(model, method, *flags, "--cache.offload", offload))
    assert max(attended[-1]) < 0.8 * len(PROMPT), "rows were selected"
    for own, reference in zip(attended, expected_attended, strict=True):
        assert own == pytest.approx(reference, rel=0.1)
    # A row near the last place of a selection may differ, and what follows with it; most logits do not notice.
    differences = (found - expected).abs().max(dim=1).values
    scale = expected.abs().max()
    assert differences.median() <= 2e-2 * scale
    assert differences[: len(SLOTS) + 1].max() <= 2e-2 * scale


@pytest.mark.parametrize("offload", ["always", "never"])
@pytest.mark.parametrize("name", CONTESTANTS)
def test_tokens_do_not_depend_on_company(name: str, offload: str, model: Path, on_gpu: BuildEngine) -> None:
    method, sparse = CONTESTANTS[name]
    engine = Engine.load(on_gpu(model, method, *WINDOW, *LIMITS, *sparse, "--cache.offload", offload))
    requests = [Request(tuple(PROMPT[i * 9 :]), 140 + i) for i in range(5)]
    alone = [engine.generate([request])[0] for request in requests]
    for found in (engine.generate(requests), engine.generate(requests[::-1])[::-1]):  # other slots, other order
        differing = [pair for pair in zip(found, alone, strict=True) if pair[0] != pair[1]]
        assert len(differing) <= 1
        assert all(found[:LIKELY_EQUAL] == own[:LIKELY_EQUAL] for found, own in differing)
    assert engine._cache.extents.used == 0


@pytest.mark.parametrize("name", CONTESTANTS)
def test_cancelling_leaves_others_alone(name: str, model: Path, on_gpu: BuildEngine) -> None:
    method, sparse = CONTESTANTS[name]
    engine = Engine.load(on_gpu(model, method, *WINDOW, *LIMITS, *sparse, "--cache.offload", "always"))
    (expected,) = engine.generate([Request(tuple(PROMPT), 160)])
    for steps in (2, 40, 140):
        kept, dropped = engine.submit(Request(tuple(PROMPT), 160)), engine.submit(Request(tuple(PROMPT[3:]), 170))
        outputs = [output for _ in range(steps) for output in engine.step()]
        engine.cancel(dropped)
        late = engine.submit(Request(tuple(PROMPT[50:]), 5))  # takes the slot and the extents that were given back
        outputs += run_to_end(engine)
        found = [o.token_id for o in outputs if o.request_id == kept and o.token_id is not None]
        assert len(found) == len(expected)
        assert found[:LIKELY_EQUAL] == expected[:LIKELY_EQUAL]
        assert any(o.request_id == late and o.finish_reason is FinishReason.LENGTH for o in outputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CONTESTANTS)
def test_sixteen_bits_run(name: str, dtype: str, model: Path, on_gpu: BuildEngine) -> None:
    method, sparse = CONTESTANTS[name]
    flags = (*WINDOW, *LIMITS, "--cache.offload", "always")
    full, _ = logits_of(on_gpu(model, "full", *flags, "--dtype", dtype))
    keep = (*flags, *sparse, *method_flags(method, CASES[method].everything), "--dtype", dtype)
    found, _ = logits_of(on_gpu(model, method, *keep))
    assert (found - full).norm() <= 5e-2 * full.norm()
    sparse_logits, _ = logits_of(on_gpu(model, method, *flags, *sparse, "--dtype", dtype))
    assert sparse_logits.isfinite().all()
