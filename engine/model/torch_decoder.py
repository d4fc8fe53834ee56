"""The decoder: Llama, Qwen2 and Qwen3, read top to bottom. layer.py has what a layer computes around attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.cpu_library import CpuLibrary
from kvseek.engine.cache.host_cache.host_cache import Cache
from kvseek.engine.sampling import greedy_token
from kvseek.plugins.attention.host import attend
from kvseek.plugins.contract import Index
from kvseek.plugins.selection import Selection

from .attention import causal_attention
from .decoder import LayerwiseDecoder
from .layer import Head, Layer
from .prefill import Prefill, attend_pieces, pieces_of
from .rope import RotaryEmbedding

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


@dataclass(frozen=True)
class Stream:
    """What is kept of a pack of prompts, or of one, from layer to layer.

    Attributes
    ----------
    residual : Tensor [rows, hidden]
        The residual stream, which every layer changes in place.
    borders : tuple of int
        As Prefill.borders.
    rotation : pair of Tensor, or None
        Cosines and sines of all rows of a pack, in which positions begin anew with every prompt; None: one prompt, whose
        positions are its rows.
    """

    residual: Tensor
    borders: tuple[int, ...]
    rotation: tuple[Tensor, Tensor] | None


class Decoder(LayerwiseDecoder[Stream]):
    """Runs prompts and decode steps with PyTorch."""

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

    def begin_prompt(self, prefill: Prefill) -> Stream:
        """See LayerwiseDecoder."""
        lengths = [stop - start for start, stop in pairwise(prefill.borders)]
        if len(lengths) == 1:
            return Stream(self._embed(prefill.ids), prefill.borders, None)
        cos, sin = self._rotation(0, max(lengths))
        rotation = torch.cat([cos[:n] for n in lengths]), torch.cat([sin[:n] for n in lengths])
        return Stream(self._embed(prefill.ids), prefill.borders, rotation)

    def prompt_logits(self, prompt: Stream) -> Tensor:
        """See LayerwiseDecoder."""
        # Slices rather than an index: a list of rows would be copied to a GPU, and the host would wait for it.
        last = [prompt.residual[stop - 1 : stop] for stop in prompt.borders[1:]]
        return self.head(last[0] if len(last) == 1 else torch.cat(last))

    def _rotation(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions start .. stop - 1."""
        return self.rope(start, stop)

    def _rotation_of(self, prompt: Stream, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rows start .. stop - 1."""
        if prompt.rotation is None:
            return self._rotation(start, stop)
        cos, sin = prompt.rotation
        return cos[start:stop], sin[start:stop]

    def _embed(self, ids: Sequence[int]) -> Tensor:
        """Embeddings of token ids, [tokens, hidden]."""
        return F.embedding(torch.tensor(ids, device=self.embed.device), self.embed)

    def prefill_chunk(self, number: int, prompt: Stream, start: int, stop: int, keys: Tensor, values: Tensor) -> Tensor:
        """See LayerwiseDecoder."""
        x = prompt.residual[start:stop]
        q, k, v = self.layers[number].project(x, *self._rotation_of(prompt, start, stop))
        keys[:, start:stop], values[:, start:stop] = k.transpose(0, 1), v.transpose(0, 1)
        q = q.transpose(0, 1)
        pieces = pieces_of(prompt.borders, start, stop)
        out = attend_pieces(causal_attention, q, keys, values, self.scaling, pieces)
        prompt.residual[start:stop] = self.layers[number].finish(x, out.flatten(1))
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
        selection = group.selection or self.indexes[number].select(queries, group.slots)
        return attend(queries, selection, view, self.scaling, self.library), selection.counts

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
