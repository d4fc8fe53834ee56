"""Causal attention over a prompt, in chunks, in PyTorch: the definition of correct for kernels/cpu/attention/causal_attention.py.

Attention of decode steps on the CPU is in kernels/cpu/attention/attend.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvseek.kernels.reference.attention.attend import merge

CausalAttention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Queries [H, q, D] of a prompt's last tokens, keys and values [G, n, D] and the softmax scale to outputs [q, H, D]."""


@runtime_checkable
class BlockAttention(Protocol):
    """A CausalAttention on a GPU that also reads several prompts at once, and what was chosen for several blocks of queries.

    Attributes
    ----------
    dtype : torch.dtype
    refusal : str or None
        Why cuDNN does not attend; None: it does.
    """

    dtype: torch.dtype
    refusal: str | None

    def attend_in_blocks(
        self, queries: Tensor, size: int, chosen: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], scaling: float
    ) -> Tensor:
        """See PromptAttention (engine/model/cuda/attention.py)."""

    def attend_pack(
        self, queries: Tensor, keys: Tensor, values: Tensor, borders: tuple[int, ...], scaling: float
    ) -> Tensor:
        """Attend causally in each prompt to itself: queries [H, n, D], keys and values [G, n, D] to outputs [n, H, D].

        Prompt i has rows borders[i] .. borders[i + 1] - 1.
        """


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attend from the last q tokens of a sequence to the whole sequence, causally.

    Parameters
    ----------
    queries : Tensor [H, q, D]
    keys, values : Tensor [G, n, D], n >= q

    Returns
    -------
    Tensor [q, H, D]
    """
    heads, q, dim = queries.shape
    kv_heads, past = keys.shape[0], keys.shape[1] - q
    own_keys, own_values = (part[:, past:].repeat_interleave(heads // kv_heads, dim=0) for part in (keys, values))
    out, lse = _flash(queries, own_keys, own_values, scaling, causal=True)
    if past:
        # Every query sees all of the past, so the heads of a group stack as further queries of one KV head.
        stacked = queries.reshape(kv_heads, -1, dim)
        past_out, past_lse = _flash(stacked, keys[:, :past], values[:, :past], scaling, causal=False)
        out, _ = merge(out, lse, past_out.reshape(heads, q, dim), past_lse.reshape(heads, q))
    return out.transpose(0, 1)


def _flash(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    # The public scaled_dot_product_attention does not return the log-sum-exp that merging two parts needs.
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = operator(queries[None], keys[None], values[None], 0.0, causal, scale=scaling)
    return out[0], lse[0]
