"""The layers and the head of Llama, Qwen2, Qwen3 and hybrids: products around attention, and how prompts pass them.

What stands between the products is in reference.py. Models differ in biases, QK-norm, gates, and in what their layers have: rows
that they attend to, or a state. `Products` makes the matrix products, of
weights in the engine's dtype or of 8 bits with a scale for each row, and decides what multiplies: here PyTorch's operator. That
of cpu.py and that of cuda/products.py are faster.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.core.batch import Batch, RequestState, pack
from kvseek.core.rope import LocalRotation
from kvseek.core.streams import to_device
from kvseek.core.weight_only import HEAD, dequantise
from kvseek.engine.retrieval import Retrieval
from kvseek.kernels.reference.delta_net import DeltaParameters, DeltaPrompt, DeltaStates, read_prompts

from .experts import Experts, LoopedExperts, Mixture, Parts
from .prefill import (
    NO_CALLBACKS,
    AttendChunk,
    BlockReader,
    Continuation,
    LayerwiseModel,
    LogitsCallbacks,
    Prefill,
    Prompts,
    Stream,
)
from .reference import CausalAttention, LayerOperations, rms_norm, scaled
from .weights import POST_NORMS, ROUTER

if TYPE_CHECKING:
    from kvseek.core.model_config import DeltaNetConfig, ExpertsConfig, ModelConfig
    from kvseek.core.rope import Rotation


class Product(Protocol):
    """A map from x [rows, inputs] to [rows, outputs], such as a Linear."""

    def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor:
        """Multiply x. What a row gives depends to the bit on neither the number nor the other rows of x, but on `prompt`.

        So a request's rows are the same in any batch of a decode step, and with `prompt` however its prompt is read: whole, in
        chunks, in a pack or behind a reused beginning. That holds for numbers of 16 bits; in float32, and with PyTorch's
        operator alone, last bits may differ.
        """
        ...


class Linear:
    """A linear map from x [rows, inputs] to x Wᵀ + b [rows, outputs].

    Parameters
    ----------
    weight : Tensor [outputs, inputs]
        In the dtype of x.
    bias : Tensor [outputs], optional
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor:
        """Multiply x with the weight and add the bias; see Product."""
        return F.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor, silu_mul: Callable[[Tensor], Tensor], *, prompt: bool = False) -> Tensor:
        """Multiply, and take silu(gate) * up of the result [rows, gates and ups], as `silu_mul` computes it."""
        return silu_mul(self(x, prompt=prompt))


class Embedding:
    """The map from token ids, int64 or int32 [tokens], to their rows of the vocabulary [tokens, hidden].

    Parameters
    ----------
    weight : Tensor [vocabulary, hidden]
        One of several ranks has some rows of the vocabulary.
    first : int
        The token of the first row.
    """

    def __init__(self, weight: Tensor, first: int = 0) -> None:
        self.weight, self.first = weight, first

    def __call__(self, tokens: Tensor) -> Tensor:
        """Copy the rows of tokens."""
        return F.embedding(tokens, self.weight)

    def complete(self, rows: Tensor) -> Tensor:
        """Make the rows [tokens, hidden] of all tokens of those that this rank has, which are zeros for other ranks' tokens."""
        return rows


class Products:
    """Makes a model's products with PyTorch's operator, which is the reference of all others.

    Weights of 8 or 4 bits are dequantised to `dtype`, that of x, when a product is made: the numbers are the same, but no memory
    is saved.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Linear:
        """Make the product with a weight [outputs, inputs]; `scale` is that of `quantise`."""
        return Linear(weight if scale is None else dequantise(weight, scale, self.dtype), bias)

    # An engine of several ranks has parts of weights (engine/parallel/ranks.py). Here there is one rank.

    def row_parallel(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Product:
        """Make a product as `linear`, whose inputs are divided among the ranks: each gets the sum of all ranks' outputs."""
        return self.linear(weight, bias, scale)

    def experts(self, config: ExpertsConfig, gate_up: Parts, down: Parts) -> Experts:
        """Make a layer's experts, whose weights follow each other; with several ranks they give this rank's part of the sum."""
        made = [
            [
                self.linear(*one)
                for one in zip(*(_each(part, config.num_experts) for part in (weight, None, scale)), strict=True)
            ]
            for weight, scale in (gate_up, down)
        ]
        return LoopedExperts(config, *made)

    def sum(self, part: Tensor) -> Tensor:
        """Give the sum of all ranks' parts, in place of a product by `row_parallel`."""
        return part

    def head(self, weight: Tensor, scale: Tensor | None = None) -> Product:
        """Make the product with the rows of the vocabulary that this rank has; rank 0 gets the outputs of all ranks."""
        return self.linear(weight, None, scale)

    def embedding(self, weight: Tensor) -> Embedding:
        """Make the embedding with the rows of the vocabulary that this rank has."""
        return Embedding(weight)


def _each(part: Tensor | None, count: int) -> Sequence[Tensor | None]:
    return [None] * count if part is None else part.chunk(count)


Mark = Callable[[str], None]
"""Takes the name of an operation of a decode step: one of OPS of engine/retrieval.py."""


def _ignore(name: str) -> None:
    """Take no note of an operation."""


class Layer:
    """Products and norms of one decoder layer; absent norms are None.

    Parameters
    ----------
    weights : mapping of str to Tensor
        Weights of this layer under the names of engine/model/weights.py; others are not looked at.
    number : int
        Number of the layer, from 0.
    products : Products, optional
        Makes the layer's products; None: with PyTorch's operator, in the dtype of the norms.
    model : ModelConfig, optional
        Of a model with experts, gates or states.

    Attributes
    ----------
    delta_net : DeltaParameters or None
        What a Gated DeltaNet layer has beside its products; None: the layer attends.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        number: int,
        products: Products | None = None,
        model: ModelConfig | None = None,
    ) -> None:
        prefix = f"layers.{number}."
        self.attention_norm, self.mlp_norm = (weights[f"{prefix}{name}_norm.weight"] for name in ("attention", "mlp"))
        self.q_norm, self.k_norm = (weights.get(f"{prefix}{name}_norm.weight") for name in ("q", "k"))
        self.post_attention_norm, self.post_mlp_norm = (weights.get(f"{prefix}{name}.weight") for name in POST_NORMS)
        self.gelu = model is not None and model.activation == "gelu_tanh"
        products = products or Products(self.attention_norm.dtype)

        def parts(name: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
            weight, bias, scale = (weights.get(f"{prefix}{name}.{part}") for part in ("weight", "bias", "weight_scale"))
            assert weight is not None, f"{prefix}{name}.weight is in every engine directory"
            return weight, bias, scale

        self.o = products.row_parallel(*parts("o"))
        self.gated = model is not None and model.gated_attention
        self.delta_net: DeltaParameters | None = None
        if model is not None and model.delta_net is not None and model.has_state(number):
            self.delta_net = _delta_parameters(weights, prefix, model.delta_net, model.rms_norm_eps)
            self.qkvz, self.ba = products.linear(*parts("qkvz")), products.linear(*parts("ba"))
        else:
            self.qkv = products.linear(*parts("qkv"))
        self.mixture: Mixture | None = None
        experts = None if model is None else model.experts
        if experts is not None and f"{prefix}{ROUTER}.weight" in weights:
            self.mixture = Mixture(weights, prefix, experts, products)
        else:
            self.gate_up, self.down = products.linear(*parts("gate_up")), products.row_parallel(*parts("down"))

    def project(
        self, ops: LayerOperations, x: Tensor, delta: Tensor | None, mark: Mark = _ignore, *, prompt: bool = False
    ) -> Tensor:
        """Add `delta`, unless it is None, to x [tokens, hidden] in place; normalise and project: [tokens, (H + 2G) * D].

        With gated attention the H * D gates are behind these. `mark` is called with the name of each operation when that has been
        launched. `prompt` is that of Product.
        """
        normed = ops.add_rms_norm(x, delta, self.attention_norm)
        mark("norm")
        qkv = self.qkv(normed, prompt=prompt)
        mark("qkv")
        return qkv

    def project_state(
        self, ops: LayerOperations, x: Tensor, delta: Tensor | None, mark: Mark = _ignore, *, prompt: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As `project`, in a layer with a state: qkvz and ba of kernels/reference/delta_net.py."""
        normed = ops.add_rms_norm(x, delta, self.attention_norm)
        mark("norm")
        projected = self.qkvz(normed, prompt=prompt), self.ba(normed, prompt=prompt)
        mark("qkv")
        return projected

    def gate(self, attended: Tensor, qkv: Tensor) -> Tensor:
        """Multiply `attended` [tokens, H * D] with the sigmoids of the gates of `project`, if there are any."""
        return attended * torch.sigmoid(qkv[:, -attended.shape[1] :]) if self.gated else attended

    def finish(
        self, ops: LayerOperations, x: Tensor, attended: Tensor, mark: Mark = _ignore, *, prompt: bool = False
    ) -> Tensor:
        """Project `attended` [tokens, H * D] and add it to x [tokens, hidden] in place; apply the MLP.

        Returns the MLP's output [tokens, hidden], which is still to be added to x. `mark` and `prompt` are those of `project`.
        """
        projected = self._normalised(ops, self.o(attended, prompt=prompt), self.post_attention_norm)
        mark("o")
        normed = ops.add_rms_norm(x, projected, self.mlp_norm)
        mark("mlp_norm")
        if self.mixture is not None:
            return self.mixture(ops, normed, mark, prompt=prompt)
        if self.gelu:
            activated = gelu_mul(self.gate_up(normed, prompt=prompt))
        else:
            activated = self.gate_up.gated(normed, ops.silu_mul, prompt=prompt)
        mark("gate_up")
        down = self._normalised(ops, self.down(activated, prompt=prompt), self.post_mlp_norm)
        mark("down")
        return down

    def _normalised(self, ops: LayerOperations, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else ops.add_rms_norm(x, None, weight)

    def decode(
        self,
        ops: LayerOperations,
        batch: Batch,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        window: Tensor,
        attend: Callable[[Tensor], Tensor],
        mark: Mark = _ignore,
    ) -> Tensor:
        """Run the layer over a decode step's tokens: add `delta`, unless it is None, and attention's output to x in place.

        Parameters
        ----------
        x, delta : Tensor [batch, hidden]
            The residual stream, and the output of the layer before.
        rotation : Rotation
            Of each request's token.
        window : Tensor [slots, G, window rows, 2, D]
            Receives the tokens' keys and values.
        attend : callable
            Takes queries [batch, H, D], and returns outputs of that shape.
        mark : callable
            Called with the name of each operation of the layer when that has been launched; `attend` marks its own.

        Returns
        -------
        Tensor [batch, hidden]
            The MLP's output, which is still to be added to x.
        """
        qkv = self.project(ops, x, delta, mark)
        queries = ops.rope_append(qkv, batch, rotation, window, self.q_norm, self.k_norm)
        mark("rope")
        return self.finish(ops, x, self.gate(attend(queries).flatten(1), qkv), mark)

    def decode_state(
        self,
        ops: LayerOperations,
        batch: Batch,
        x: Tensor,
        delta: Tensor | None,
        states: DeltaStates,
        mark: Mark = _ignore,
    ) -> Tensor:
        """As `decode`, in a layer whose `states` a step advances."""
        assert self.delta_net is not None, "the layer has a state"
        mixed = ops.delta_step(*self.project_state(ops, x, delta, mark), batch, self.delta_net, states)
        mark("attend")
        return self.finish(ops, x, mixed, mark)


@torch.inference_mode()
def catch_up(
    ops: LayerOperations,
    parameters: Sequence[DeltaParameters],
    states: Sequence[DeltaStates],
    table: Tensor,
    slot: int,
    tokens: int,
) -> None:
    """Bring the states of a slot in these layers to so many tokens; `table`: extents of the slots, on their device."""
    requests = pack([RequestState(slot=slot, position=tokens, length=0)])
    batch = Batch(to_device(requests, torch.int32, table.device), table)  # for which the host does not wait
    for own, state in zip(parameters, states, strict=True):
        ops.catch_up(batch, own, state)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Compute gelu(gate) * up [rows, intermediate] from gate_up [rows, 2 * intermediate], GELU by a tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def _delta_parameters(
    weights: Mapping[str, Tensor], prefix: str, config: DeltaNetConfig, epsilon: float
) -> DeltaParameters:
    conv, norm = weights[f"{prefix}conv.weight"], weights[f"{prefix}delta_norm.weight"]
    return DeltaParameters(config, conv, weights[f"{prefix}a_log.weight"], weights[f"{prefix}dt.bias"], norm, epsilon)


class Head:
    """The last norm and the projection to the vocabulary.

    Parameters
    ----------
    norm : Tensor [hidden]
    weight : Tensor [vocabulary, hidden]
    products : Products, optional
        See Layer.
    scale : Tensor, optional
        Of `quantise`.

    Attributes
    ----------
    project : Product
        From what is normalised to logits in its dtype.
    """

    def __init__(
        self,
        model: ModelConfig,
        norm: Tensor,
        weight: Tensor,
        products: Products | None = None,
        scale: Tensor | None = None,
    ) -> None:
        self.model, self.norm = model, norm
        self.project = (products or Products(norm.dtype)).head(weight, scale)

    @classmethod
    def of(cls, model: ModelConfig, weights: Mapping[str, Tensor], products: Products | None = None) -> Head:
        """Make the head of an engine's weights. That of a tied model is the embedding, unless it has 8 bits."""
        name = "embed.weight" if model.tie_word_embeddings and HEAD not in weights else HEAD
        return cls(model, weights["norm.weight"], weights[name], products, weights.get(f"{name}_scale"))

    def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor:
        """Compute the logits, float32 [tokens, vocabulary], of x [tokens, hidden]; `prompt` is that of Product."""
        normed = rms_norm(x, self.norm, self.model)
        return self.project(normed, prompt=prompt).float()


class WeightsModel(LayerwiseModel[Stream]):
    """A model whose layers are made of weights. How its decode steps run is in cpu.py and cuda/steps.py.

    Parameters
    ----------
    weights : dict of str to Tensor
        Weights as engine/model/weights.py loads them.
    ops : LayerOperations
        What a layer computes between its products.
    attention : callable
        Causal attention over a prompt.
    products : Products
        Makes the products of the weights.

    Attributes
    ----------
    reader : BlockReader or None
        What reads the rest of a prompt sparsely, in an engine that does (cache.cached_prefill).
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        retrieval: Retrieval,
        ops: LayerOperations,
        attention: CausalAttention,
        products: Products,
    ) -> None:
        super().__init__(retrieval, attention)
        self.ops = ops
        self.embed = products.embedding(weights["embed.weight"])
        self.layers = [Layer(weights, number, products, self.model) for number in range(self.model.num_layers)]
        self.head = Head.of(self.model, weights, products)
        self.reader: BlockReader | None = None
        if retrieval.cache.states is not None:
            own = [layer.delta_net for layer in self.layers if layer.delta_net is not None]
            states, table = retrieval.cache.states, retrieval.cache.extents.device_table
            states.catch_up = partial(catch_up, ops, own, states.layers, table)
        device = retrieval.cache.window.device
        self.local = LocalRotation(self.model, device) if self.model.local_rope_theta is not None else None

    @abstractmethod
    def rotate(self, start: int, stop: int, length: int) -> Rotation:
        """Return the rotation of positions start .. stop - 1 of a prompt of `length` tokens."""

    def prefill(self, prompts: Prompts, on_logits: LogitsCallbacks = NO_CALLBACKS) -> Prefill:
        if self.reader is not None and self.retrieval.resumes([slot for slot, _ in prompts]):
            return Continuation(self.reader, self.retrieval, prompts)
        return super().prefill(prompts, on_logits)

    def begin_prompt(self, prefill: Prefill) -> Stream:
        ids = to_device(prefill.ids, torch.int64, self.retrieval.cache.window.device)
        residual = scaled(self.embed(ids), self.model)
        stream = Stream.begin(residual, prefill.borders, self.rotate, self.model.short_reach)
        if self.local is None or stream.rotation is None:
            return stream
        positions = [place for first, stop in pairwise(prefill.borders) for place in range(stop - first)]
        return replace(stream, local=self.local(to_device(positions, torch.int64, residual.device)))

    def _local_rotation(self, prompt: Stream, start: int, stop: int) -> Rotation:
        """Return the rotation of rows start .. stop - 1 in layers with a window."""
        assert self.local is not None, "these layers have a base of their own"
        if prompt.local is not None:
            return prompt.local[0][start:stop], prompt.local[1][start:stop]
        return self.local(torch.arange(start, stop, device=prompt.residual.device))

    def read_chunk(
        self, layer: int, prompt: Stream, start: int, stop: int, keys: Tensor, values: Tensor, attend: AttendChunk
    ) -> Tensor:
        weights, x, mark = self.layers[layer], prompt.residual[start:stop], self.retrieval.observer.prompt_op_launched
        local = self.local is not None and self.model.window_of(layer) is not None
        rotation = self._local_rotation(prompt, start, stop) if local else prompt.rotation_of(start, stop, self.rotate)
        qkv = weights.project(self.ops, x, None, mark, prompt=True)
        q = self.ops.rope_prompt(qkv, rotation, keys, values, start, weights.q_norm, weights.k_norm).transpose(0, 1)
        mark("rope")
        out = attend(q)
        mark("attend")
        self.add(x, weights.finish(self.ops, x, weights.gate(out.flatten(1), qkv), mark, prompt=True))
        return q

    def read_states(
        self, layer: int, prompt: Stream, start: int, counts: Sequence[int], states: Sequence[DeltaPrompt]
    ) -> list[DeltaPrompt]:
        weights, mark = self.layers[layer], self.retrieval.observer.prompt_op_launched
        assert weights.delta_net is not None, "the layer has a state"
        x = prompt.residual[start : start + sum(counts)]
        states = states or [DeltaPrompt.begin(weights.delta_net.config, x.dtype, x.device)] * len(counts)
        projected = weights.project_state(self.ops, x, None, mark, prompt=True)
        out, read = read_prompts(*projected, states, counts, weights.delta_net)
        mark("attend")
        self.add(x, weights.finish(self.ops, x, out, mark, prompt=True))
        return read

    def decode_layers(
        self, batch: Batch, x: Tensor, rotation: Rotation, attend: Callable[[int, Tensor], Tensor], mark: Mark
    ) -> Tensor:
        """Run the layers over a decode step's tokens, whose embeddings x [batch, hidden] become the residual stream.

        `attend` is attention in the layer that has rows of this number, as of Layer.decode. Returns what is still to be added.
        """
        cache = self.retrieval.cache
        delta: Tensor | None = None
        windows, states = enumerate(cache.windows), iter(cache.states.layers if cache.states else ())
        rings = enumerate(cache.states.rings if cache.states else ())
        latest = self.retrieval.in_rings(batch)
        local = rotation if self.local is None else self.local(batch.column("position"))
        for place, layer in enumerate(self.layers):
            if layer.delta_net is not None:
                delta = layer.decode_state(self.ops, batch, x, delta, next(states), mark)
                continue
            if self.model.window_of(place) is not None:
                number, ring = next(rings)
                attend_latest = partial(self.retrieval.attend_latest, number, batch=latest)
                delta = layer.decode(self.ops, latest, x, delta, local, ring, attend_latest, mark)
                continue
            number, window = next(windows)
            delta = layer.decode(self.ops, batch, x, delta, rotation, window, partial(attend, number), mark)
        assert delta is not None, "a model has layers"
        return delta

    def add(self, x: Tensor, delta: Tensor) -> None:
        """Add what a layer's last product has computed to the residual stream x [rows, hidden] in place."""
        x += delta

    def logits_of(self, prompt: Stream, spans: Sequence[tuple[int, int]]) -> Tensor:
        return self.head(prompt.rows(spans), prompt=True)
