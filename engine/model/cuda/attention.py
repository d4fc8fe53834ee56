"""Attention of prompts on a GPU: cuDNN attends to what precedes a window and to the window itself; a kernel of ours merges both.

On Hopper cuDNN is faster than flash attention 2 without a mask, and with a causal mask over as many keys as queries. With
more keys than queries its causal mask makes it slow, but all queries of a window see all of the past, which needs no mask.

A prompt's tokens are cut into windows at multiples of 2,048 tokens or more, and what is computed for a query follows from its
window: the same bits come out whether a prompt is read whole, in chunks, in a pack or behind a reused beginning. Flash attention
would cut its sums by the number of queries.

The past is cut into equal blocks, and shorter ones at its end. Several are one call, a batch, so that few queries occupy the
GPU, too.

cuDNN compiles a plan for each combination of sizes and strides, in some 60 ms, and PyTorch keeps it for good. So the sizes of
blocks, the number of them in a call and the number of queries, which are filled up, are few, and the KV heads of a prompt's keys
are equally spaced in all long prompts (`new_rows` of prefill.py).

With prefill_precision = "fp8" the past is read in FP8 (fp8_attention.py), and the window itself as before.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import require
from kvseek.core.model_config import ModelConfig
from kvseek.core.streams import to_device
from kvseek.engine.model.fp8_attention import Fp8Attention, Fp8Past
from kvseek.engine.model.library_attention import (
    OCCUPYING_QUERIES,
    causal_attention_batch,
    causal_attention_device,
    cudnn_attention,
    flash_attention,
    windowed_flash,
)
from kvseek.engine.model.prompt_windows import (
    FEWEST_QUERIES,
    SHORTEST_BLOCK,
    Blocks,
    block_tokens,
    cut_blocks,
    filled_up,
    floor_power_of_two,
    past_blocks,
    power_of_two,
    window_tokens,
    windows,
)
from kvseek.engine.model.reference import windowed_attention
from kvseek.kernels.cuda.attention.fp8_rows import FP8
from kvseek.kernels.cuda.attention.merge_attention import PartialAttention, merge

CUDNN_AND_FLASH, FLASH = "cuDNN and flash attention", "flash attention"
MEMORY_EFFICIENT = "PyTorch's memory-efficient attention"
FLASH_KEYS = 256  # that all blocks of the kernel divide
OF_THE_CPU = {"native": "kvseek's kernel", "reference": "PyTorch's flash attention for CPUs"}

logger = logging.getLogger(__name__)


class PromptAttention:
    """A CausalAttention (attention.py) for one model on one GPU.

    Parameters
    ----------
    dtype : torch.dtype
        Of queries, keys and values.
    chunk, longest : int
        Most queries of a call, and most tokens of a prompt.
    fp8 : bool
        Whether the past is read in FP8.

    Attributes
    ----------
    name : str
        Who attends: CUDNN_AND_FLASH, FLASH or MEMORY_EFFICIENT.
    refusal : str or None
        Why cuDNN does not attend to the past of chunks; None: it does.
    fp8 : Fp8Attention or None
        What reads the past in FP8.

    Raises
    ------
    ConfigError
        With `fp8`, if cuDNN does not attend with heads of this size, or its frontend is missing.
    """

    def __init__(
        self, kernels: CudaKernels, model: ModelConfig, dtype: torch.dtype, chunk: int, longest: int, fp8: bool = False
    ) -> None:
        self._kernels, self._model, self.dtype = kernels, model, dtype
        self._window, self._block = window_tokens(chunk), block_tokens(longest)
        self._pack: tuple[tuple[int, ...], list[PackedPrompts]] | None = None  # the last one's borders, and its calls
        # Borders of the last call with a window, here and on the device.
        self._latest: tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[Tensor, Tensor]] | None = None
        self.refusal = self._refused()
        alone = MEMORY_EFFICIENT if dtype is torch.float32 else FLASH
        self.name = CUDNN_AND_FLASH if self.refusal is None else alone
        if self.refusal is None:
            logger.info("prompts are read by %s", self.name)
        else:
            logger.warning("prompts are read by %s: cuDNN's attention refuses them: %s", self.name, self.refusal)
        limit, remedy = "'none' where cuDNN refuses 16 bits", "build without it"
        require(not fp8 or self.refusal is None, "prefill_precision", "fp8", limit, remedy)
        self.fp8 = Fp8Attention(kernels.device) if fp8 else None
        if self.fp8 is not None:
            queries, keys = (
                torch.zeros(1, heads, SHORTEST_BLOCK, model.head_dim, dtype=FP8, device=kernels.device)
                for heads in (model.num_heads, model.num_kv_heads)
            )
            self.fp8(queries, keys, keys, 1.0)

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        window: int | None = None,
        past: Fp8Past | None = None,
    ) -> Tensor:
        """Attend from the last q tokens of a prompt to the whole of it, causally; see causal_attention_device.

        `past` is that of the layer, in which tokens before a window are rounded as far as they are read; None: 16 bits.
        """
        if window is not None:
            return self._attend_latest(queries, keys, values, (0, keys.shape[1]), scaling, window)
        if self.refusal is not None:
            return causal_attention_device(queries, keys, values, scaling)
        heads, q, dim = queries.shape
        before, out = keys.shape[1] - q, queries.new_empty(q, heads, dim)
        for base, start, stop in windows(before, before + q, self._window):
            own, kept = queries[:, start - before : stop - before], slice(start - before, stop - before)
            filled, window_keys = filled_up(stop - start), keys[:, base:stop]
            calls = past_blocks(base, self._block, filled)
            if past is None or not calls:
                # Of every row that fills up only the results of its own are wrong, and nobody reads these.
                most = max((one.number for one in calls), default=0)
                copies = own.new_empty(most, filled, heads, dim).transpose(1, 2)
                copies[:, :, : stop - start] = own
                parts = [attend_blocks(copies, keys, values, blocks, scaling) for blocks in calls]
            else:
                past.extend(keys, values, base)
                parts = attend_rounded(past.rounded(own, filled), past, calls, scaling)
                window_keys = past.centred(window_keys)
            parts.append(attend_window(own, window_keys, values[:, base:stop], scaling))
            merge(self._kernels, parts, out[kept])
        return out

    def fp8_past(self, spacing: int) -> Fp8Past | None:
        """Make what keeps the rounded rows of a prompt in a layer, see Fp8Past; None: prompts are read in 16 bits."""
        if self.fp8 is None:
            return None
        model = self._model
        return Fp8Past(self._kernels, self.fp8, model.num_kv_heads, model.group_size, spacing, model.head_dim)

    def attend_pack(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        borders: tuple[int, ...],
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend causally in each prompt of a pack to itself; see BlockAttention.

        Prompts that are filled up to the same number of tokens are one call, with the bits that each of them gets alone.
        """
        if window is not None:
            return self._attend_latest(queries, keys, values, borders, scaling, window)
        if self._pack is None or self._pack[0] != borders:  # the layers of a pack follow each other
            self._pack = borders, packed_prompts(borders, self._window, queries.device)
        tokens, (heads, _, dim) = queries.transpose(0, 1), queries.shape
        out = torch.empty_like(tokens)
        for first, stop in pairwise(borders):
            if stop - first > self._window:
                one_prompt = slice(first, stop)
                own = queries[:, one_prompt], keys[:, one_prompt], values[:, one_prompt]
                out[one_prompt] = self(*own, scaling, past=self.fp8_past(power_of_two(stop - first)))
        for one in self._pack[1]:
            filled = tokens.index_select(0, one.rows).view(one.number, one.size, heads, dim).transpose(1, 2)
            own_keys, own_values = (
                part.index_select(1, one.rows).view(-1, one.number, one.size, dim).transpose(0, 1)
                for part in (keys, values)
            )
            if self.refusal is None:
                found, _ = cudnn_attention(filled, own_keys, own_values, scaling, causal=True)
            else:
                found = causal_attention_batch(filled, own_keys, own_values, scaling)
            out.index_copy_(0, one.own, found.transpose(1, 2).flatten(0, 1).index_select(0, one.places))
        return out

    def _attend_latest(
        self, queries: Tensor, keys: Tensor, values: Tensor, borders: tuple[int, ...], scaling: float, window: int
    ) -> Tensor:
        """Attend with a window in each prompt to itself, or from the last tokens of one prompt, whose borders have all tokens.

        Keys begin at a multiple of the flash kernel's blocks, so that these are the same however a prompt is cut.
        """
        if self.dtype is torch.float32:
            spans = [slice(*span) for span in pairwise(borders)]
            each = [(queries[:, span], keys[:, span], values[:, span]) for span in spans]
            return torch.cat([windowed_attention(*one, scaling, window) for one in each])
        of_queries = borders
        if queries.shape[1] < keys.shape[1]:  # a chunk of one prompt
            first = max(0, keys.shape[1] - queries.shape[1] + 1 - window) // FLASH_KEYS * FLASH_KEYS
            keys, values = keys[:, first:], values[:, first:]
            of_queries, borders = (0, queries.shape[1]), (0, keys.shape[1])
        if self._latest is None or self._latest[0] != (of_queries, borders):  # layers follow each other
            tensors = [to_device(torch.tensor(one), torch.int32, queries.device) for one in (of_queries, borders)]
            self._latest = (of_queries, borders), (tensors[0], tensors[1])
        most = max(stop - first for first, stop in pairwise(borders))
        return windowed_flash(queries, keys, values, self._latest[1], most, scaling, window)

    def attend_in_blocks(
        self,
        queries: Tensor,
        size: int,
        chosen: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        scaling: float,
        past: Fp8Past | None = None,
    ) -> Tensor:
        """Attend from each block of `size` queries to all keys that were chosen for it, and causally to those of the chunk.

        All blocks are one call, as the host would need longer for a call each than the GPU for its work. Not for float32,
        of which no log-sum-exps are to be had.

        Parameters
        ----------
        queries : Tensor [H, q, D]
            Those of a chunk, the last block may be shorter.
        chosen : Tensors [b, G, n, D], contiguous
            Keys and values for each of the b blocks.
        own : Tensors [G, at least q, D]
            Keys and values whose last q tokens are those of the queries.
        past : Fp8Past or None
            Of the layer, if what was chosen is in FP8.

        Returns
        -------
        Tensor [q, H, D], contiguous.
        """
        heads, q, dim = queries.shape
        blocks, scales = in_blocks(queries, size), None
        if past is not None:
            output, lse = past.attention(past.rounded_blocks(blocks), *chosen, scaling)
            scales, own = past.value_scales, (past.centred(own[0]), own[1])
        else:
            by_cudnn = self.refusal is None and blocks.shape[2] >= OCCUPYING_QUERIES
            output, lse = (cudnn_attention if by_cudnn else flash_attention)(blocks, *chosen, scaling)
        # A block is filled up, and all are put one behind the other again: no copy where they are full, but of the log-sum-exps.
        output = output[:, :, :size].transpose(1, 2).reshape(-1, heads, dim).transpose(0, 1)
        lse = lse[:, :, :size].transpose(0, 1).reshape(heads, -1)
        attend_own = attend_causally if self.refusal else attend_window
        parts = [PartialAttention(output[None], lse[None], scales), attend_own(queries, *own, scaling)]
        return merge(self._kernels, parts, queries.new_empty(q, heads, dim))

    def _refused(self) -> str | None:
        """Say why cuDNN does not take this model's attention: it is asked, with the smallest of the sizes above."""
        if self.dtype is torch.float32:
            return "it does not take float32"
        model, device = self._model, self._kernels.device
        queries = torch.zeros(FEWEST_QUERIES, model.num_heads, model.head_dim, dtype=self.dtype, device=device)
        keys = torch.zeros(model.num_kv_heads, SHORTEST_BLOCK, model.head_dim, dtype=self.dtype, device=device)
        try:
            attend_blocks(queries.transpose(0, 1)[None], keys, keys, Blocks(0, 1, SHORTEST_BLOCK), 1.0)
            own = keys[:, :FEWEST_QUERIES]
            attend_window(queries.transpose(0, 1), own, own, 1.0)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None


@dataclass(frozen=True)
class PackedPrompts:
    """Prompts of a pack that one call reads, `number` of them filled up to `size` tokens, and how rows come there and back.

    Attributes
    ----------
    rows : Tensor, int64 [number x size]
        The row of the pack that stands at each place. A prompt's first one fills it up: no query of its own sees that, and what
        is wrong in another prompt stays there.
    own, places : Tensor, int64 [rows]
        The rows of the prompts, and where they stand.
    """

    number: int
    size: int
    rows: Tensor
    own: Tensor
    places: Tensor


def packed_prompts(borders: Sequence[int], most: int, device: torch.device) -> list[PackedPrompts]:
    """Distribute the prompts of a pack to calls of at most `most` rows; prompt i has rows borders[i] .. borders[i + 1] - 1.

    Longer ones are left out.

    Numbers of prompts are powers of two, for which the last prompt stands several times, so that plans are few.
    """
    alike, calls = defaultdict[int, list[tuple[int, int]]](list), list[PackedPrompts]()
    for first, stop in pairwise(borders):
        if stop - first <= most:
            alike[filled_up(stop - first)].append((first, stop))
    for size, prompts in alike.items():
        together = floor_power_of_two(most // size)
        for chosen in (prompts[at : at + together] for at in range(0, len(prompts), together)):
            number = power_of_two(len(chosen))
            spans = [*chosen, *[chosen[-1]] * (number - len(chosen))]
            stands = np.array([[first, stop] for first, stop in spans])
            rows = stands[:, :1] + np.arange(size)
            rows = np.where(rows < stands[:, 1:], rows, stands[:, :1])
            places = np.flatnonzero((np.arange(size) < stands[:, 1:] - stands[:, :1])[: len(chosen)])
            indices = (torch.from_numpy(part) for part in (rows.reshape(-1), rows.reshape(-1)[places], places))
            calls.append(PackedPrompts(number, size, *(to_device(part, torch.int64, device) for part in indices)))
    return calls


def expected_attention(config: EngineConfig) -> str:
    """Say who attends in prompts of an engine, as far as that is known without its GPU, and to what."""
    return described_attention(config, _expected_reader(config))


def described_attention(config: EngineConfig, reader: str) -> str:
    """Say what prompts attend to, and by whom it is read."""
    if config.prefill_precision == "fp8":
        reader += ", in FP8 but for the latest window"
    if config.prefill_attention == "dense":
        return reader
    return f"{config.prefill_attention}, {config.block_sparse.budget:,} tokens, read by {reader}"


def _expected_reader(config: EngineConfig) -> str:
    if config.device != "cuda":
        return OF_THE_CPU[config.kernels]
    if config.dtype == "float32":
        return MEMORY_EFFICIENT
    if config.runtime == "tensorrt" and config.tensorrt.form == "engine":
        return FLASH  # a prompt is one chunk, which has no past
    return f"{CUDNN_AND_FLASH}, or {FLASH} alone if cuDNN refuses the model on the GPU, as the log then says"


def in_blocks(queries: Tensor, size: int) -> Tensor:
    """Cut queries [H, q, D] into blocks of `size`, [b, H, n, D] with n a power of two; zeros fill up."""
    heads, q, dim = queries.shape
    number, width = -(-q // size), power_of_two(min(size, q))
    tokens = queries.transpose(0, 1)
    if q == number * width:
        return tokens.reshape(number, width, heads, dim).transpose(1, 2)
    padded = queries.new_zeros(number, width, heads, dim)
    for block, part in zip(padded, torch.split(tokens, size), strict=True):
        block[: len(part)] = part
    return padded.transpose(1, 2)


def attend_blocks(copies: Tensor, keys: Tensor, values: Tensor, blocks: Blocks, scaling: float) -> PartialAttention:
    """Attend to all of each block by cuDNN: at least as many copies of the queries [copies, H, q, D], keys and values [G, n, D].

    Raises RuntimeError if cuDNN does not take the sizes.
    """
    own_keys, own_values = (cut_blocks(part, blocks) for part in (keys, values))
    return PartialAttention(*cudnn_attention(copies[: blocks.number], own_keys, own_values, scaling))


def attend_rounded(queries: Tensor, past: Fp8Past, calls: Sequence[Blocks], scaling: float) -> list[PartialAttention]:
    """Attend in FP8 to all of each block of what has been rounded: rounded queries [H, q, D]."""
    found = list[PartialAttention]()
    for blocks in calls:
        keys, values = (cut_blocks(part, blocks) for part in (past.keys, past.values))
        output, lse = past.attention(queries.expand(blocks.number, -1, -1, -1), keys, values, scaling)
        found.append(PartialAttention(output, lse, past.value_scales))
    return found


def attend_window(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> PartialAttention:
    """Attend causally by cuDNN: queries [H, q, D] are the last of the tokens of keys and values [G, n, D].

    cuDNN aligns its mask to the top left, so other rows stand before and behind the queries. Zeros stand behind the keys:
    no query sees them, but what lies there in memory might be no number.
    """
    (heads, q, dim), n = queries.shape, keys.shape[1]
    size, filled = filled_up(n), queries
    if size > q:
        filled = queries.new_empty(size, heads, dim).transpose(0, 1)
        filled[:, n - q : n] = queries
    if size > n:
        keys, values = (F.pad(part, (0, 0, 0, size - n)) for part in (keys, values))
    output, lse = cudnn_attention(filled[None], keys[None], values[None], scaling, causal=True)
    return PartialAttention(output[:, :, n - q :], lse[:, :, n - q :])


def attend_causally(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> PartialAttention:
    """Attend causally by flash attention: queries [H, q, D] are the last of the tokens of keys and values [G, n, D]."""
    return PartialAttention(*flash_attention(queries[None], keys[None], values[None], scaling, causal=True))
