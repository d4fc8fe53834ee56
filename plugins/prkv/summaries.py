"""What an index knows of the keys of each page, and how pages are scored by it, in PyTorch on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from kvseek.core.config import EXTENT_TOKENS
from kvseek.plugins.codes.key_codes import encode, estimate_all, round_lanes
from kvseek.plugins.codes.rotation import rotate
from kvseek.plugins.codes.store import CodeStore
from kvseek.plugins.contract import IndexContext

from .config import Config

CODE_BITS = 2
ROTATION_SEED = 0  # of the signs in Traits.codebooks


class Summaries(ABC):
    """Summaries of a layer's pages: page p of a slot holds places p * page .. p * page + page - 1."""

    def __init__(self, context: IndexContext) -> None:
        self.context = context
        self.config: Config = context.config

    @property
    @abstractmethod
    def bytes_per_token(self) -> float:
        """Bytes of all KV heads per token."""

    @abstractmethod
    def build(self, slot: int, keys: Tensor) -> None:
        """Summarise a prompt's keys [G, n, D], in the order of places; n may be 0."""

    @abstractmethod
    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """Take in keys [G, u, D] of the places from `start` on; scores of pages that selections see stay as they are."""

    @abstractmethod
    def publish(self, slot: int, start: int) -> None:
        """Let selections see what `append` took in last, from place `start` on."""

    @abstractmethod
    def exchange(self, slot: int, head: int, places: Tensor, others: Tensor, pool: Tensor) -> None:
        """Follow rows of a KV head that were swapped: places and others int64 [m], no place twice, in pool [E, G, 1024, 2, D]."""

    @abstractmethod
    def scores(self, queries: Tensor, slot: int, length: int, first: int) -> Tensor:
        """Score pages for queries [G, g, D]: float32 [G, lanes, pages].

        Scores are on the scale of q·k. Pages are those from page `first` on that the first `length` places occupy.
        """


class Boxes(Summaries):
    """Bounding boxes of the keys of each page (PRKV paper, section 4.1), in extents.

    Attributes
    ----------
    boxes : Tensor [E, G, P, 2, D]
        Smallest and largest number of each channel among a page's keys, exact in the dtype of the keys; P pages an extent.
    pending : Tensor [slots, G, 2, D]
        Box of the keys that are to join a page that earlier keys began, kept from `append` to `publish`.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.pages_of_extent = EXTENT_TOKENS // self.config.page
        heads, box = context.num_kv_heads, (2, context.head_dim)
        pages = (context.extents.capacity, heads, self.pages_of_extent)
        self.boxes = torch.empty((*pages, *box), dtype=context.dtype, device=context.device)
        joining = (context.extents.slots, heads, *box)
        self.pending = torch.empty(joining, dtype=context.dtype, device=context.device)

    @property
    def bytes_per_token(self) -> float:
        """See Summaries.bytes_per_token."""
        box = 2 * self.context.head_dim * self.context.dtype.itemsize
        return self.context.num_kv_heads * box / self.config.page

    def build(self, slot: int, keys: Tensor) -> None:
        """See Summaries.build."""
        self._enclose(slot, 0, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Summaries.append. New rows fill up the last page, then new pages, which the length alone makes visible."""
        joining = min(-start % self.config.page, keys.shape[1])
        if joining:
            self.pending[slot] = box_of(keys[:, :joining])
        self._enclose(slot, start + joining, keys[:, joining:])

    def publish(self, slot: int, start: int) -> None:
        """See Summaries.publish. Lets rows join the page that earlier rows began."""
        if start % self.config.page:
            box, joining = self._box(slot, start // self.config.page), self.pending[slot]
            box[:, 0] = torch.minimum(box[:, 0], joining[:, 0])
            box[:, 1] = torch.maximum(box[:, 1], joining[:, 1])

    def exchange(self, slot: int, head: int, places: Tensor, others: Tensor, pool: Tensor) -> None:
        """See Summaries.exchange. Computes the boxes of all pages of these places again, from their keys."""
        page = self.config.page
        for number in sorted(set((torch.cat((places, others)) // page).tolist())):
            extent = int(self.context.extents.table[slot, number // self.pages_of_extent])
            offset = number % self.pages_of_extent
            keys = pool[extent, head, offset * page : (offset + 1) * page, 0]
            self.boxes[extent, head, offset] = box_of(keys[None])[0]

    def scores(self, queries: Tensor, slot: int, length: int, first: int) -> Tensor:
        """See Summaries.scores."""
        boxes = read_pages(self.context, self.boxes, slot, -(-length // self.config.page))[:, first:]
        return box_scores(queries, boxes, self.config.box_radius)

    def _enclose(self, slot: int, start: int, keys: Tensor) -> None:
        """Write the boxes of the pages that keys [G, u, D] fill, from place `start` on, where a page begins."""
        page = self.config.page
        for first in range(0, keys.shape[1], page):
            self._box(slot, (start + first) // page).copy_(box_of(keys[:, first : first + page]))

    def _box(self, slot: int, number: int) -> Tensor:
        """Return the box of a page, [G, 2, D], as a view that may be written to."""
        extent = self.context.extents.table[slot, number // self.pages_of_extent]
        return self.boxes[int(extent), :, number % self.pages_of_extent]


class Codes(Summaries):
    """Nested key codes of 2 bits of every row (plugins/codes): a page scores what its rows weigh together in the softmax.

    Attributes
    ----------
    store : CodeStore
        Codes by place. Those of places beyond a region's length are not read, so there is nothing to publish.
    """

    store_type = CodeStore

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.store = self.store_type(context, context.codebooks["signs"], CODE_BITS)

    @property
    def bytes_per_token(self) -> float:
        """See Summaries.bytes_per_token."""
        return self.store.bytes_per_token

    def build(self, slot: int, keys: Tensor) -> None:
        """See Summaries.build."""
        self.store.append(slot, 0, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Summaries.append."""
        self.store.append(slot, start, keys)

    def publish(self, slot: int, start: int) -> None:
        """See Summaries.publish. The length alone makes codes visible."""

    def exchange(self, slot: int, head: int, places: Tensor, others: Tensor, pool: Tensor) -> None:
        """See Summaries.exchange. Rows are encoded again, with the means of the blocks that they are in now."""
        places = torch.cat((places, others))
        table = self.context.extents.table[slot].long()
        here = (table[places // EXTENT_TOKENS], head, places % EXTENT_TOKENS)
        centred = rotate(pool[here][:, 0], self.store.signs) - self.store.mean_of(slot, places)[head]
        high, _, scales = encode(centred, CODE_BITS)
        self.store.high[here], self.store.scales[here] = high, scales

    def scores(self, queries: Tensor, slot: int, length: int, first: int) -> Tensor:
        """See Summaries.scores. A page scores log Σ exp(scaling · estimate) / scaling, the sum over its rows."""
        lanes = round_lanes(rotate(queries.float(), self.store.signs))
        estimates = estimate_all(self.store.read(slot, length), lanes)
        exponents = rows_of_pages(estimates * self.context.scaling, self.config.page)
        return exponents.logsumexp(dim=-1)[..., first:] / self.context.scaling


def rows_of_pages(scores: Tensor, page: int) -> Tensor:
    """Cut scores of rows into pages: [G, lanes, n] to [G, lanes, pages, page], filled up with -infinity."""
    return F.pad(scores, (0, -scores.shape[-1] % page), value=-torch.inf).view(*scores.shape[:2], -1, page)


def read_pages(context: IndexContext, array: Tensor, slot: int, pages: int) -> Tensor:
    """Copy the entries of a slot's first pages out of an array [E, G, P, ...], P pages an extent: [G, pages, ...]."""
    extents = context.extents.device_table[slot, : -(-pages // array.shape[2])].long()
    return array.index_select(0, extents).transpose(0, 1).flatten(1, 2)[:, :pages]


def box_of(keys: Tensor) -> Tensor:
    """Find the smallest and largest number of each channel among keys [G, n, D], n >= 1: [G, 2, D]."""
    return torch.stack((keys.amin(dim=1), keys.amax(dim=1)), dim=1)


def box_scores(lanes: Tensor, boxes: Tensor, radius: float = 1.0) -> Tensor:
    """Score each page's box by q·centre + radius · Σ |q_c| · half-width: float32 [G, lanes, pages].

    With radius 1 the scores are upper bounds of q·k. A score is the sum of two products: the largest numbers of the channels
    times max(q · near, q · far), and the smallest numbers times min(q · near, q · far), with near, far = (1 ± radius) / 2. Both
    factors and their products with q are rounded to the dtype of the lanes.

    Parameters
    ----------
    lanes : Tensor [G, lanes, D]
    boxes : Tensor [G, pages, 2, D]
        Smallest, then largest number of each channel.
    """
    boxes = boxes.float()
    near, far = (lanes * torch.tensor(factor / 2, dtype=lanes.dtype) for factor in (1 + radius, 1 - radius))
    on_largest = torch.maximum(near, far).float() @ boxes[:, :, 1].transpose(1, 2)
    return on_largest + torch.minimum(near, far).float() @ boxes[:, :, 0].transpose(1, 2)
