"""Sparse attention of prompts: queries attend to chosen blocks of the tokens before their chunk, and to the chunk itself.

Keys before a chunk are cut into blocks of KEY_BLOCK tokens, the chunk's queries into larger blocks. For each KV head and query
block, some of the queries attend exactly to all keys; the blocks that get most of this attention, and those where the block's
tokens stood before, are gathered, and the dense attention reads them as if they were all of the past. docs/sparse_prompts.md has
the reasons and the measurements.

Why those where the tokens stood before: heads that copy look for what followed the same tokens. They are sure of what they look
for, but few tokens of a text do it at a time, so a sample of queries misses them. The tokens themselves tell where they look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.config import KEY_BLOCK
from kvseek.core.streams import to_device

from .fp8_attention import Fp8Past
from .library_attention import OCCUPYING_QUERIES, cudnn_attention, flash_attention
from .prompt_windows import LSE_ELEMENTS, Blocks, cut_blocks, floor_power_of_two, power_of_two
from .reference import BlockAttention, CausalAttention

if TYPE_CHECKING:
    from kvseek.core.config import EngineConfig

BlockMass = Callable[[Tensor, Tensor, float], Tensor]
"""Sampled queries [G, b, s, D] of b query blocks, keys [G, p, D] and the softmax scale to float32 [G, b, p / KEY_BLOCK]:
attention of the samples to each block of keys, softmax over all p keys, summed over the samples. p is a multiple of KEY_BLOCK."""
Attend = Callable[[Tensor, Tensor, Blocks, Tensor, float], tuple[Tensor, Tensor]]
"""Attention of the same queries [G, r, D] to each of B blocks of the keys [G, p, D], without a mask. The values [n, D] are those
of every block and head. With the scale to outputs [B, G, r, D] and log-sum-exps float32 [B, G, r]."""

LATEST = 256 // KEY_BLOCK  # blocks before the chunk that are always chosen, as the first one is
NAMED = 256.0  # what names a block, in FP8
PIECES_TOGETHER = 8  # that cuDNN reads at once: always as many, since it compiles a plan for each number
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


class BlockSparseAttention:
    """Attends in chunks of long prompts by choosing blocks of keys, and densely by `dense` otherwise.

    Dense are chunks that have no more than `budget` tokens before them, and the prompt's last `dense_tail` tokens, where
    tasks put the question.

    Parameters
    ----------
    config : EngineConfig
        Of an engine with prefill_attention = "block_sparse".
    dense : callable
        Causal attention that reads the gathered keys.
    mass : callable
        Tells how much attention blocks get.
    """

    def __init__(self, config: EngineConfig, dense: CausalAttention, mass: BlockMass) -> None:
        self._dense, self._mass = dense, mass
        self._together: BlockAttention | None = None  # who reads what was chosen for all query blocks at once
        if isinstance(dense, BlockAttention) and dense.dtype is not torch.float32:
            self._together = dense
        self._count = config.block_sparse.budget // KEY_BLOCK
        self._repeated = repeated_blocks(self._count)
        self._size, self._samples = config.block_sparse.query_block, config.block_sparse.samples
        self._tail = config.block_sparse.dense_tail

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        following: int,
        repeated: RepeatedTokens,
        fp8: Fp8Past | None = None,
    ) -> Tensor:
        """Attend as a CausalAttention; `following` tokens of the prompt come after the queries', and `repeated` knows all.

        `fp8` has the layer's rows in FP8, which are read instead of those of 16 bits where there are any; None: 16 bits.
        """
        q = queries.shape[1]
        dense = self._dense if fp8 is None or self._together is None else partial(self._together, past=fp8)
        blocks, sparse = (keys.shape[1] - q) // KEY_BLOCK, q - max(0, self._tail - following)
        if blocks <= self._count or sparse <= 0:
            return dense(queries, keys, values, scaling)
        past, first, last = blocks * KEY_BLOCK, keys.shape[1] - q, keys.shape[1] - q + sparse
        asking, mass_of_blocks = queries[:, :sparse], self._mass
        if fp8 is not None:
            fp8.extend(keys, values, past)
            mass_of_blocks = partial(block_mass_by_attention, attend=partial(attend_by_fp8, fp8))
        mass = mass_of_blocks(sample(asking, keys.shape[0], self._size, self._samples), keys[:, :past], scaling)
        again = repeated.blocks(first, last, self._size, blocks, self._repeated)
        chosen = choose(mass, self._count, again).transpose(0, 1)
        if self._together is None:
            out = self._read_each(asking, chosen, keys[:, :last], values[:, :last], past, scaling)
        else:
            rows = (keys, values) if fp8 is None else (fp8.keys, fp8.values)
            kept = gather_chosen(rows[0][:, :past], chosen), gather_chosen(rows[1][:, :past], chosen)
            own = keys[:, past:last], values[:, past:last]
            out = self._together.attend_in_blocks(asking, self._size, kept, own, scaling, fp8)
        if sparse < q:
            out = torch.cat((out, dense(queries[:, sparse:], keys, values, scaling)))
        return out

    def _read_each(
        self, queries: Tensor, chosen: Tensor, keys: Tensor, values: Tensor, past: int, scaling: float
    ) -> Tensor:
        """Attend from queries [H, q, D] to the chosen blocks [b, G, count] of `past` tokens, and to what follows these.

        Keys and values [G, n, D] end with the last query's. Returns [q, H, D]. One query block after the other is read from
        the same memory, in which what was chosen stands before what follows.
        """
        q, room, out = queries.shape[1], chosen.shape[2] * KEY_BLOCK, list[Tensor]()
        read_keys, read_values = (
            part.new_empty(part.shape[0], room + part.shape[1] - past, part.shape[2]) for part in (keys, values)
        )
        read_keys[:, room:], read_values[:, room:] = keys[:, past:], values[:, past:]
        for block, start in zip(torch.split(chosen, 1), range(0, q, self._size), strict=True):
            stop = min(start + self._size, q)
            gather(keys[:, :past], block, read_keys[None, :, :room])
            gather(values[:, :past], block, read_values[None, :, :room])
            seen = read_keys.shape[1] - (q - stop)
            out.append(self._dense(queries[:, start:stop], read_keys[:, :seen], read_values[:, :seen], scaling))
        return torch.cat(out)


def sample(queries: Tensor, kv_heads: int, size: int, samples: int) -> Tensor:
    """Return evenly spread queries of each block of `size`: queries [H, q, D] to [G, b, H / G * samples, D].

    A block with fewer than `samples` queries gives some of them twice.
    """
    heads, q, dim = queries.shape
    odd = torch.arange(1, 2 * samples, 2, device=queries.device)
    starts = torch.arange(0, q, size, device=queries.device)[:, None]
    places = starts + odd * (q - starts).clamp_max(size) // (2 * samples)
    taken = queries[:, places].view(kv_heads, heads // kv_heads, len(places), samples, dim)
    return taken.transpose(1, 2).reshape(kv_heads, len(places), -1, dim)


def repeated_blocks(count: int) -> int:
    """Return how many of `count` blocks may be chosen because the tokens stood there before: half of those not fixed."""
    return (count - 1 - LATEST) // 2


def choose(mass: Tensor, count: int, again: Tensor) -> Tensor:
    """Choose `count` blocks by mass [G, b, blocks], which is changed: int64 [G, b, count], ascending.

    The first and the latest blocks are among them, and those of `again`, int64 [b, few].
    """
    mass[..., 0] = mass[..., -LATEST:] = torch.inf
    mass.scatter_(2, again.expand(len(mass), -1, -1), torch.inf)
    return mass.topk(count, dim=-1).indices.sort(dim=-1).values


def gather(part: Tensor, chosen: Tensor, out: Tensor) -> None:
    """Copy the chosen blocks [b, G, count] of keys or values [G, p, D] to `out` [b, G, count * KEY_BLOCK, D]."""
    heads = torch.arange(len(part), device=chosen.device)[:, None]
    if part.shape[2] * part.itemsize % 8 == 0:
        part, out = part.view(torch.int64), out.view(torch.int64)  # an index copies number by number: larger ones
    torch.ops.aten.index.Tensor_out(cut(part, KEY_BLOCK), [heads, chosen], out=cut(out, KEY_BLOCK))


def gather_chosen(part: Tensor, chosen: Tensor) -> Tensor:
    """Copy the chosen blocks [b, G, count] of keys or values [G, p, D]: [b, G, count * KEY_BLOCK, D]."""
    found = part.new_empty(*chosen.shape[:2], chosen.shape[2] * KEY_BLOCK, part.shape[2])
    gather(part, chosen, found)
    return found


def cut(part: Tensor, size: int) -> Tensor:
    """View rows [..., n, D] in pieces of `size`, [..., n / size, size, D]."""
    return part.view(*part.shape[:-2], part.shape[-2] // size, size, part.shape[-1])


def block_mass(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Compute a BlockMass in float32, one KV head and query block at a time; it defines what is correct."""
    mass = queries.new_empty(*queries.shape[:2], keys.shape[1] // KEY_BLOCK, dtype=torch.float32)
    for head, samples in enumerate(queries):
        own = keys[head].float().T
        for number, rows in enumerate(samples):
            weights = torch.mm(rows.float() * scaling, own).softmax(dim=1)
            mass[head, number] = weights.sum(dim=0).view(-1, KEY_BLOCK).sum(dim=1)
    return mass


def block_mass_by_attention(queries: Tensor, keys: Tensor, scaling: float, attend: Attend) -> Tensor:
    """Compute a BlockMass by a library's attention, which never writes out the weights of single keys.

    Attention to values that say which block a key is in, as one-hot vectors, gives the mass of every block. D channels tell D
    blocks apart, so keys are cut into pieces of D blocks; these are the batch of one call, and a shorter piece at the end is a
    second. Their log-sum-exps tell how much of the attention each piece gets.
    """
    kv_heads, number, samples, dim = queries.shape
    rows, piece = queries.flatten(1, 2), dim * KEY_BLOCK
    whole, rest = divmod(keys.shape[1], piece)
    names = torch.eye(dim, dtype=keys.dtype, device=keys.device).repeat_interleave(KEY_BLOCK, dim=0)
    parts = Blocks(0, whole, piece), Blocks(whole * piece, 1 if rest else 0, rest)
    found = [attend(rows, keys, part, names[: part.size], scaling) for part in parts if part.number]
    shares, lse = (torch.cat(parts) for parts in zip(*found, strict=True))  # [pieces, G, b * s, D], [pieces, G, b * s]
    weights = (lse - lse.logsumexp(dim=0)).exp().view(-1, kv_heads, number, 1, samples)
    mass = torch.matmul(weights, shares.float().view(-1, kv_heads, number, samples, dim))  # [pieces, G, b, 1, D]
    return mass.squeeze(3).permute(1, 2, 0, 3).flatten(2)[..., : keys.shape[1] // KEY_BLOCK]


def attend_by_flash(
    queries: Tensor, keys: Tensor, blocks: Blocks, values: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attend by flash attention on a GPU; see Attend. It does not take float32."""
    pieces = cut_blocks(keys, blocks)
    shape = (*pieces.shape[:2], -1, -1)
    return flash_attention(queries.expand(shape), pieces, values.expand(shape), scaling)


def attend_by_cudnn(
    queries: Tensor, keys: Tensor, blocks: Blocks, values: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attend by cuDNN, PIECES_TOGETHER at a time, and to those left over by flash attention; see Attend.

    cuDNN is asked with at least OCCUPYING_QUERIES queries, as by PromptAttention.attend_in_blocks.
    """
    start, number, size = blocks
    together = number // PIECES_TOGETHER * PIECES_TOGETHER
    if not together or queries.shape[1] < OCCUPYING_QUERIES:
        return attend_by_flash(queries, keys, blocks, values, scaling)
    shape, found = (PIECES_TOGETHER, len(keys), -1, -1), []
    rows, names = queries.expand(shape).contiguous(), values.expand(shape).contiguous()
    for first in range(0, together, PIECES_TOGETHER):
        pieces = cut_blocks(keys, Blocks(start + first * size, PIECES_TOGETHER, size))
        found.append(cudnn_attention(rows, pieces, names, scaling))
    if together < number:
        left = Blocks(start + together * size, number - together, size)
        found.append(attend_by_flash(queries, keys, left, values, scaling))
    shares, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    return shares, lse


def attend_by_fp8(
    past: Fp8Past, queries: Tensor, keys: Tensor, blocks: Blocks, values: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attend in FP8 to whole pieces, in numbers that are powers of two, and to a shorter one by flash attention; see Attend.

    `keys` are those that `past` has rounded. Values are NAMED in place of 1, so that small shares are not rounded away.
    """
    if blocks.size < keys.shape[2] * KEY_BLOCK:
        rest = past.centred(keys[:, blocks.start : blocks.start + blocks.size])
        return attend_by_flash(queries, rest, Blocks(0, 1, blocks.size), values, scaling)
    rows, names = past.rounded_samples(queries), (values * NAMED).to(past.keys.dtype)
    start, left, size = blocks
    found = []
    while left:
        number = min(PIECES_TOGETHER, floor_power_of_two(left))
        pieces = cut_blocks(past.keys, Blocks(start, number, size))
        shape = (number, len(keys), -1, -1)
        shares, lse = past.attention(rows.expand(shape), pieces, names.expand(shape), scaling)
        found.append((shares.float() / NAMED, lse))
        start, left = start + number * size, left - number
    shares, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    return shares, lse


def mass_of(config: EngineConfig, dense: CausalAttention) -> BlockMass:
    """Return the computation of a BlockMass that suits an engine whose prompts `dense` reads."""
    if config.device != "cuda" or config.dtype == "float32":
        return block_mass
    by_cudnn = isinstance(dense, BlockAttention) and dense.refusal is None
    return partial(block_mass_by_attention, attend=attend_by_cudnn if by_cudnn else attend_by_flash)


def attended_pairs(config: EngineConfig, tokens: int) -> int:
    """Count the pairs of a query and a key that a head attends to in all layers, in a prompt that is read from its start on."""
    layers, pairs = len(config.model.row_layers), tokens * (tokens + 1) // 2
    if config.prefill_attention == "dense":
        return layers * pairs
    sparse_layers, fewer = max(0, layers - config.block_sparse.dense_layers), 0
    tail = max(0, tokens - config.block_sparse.dense_tail)  # the first token of it
    for start in range(0, tail, config.prefill_chunk_tokens):
        unread = start // KEY_BLOCK * KEY_BLOCK - config.block_sparse.budget
        fewer += max(0, unread) * (min(start + config.prefill_chunk_tokens, tail) - start)
    return layers * pairs - sparse_layers * fewer


def sparse_bytes(config: EngineConfig, dtype: torch.dtype, tokens: int, chunk: int) -> int:
    """Return the most bytes that sparse attention in chunks of a prompt of `tokens` tokens allocates beside the dense one's."""
    model, budget, past = config.model, config.block_sparse.budget, tokens - chunk
    if past // KEY_BLOCK * KEY_BLOCK <= budget:
        return 0
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    query_blocks, blocks = -(-chunk // config.block_sparse.query_block), past // KEY_BLOCK
    each = config.block_sparse.samples
    samples = query_blocks * each * heads
    gathered = 2 * kv_heads * (budget + KEY_BLOCK + chunk) * dim + chunk * heads * dim + 2 * samples * dim
    if (
        config.device == "cuda" and dtype is not torch.float32
    ):  # all query blocks at once; queries and outputs are filled up
        rows = query_blocks * power_of_two(min(config.block_sparse.query_block, chunk))
        gathered += 2 * kv_heads * (query_blocks - 1) * budget * dim + heads * (3 * rows + chunk) * dim
        gathered += 3 * LSE_ELEMENTS * heads * rows
    # Ranks of blocks: their mass, and its order (topk and sort). By attention: shares of all samples, also in float32.
    ranks = query_blocks * kv_heads * blocks * (torch.float32.itemsize + 2 * torch.int64.itemsize)
    if config.device == "cuda" and dtype is not torch.float32:
        scores = samples * (blocks + dim) * (2 * dtype.itemsize + 2 * torch.float32.itemsize)
        if blocks >= PIECES_TOGETHER * dim:  # values and queries as cuDNN reads them
            gathered += PIECES_TOGETHER * (kv_heads * KEY_BLOCK * dim + samples) * dim
    else:  # of one KV head: its keys, and weights of a query block's samples before and after softmax
        scores = past * (dim + 2 * each * model.group_size) * torch.float32.itemsize
    # Places of all tokens, and what sorts them; the places of a chunk's pairs, their blocks and what they count.
    places = (10 * tokens + 8 * MOST_PLACES * chunk) * torch.int64.itemsize
    return gathered * dtype.itemsize + ranks + scores + places
