"""What tests/engine/test_preemption.py asks of engines on the CPU: no answer tells that its request has made room for others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine.test_preemption import LIMITS, REQUESTS, ask
from tests.gpu.engine.test_prefix_reuse import SPARSE, WINDOW
from tests.support.long_prompts import DOCUMENT, HEADS, SHAPE, load_changed

from kvseek.core.config import read_config
from kvseek.engine.cache.memory_layout import lay_out_rows

pytestmark = pytest.mark.gpu

# Evictions are of 64 tokens here, for which a request has room when it begins: all but the last have one extent then, as
# 1,042 + 64 tokens are at most 1,024 + 64 + 20, and two when they end.
LONGER = [
    replace(request, prompt_ids=(*request.prompt_ids, *DOCUMENT[:32]), max_tokens=request.max_tokens + 40)
    for request in REQUESTS
]


def pool(directory: Path, offload: str, extents: int) -> dict[str, object]:
    """Fields of the cache with which an engine has so many extents, though layers that attend densely stay on the device."""
    config = read_config(directory)
    rows = lay_out_rows(replace(config, cache=replace(config.cache, offload=offload)), torch.bfloat16, None)
    kind, layers = ("host", rows.host_layers) if offload == "always" else ("device", rows.device_layers)
    return {"offload": offload, f"kv_cache_{kind}_memory_bytes": extents * layers * rows.layer_bytes}


@pytest.mark.parametrize("offload", ["always", "never"])
@pytest.mark.parametrize("name", SPARSE)
def test_answers_do_not_tell_of_preemptions(
    name: str, offload: str, random_model: RandomModel, on_gpu: BuildEngine
) -> None:
    model = random_model("llama", **SHAPE, **HEADS, head_dim=64)
    method, few = SPARSE[name]
    directory = on_gpu(model, method, *WINDOW, *LIMITS, *few, "--dtype", "bfloat16")
    expected, none = ask(load_changed(directory, pool(directory, offload, 30)), LONGER)
    assert sum(none) == 0
    for reuse in (True, False):
        for extents, share in ((6, 0.0), (9, 0.1)):
            engine = load_changed(directory, {"reuse": reuse, **pool(directory, offload, extents)})
            assert engine._cache.extents.capacity == extents
            found, counts = ask(engine, LONGER, share)
            assert found == expected
            assert sum(counts) > 0
