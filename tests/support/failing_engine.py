"""An engine process one of whose functions raises for chosen requests: `python -m tests.support.failing_engine`.

It takes the arguments of kvseek.server.engine.process. A prompt of FAILING_PROMPT tokens fails while it is read. A decode step
of FAILING_SLOTS requests fails as a whole.
"""

from __future__ import annotations

import sys
from typing import Any

from kvseek.core.errors import CapacityError
from kvseek.engine.decoder import Decoder
from kvseek.engine.retrieval import Retrieval
from kvseek.server.engine import process

FAILING_PROMPT, FAILING_SLOTS = 33, 2
PROMPT_ERROR, STEP_ERROR = "no memory for a layer", "a kernel has failed"


def main() -> int:
    """Replace the functions and run the process."""
    store_layer, decode_tokens = Retrieval.store_layer, Decoder.decode_tokens

    def failing_store(self: Retrieval, layer: int, slot: int, keys: Any, values: Any, queries: Any) -> None:
        if keys.shape[1] == FAILING_PROMPT and layer == 1:
            raise CapacityError(PROMPT_ERROR)
        store_layer(self, layer, slot, keys, values, queries)

    def failing_decode(self: Decoder, tokens: Any, slots: Any, greedy: Any) -> Any:
        if len(slots) == FAILING_SLOTS:
            raise RuntimeError(STEP_ERROR)
        return decode_tokens(self, tokens, slots, greedy)

    Retrieval.store_layer, Decoder.decode_tokens = failing_store, failing_decode  # type: ignore[method-assign]
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
