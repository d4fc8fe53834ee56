"""The embedding of a rank, apart from other processes: a prompt's rows are summed in pieces of bounded size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.engine.parallel.ranks import EMBEDDED_TOKENS, RankEmbedding, Ranks

RANKS, ROWS, HIDDEN = 3, 7, 4


class LoneRanks(Ranks):
    """A rank whose sums are its own parts, in the order in which the others would add theirs."""

    def sum(self, tensor: Tensor) -> Tensor:
        assert tensor.shape[0] <= EMBEDDED_TOKENS
        return tensor


def test_parts_of_all_ranks_are_the_rows_of_a_long_prompt() -> None:
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(RANKS * ROWS, HIDDEN, generator=generator)
    tokens = torch.randint(RANKS * ROWS, (2 * EMBEDDED_TOKENS + 5,), generator=generator)
    before = tokens.clone()
    parts = [RankEmbedding(whole[rank * ROWS :][:ROWS], LoneRanks(rank, RANKS))(tokens) for rank in range(RANKS)]
    assert torch.equal(sum(parts[1:], parts[0]), F.embedding(tokens, whole))
    assert torch.equal(tokens, before)
