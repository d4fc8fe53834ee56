"""What one request leaves on the GPU and in pinned memory is never read by another.

The same for the CPU: tests/engine/cache/test_isolation.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine
from tests.engine.cache.test_isolation import POISONS, poison, tensors_in
from tests.gpu.plugins.test_methods import CONTESTANTS, WINDOW
from tests.gpu.waits import slow_stream
from tests.support.random_models import save_random_model
from torch import Tensor

from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.plugins.clusterkv import device as clusterkv

pytestmark = pytest.mark.gpu

METHODS = {"full": ("full", ()), **CONTESTANTS}
KEEP_NOTHING = {"full", "streamingllm"}  # methods without an index, or whose index has no arrays
# 3 extents a request, 6 in all.
SIZES = ("--max_batch_size", "2", "--max_seq_len", "2700", "--max_input_len", "2500", "--prefill_chunk_tokens", "600")
LIMITS = (*SIZES, "--cache.reuse", "false")  # which would keep rows on purpose
OTHER = Request(tuple(torch.arange(2400).mul(11).remainder(97).tolist()), 100)
OWN = Request(tuple(torch.arange(1300).mul(13).remainder(101).tolist()), 150)  # evictions, an update of prkv
STEP_TOKENS = 600  # of a prompt that a step reads: OTHER takes four
# About 0.3 s, longer than to poison everything with NaN: a cancelled prompt's clustering ends after others have got its extents.
SIDE_CYCLES = 600_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(
        tmp_path_factory.mktemp("model") / "qwen3", "qwen3", head_dim=64, max_position_embeddings=4096
    )


def left_behind(engine: Engine) -> list[Tensor]:
    """Windows, row pools, and what indexes and attention keep by extent or by slot, but for the padding's slot."""
    decoder: Any = engine.decoder
    cache = decoder.cache
    slots, extents = cache.padding_slot, cache.extents.capacity
    kept = [tensor for index in decoder.retrieval.indexes for tensor in tensors_in(vars(index), set())]
    hot = decoder.retrieval.hot_rows
    hot_rows = [array for own in hot for array in (own.frames, own.rows, own.places)]
    by_extent = [tensor for tensor in kept if tensor.ndim and tensor.shape[0] == extents]
    by_slot = [tensor[:slots] for tensor in kept if tensor.ndim and tensor.shape[0] == slots + 1]
    return [cache.window[:, :slots], cache.rows.device_rows, cache.rows.pool.rows, *by_extent, *by_slot, *hot_rows]


def cancel_while_it_is_read(engine: Engine, request: Request) -> None:
    """Cancel when some layers are stored, and the last one is not."""
    number, progress = engine.submit(request), 0.0
    while progress < 0.6:
        progress = max(output.prefill_progress for output in engine.step())
    assert progress < 1
    engine.cancel(number)


@pytest.mark.parametrize("offload", ["always", "never"])
@pytest.mark.parametrize("name", METHODS)
def test_a_freed_slot_tells_nothing(
    name: str, offload: str, model: Path, on_gpu: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one method that builds on a side stream.
    monkeypatch.setattr(clusterkv, "SideStream", slow_stream(SIDE_CYCLES))
    method, sparse = METHODS[name]
    directory = on_gpu(model, method, "--cache.offload", offload, *WINDOW, *LIMITS, *sparse)
    expected = Engine.load(directory, max_num_tokens=STEP_TOKENS).generate([OWN])
    engine, generator = Engine.load(directory, max_num_tokens=STEP_TOKENS), torch.Generator().manual_seed(3)
    for kind in POISONS:
        engine.generate([OTHER, OTHER])
        cancel_while_it_is_read(engine, OTHER)
        assert engine._cache.extents.free == engine._cache.extents.capacity
        arrays = left_behind(engine)
        keeping = 0 if method in KEEP_NOTHING else engine.config.model.num_layers - 1
        assert len(arrays) >= 3 + keeping, "indexes keep some"
        # For rows on their way to pinned memory, which the host writes to; clustering goes on.
        torch.cuda.current_stream().synchronize()
        with torch.inference_mode():
            for array in arrays:
                poison(array, kind, generator)
        assert engine.generate([OWN]) == expected, kind
