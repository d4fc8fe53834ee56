"""What an index knows of the keys of each page, and how pages are scored by it, in PyTorch on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.index_context import IndexContext
from kvseek.kernels.reference.codes.key_codes import estimate_all, round_lanes
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.plugins.ranking import code_store

from .config import Config
from .static import static_first

CODE_BITS = 2
ROTATION_SEED = 0  # of the signs in Traits.codebooks


class Summaries(ABC):
    """Which tokens form pages, and what is known of their keys. An index's static set, int64 [G, s], is given to each call."""

    def __init__(self, context: IndexContext) -> None:
        self.context = context
        self.config: Config = context.config

    @property
    @abstractmethod
    def bytes_per_token(self) -> float:
        """Bytes of all KV heads per token."""

    @abstractmethod
    def build(self, slot: int, keys: Tensor, static: Tensor) -> None:
        """Summarise a prompt's keys [G, n, D]; n may be 0."""

    @abstractmethod
    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """Take in keys [G, u, D] of the tokens from `start` on; scores of pages that selections see stay as they are."""

    def publish(self, slot: int, start: int) -> None:  # noqa: B027  a region's length may be all that selections need
        """Let selections see what `append` took in last, from token `start` on."""

    def prepare(self, keys: Tensor, static: Tensor) -> Tensor | None:
        """Compute what a new static set changes, and leave all as it is; `keys` as read for the choice of the set."""
        return None

    def renew(self, slot: int, old: Tensor, static: Tensor, prepared: Tensor | None) -> None:  # noqa: B027  likewise
        """Follow a change of the static set from `old` to `static`, with what `prepare` has returned for it."""

    def first_page(self, static: int) -> int:
        """Return the number of the first page, if `static` tokens are static."""
        return 0

    @abstractmethod
    def tokens(self, static: Tensor, length: int) -> Tensor:
        """List the tokens of the pages of a region, from the first page on, that are not static: int64 [G, pages, page].

        -1 stands for a token that is static, or beyond the region's length.
        """

    @abstractmethod
    def scores(self, queries: Tensor, slot: int, static: Tensor, length: int) -> Tensor:
        """Score the pages of a region for queries [G, g, D], from the first page on: float32 [G, g, pages], as q·k is scaled."""


class Boxes(Summaries):
    """Bounding boxes of the keys of each page, in extents (PRKV paper, section 4.1).

    Static tokens have the first *places*, the others follow, both in token order, and page p is places p * page and on. Tokens
    that come later have the places of their numbers. A new static set makes other pages, and so other boxes of nearly all.

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
        box = 2 * self.context.head_dim * self.context.dtype.itemsize
        return self.context.num_kv_heads * box / self.config.page

    def build(self, slot: int, keys: Tensor, static: Tensor) -> None:
        order = static_first(static, keys.shape[1])
        self._enclose(slot, 0, keys.gather(1, order[..., None].expand_as(keys)))

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

    def prepare(self, keys: Tensor, static: Tensor) -> Tensor | None:
        """See Summaries.prepare. Takes the keys [G, n, D] of all whole pages to the boxes of these: [G, n / page, 2, D]."""
        order = static_first(static, keys.shape[1])
        pages = keys.gather(1, order[..., None].expand_as(keys)).view(
            keys.shape[0], -1, self.config.page, keys.shape[2]
        )
        return torch.stack((pages.amin(dim=2), pages.amax(dim=2)), dim=2)

    def renew(self, slot: int, old: Tensor, static: Tensor, prepared: Tensor | None) -> None:
        assert prepared is not None, "boxes follow the static set"
        extents, size = self.context.extents.device_table[slot].long(), self.pages_of_extent
        whole, left = divmod(prepared.shape[1], size)
        by_extent = prepared[:, : whole * size].reshape(len(prepared), whole, *self.boxes.shape[2:]).transpose(0, 1)
        self.boxes.index_copy_(0, extents[:whole], by_extent)
        if left:
            self.boxes[int(self.context.extents.table[slot, whole]), :, :left] = prepared[:, whole * size :]

    def first_page(self, static: int) -> int:
        """See Summaries.first_page. Static tokens fill the pages before."""
        return static // self.config.page

    def tokens(self, static: Tensor, length: int) -> Tensor:
        return by_page(static_first(static, length)[:, static.shape[1] :], self.config.page, -1)

    def scores(self, queries: Tensor, slot: int, static: Tensor, length: int) -> Tensor:
        boxes = read_pages(self.context, self.boxes, slot, -(-length // self.config.page))
        return box_scores(queries, boxes[:, self.first_page(static.shape[1]) :], self.config.box_radius)

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
    """Nested key codes of 2 bits of every row: a page scores what its rows weigh together in the softmax.

    Page p is tokens p * page and on, whichever of them are static: static tokens weigh nothing there, and codes stay as they are.

    Attributes
    ----------
    store : CodeStore
        Those of tokens beyond a region's length are not read, so there is nothing to publish.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.store = code_store(context, CODE_BITS)

    @property
    def bytes_per_token(self) -> float:
        return self.store.bytes_per_token

    def build(self, slot: int, keys: Tensor, static: Tensor) -> None:
        self.store.append(slot, 0, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        self.store.append(slot, start, keys)

    def tokens(self, static: Tensor, length: int) -> Tensor:
        every = torch.arange(length, device=static.device).repeat(static.shape[0], 1)
        return by_page(every.scatter_(1, static, -1), self.config.page, -1)

    def scores(self, queries: Tensor, slot: int, static: Tensor, length: int) -> Tensor:
        """See Summaries.scores. A page scores log Σ exp(scaling · estimate) / scaling, the sum over its rows."""
        lanes = round_lanes(rotate(queries, self.store.signs))
        exponents = estimate_all(self.store.read(slot, length), lanes) * self.context.scaling
        exponents.scatter_(2, static[:, None].expand(-1, queries.shape[1], -1), -torch.inf)
        return by_page(exponents, self.config.page, -torch.inf).logsumexp(dim=-1) / self.context.scaling


def by_page(rows: Tensor, page: int, fill: float) -> Tensor:
    """Cut what belongs to rows into pages: [..., n] to [..., pages, page], the last one filled up."""
    padded = F.pad(rows, (0, -rows.shape[-1] % page), value=fill)
    return padded.view(*rows.shape[:-1], -1, page)


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
