"""Attention by PyTorch's libraries on a GPU: cuDNN and flash attention, with what merging parts needs, and causally by either."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import windowed_attention

# of sparse prompts: fewer in a call are left to flash attention, as they would not occupy the GPU
OCCUPYING_QUERIES = 512


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


def windowed_flash(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    borders: tuple[Tensor, Tensor],
    most: int,
    scaling: float,
    window: int,
) -> Tensor:
    """Attend causally with a window by flash attention, which goes through the same blocks of keys for any number of queries.

    Parameters
    ----------
    queries : Tensor [H, n, D]
    keys, values : Tensor [G, m, D]
    borders : Tensors, int32 [prompts + 1], on the device
        Of the prompts' queries and of their keys: prompt i has those of borders[i] .. borders[i + 1] - 1. Its queries are of its
        last tokens.
    most : int
        At least the tokens of the longest prompt.

    Returns
    -------
    Tensor [n, H, D]
    """
    operator: Any = torch.ops.aten._flash_attention_forward
    rows = [part.transpose(0, 1) for part in (queries, keys, values)]
    sizes = {"scale": scaling, "window_size_left": window - 1, "window_size_right": 0}
    out: Tensor = operator(*rows, *borders, most, most, 0.0, True, False, **sizes)[0]
    return out


def causal_attention_device(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None = None
) -> Tensor:
    """Compute `causal_attention` on a GPU: queries [H, q, D] and keys, values [G, n, D] to [q, H, D], n >= q.

    Flash attention aligns its causal mask to the bottom right and lets heads share keys, so a chunk needs neither a mask
    nor copies. It does not support float32. The memory-efficient kernel does, but reads keys and values of every query head,
    so these are copied for it. torch.nn.attention.bias chooses between the two kernels by dtype.
    """
    if window is not None:
        return windowed_attention(queries, keys, values, scaling, window)
    return causal_attention_batch(queries[None], keys[None], values[None], scaling)[0].transpose(0, 1)


def causal_attention_batch(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """See causal_attention_device: queries [B, H, q, D] and keys, values [B, G, n, D] to [B, H, q, D]."""
    from torch.nn.attention.bias import causal_lower_right

    heads, q = queries.shape[1:3]
    shared = queries.dtype is not torch.float32
    if not shared:
        keys, values = (part.repeat_interleave(heads // keys.shape[1], dim=1) for part in (keys, values))
    mask = causal_lower_right(q, keys.shape[2])
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=shared)
