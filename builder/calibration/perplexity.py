"""Computes the perplexity of a model that is read one layer at a time, by the engine's own arithmetic for prompts.

The text is cut into windows that do not see each other. All windows pass a layer before the next layer is read, so memory
holds all hidden states but the weights of only one layer, never those of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.builder.printing import Advance
from kvseek.core.config import ModelConfig
from kvseek.core.rope import RotaryEmbedding
from kvseek.engine.model.layer import Head, Layer
from kvseek.engine.model.library_attention import causal_attention_device
from kvseek.engine.model.reference.attention import causal_attention
from kvseek.engine.model.reference.operations import TorchOperations
from kvseek.engine.model.reference.products import Products

LOGIT_BYTES = 64 << 20  # bytes of one slice's logits; a handful of tensors of this size exist at a time

# Takes a layer's number; returns its weights, on the CPU or on the device of the computation.
LayerSource = Callable[[int], dict[str, Tensor]]


@dataclass(frozen=True)
class Losses:
    """Results over all predictions, for one or two sets of weights.

    Attributes
    ----------
    perplexities : tuple of float
        For every set of weights: the exponential of the mean negative log-likelihood of the next token.
    kl_divergence : float
        Divergence of the second set's distribution of the next token from the first set's, mean over the predictions, in nats;
        0 for one set.
    same_token : float
        Share of predictions whose most probable token is the same with both sets; 1 for one set.
    """

    perplexities: tuple[float, ...]
    kl_divergence: float
    same_token: float


class WindowedText:
    """Token ids in windows of `window` tokens; the last window has the rest.

    A window of n tokens has n - 1 predictions, because nothing predicts its first token.

    Parameters
    ----------
    ids : sequence of int
        At least two.
    window : int
        At least two.
    products : Products, optional
        Makes the matrix products; None: with PyTorch's operator.
    """

    def __init__(
        self,
        model: ModelConfig,
        ids: Sequence[int],
        window: int,
        device: torch.device,
        products: Products | None = None,
    ) -> None:
        self.model, self.device, self.products = model, device, products
        self._ops = TorchOperations(model)
        self.ids = torch.tensor(ids)  # on the CPU, where the embedding is
        self.window = min(window, len(ids))
        self.spans = [(start, min(start + window, len(ids))) for start in range(0, len(ids), window)]
        self._slice = max(1, LOGIT_BYTES // (4 * model.vocab_size))

    @property
    def predictions(self) -> int:
        """Number of tokens that are predicted."""
        return len(self.ids) - len(self.spans)

    def units(self, sets: int) -> int:
        """Count the steps of progress for `sets` sets of weights: windows of all layers, then slices of the predictions."""
        return sets * self.model.num_layers * len(self.spans) + len(list(self._slices()))

    @torch.inference_mode()
    def hidden_states(self, embedding: Tensor, layers: LayerSource, advance: Advance) -> Tensor:
        """Compute the hidden states [tokens, hidden] after the last layer.

        Parameters
        ----------
        embedding : Tensor [vocabulary, hidden]
            On the CPU; only the rows of the text's tokens are copied.
        layers : callable
            Called once for each layer, in order; the returned weights are dropped before the next call.
        """
        hidden = F.embedding(self.ids, embedding).to(self.device)
        rope = RotaryEmbedding(self.model, self.device)
        for number in range(self.model.num_layers):
            self._run_layer(self._layer(layers, number), hidden, rope, advance)
        return hidden

    @torch.inference_mode()
    def losses(self, heads: Sequence[Head], hidden: Sequence[Tensor], advance: Advance) -> Losses:
        """Compare one or two sets of hidden states [tokens, hidden] with the text, and the second set with the first.

        `heads` has the head of each set.
        """
        likelihood = torch.zeros(len(hidden), dtype=torch.float64)
        divergence, same = 0.0, 0
        for start, stop in self._slices():
            targets = self.ids[start + 1 : stop + 1].to(self.device)[:, None]
            rows = [states[start:stop] for states in hidden]
            predicted = [head(own, prompt=True).log_softmax(dim=-1) for head, own in zip(heads, rows, strict=True)]
            for number, one in enumerate(predicted):
                likelihood[number] += one.gather(1, targets).double().sum().cpu()
            first, last = predicted[0], predicted[-1]
            same += int((first.argmax(dim=-1) == last.argmax(dim=-1)).sum())
            if len(hidden) > 1:
                each = F.kl_div(last, first, reduction="none", log_target=True).sum(dim=-1)
                divergence += float(each.double().sum())
            advance(1)
        means = (-likelihood / self.predictions).tolist()
        return Losses(tuple(map(_exponential, means)), divergence / self.predictions, same / self.predictions)

    def _layer(self, layers: LayerSource, number: int) -> Layer:
        """Make a layer; its weights are copied to the device as they are stored."""
        weights = {name: tensor.to(self.device) for name, tensor in layers(number).items()}
        return Layer(self.model, weights, number, self.products)

    def _run_layer(self, layer: Layer, hidden: Tensor, rope: RotaryEmbedding, advance: Advance) -> None:
        """Run one layer over every window, in place."""
        kv_heads, dim = self.model.num_kv_heads, self.model.head_dim
        attention = causal_attention_device if self.device.type == "cuda" else causal_attention
        for start, stop in self.spans:
            x, tokens = hidden[start:stop], stop - start
            keys, values = x.new_empty(2, kv_heads, tokens, dim)
            qkv, rotation = layer.project(self._ops, x, None, prompt=True), rope(0, tokens, tokens)
            q = self._ops.rope_prompt(qkv, rotation, keys, values, 0, layer.q_norm, layer.k_norm)
            attended = attention(q.transpose(0, 1), keys, values, dim**-0.5)
            x += layer.finish(self._ops, x, attended.flatten(1), prompt=True)
            advance(1)

    def _slices(self) -> Iterator[tuple[int, int]]:
        """Cut the positions that predict a token into slices; the last position of a window predicts nothing."""
        for start, stop in self.spans:
            for first in range(start, stop - 1, self._slice):
                yield first, min(first + self._slice, stop - 1)


def _exponential(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
