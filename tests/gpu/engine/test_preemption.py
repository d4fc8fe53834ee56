"""What tests/engine/test_preemption.py asks of engines on the CPU: no answer tells that its request has made room for others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.engine.test_preemption import EXTENT_BYTES, LIMITS, REQUESTS, ask
from tests.gpu.engine.test_prefix_reuse import SPARSE, WINDOW
from tests.support.long_prompts import DOCUMENT, HEADS, SHAPE, load_changed

pytestmark = pytest.mark.gpu

# Evictions are of 64 tokens here: all but the last request have one extent at first, and two when they end.
LONGER = [replace(request, prompt_ids=(*request.prompt_ids, *DOCUMENT[:60])) for request in REQUESTS]


@pytest.mark.parametrize("offload", ["always", "never"])
@pytest.mark.parametrize("name", SPARSE)
def test_answers_do_not_tell_of_preemptions(
    name: str, offload: str, random_model: RandomModel, on_gpu: BuildEngine
) -> None:
    model = random_model("llama", **SHAPE, **HEADS, head_dim=64)
    method, few = SPARSE[name]
    directory = on_gpu(model, method, *WINDOW, *LIMITS, *few, "--dtype", "bfloat16")
    expected, none = ask(load_changed(directory, {"offload": offload}), LONGER)
    assert sum(none) == 0
    pool = f"kv_cache_{'device' if offload == 'never' else 'host'}_memory_bytes"
    for reuse in (True, False):
        for extents, share in ((6, 0.0), (9, 0.1)):
            cache = {"offload": offload, "reuse": reuse, pool: extents * EXTENT_BYTES}
            found, counts = ask(load_changed(directory, cache), LONGER, share)
            assert found == expected
            assert sum(counts) > 0
