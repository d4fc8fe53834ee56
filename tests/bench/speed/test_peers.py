"""bench/speed/studies/peers.py: whether published code was given what it expects."""

from __future__ import annotations

import pytest
import torch

from kvseek.bench.speed.studies.peers import recall
from kvseek.core.errors import KvseekError


def test_rows_that_are_not_the_best_are_refused() -> None:
    """Rows counted from another place, such as a sink that was left out, are found by chance alone."""
    keys, queries = torch.randn(2, 4000, 16), torch.randn(2, 16)
    best = (keys @ queries.unsqueeze(-1))[..., 0].topk(100).indices
    assert recall(best, keys, queries) == 1
    with pytest.raises(KvseekError, match="it was not given what it expects"):
        recall((best + 64) % 4000, keys, queries)
