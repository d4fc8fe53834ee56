"""What a decoder layer computes of a prompt besides matrix products, and of a step besides selection and attention, in PyTorch.

That is the definition of correct for kernels/layer.py and for causal attention in kernels/cpu/attention/attend.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.core.rope import Rotation, rotate
from kvseek.kernels.layer import CompiledOperations
from kvseek.kernels.reference.attention.attend import merge
from kvseek.kernels.reference.delta_net import catch_up, delta_step

from .fp8_attention import Fp8Attention, Fp8Past

if TYPE_CHECKING:
    from kvseek.core.batch import Batch
    from kvseek.core.model_config import ModelConfig
    from kvseek.kernels.reference.delta_net import DeltaParameters, DeltaStates


class TorchOperations:
    """The operations in PyTorch, on the device of their tensors, which have the engine's dtype unless said otherwise.

    They define what is correct. As in transformers, results between two operators of PyTorch have the dtype of the tensors.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta`, unless it is None, to x [rows, hidden] in place; returns the RMS norm of x, times `weight` [hidden]."""
        if delta is not None:
            x += delta
        return rms_norm(x, weight, self.model)

    def rope_append(
        self,
        qkv: Tensor,
        batch: Batch,
        rotation: Rotation,
        window: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> Tensor:
        """Split qkv [batch, (H + 2G) * D]: rotated queries [batch, H, D] are returned, keys and values go to the window.

        Rows may be longer: gates lie behind (Layer.gate).

        Parameters
        ----------
        rotation : Rotation
            Of each request's token.
        window : Tensor [slots, G, window rows, 2, D]
            A layer's window; each request's `slot` and `write_row` say where its rotated key and its value go.
        q_norm, k_norm : Tensor [D] or None
            Weights of QK-norm, before the rotation.
        """
        queries, keys, values = self._split(qkv, rotation, q_norm, k_norm)
        slots, rows = batch.column("slot").long(), batch.column("write_row").long()
        window[slots, :, rows] = torch.stack((keys, values), dim=2)
        return queries

    def rope_prompt(
        self,
        qkv: Tensor,
        rotation: Rotation,
        keys: Tensor,
        values: Tensor,
        start: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> Tensor:
        """Split a chunk's qkv [rows, (H + 2G) * D], as `rope_append`: rotated queries [rows, H, D] are returned.

        Rotated keys, and values, are written to `keys` and `values` [G, tokens, D] of the whole prompt, from token `start` on.
        """
        queries, own_keys, own_values = self._split(qkv, rotation, q_norm, k_norm)
        stop = start + qkv.shape[0]
        keys[:, start:stop], values[:, start:stop] = own_keys.transpose(0, 1), own_values.transpose(0, 1)
        return queries

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute silu(gate) * up [rows, intermediate] from gate_up [rows, 2 * intermediate]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def delta_step(
        self, qkvz: Tensor, ba: Tensor, batch: Batch, parameters: DeltaParameters, states: DeltaStates
    ) -> Tensor:
        """See kernels/reference/delta_net.py."""
        return delta_step(qkvz, ba, batch, parameters, states)

    def catch_up(self, batch: Batch, parameters: DeltaParameters, states: DeltaStates) -> None:
        """See kernels/reference/delta_net.py."""
        catch_up(batch, parameters, states)

    def _split(
        self, qkv: Tensor, rotation: Rotation, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [rows, H, D], rotated keys and values [rows, G, D]."""
        heads, kv_heads = self.model.num_heads, self.model.num_kv_heads
        qkv = qkv.view(qkv.shape[0], -1, self.model.head_dim)
        qk = qkv[:, : heads + kv_heads]
        if q_norm is not None and k_norm is not None:
            parts = (qk[:, :heads], q_norm), (qk[:, heads:], k_norm)
            qk = torch.cat([rms_norm(part, norm, self.model) for part, norm in parts], dim=1)
        qk = rotate(qk, rotation)
        return qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :][:, :kv_heads]


def rms_norm(x: Tensor, weight: Tensor, model: ModelConfig) -> Tensor:
    """Normalise rows of x [..., channels]; the weight [channels] of centred_norms is a difference from 1."""
    if model.centred_norms:
        return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), model.rms_norm_eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, model.rms_norm_eps)


def scaled(embeddings: Tensor, model: ModelConfig) -> Tensor:
    """Multiply embeddings [tokens, hidden] in place with their factor, which transformers rounds to their dtype."""
    factor = model.embedding_scale
    return embeddings if factor == 1 else embeddings.mul_(torch.tensor(factor, dtype=embeddings.dtype).item())


MASKED_QUERIES = 512  # of a block that attends with a window: the mask has as many rows
LayerOperations = TorchOperations | CompiledOperations


class CausalAttention(Protocol):
    """Attention of a prompt's last tokens to all tokens up to each, or to as many of the latest as a window has."""

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None = None
    ) -> Tensor:
        """Attend: queries [H, q, D], keys and values [G, n, D] and the softmax scale to outputs [q, H, D]."""


@runtime_checkable
class BlockAttention(Protocol):
    """A CausalAttention on a GPU that also reads several prompts at once, and what was chosen for several blocks of queries.

    Attributes
    ----------
    dtype : torch.dtype
    refusal : str or None
        Why cuDNN does not attend; None: it does.
    fp8 : Fp8Attention or None
        What reads the tokens before a window in FP8.
    """

    dtype: torch.dtype
    refusal: str | None
    fp8: Fp8Attention | None

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float, past: Fp8Past | None = None
    ) -> Tensor:
        """See PromptAttention (engine/model/cuda/attention.py)."""

    def fp8_past(self, spacing: int) -> Fp8Past | None:
        """See PromptAttention."""

    def attend_in_blocks(
        self,
        queries: Tensor,
        size: int,
        chosen: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        scaling: float,
        past: Fp8Past | None = None,
    ) -> Tensor:
        """See PromptAttention."""

    def attend_pack(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        borders: tuple[int, ...],
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend causally in each prompt of a pack to itself: queries [H, n, D], keys and values [G, n, D] to outputs [n, H, D].

        Prompt i has rows borders[i] .. borders[i + 1] - 1.
        """


def causal_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None = None
) -> Tensor:
    """Attend from the last q tokens of a sequence to the whole sequence, causally.

    Parameters
    ----------
    queries : Tensor [H, q, D]
    keys, values : Tensor [G, n, D], n >= q
    window : int, optional
        Latest tokens that each attends to, itself included; None: all.

    Returns
    -------
    Tensor [q, H, D]
    """
    if window is not None:
        return windowed_attention(queries, keys, values, scaling, window)
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


def windowed_attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int) -> Tensor:
    """Compute `causal_attention` with a window on any device, by a mask: blocks of queries attend to the keys that they see."""
    past, out = keys.shape[1] - queries.shape[1], []
    for start in range(past, keys.shape[1], MASKED_QUERIES):
        stop = min(start + MASKED_QUERIES, keys.shape[1])
        first = max(0, start + 1 - window)
        position = torch.arange(first, stop, device=queries.device)
        behind = position[start - first :, None] - position
        own, seen = queries[:, start - past : stop - past], slice(first, stop)
        found = F.scaled_dot_product_attention(
            own[None],
            keys[None, :, seen],
            values[None, :, seen],
            attn_mask=(behind >= 0) & (behind < window),
            scale=scaling,
            enable_gqa=True,
        )
        out.append(found[0].transpose(0, 1))
    return torch.cat(out)


def _flash(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    # The public scaled_dot_product_attention does not return the log-sum-exp that merging two parts needs.
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = operator(queries[None], keys[None], values[None], 0.0, causal, scale=scaling)
    return out[0], lse[0]
