"""Which rows of the context the decode steps of a request select: what a client asks for, and what it gets for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from .config import EngineConfig
from .errors import RequestError, check_types, require

FIELD = "return_selected_rows"
SMALLEST_BLOCK = 16
MAX_BLOCK = 1 << 20
MAX_COUNTS = 1 << 16  # numbers that may come with a token: 512 KiB


@dataclass(frozen=True)
class RowReport:
    """How finely, and of which layers and KV heads, the selected rows are reported.

    Attributes
    ----------
    block : int or None
        Tokens that one number counts: number b counts rows of the positions b * block .. (b + 1) * block - 1. 1 reports every
        row. None: the smallest power of two from 16 on with which the numbers of a token stay within 65,536.
    layers, kv_heads : tuple of int
        Those that are reported, ascending; () stands for all.
    """

    block: int | None = None
    layers: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("layers", "kv_heads"):
            given = getattr(self, name)
            ascends = all(first < second for first, second in pairwise(given))
            _require(ascends, name, list(given)[:8], "numbers that ascend", "sort them, each once")
        fits = self.block is None or 1 <= self.block <= MAX_BLOCK
        _require(fits, "block", self.block, f"in [1, {MAX_BLOCK}]", "leave it out for one that fits")

    def fitted(self, config: EngineConfig, tokens: int) -> RowReport:
        """Name layers, KV heads and block for a request of at most `tokens` tokens; raises RequestError."""
        model = config.model
        named = {}
        for name, count in (("layers", len(model.row_layers)), ("kv_heads", model.num_kv_heads)):
            given = getattr(self, name)
            known = not given or (given[0] >= 0 and given[-1] < count)
            _require(known, name, list(given)[:8], f"in [0, {count})", "the model has no such")
            named[name] = given or tuple(range(count))
        lists, block = len(named["layers"]) * len(named["kv_heads"]), self.block or SMALLEST_BLOCK
        while self.block is None and lists * -(-tokens // block) > MAX_COUNTS:
            block *= 2
        counts, limit = lists * -(-tokens // block), f"<= {MAX_COUNTS}"
        what = f"{counts} numbers a token, of {lists} layers × KV heads with block = {block},"
        _require(counts <= MAX_COUNTS, "counts", what, limit, "take a larger block, or fewer layers or kv_heads")
        return RowReport(block, **named)


class SelectedRows(msgspec.Struct, frozen=True):
    """What the decode step read of the context that drew one token.

    A step always reads the positions outside of the retrieval region: before `start`, and from `stop` up to `cached_tokens`.
    Inside of it each layer and KV head reads the rows that the method selects, which `of` gives.

    Attributes
    ----------
    cached_tokens, attended_tokens : int, float
        As of StepOutput.
    start, stop : int
        Positions of the retrieval region.
    block : int
        Tokens that one number counts.
    layers, kv_heads : tuple of int
        Those that are reported.
    dense : tuple of int
        Those of `layers` that read every row of the region; they have no numbers.
    ends, blocks, counts : bytes
        int32 numbers in the byte order of the machine. `blocks` and `counts` have an entry for each block with a row that was
        read, ascending, one layer and KV head after the other; `ends` where the entries of each of these end.
    """

    cached_tokens: int
    attended_tokens: float
    start: int
    stop: int
    block: int
    layers: tuple[int, ...]
    kv_heads: tuple[int, ...]
    dense: tuple[int, ...]
    ends: bytes
    blocks: bytes
    counts: bytes

    @property
    def size(self) -> int:
        """Bytes of the numbers."""
        return len(self.ends) + len(self.blocks) + len(self.counts)

    def of(self, layer: int, kv_head: int) -> Mapping[int, int] | None:
        """Return how many rows one KV head of a layer read of each block, by the block's number; None: every row of the region.

        Raises KeyError if the layer or the KV head is not reported.
        """
        if layer not in self.layers or kv_head not in self.kv_heads:
            raise KeyError(f"layer {layer}, KV head {kv_head}: not among the reported {self.layers}, {self.kv_heads}")
        if layer in self.dense:
            return None
        selecting = [own for own in self.layers if own not in self.dense]
        place = selecting.index(layer) * len(self.kv_heads) + self.kv_heads.index(kv_head)
        ends = np.frombuffer(self.ends, np.int32)
        part = slice(ends[place - 1] if place else 0, ends[place])
        blocks, counts = (np.frombuffer(own, np.int32)[part].tolist() for own in (self.blocks, self.counts))
        return dict(zip(blocks, counts, strict=True))

    def lists(self) -> tuple[list[list[list[int]] | None], list[list[list[int]] | None]]:
        """Return blocks and counts as lists by layer and KV head; None for a layer that is dense."""
        ends = np.frombuffer(self.ends, np.int32).tolist()
        return self._cut(np.frombuffer(self.blocks, np.int32).tolist(), ends), self._cut(
            np.frombuffer(self.counts, np.int32).tolist(), ends
        )

    def _cut(self, numbers: list[int], ends: Sequence[int]) -> list[list[list[int]] | None]:
        cut, heads = list[list[list[int]] | None](), len(self.kv_heads)
        first, given = 0, iter(ends)
        for layer in self.layers:
            if layer in self.dense:
                cut.append(None)
                continue
            own = []
            for _ in range(heads):
                end = next(given)
                own.append(numbers[first:end])
                first = end
            cut.append(own)
        return cut


def _require(condition: bool, name: str, value: object, limit: str, remedy: str) -> None:
    require(condition, f"{FIELD}.{name}", value, limit, remedy, RequestError)
