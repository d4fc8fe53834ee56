"""Attention of prompts on a GPU: cuDNN attends to the past of a window and to the window itself, and a kernel of ours merges both.

On Hopper cuDNN is twice as fast as flash attention 2 without a mask, and with a causal mask over as many keys as queries. With
more keys than queries its causal mask makes it slow, but all queries of a window see all of the past, which needs no mask
(docs/measurements.md has the times).

A prompt's tokens are cut into windows at multiples of 2,048 tokens or more, and what is computed for a query follows from its
window: the same bits come out whether a prompt is read whole, in chunks, in a pack or behind a reused beginning. Flash attention
would cut its sums by the number of queries.

cuDNN compiles a plan for each combination of sizes and strides, which PyTorch keeps for good. So the past is cut into blocks
of 2,048, 4,096, 8,192 … keys, queries are filled up to such sizes, and the KV heads of a prompt's keys are equally spaced in
all long prompts (Retrieval.new_rows): an engine needs a few dozen plans.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import causal_attention_device

if TYPE_CHECKING:
    from kvseek.core.config import EngineConfig, ModelConfig
    from kvseek.core.cuda import CudaKernels

CUDNN_AND_FLASH, FLASH = "cuDNN and flash attention", "flash attention"
MEMORY_EFFICIENT = "PyTorch's memory-efficient attention"
OF_THE_CPU = {"native": "kvseek's kernel", "reference": "PyTorch's flash attention for CPUs"}

logger = logging.getLogger(__name__)

SHORTEST_BLOCK = 2048  # keys; also the shortest window
FEWEST_QUERIES = 512  # to which fewer are filled up
MERGED_PARTS = 16  # as in merge_attention.cu: blocks for 2^15 times SHORTEST_BLOCK tokens, and the window
THREADS = 256  # as in merge_attention.cu
PIECE = 8  # numbers that a thread merges
LSE_NUMBERS = 2  # numbers of 16 bits in a log-sum-exp


class MergeAttentionArguments(ctypes.Structure):
    """Arguments of kvseek_merge_attention."""

    _fields_ = (
        *((name, c_void_p * MERGED_PARTS) for name in ("outputs", "lses")),
        *((name, c_int64 * MERGED_PARTS) for name in ("head_strides", "token_strides", "lse_strides")),
        ("merged", c_void_p),
        ("pieces", c_int64),
        *((name, c_int32) for name in ("parts", "heads")),
    )


@dataclass(frozen=True)
class Part:
    """Attention of queries to some of their keys.

    Attributes
    ----------
    output : Tensor [H, at least q, D]
        In the engine's dtype; the numbers of a token and head are neighbours.
    lse : Tensor, float32 [H, at least q]
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
    chunk : int
        Most queries of a call.

    Attributes
    ----------
    name : str
        Who attends: CUDNN_AND_FLASH, FLASH or MEMORY_EFFICIENT.
    refusal : str or None
        Why cuDNN does not attend to the past of chunks; None: it does.
    """

    def __init__(self, kernels: CudaKernels, model: ModelConfig, dtype: torch.dtype, chunk: int) -> None:
        self._kernels, self._model, self.dtype = kernels, model, dtype
        self._window = window_tokens(chunk)
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
            filled = fill_up(own)
            parts = [attend_block(filled, keys[:, a:b], values[:, a:b], scaling) for a, b in past_blocks(base)]
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
        by_cudnn = self.refusal is None and blocks.shape[2] >= FEWEST_QUERIES  # fewer would not occupy the GPU
        output, lse = (cudnn_attention if by_cudnn else flash_attention)(blocks, *chosen, scaling)
        # A block is filled up, and all are put one behind the other again: no copy where they are full, but of the log-sum-exps.
        output = output[:, :, :size].transpose(1, 2).reshape(-1, heads, dim).transpose(0, 1)
        lse = lse[:, :, :size].transpose(0, 1).reshape(heads, -1)
        attend_own = attend_causally if self.refusal else attend_window
        return self.merge([Part(output, lse), attend_own(queries, *own, scaling)], q, queries.new_empty(q, heads, dim))

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
            arguments.head_strides[number], arguments.token_strides[number], _ = part.output.stride()
            arguments.lse_strides[number] = part.lse.stride(0)
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
            attend_block(queries.transpose(0, 1), keys, keys, 1.0)
            own = keys[:, :FEWEST_QUERIES]
            attend_block(queries.transpose(0, 1), own, own, 1.0, causal=True)
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


def past_blocks(past: int) -> list[tuple[int, int]]:
    """Cut the first of `past` tokens into blocks (start, stop) of SHORTEST_BLOCK tokens times a power of two, largest first.

    Fewer than SHORTEST_BLOCK tokens are left over at the end.
    """
    blocks, start = list[tuple[int, int]](), 0
    while (left := (past - start) // SHORTEST_BLOCK) > 0:
        size = SHORTEST_BLOCK << (left.bit_length() - 1)
        blocks.append((start, start + size))
        start += size
    return blocks


def window_tokens(chunk: int) -> int:
    """Return the tokens of a window of an engine whose chunks have `chunk` tokens: a power of two."""
    return max(SHORTEST_BLOCK, 1 << (chunk.bit_length() - 1))


def windows(start: int, stop: int, size: int) -> list[tuple[int, int, int]]:
    """Cut tokens start .. stop - 1 at multiples of `size`: for each window its first token, and the first and last + 1 of these."""
    return [
        (base, max(base, start), min(base + size, stop)) for base in range(start // size * size, stop, size)
    ]


def most_parts(tokens: int) -> int:
    """Return the most parts into which attention of a window of a prompt of `tokens` tokens is cut."""
    return ((tokens - 1) // SHORTEST_BLOCK).bit_length() + 1


def filled_up(queries: int) -> int:
    """Return the power of two to which a window's `queries` queries are filled up."""
    return max(FEWEST_QUERIES, power_of_two(queries))


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def fill_up(queries: Tensor, first: int = 0) -> Tensor:
    """Return queries [H, q, D] with zeros behind, and before the number `first`, up to as many as `filled_up` says.

    The numbers of a token lie together, as those of queries do.
    """
    heads, q, dim = queries.shape
    size = filled_up(first + q)
    if size == q:
        return queries
    padded = queries.new_zeros(size, heads, dim).transpose(0, 1)
    padded[:, first : first + q] = queries
    return padded


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


def attend_block(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool = False) -> Part:
    """Attend to all of a block by cuDNN, or causally to as many keys as queries: queries [H, q, D], keys and values [G, n, D].

    Raises RuntimeError if cuDNN does not take the sizes.
    """
    output, lse = cudnn_attention(queries[None], keys[None], values[None], scaling, causal)
    return Part(output[0], lse[0])


def attend_window(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Part:
    """Attend causally by cuDNN: queries [H, q, D] are the last of the tokens of keys and values [G, n, D].

    cuDNN aligns its mask to the top left, so zeros stand for the queries before these. Zeros stand for the keys behind, too:
    no query sees them, but what lies there in memory might be no number.
    """
    q, n = queries.shape[1], keys.shape[1]
    filled = fill_up(queries, n - q)
    if filled.shape[1] > n:
        keys, values = (F.pad(part, (0, 0, 0, filled.shape[1] - n)) for part in (keys, values))
    part = attend_block(filled, keys, values, scaling, causal=True)
    return Part(part.output[:, n - q :], part.lse[:, n - q :])


def attend_causally(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Part:
    """Attend causally by flash attention: queries [H, q, D] are the last of the tokens of keys and values [G, n, D]."""
    output, lse = flash_attention(queries[None], keys[None], values[None], scaling, causal=True)
    return Part(output[0], lse[0])


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
