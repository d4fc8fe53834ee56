"""Where the text of a prompt stands a second time, for attention that reads chosen blocks of tokens (block_sparse.py).

Heads that copy look for what followed the same tokens before. They are sure of what they look for, but few tokens of a text do
it at a time, so a sample of queries misses them. The tokens themselves tell where they will look.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from kvseek.core.config import KEY_BLOCK
from kvseek.core.streams import to_device

MOST_PLACES = 16  # a pair of tokens that was there more often says little about where to look


class RepeatedTokens:
    """Pairs of neighbouring tokens of one prompt, each with its earlier places.

    Parameters
    ----------
    ids : sequence of int
        Tokens of the whole prompt.
    device : torch.device
        Where blocks are looked up, in four numbers a token. The host does not wait for it.
    """

    def __init__(self, ids: Sequence[int], device: torch.device) -> None:
        self._ids, self._device = ids, device
        self._blocks: dict[tuple[int, int], Tensor] = {}  # by `start` and `stop`: the same in all layers

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Places sorted by their pair, those of one pair in the order of the text; of each token, its place in that list, how
        many of its pair are before it, and how surprising its pair is. Made when a chunk is sparse: all of a short prompt is
        dense.

        Two frequent tokens meet again by chance. Surprise is the logarithm of how much more often the pair was seen, this time
        counted, than it would be by chance in the whole prompt (pointwise mutual information); at least 0.
        """
        ids = torch.tensor(self._ids)
        tokens = to_device(ids, torch.int64, self._device)
        seen_alone = to_device(ids.bincount()[ids], torch.float32, self._device)
        number = torch.arange(len(tokens), device=self._device)
        pairs = tokens.clone()  # the first token has none before it, and repeats nothing that matters
        pairs[1:] += tokens[:-1] * (1 + tokens.max())
        by_pair = pairs.argsort(stable=True)
        ordered = pairs[by_pair]
        begins = torch.ones_like(ordered, dtype=torch.bool)
        begins[1:] = ordered[1:] != ordered[:-1]
        first = torch.where(begins, number, 0).cummax(dim=0).values
        own = torch.empty_like(number).scatter_(0, by_pair, number)
        earlier = torch.empty_like(number).scatter_(0, by_pair, number - first)
        surprise = earlier.float().add_(1).mul_(len(tokens)).div_(seen_alone)
        surprise[1:] /= seen_alone[:-1]
        return by_pair, own, earlier, surprise.log_().clamp_min_(0)

    def blocks(self, start: int, stop: int, size: int, past: int, count: int) -> Tensor:
        """Find the key blocks in which the tokens start .. stop - 1, in query blocks of `size`, stood before.

        A place counts with its next token: by the surprise of its pair, divided by the number of places. `past` is the number of
        key blocks, counted from the first token, that may be found.

        Returns
        -------
        Tensor, int64 [query blocks, at most `count`]
            The blocks that count most; 0 where there are no more.
        """
        if (start, stop) not in self._blocks:
            self._blocks[start, stop] = self._find(start, stop, size, past, count)
        return self._blocks[start, stop]

    def _find(self, start: int, stop: int, size: int, past: int, count: int) -> Tensor:
        by_pair, *of_tokens = self._places
        own, earlier, surprise = (part[start:stop, None] for part in of_tokens)
        back = torch.arange(1, MOST_PLACES + 1, device=own.device)
        there = (back <= earlier) & (earlier <= MOST_PLACES)
        places = by_pair[(own - back).clamp_min(0)]
        worth = torch.where(there, surprise / earlier.clamp_min(1), 0.0).flatten()
        number = torch.arange(stop - start, device=own.device).div(size, rounding_mode="floor")
        number = number[:, None].expand_as(places).flatten()
        mass = worth.new_zeros(-(-(stop - start) // size), past + 1)  # the last one takes what stands behind the past
        for place in (places, places + 1):
            block = place.div(KEY_BLOCK, rounding_mode="floor").clamp_max(past).flatten()
            mass.index_put_((number, block), worth, accumulate=True)
        best = mass[:, :past].topk(min(count, past), dim=1)
        return torch.where(best.values > 0, best.indices, 0)
