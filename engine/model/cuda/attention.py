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
are equally spaced in all long prompts (Retrieval.new_rows).
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from kvseek.core.config import EngineConfig, ModelConfig
    from kvseek.core.cuda import CudaKernels

CUDNN_AND_FLASH, FLASH = "cuDNN and flash attention", "flash attention"
MEMORY_EFFICIENT = "PyTorch's memory-efficient attention"
OF_THE_CPU = {"native": "kvseek's kernel", "reference": "PyTorch's flash attention for CPUs"}

logger = logging.getLogger(__name__)

SHORTEST_BLOCK = 2048  # keys; also the shortest window
EQUAL_BLOCK = 8192  # keys of an equal block in prompts of up to MOST_EQUAL of them, and in longer ones more
MOST_EQUAL = 32
BLOCKS_TOGETHER = 16  # most that a call reads
FEWEST_QUERIES = 128  # they are filled up to powers of two from this one, and beyond 512 to multiples of QUERY_STEP
QUERY_STEP = 256
OCCUPYING_QUERIES = (
    512  # of sparse prompts: fewer in a call are left to flash attention, as they would not occupy the GPU
)
MERGED_PARTS = 32  # as in merge_attention.cu
THREADS = 256  # as in merge_attention.cu
PIECE = 8  # numbers that a thread merges
LSE_NUMBERS = 2  # numbers of 16 bits in a log-sum-exp


class MergeAttentionArguments(ctypes.Structure):
    """Arguments of kvseek_merge_attention."""

    _fields_ = (
        *((name, c_void_p * MERGED_PARTS) for name in ("outputs", "lses")),
        *((name, c_int64 * MERGED_PARTS) for name in ("head_strides", "token_strides", "lse_strides")),
        *((name, c_int64 * MERGED_PARTS) for name in ("block_strides", "lse_block_strides")),
        ("blocks", c_int32 * MERGED_PARTS),
        ("merged", c_void_p),
        ("pieces", c_int64),
        *((name, c_int32) for name in ("parts", "heads")),
    )


@dataclass(frozen=True)
class Part:
    """Attention of queries to each of some blocks of their keys.

    Attributes
    ----------
    output : Tensor [blocks, H, at least q, D]
        In the engine's dtype; the numbers of a token and head are neighbours.
    lse : Tensor, float32 [blocks, H, at least q]
        A head's numbers are neighbours. Natural logarithms of the sums of exponentials.
    """

    output: Tensor
    lse: Tensor


class PromptAttention:
    """A CausalAttention (attention.py) for one model on one GPU.

    Parameters
    ----------
    dtype : torch.dtype
        Of queries, keys and values.
    chunk, longest : int
        Most queries of a call, and most tokens of a prompt.

    Attributes
    ----------
    name : str
        Who attends: CUDNN_AND_FLASH, FLASH or MEMORY_EFFICIENT.
    refusal : str or None
        Why cuDNN does not attend to the past of chunks; None: it does.
    """

    def __init__(self, kernels: CudaKernels, model: ModelConfig, dtype: torch.dtype, chunk: int, longest: int) -> None:
        self._kernels, self._model, self.dtype = kernels, model, dtype
        self._window, self._block = window_tokens(chunk), block_tokens(longest)
        self.refusal = self._refused()
        alone = MEMORY_EFFICIENT if dtype is torch.float32 else FLASH
        self.name = CUDNN_AND_FLASH if self.refusal is None else alone
        if self.refusal is None:
            logger.info("prompts are read by %s", self.name)
        else:
            logger.warning("prompts are read by %s: cuDNN's attention refuses them: %s", self.name, self.refusal)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attend from the last q tokens of a prompt to the whole of it, causally; see causal_attention_device."""
        if self.refusal is not None:
            return causal_attention_device(queries, keys, values, scaling)
        heads, q, dim = queries.shape
        past, out = keys.shape[1] - q, queries.new_empty(q, heads, dim)
        for base, start, stop in windows(past, past + q, self._window):
            own, kept = queries[:, start - past : stop - past], slice(start - past, stop - past)
            filled = filled_up(stop - start)
            calls = past_blocks(base, self._block, filled)
            # Of every row that fills up only the results of its own are wrong, and nobody reads these.
            copies = own.new_empty(max((one.number for one in calls), default=0), filled, heads, dim).transpose(1, 2)
            copies[:, :, : stop - start] = own
            parts = [attend_blocks(copies, keys, values, blocks, scaling) for blocks in calls]
            parts.append(attend_window(own, keys[:, base:stop], values[:, base:stop], scaling))
            self.merge(parts, stop - start, out[kept])
        return out

    def attend_in_blocks(
        self, queries: Tensor, size: int, chosen: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], scaling: float
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

        Returns
        -------
        Tensor [q, H, D], contiguous.
        """
        heads, q, dim = queries.shape
        blocks = in_blocks(queries, size)
        by_cudnn = self.refusal is None and blocks.shape[2] >= OCCUPYING_QUERIES
        output, lse = (cudnn_attention if by_cudnn else flash_attention)(blocks, *chosen, scaling)
        # A block is filled up, and all are put one behind the other again: no copy where they are full, but of the log-sum-exps.
        output = output[:, :, :size].transpose(1, 2).reshape(-1, heads, dim).transpose(0, 1)
        lse = lse[:, :, :size].transpose(0, 1).reshape(heads, -1)
        attend_own = attend_causally if self.refusal else attend_window
        parts = [Part(output[None], lse[None]), attend_own(queries, *own, scaling)]
        return self.merge(parts, q, queries.new_empty(q, heads, dim))

    def merge(self, parts: list[Part], tokens: int, merged: Tensor) -> Tensor:
        """Merge attention of the first `tokens` queries to disjoint sets of keys into `merged`.

        `merged` is contiguous [tokens, H, D], and is returned.
        """
        heads = merged.shape[1]
        arguments = MergeAttentionArguments(
            merged=merged.data_ptr(), pieces=merged.numel() // PIECE, parts=len(parts), heads=heads
        )
        for number, part in enumerate(parts):
            arguments.outputs[number], arguments.lses[number] = part.output.data_ptr(), part.lse.data_ptr()
            block, head, token, _ = part.output.stride()
            arguments.block_strides[number] = block
            arguments.head_strides[number], arguments.token_strides[number] = head, token
            arguments.lse_block_strides[number], arguments.lse_strides[number], _ = part.lse.stride()
            arguments.blocks[number] = part.output.shape[0]
        blocks = -(-arguments.pieces // THREADS)
        self._kernels.launch("kvseek_merge_attention", (blocks, 1, 1), THREADS, arguments, overlap=True)
        return merged

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


def expected_attention(config: EngineConfig) -> str:
    """Say who attends in prompts of an engine, as far as that is known without its GPU, and to what."""
    return described_attention(config, _expected_reader(config))


def described_attention(config: EngineConfig, reader: str) -> str:
    """Say what prompts attend to, and by whom it is read."""
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


class Blocks(NamedTuple):
    """Blocks of `size` tokens, `number` of them one behind the other from the token `start` on."""

    start: int
    number: int
    size: int


def block_tokens(longest: int) -> int:
    """Return the tokens of an equal block of an engine whose prompts have up to `longest` tokens."""
    return max(EQUAL_BLOCK, power_of_two(longest) // MOST_EQUAL)


def past_blocks(past: int, equal: int, queries: int) -> list[Blocks]:
    """Cut `past` tokens, a multiple of SHORTEST_BLOCK, into blocks of `equal` tokens, and what is left into halves of that.

    What is one call depends on the number of queries: few occupy the GPU only with many blocks.
    """
    blocks, start = list[Blocks](), 0
    while left := past - start:
        size = min(equal, floor_power_of_two(left))
        number = min(BLOCKS_TOGETHER, left // size)
        if queries > 2 * QUERY_STEP:
            number = floor_power_of_two(number)
        blocks.append(Blocks(start, number, size))
        start += number * size
    return blocks


def window_tokens(chunk: int) -> int:
    """Return the tokens of a window of an engine whose chunks have `chunk` tokens: a power of two."""
    return max(SHORTEST_BLOCK, floor_power_of_two(chunk))


def windows(start: int, stop: int, size: int) -> list[tuple[int, int, int]]:
    """Cut tokens start .. stop - 1 at multiples of `size`: of each window its first token, and which of these it has."""
    return [(base, max(base, start), min(base + size, stop)) for base in range(start // size * size, stop, size)]


def most_blocks(tokens: int, longest: int) -> int:
    """Return the most blocks, the window with them, that attention of a prompt of `tokens` tokens is merged of."""
    equal = block_tokens(longest)
    return tokens // equal + (equal // SHORTEST_BLOCK).bit_length()


def filled_up(queries: int) -> int:
    """Return the number to which a window's `queries` queries are filled up."""
    if queries > 2 * QUERY_STEP:
        return -(-queries // QUERY_STEP) * QUERY_STEP
    return max(FEWEST_QUERIES, power_of_two(queries))


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def floor_power_of_two(number: int) -> int:
    """Return the largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1)


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


def attend_blocks(copies: Tensor, keys: Tensor, values: Tensor, blocks: Blocks, scaling: float) -> Part:
    """Attend to all of each block by cuDNN: at least as many copies of the queries [copies, H, q, D], keys and values [G, n, D].

    Raises RuntimeError if cuDNN does not take the sizes.
    """
    start, number, size = blocks
    own_keys, own_values = (
        part[:, start : start + number * size].view(len(part), number, size, -1).transpose(0, 1)
        for part in (keys, values)
    )
    return Part(*cudnn_attention(copies[:number], own_keys, own_values, scaling))


def attend_window(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Part:
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
    return Part(output[:, :, n - q :], lse[:, :, n - q :])


def attend_causally(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Part:
    """Attend causally by flash attention: queries [H, q, D] are the last of the tokens of keys and values [G, n, D]."""
    return Part(*flash_attention(queries[None], keys[None], values[None], scaling, causal=True))


def cudnn_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attend by cuDNN, with the mask's corner at the top left: queries [B, H, q, D], keys and values [B, G, n, D].

    Returns the output [B, H, q, D] and log-sum-exps float32 [B, H, q]. Raises RuntimeError if cuDNN does not take the sizes.
    """
    operator: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
    found = operator(queries, keys, values, None, True, 0.0, causal, False, scale=scaling)
    return found[0], found[1].view(queries.shape[:3])


def flash_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attend by flash attention, with the mask's corner at the bottom right; see cudnn_attention."""
    operator: Any = torch.ops.aten._scaled_dot_product_flash_attention
    found = operator(queries, keys, values, 0.0, causal, False, scale=scaling)
    return found[0], found[1]


def causal_attention_device(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Compute `causal_attention` on a GPU: queries [H, q, D] and keys, values [G, n, D] to [q, H, D], n >= q.

    Flash attention aligns its causal mask to the bottom right and lets heads share keys, so a chunk needs neither a mask
    nor copies. It does not support float32. The memory-efficient kernel does, but reads keys and values of every query head,
    so these are copied for it. torch.nn.attention.bias chooses between the two kernels by dtype.
    """
    from torch.nn.attention.bias import causal_lower_right

    heads, q = queries.shape[:2]
    shared = queries.dtype is not torch.float32
    if not shared:
        keys, values = (part.repeat_interleave(heads // keys.shape[0], dim=0) for part in (keys, values))
    mask = causal_lower_right(q, keys.shape[1])
    out = F.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=mask, scale=scaling, enable_gqa=shared
    )
    return out[0].transpose(0, 1)
