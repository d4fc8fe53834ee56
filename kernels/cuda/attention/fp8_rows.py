"""Launches fp8_rows.cu: rows of prompts are rounded to FP8 for attention. `fp8_rows_reference` says what is correct."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.cuda import CudaKernels
from kvseek.kernels.structs import c_struct

THREADS = 256  # as in fp8_rows.cu
PIECE = 8  # numbers that a thread rounds
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max

Fp8RowsArguments = c_struct("kernels/cuda/attention/fp8_rows.cu", "Fp8RowsArguments")


def round_to_fp8(
    kernels: CudaKernels,
    rows: Tensor,
    rounded: Tensor,
    clipped: Tensor,
    centres: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Write (rows - centres) * scales to `rounded`, to nearest with ties to even, and at most 448. On the current stream.

    Parameters
    ----------
    rows : Tensor, bfloat16 or float16 [heads, n, D]
        The D numbers of a token and head are neighbours, at a multiple of 16 bytes.
    rounded : Tensor, float8_e4m3fn [heads, n, D]
        Likewise, at a multiple of 8 bytes.
    clipped : Tensor, int32 [1]
        Becomes 1 if a number was too large, and is left alone otherwise.
    centres : Tensor of the rows' dtype [heads, D], contiguous; None: zeros
    scales : Tensor, float32 [heads, D], contiguous; None: ones

    NaN stays NaN. For compute capability 8.9 and later.
    """
    heads, tokens, dim = rows.shape
    if not rows.numel():
        return
    arguments = Fp8RowsArguments(
        rows=rows.data_ptr(),
        centres=0 if centres is None else centres.data_ptr(),
        scales=0 if scales is None else scales.data_ptr(),
        clipped=clipped.data_ptr(),
        rounded=rounded.data_ptr(),
        head_stride=rows.stride(0),
        token_stride=rows.stride(1),
        head_stride8=rounded.stride(0),
        token_stride8=rounded.stride(1),
        pieces=heads * tokens * dim // PIECE,
        tokens=tokens,
    )
    blocks = -(-arguments.pieces // THREADS)
    kernels.launch("kvseek_fp8_rows", (blocks, 1, 1), THREADS, arguments, overlap=True)


def fp8_rows_reference(rows: Tensor, centres: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    """Compute what `round_to_fp8` writes, float8_e4m3fn [heads, n, D]."""
    found = rows.float()
    if centres is not None:
        found = found - centres[:, None].float()
    if scales is not None:
        found = found * scales[:, None]
    return found.clamp(-LARGEST, LARGEST).to(FP8)
