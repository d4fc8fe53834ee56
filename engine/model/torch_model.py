"""The model on the CPU: Llama, Qwen2 and Qwen3 in PyTorch. layer.py has the part of a layer around attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.engine.retrieval import Retrieval
from kvseek.plugins.batch import Batch

from . import native_attention
from .attention import causal_attention
from .layer import Head, Layer
from .prefill import LayerwiseModel, Prefill, attend_pieces, pieces_of
from .rope import RotaryEmbedding

Attend = Callable[[int, Tensor], Tensor]
"""Attention of a decode step: layer, queries [batch, H, D] to outputs [batch, H, D]."""
Rotation = tuple[Tensor, Tensor]  # cosines and sines of tokens
RotatePrompt = Callable[[int, int, int], Rotation]
"""Rotation of positions start .. stop - 1 of a prompt of so many tokens: takes start, stop and the length."""


@dataclass(frozen=True)
class Stream:
    """State of one prompt, or of a pack of prompts, that is kept from layer to layer.

    Attributes
    ----------
    residual : Tensor [rows, hidden]
        The residual stream, which every layer changes in place.
    borders : tuple of int
        See Prefill.borders.
    rotation : pair of Tensor, or None
        Cosines and sines of all rows of a pack, in which positions begin anew with every prompt. None for a single prompt,
        in which a row's number is its position.
    """

    residual: Tensor
    borders: tuple[int, ...]
    rotation: Rotation | None

    @classmethod
    def begin(cls, residual: Tensor, borders: tuple[int, ...], rotate: RotatePrompt, short_reach: int) -> Stream:
        """Begin with embeddings [rows, hidden]; `short_reach` is that of ModelConfig."""
        lengths = [stop - start for start, stop in pairwise(borders)]
        if len(lengths) == 1:
            return cls(residual, borders, None)
        # Prompts on one side of short_reach are rotated alike: the longest of them has the rotation of all.
        longest = {n > short_reach: n for n in sorted(lengths)}
        tables = {beyond: rotate(0, n, n) for beyond, n in longest.items()}
        cos, sin = ([tables[n > short_reach][part][:n] for n in lengths] for part in (0, 1))
        return cls(residual, borders, (torch.cat(cos), torch.cat(sin)))

    def rows(self, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Return rows start .. stop - 1 of each (start, stop), [rows, hidden]."""
        # Slices rather than an index: a list of rows would be copied to a GPU, and the host would wait for it.
        rows = [self.residual[start:stop] for start, stop in spans]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def rotation_of(self, start: int, stop: int, rotate: RotatePrompt) -> Rotation:
        """Return cosines and sines of rows start .. stop - 1."""
        if self.rotation is None:
            return rotate(start, stop, self.borders[-1])
        cos, sin = self.rotation
        return cos[start:stop], sin[start:stop]


class TorchModel(LayerwiseModel[Stream]):
    """Runs prompts and decode steps with PyTorch.

    Parameters
    ----------
    weights : dict of str to Tensor
        Weights as engine/model/weights.py loads them.
    library : CpuLibrary, optional
        Compiled kernels; without them attention over prompts is PyTorch's.
    """

    def __init__(self, weights: dict[str, Tensor], retrieval: Retrieval, library: CpuLibrary | None = None) -> None:
        super().__init__(retrieval)
        self._causal_attention = (
            causal_attention if library is None else partial(native_attention.causal_attention, library=library)
        )
        self.embed = weights["embed.weight"]
        lm_head = self.embed if self.model.tie_word_embeddings else weights["lm_head.weight"]
        self.layers = [Layer(self.model, weights, number) for number in range(self.model.num_layers)]
        self.head = Head(self.model, weights["norm.weight"], lm_head)
        self.rope = RotaryEmbedding(self.model, self.embed.device)

    def begin_prompt(self, prefill: Prefill) -> Stream:
        """See LayerwiseModel."""
        return Stream.begin(self._embed(prefill.ids), prefill.borders, self.rope, self.model.short_reach)

    def read_chunk(self, layer: int, prompt: Stream, start: int, stop: int, keys: Tensor, values: Tensor) -> Tensor:
        """See LayerwiseModel."""
        x = prompt.residual[start:stop]
        q, k, v = self.layers[layer].project(x, *prompt.rotation_of(start, stop, self.rope))
        keys[:, start:stop], values[:, start:stop] = k.transpose(0, 1), v.transpose(0, 1)
        q = q.transpose(0, 1)
        pieces = pieces_of(prompt.borders, start, stop)
        out = attend_pieces(self._causal_attention, q, keys, values, self.scaling, pieces)
        prompt.residual[start:stop] = self.layers[layer].finish(x, out.flatten(1))
        return q

    def logits_of(self, prompt: Stream, spans: Sequence[tuple[int, int]]) -> Tensor:
        """See LayerwiseModel."""
        return self.head(prompt.rows(spans))

    def run_layers(self, batch: Batch, attend: Attend) -> Tensor:
        """Run a decode step: write each token's rows to the window, and return logits, float32 [batch, vocabulary]."""
        positions, slots = batch.column("position").tolist(), batch.column("slot").long()
        write_rows = batch.column("write_row").long()
        cos, sin = self.rope.at(positions)
        x = self._embed(batch.column("token").tolist())
        for number, layer in enumerate(self.layers):
            q, k, v = layer.project(x, cos, sin)
            window = self.retrieval.cache.window[number]
            window[slots, :, write_rows] = torch.stack((k, v), dim=2)
            x = layer.finish(x, attend(number, q).flatten(1))
        return self.head(x)

    def _embed(self, ids: Sequence[int]) -> Tensor:
        """Look up the embeddings of token ids, [tokens, hidden]."""
        return F.embedding(torch.tensor(ids, device=self.embed.device), self.embed)
