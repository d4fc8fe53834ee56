"""An engine process one of whose functions raises for chosen requests: `python -m tests.support.failing_engine`.

It takes the arguments of kvseek.server.engine.process. A prompt of FAILING_PROMPT tokens fails while it is read, one of
HANGING_PROMPT tokens is never read to its end. A decode step of FAILING_SLOTS requests fails as a whole. Once a prompt of
DEAD_PROMPT tokens is read no call succeeds any more, as after a CUDA error, and the engine cannot be closed. No step is
shorter than STEP_SECONDS, so that a long answer still runs when the next request comes through a slow port.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from kvseek.core.errors import CapacityError
from kvseek.engine import service
from kvseek.engine.cache.cache import Cache
from kvseek.engine.engine import Engine
from kvseek.engine.model.cpu import HostDecoder
from kvseek.engine.retrieval import Retrieval
from kvseek.server.engine import process

FAILING_PROMPT, HANGING_PROMPT, DEAD_PROMPT, FAILING_SLOTS = 33, 34, 35, 2
PROMPT_ERROR, STEP_ERROR, DEAD_ERROR = "no memory for a layer", "a kernel has failed", "CUDA error: an illegal address"
HUNG_SECONDS, STEP_SECONDS = 2.0, 0.001


def main() -> int:
    """Replace the functions and run the process."""
    store_layer, store_pack, launch = Retrieval.store_layer, Retrieval.store_pack, HostDecoder.launch

    def fail(layer: int, tokens: int) -> None:
        if tokens == FAILING_PROMPT and layer == 1:
            raise CapacityError(PROMPT_ERROR)
        if tokens == HANGING_PROMPT:
            time.sleep(1e6)
        if tokens == DEAD_PROMPT:
            Cache.close, Engine.close = dead, lambda self: time.sleep(1e6)  # type: ignore[method-assign]
            raise RuntimeError(DEAD_ERROR)

    def failing_store(self: Retrieval, layer: int, slot: int, keys: Any, values: Any, queries: Any) -> None:
        fail(layer, keys.shape[1])
        store_layer(self, layer, slot, keys, values, queries)

    def failing_pack(self: Retrieval, layer: int, spans: Any, keys: Any, values: Any, queries: Any) -> None:
        for first, stop in spans.values():
            fail(layer, stop - first)
        store_pack(self, layer, spans, keys, values, queries)

    def dead(self: Cache, slot: int) -> None:
        raise RuntimeError(DEAD_ERROR)

    def failing_launch(self: HostDecoder, tokens: Any, slots: Any, *others: Any) -> Any:
        if len(slots) == FAILING_SLOTS:
            raise RuntimeError(STEP_ERROR)
        time.sleep(STEP_SECONDS)
        return launch(self, tokens, slots, *others)

    Retrieval.store_layer, Retrieval.store_pack = failing_store, failing_pack  # type: ignore[method-assign]
    HostDecoder.launch = failing_launch  # type: ignore[method-assign]
    service.HUNG_SECONDS, service.LOOK_SECONDS = HUNG_SECONDS, 0.2
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
