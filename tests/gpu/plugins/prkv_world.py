"""An index of PRKV, its row pool and the rows that it should attend to, for tests on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tests.gpu.plugins import gpu_context
from tests.plugins.index_cases import KV_HEADS
from torch import Tensor

from kvseek.core.batch import Batch, RequestState, Selection
from kvseek.core.index_context import IndexContext, LayerRows
from kvseek.kernels.cuda.attention.attend import DeviceAttention, LayerAttention
from kvseek.kernels.cuda.attention.hot_rows import HotRows, empty_frames
from kvseek.kernels.reference.codes.key_codes import KeyCodes, encode, leading_bits
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.plugins.prkv.config import Config
from kvseek.plugins.prkv.device import CudaIndex
from kvseek.plugins.prkv.reference import ReferenceIndex
from kvseek.plugins.prkv.static import static_first
from kvseek.plugins.prkv.summaries import CODE_BITS, Boxes, Codes, box_scores, read_pages
from kvseek.plugins.ranking import softmax_mean

# dtype, head_dim, group size, page
SHAPES = [
    ("bfloat16", 128, 4, 16),
    ("bfloat16", 128, 4, 32),
    ("float16", 64, 3, 16),
    ("float32", 96, 1, 32),
    ("bfloat16", 256, 8, 8),
    ("float32", 128, 16, 128),
    ("bfloat16", 128, 16, 128),
    ("float16", 128, 7, 64),
    ("bfloat16", 64, 2, 32),
    ("float32", 32, 5, 8),
]


class World:
    """An index, its row pool, and the truth: rows by token, which carry the token's number in their values."""

    def __init__(
        self,
        config: Config,
        dtype: str,
        dim: int,
        group: int,
        lengths: Sequence[int],
        *,
        cuda: bool = True,
        on_host: bool = True,
        room: int = 0,
    ) -> None:
        self.config, self.dtype, self.dim, self.group = config, getattr(torch, dtype), dim, group
        self.device = gpu_context.PLACE if cuda else torch.device("cpu")
        context = gpu_context.make_context("prkv", config, dtype, dim, group, lengths, "cuda" if cuda else "cpu", room)
        pool = (context.extents.capacity, 2, KV_HEADS, 1024, 2, dim)  # this layer is the second of two
        memory = torch.device("cpu") if on_host else self.device
        self.pool = torch.full(pool, torch.nan, dtype=self.dtype, device=memory, pin_memory=cuda and on_host)[:, 1]
        self.context = replace(
            context,
            rows=LayerRows(self.pool, self.pool.data_ptr(), self.pool.stride(0)),
            frames=empty_frames(context.extents, KV_HEADS) if cuda and on_host else None,
            reuses_prefixes=True,
        )
        self.hot = make_hot_rows(self.context)
        self.index = CudaIndex(self.context) if cuda else ReferenceIndex(self.context)
        poison(self.index)
        self.truth: list[Tensor] = [torch.empty(0)] * len(lengths)

    def prompt(self, slot: int, rows: Tensor, queries: Tensor) -> None:
        """Give a slot its rows [G, n, 2, D] and the prompt's last queries [H, w, D], both from the CPU."""
        rows, queries = rows.to(self.device), queries.to(self.device)
        self.truth[slot] = rows
        if self.hot is not None:
            self.hot.forget(slot)
        self.index.build(slot, rows[:, :, 0], queries)  # nothing is left to wait for
        self.context.extents.write(self.pool, slot, 0, rows.to(self.pool.device))

    def batch(self, slots: Sequence[int], position: int, dense: Sequence[int] = ()) -> Batch:
        """A decode step of these slots, at the same position of each."""
        lengths = self.context.lengths
        states = [
            RequestState(slot=slot, position=position, length=lengths[slot], dense=slot in dense or lengths[slot] == 0)
            for slot in slots
        ]
        return Batch.of(states, self.context.extents.device_table)

    def select(self, queries: Tensor, slots: Sequence[int], position: int = 0, dense: Sequence[int] = ()) -> Selection:
        """What a decode step selects: queries [batch, H, D], where the index computes."""
        selection = self.index.select(queries, self.batch(slots, position, dense))
        assert selection is not None
        return selection

    def static(self, slot: int) -> Tensor:
        """Static tokens of a slot, int64 [G, s], on the CPU."""
        torch.cuda.synchronize()
        assert int(self.index.static_rows[slot]) == self.index.counts[slot]
        return self.index.static_of(slot).cpu()


def poison(index: ReferenceIndex) -> None:
    """What nobody may rely on: memory is handed on without being cleared."""
    if isinstance(index.summaries, Boxes):
        index.summaries.boxes.fill_(torch.nan)
        index.summaries.pending.fill_(torch.nan)
    elif isinstance(index.summaries, Codes):
        index.summaries.store.high.fill_(255)
        index.summaries.store.scales.fill_(torch.nan)
    index.recent.fill_(torch.nan)
    for integers in (index.picked, index.static_rows, index.static):
        integers.fill_(-77)
    if isinstance(index, CudaIndex):
        index.workspace.scores.fill_(torch.nan)


def random_rows(n: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows whose keys drift with the token, and whose values begin with its number in digits and the KV head."""
    drift = torch.linspace(0, 20, n).sin()[None, :, None] * torch.randn(KV_HEADS, 1, dim)
    rows = torch.randn(KV_HEADS, n, 2, dim)
    rows[:, :, 0] += drift + 0.5
    tokens = torch.arange(n)
    for digit in range(3):
        rows[:, :, 1, digit] = (tokens // 128**digit % 128).float()
    rows[:, :, 1, 3] = torch.arange(KV_HEADS)[:, None].float()
    return rows.to(dtype)


def token_numbers(rows: Tensor) -> Tensor:
    """The tokens whose rows these are: [..., 2, D] to int64 [...]."""
    digits = rows[..., 1, :3].float().long()
    return digits[..., 0] + 128 * digits[..., 1] + 128**2 * digits[..., 2]


def make_pair(
    config: Config, dtype: str, dim: int, group: int, lengths: Sequence[int], on_host: bool = True
) -> tuple[World, World]:
    """The same prompts in the reference on the CPU and in the index on the GPU."""
    worlds = [World(config, dtype, dim, group, lengths, cuda=cuda, on_host=on_host) for cuda in (False, True)]
    for slot, n in enumerate(lengths):
        rows = random_rows(n, dim, worlds[0].dtype)
        queries = torch.randn(KV_HEADS * group, 100, dim).to(worlds[0].dtype)
        for world in worlds:
            world.prompt(slot, rows, queries)
    return worlds[0], worlds[1]


def make_hot_rows(context: IndexContext) -> HotRows | None:
    """Hot rows for the context's frames; what they hold before a copy is NaN."""
    if context.frames is None:
        return None
    sizes = {"slots": context.extents.slots, "entries": context.config.top_k, "steps": context.config.cache_steps}
    hot = HotRows.make(context.frames, head_dim=context.head_dim, dtype=context.dtype, **sizes)
    assert hot is not None
    hot.rows.fill_(torch.nan)
    return hot


def attend(world: World, selection: Selection, slots: Sequence[int], position: int) -> Tensor:
    """Rows that attention reads, [batch, G, entries, 2, D] on the device, NaN for none.

    With rows in host memory the kernel runs; the copies that it makes for the next step are the rows that it has read.
    """
    if world.hot is None:
        rows = torch.stack([gather(world, slot, selection.rows[i].long()) for i, slot in enumerate(slots)])
    else:
        launch_attention(world, selection, slots, position)
        rows = world.hot.rows[list(slots), :, position % world.hot.rows.shape[2]]
    return torch.where((selection.rows >= 0)[..., None, None], rows, torch.nan)


def launch_attention(world: World, selection: Selection, slots: Sequence[int], position: int) -> None:
    """A launch of the attention kernel, over the selected rows alone: the window is empty."""
    context = world.context
    assert context.cuda is not None
    assert context.rows is not None
    kernel = DeviceAttention(
        context.cuda,
        num_heads=context.num_heads,
        kv_heads=KV_HEADS,
        head_dim=world.dim,
        dtype=world.dtype,
        window_rows=1,
        sink=0,
        entries=world.config.top_k,
        max_batch=len(slots),
        scaling=context.scaling,
        device=world.device,
        hot=world.hot,
    )
    window = torch.zeros(context.extents.slots, KV_HEADS, 1, 2, world.dim, dtype=world.dtype, device=world.device)
    queries = torch.zeros(len(slots), context.num_heads, world.dim, dtype=world.dtype, device=world.device)
    LayerAttention(kernel, window, context.rows)(queries, world.batch(slots, position), selection)


def gather(world: World, slot: int, places: Tensor) -> Tensor:
    """Rows [G, m, 2, D] of the pool at places, wherever it lies; -1 is any row."""
    table, kept = world.context.extents.table[slot], places.clamp(min=0).to(world.pool.device)
    heads = torch.arange(KV_HEADS, device=kept.device)[:, None]
    return world.pool[table.to(kept.device)[kept // 1024].long(), heads, kept % 1024].to(world.device)


def check_attended(world: World, slot: int, n: int, chosen: Tensor, rows: Tensor) -> None:
    """Each entry holds the row of a token, exact, and no token occurs twice. Places [G, k], rows [G, k, 2, D]."""
    for head in range(KV_HEADS):
        own = rows[head, (chosen[head] >= 0).to(rows.device)].cpu()
        spare = min(world.config.top_k, n) - own.shape[0]
        assert 0 <= spare < world.config.page, "the budget is used, but for what no whole page fits into"
        tokens = token_numbers(own)
        assert len(tokens.unique()) == len(tokens), "a token is attended to at most once"
        assert tokens.max() < n
        assert torch.equal(own, world.truth[slot][head, tokens.to(world.device)].cpu()), "rows are exact"


def boxes_of(world: World, slot: int, tokens: int) -> Tensor:
    """Boxes of the pages that a slot's first tokens fill: [G, pages, 2, D], on the CPU."""
    assert isinstance(world.index.summaries, Boxes)
    return read_pages(world.context, world.index.summaries.boxes, slot, -(-tokens // world.config.page)).cpu()


def picked_of(world: World, slot: int, tokens: int) -> Tensor:
    """How often the pages of a slot's first tokens were selected: int32 [G, pages], on the CPU."""
    return read_pages(world.context, world.index.picked, slot, -(-tokens // world.config.page)).cpu()


def check_summaries(world: World, slot: int, n: int) -> None:
    """Boxes enclose the keys of their pages exactly; codes are those of the rows, of which the static ones are marked."""
    keys, page, static = world.truth[slot][:, :n, 0].cpu(), world.config.page, world.static(slot)
    if isinstance(world.index.summaries, Codes):
        store = world.index.summaries.store
        have = store.read(slot, n)
        centred = rotate(keys.to(world.device), store.signs) - store.mean_of(slot, torch.arange(n))
        want = KeyCodes(*encode(centred, CODE_BITS), have.means, have.mean_steps)
        apart = (leading_bits(want, CODE_BITS).int() - leading_bits(have, CODE_BITS).int()).abs()
        assert apart.max() <= 1, "channels at the border of two cells alone differ"
        assert apart.sum() <= 1e-4 * apart.numel() + 2
        torch.testing.assert_close(have.scales.abs(), want.scales, rtol=1e-2, atol=0)
        if isinstance(world.index, CudaIndex):
            marked = torch.zeros(KV_HEADS, n, dtype=torch.bool).scatter_(1, static, True)
            assert torch.equal(have.scales.signbit().cpu(), marked)
        return
    boxes = boxes_of(world, slot, n)
    order = static_first(static, n)
    for number in range(static.shape[1] // page, boxes.shape[1]):
        tokens = order[:, number * page : (number + 1) * page]
        own = keys.gather(1, tokens[..., None].expand(-1, -1, keys.shape[2]))
        assert torch.equal(boxes[:, number], torch.stack((own.amin(dim=1), own.amax(dim=1)), dim=1)), number


def check_request(world: World, queries: Tensor, slot: int, rows: Tensor) -> None:
    """Static rows, then those of whole pages that no better page was passed over for, as many as there is room for."""
    n, static, config = world.context.lengths[slot], world.static(slot), world.config
    count = static.shape[1]
    assert torch.equal(rows[:, :count].long(), static)
    grouped = queries.view(KV_HEADS, -1, world.dim)
    if isinstance(world.index.summaries, Codes):  # codes are the GPU's: their own test compares them
        scores = world.index.summaries.scores(grouped.to(world.device), slot, static.to(world.device), n).cpu()
    else:
        scores = box_scores(grouped, boxes_of(world, slot, n)[:, count // config.page :], config.box_radius)
    values = softmax_mean(scores, world.context.scaling)
    tokens = world.index.summaries.tokens(static, n)
    free = (tokens >= 0).sum(dim=-1)
    for head in range(KV_HEADS):
        chosen = rows[head, count:]
        taken = torch.isin(tokens[head], chosen[chosen >= 0]).any(dim=1)
        want = tokens[head, taken].flatten()
        want = want[want >= 0].int()
        assert torch.equal(chosen[: len(want)], want), "pages are whole, and ascend"
        assert (chosen[len(want) :] == -1).all()
        others = ~taken & (free[head] > 0)
        if not others.any():
            continue
        # Scores are sums of products that cancel: their rounding is that of the largest terms.
        tolerance = 1e-4 * float(values[head].abs().max())
        best = float(values[head, others].max())
        assert best <= float(torch.where(taken, values[head], torch.inf).min()) + tolerance
        near = others & (values[head] >= best - tolerance)
        assert int(free[head, near].max()) > config.top_k - count - len(want), "nothing better fits"
