"""Launches merge_attention.cu: attention of queries to disjoint sets of keys becomes attention to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvseek.core.cuda import CudaKernels
from kvseek.kernels.structs import c_struct

MERGED_PARTS = 32  # as in merge_attention.cu
THREADS = 256  # as in merge_attention.cu
PIECE = 8  # numbers that a thread merges

MergeAttentionArguments = c_struct("kernels/cuda/attention/merge_attention.cu", "MergeAttentionArguments")


@dataclass(frozen=True)
class PartialAttention:
    """Attention of queries to each of some blocks of their keys.

    Attributes
    ----------
    output : Tensor [blocks, H, at least q, D]
        In the engine's dtype, or float8_e4m3fn; the numbers of a token and head are neighbours.
    lse : Tensor, float32 [blocks, H, at least q]
        A head's numbers are neighbours. Natural logarithms of the sums of exponentials.
    scales : Tensor, float32 [H, D], contiguous, or None
        By which outputs of float8_e4m3fn are multiplied.
    """

    output: Tensor
    lse: Tensor
    scales: Tensor | None = None


def merge(kernels: CudaKernels, parts: Sequence[PartialAttention], merged: Tensor) -> Tensor:
    """Merge the parts' first tokens into `merged`, contiguous [tokens, H, D], which is returned. On the current stream."""
    heads = merged.shape[1]
    arguments = MergeAttentionArguments(
        merged=merged.data_ptr(), pieces=merged.numel() // PIECE, parts=len(parts), heads=heads
    )
    for number, part in enumerate(parts):
        arguments.outputs[number], arguments.lses[number] = part.output.data_ptr(), part.lse.data_ptr()
        arguments.scales[number] = 0 if part.scales is None else part.scales.data_ptr()
        block, head, token, _ = part.output.stride()
        arguments.block_strides[number] = block
        arguments.head_strides[number], arguments.token_strides[number] = head, token
        arguments.lse_block_strides[number], arguments.lse_strides[number], _ = part.lse.stride()
        arguments.blocks[number] = part.output.shape[0]
    blocks = -(-arguments.pieces // THREADS)
    kernels.launch("kvseek_merge_attention", (blocks, 1, 1), THREADS, arguments, overlap=True)
    return merged
