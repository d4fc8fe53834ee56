"""The decoder: Llama, Qwen2 and Qwen3, read top to bottom. layer.py has what a layer computes around attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.plugins.base import Index, Selection

from .attention import attend, causal_attention
from .cache import Cache
from .config import EngineConfig
from .decoder import LayerwiseDecoder
from .kernels import CpuLibrary
from .layer import Head, Layer
from .rope import RotaryEmbedding
from .sampling import greedy_token

if TYPE_CHECKING:
    from .weight_only_kernels import WeightOnlyKernels


@dataclass(frozen=True)
class Group:
    """Requests of a decode batch that attend the same way: to `selection`, or (None) to what the index selects."""

    requests: list[int]
    slots: list[int]
    selection: Selection | None
    window_tokens: Tensor
    lengths: Tensor


class Decoder(LayerwiseDecoder[Tensor]):
    """Runs prompts and decode steps with PyTorch; of a prompt it keeps the residual stream, [n, hidden]."""

    def __init__(
        self,
        config: EngineConfig,
        weights: dict[str, Tensor],
        cache: Cache,
        indexes: Sequence[Index],
        library: CpuLibrary | None,
        weight_only: WeightOnlyKernels | None = None,
    ) -> None:
        super().__init__(config, cache, indexes)
        self.weights, self.library = weights, library
        self.embed, self.norm = weights["embed.weight"], weights["norm.weight"]
        self.lm_head = self.embed if config.model.tie_word_embeddings else weights["lm_head.weight"]
        self.layers = [Layer(self.model, weights, number, weight_only) for number in range(config.model.num_layers)]
        self.head = Head(self.model, self.norm, self.lm_head)
        self.rope = RotaryEmbedding(config.model, self.embed.device)

    def _begin_prompt(self, prompt_ids: Sequence[int]) -> Tensor:
        return self._embed(prompt_ids)

    def _prompt_logits(self, prompt: Tensor) -> Tensor:
        return self.head(prompt[-1:])[0]

    def _embed(self, ids: Sequence[int]) -> Tensor:
        """Embeddings of token ids, [tokens, hidden]."""
        return F.embedding(torch.tensor(ids, device=self.embed.device), self.embed)

    def _prefill_chunk(
        self, number: int, prompt: Tensor, start: int, stop: int, keys: Tensor, values: Tensor
    ) -> Tensor:
        """See LayerwiseDecoder; the residual stream changes in place."""
        x = prompt[start:stop]
        q, k, v = self.layers[number].project(x, *self.rope(start, stop))
        keys[:, start:stop], values[:, start:stop] = k.transpose(0, 1), v.transpose(0, 1)
        q = q.transpose(0, 1)
        out = causal_attention(q, keys[:, :stop], values[:, :stop], self.scaling)
        prompt[start:stop] = self.layers[number].finish(x, out.flatten(1))
        return q

    @torch.inference_mode()
    def decode_tokens(
        self, tokens: Sequence[int], slots: Sequence[int], greedy: Sequence[bool]
    ) -> tuple[list[Tensor | int], list[float]]:
        """See BaseDecoder.decode_tokens."""
        logits, attended = self.decode(tokens, slots)
        return [greedy_token(row) if own else row for row, own in zip(logits, greedy, strict=True)], attended

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        """See BaseDecoder.decode."""
        self._advance(slots)
        window_tokens, lengths = self.cache.describe(slots)
        attended: list[float] = (window_tokens[:, 0] + window_tokens[:, 2]).tolist()
        groups = self._groups(slots, window_tokens, lengths)
        cos, sin = self.rope.at([self.cache.tokens[slot] - 1 for slot in slots])
        x = self._embed(tokens)
        for number, layer in enumerate(self.layers):
            q, k, v = layer.project(x, cos, sin)
            self.cache.append(number, slots, k, v)
            x = layer.finish(x, self._attend(number, q, groups, attended).flatten(1))
        return self.head(x), attended

    def _advance(self, slots: Sequence[int]) -> None:
        for eviction in self.cache.advance(slots):
            for number, index in enumerate(self.indexes):
                index.extend(eviction.slot, self.cache.evicted_keys(number, eviction))

    def _attend(self, number: int, queries: Tensor, groups: list[Group], attended: list[float]) -> Tensor:
        """Attend group by group: queries and outputs [batch, H, D]; adds this layer's share to `attended`."""
        out = queries
        for group in groups:
            part = queries if len(groups) == 1 else queries[group.requests]
            part, counts = self._attend_group(number, part.contiguous(), group)
            for request, count in zip(group.requests, counts, strict=True):
                attended[request] += count / len(self.layers)
            if len(groups) == 1:
                return part
            out = torch.empty_like(queries) if out is queries else out
            out[group.requests] = part
        return out

    def _attend_group(self, number: int, queries: Tensor, group: Group) -> tuple[Tensor, tuple[int, ...]]:
        view = self.cache.view(number, group.slots, group.window_tokens, group.lengths)
        if group.selection is not None:
            return attend(queries, group.selection, view, self.scaling, self.library), group.selection.counts
        selection = self.indexes[number].select(queries, group.slots)
        return self.indexes[number].attend(queries, selection, view), selection.counts

    def _groups(self, slots: Sequence[int], window_tokens: Tensor, lengths: Tensor) -> list[Group]:
        """Split a batch into requests below full_threshold, which attend to everything, and the others."""
        threshold = self.cache.config.full_threshold
        dense = [self.cache.tokens[slot] < threshold or self.cache.lengths[slot] == 0 for slot in slots]
        groups = []
        for wanted in (True, False):
            requests = [request for request, is_dense in enumerate(dense) if is_dense == wanted]
            if requests:
                part = [slots[request] for request in requests]
                held = [self.cache.lengths[slot] for slot in part]
                kv_heads = self.model.num_kv_heads
                selection = Selection.everything(held, kv_heads, self.embed.device) if wanted else None
                groups.append(Group(requests, part, selection, window_tokens[requests], lengths[requests]))
        return groups
