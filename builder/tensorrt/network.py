"""The decoder as a TensorRT network, read top to bottom; engine/model/layer.py is the same computation.

Attention is not part of it: a function adds it where it belongs. There are two, for two forms of the decoder: segments cut at
attention, and one network with attention as layers.

Segments are for TensorRT for RTX, which has no plugin layers. Segment 0 embeds and goes up to the first layer's
attention; each of the others goes from one layer's attention to the next, the last to the logits:

    segment 0           ids, positions                   → queries, keys, values, next_hidden, cos, sin
    segment 1 .. L - 1  attended, hidden, cos, sin       → queries, keys, values, next_hidden
    segment L           attended, hidden, rows           → logits
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvseek.core.model_config import ModelConfig
from kvseek.core.rope import RotaryEmbedding

from .graph import Graph, ITensor, TensorRt, WeightSource

ROTATION = ("cos", "sin")
AttentionLayer = Callable[[Graph, int, ITensor, ITensor, ITensor], ITensor]
"""Adds an attention layer to a graph: from layer number, queries, keys and values to what was attended to."""


@dataclass(frozen=True)
class Stream:
    """The tensors that pass from layer to layer, and the graph that they are in.

    Attributes
    ----------
    hidden : ITensor
        The residual stream, [tokens, hidden size].
    rotation : callable
        Gives cosines and sines of the tokens' positions, each [tokens, 1, D/2]. It may add them to the graph's inputs, so
        that what follows the last attention, and rotates nothing, does not have them.
    """

    graph: Graph
    hidden: ITensor
    rotation: Callable[[], tuple[ITensor, ITensor]]


Attend = Callable[[int, Stream, ITensor, ITensor, ITensor], tuple[Stream, ITensor]]
"""Adds a layer's attention to a graph, or ends the graph and begins the next.

Takes the layer's number, queries [tokens, H, D] and keys and values [tokens, G, D], keys and queries rotated. Returns the stream
as it is behind the attention, maybe in another graph, and what was attended to, [tokens, H, D].
"""


def _embed(model: ModelConfig, max_positions: int, graph: Graph) -> Stream:
    """Embeddings of the token ids, cosines and sines of the positions.

    The angles are those of core/rope.py, from a table: sines of angles of 100,000 and more are as exact as the
    reduction of the angle, which TensorRT leaves to each GPU's kernels.
    """
    ids = graph.input("ids", torch.int32, (-1,), "tokens")
    positions = graph.input("positions", torch.int32, (-1,), "tokens")
    table = RotaryEmbedding(model, torch.device("cpu"))(0, max_positions, max_positions)
    cos, sin = (
        graph.gather(graph.constant(values[:, None].to(graph.dtype), f"rope.{name}_table"), positions, f"rope.{name}")
        for name, values in zip(("cos", "sin"), table, strict=True)
    )
    return Stream(graph, graph.gather(graph.weight("embed.weight"), ids, "embed"), lambda: (cos, sin))


def _before_attention(model: ModelConfig, stream: Stream, layer: int) -> tuple[ITensor, ITensor, ITensor]:
    """Normalise, project and rotate: queries [tokens, H, D], keys and values [tokens, G, D]."""
    graph, prefix = stream.graph, f"layers.{layer}"
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    normed = _norm(model, graph, stream.hidden, f"{prefix}.attention_norm")
    qkv = _project(graph, normed, f"{prefix}.qkv", model.qkv_bias)
    qkv = graph.reshape(qkv, (heads + 2 * kv_heads, dim), f"{prefix}.heads")
    qk = graph.part(qkv, 1, 0, heads + kv_heads, f"{prefix}.qk")
    values = graph.part(qkv, 1, heads + kv_heads, kv_heads, f"{prefix}.values")
    if model.qk_norm:
        qk = _norm_heads(model, graph, qk, prefix)
    qk = _rotate(graph, qk, *stream.rotation(), f"{prefix}.rope")
    queries = graph.part(qk, 1, 0, heads, f"{prefix}.queries")
    return queries, graph.part(qk, 1, heads, kv_heads, f"{prefix}.keys"), values


def _after_attention(model: ModelConfig, stream: Stream, attended: ITensor, layer: int) -> Stream:
    """Output projection and MLP, both residual."""
    graph, prefix, intermediate = stream.graph, f"layers.{layer}", model.intermediate_size
    flat = graph.reshape(attended, (model.num_heads * model.head_dim,), f"{prefix}.attended")
    projected = _project(graph, flat, f"{prefix}.o", model.output_bias)
    hidden = graph.add(stream.hidden, projected, f"{prefix}.attention_residual")
    normed = _norm(model, graph, hidden, f"{prefix}.mlp_norm")
    gate_up = _project(graph, normed, f"{prefix}.gate_up", model.mlp_bias)
    gate = graph.silu(graph.part(gate_up, 1, 0, intermediate, f"{prefix}.gate"), f"{prefix}.silu")
    up = graph.part(gate_up, 1, intermediate, intermediate, f"{prefix}.up")
    down = _project(graph, graph.multiply(gate, up, f"{prefix}.gated"), f"{prefix}.down", model.mlp_bias)
    return replace(stream, hidden=graph.add(hidden, down, f"{prefix}.mlp_residual"))


def _head(model: ModelConfig, stream: Stream) -> None:
    """Logits of the wanted tokens: a prompt needs those of its last, and those of all would be gigabytes."""
    graph = stream.graph
    rows = graph.input("rows", torch.int32, (-1,), "rows")
    normed = _norm(model, graph, graph.gather(stream.hidden, rows, "wanted"), "norm")
    weight = graph.weight("embed.weight" if model.tie_word_embeddings else "lm_head.weight")
    graph.output(graph.cast(graph.linear(normed, weight, "lm_head"), torch.float32, "logits"), "logits")


def _norm(model: ModelConfig, graph: Graph, x: ITensor, name: str) -> ITensor:
    """RMSNorm over the hidden size, with the weight of that name."""
    weight = graph.constant(graph.weight_values(f"{name}.weight").float()[None], f"{name}.weight")
    return graph.rms_norm(x, weight, model.rms_norm_eps, name)


def _norm_heads(model: ModelConfig, graph: Graph, qk: ITensor, prefix: str) -> ITensor:
    """RMSNorm of each head of queries and keys [tokens, H + G, D], in one go: the weights are stacked head by head."""
    counts = {"q": model.num_heads, "k": model.num_kv_heads}
    rows = [graph.weight_values(f"{prefix}.{x}_norm.weight").float().expand(n, -1) for x, n in counts.items()]
    weight = graph.constant(torch.cat(rows)[None], f"{prefix}.qk_norm.weight")
    return graph.rms_norm(qk, weight, model.rms_norm_eps, f"{prefix}.qk_norm")


def _project(graph: Graph, x: ITensor, name: str, bias: bool) -> ITensor:
    """Matrix product with the weight of that name, and its bias if it has one."""
    product = graph.linear(x, graph.weight(f"{name}.weight"), name)
    if not bias:
        return product
    return graph.add(product, graph.weight(f"{name}.bias", (1, -1)), f"{name}.biased")


def _rotate(graph: Graph, x: ITensor, cos: ITensor, sin: ITensor, name: str) -> ITensor:
    """Rotate the pairs (i, i + D/2) of x [tokens, heads, D] by the angles of cos and sin [tokens, 1, D/2]."""
    half = x.shape[2] // 2
    first, second = (graph.part(x, 2, half * i, half, f"{name}.half_{i}") for i in range(2))

    def turned(a: ITensor, b: ITensor, label: str) -> tuple[ITensor, ITensor]:
        return graph.multiply(a, cos, f"{name}.{label}_cos"), graph.multiply(b, sin, f"{name}.{label}_sin")

    left = graph.subtract(*turned(first, second, "left"), f"{name}.left")
    right = graph.add(*turned(second, first, "right"), f"{name}.right")
    return graph.join((left, right), 2, name)


@dataclass(frozen=True)
class NetworkWriter:
    """Writes the networks of one model.

    Inputs are `ids` and `positions`, int32 [tokens], and `rows`, int32 [rows]: the tokens whose `logits`, float32 [rows,
    vocabulary], are wanted. Methods raise KernelError if TensorRT refuses a layer.

    Attributes
    ----------
    api : TensorRt
        The module `tensorrt` or `tensorrt_rtx`.
    builder : Any
        That module's Builder, which must outlive the networks.
    max_positions : int
        Positions reach from 0 to this - 1.
    dtype : torch.dtype
        Of weights and activations: float32, bfloat16 or float16.
    """

    api: TensorRt
    builder: Any
    model: ModelConfig
    max_positions: int
    dtype: torch.dtype
    weights: WeightSource

    def write_segments(self, consume: Callable[[Graph], None]) -> None:
        """Write segment after segment, each handed to `consume` before the next is begun: one is in memory at a time."""

        def cut(layer: int, stream: Stream, queries: ITensor, keys: ITensor, values: ITensor) -> tuple[Stream, ITensor]:
            outputs = {"queries": queries, "keys": keys, "values": values, "next_hidden": stream.hidden}
            if layer == 0:  # the other segments take them as inputs: looked up once
                outputs |= dict(zip(ROTATION, stream.rotation(), strict=True))
            for name, output in outputs.items():
                stream.graph.output(output, name)
            consume(stream.graph)
            graph = self.begin(f"segment_{layer + 1}")

            def tensor(name: str, *shape: int) -> ITensor:
                return graph.input(name, self.dtype, (-1, *shape), "tokens")

            def rotation() -> tuple[ITensor, ITensor]:
                cos, sin = (tensor(name, 1, self.model.head_dim // 2) for name in ROTATION)
                return cos, sin

            attended = tensor("attended", self.model.num_heads, self.model.head_dim)
            return Stream(graph, tensor("hidden", self.model.hidden_size), rotation), attended

        consume(self._write("segment_0", cut))

    def write_whole(self, attention: AttentionLayer) -> Graph:
        """Write one network, in which `attention` adds a layer for each layer's attention."""

        def attend(
            layer: int, stream: Stream, queries: ITensor, keys: ITensor, values: ITensor
        ) -> tuple[Stream, ITensor]:
            return stream, attention(stream.graph, layer, queries, keys, values)

        return self._write("decoder", attend)

    def begin(self, name: str) -> Graph:
        """An empty, strongly typed network."""
        # TensorRT 10 needs the flag; 11 and TensorRT for RTX 1.7 know no other networks and ignore it.
        typed = 1 << int(self.api.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = self.builder.create_network(typed)
        network.name = name
        return Graph(self.api, network, self.dtype, self.weights)

    def _write(self, name: str, attend: Attend) -> Graph:
        """Write a decoder, from token ids to logits, that begins in a network of this name; returns the graph that it ends in."""
        stream = _embed(self.model, self.max_positions, self.begin(name))
        for layer in range(self.model.num_layers):
            queries, keys, values = _before_attention(self.model, stream, layer)
            stream, attended = attend(layer, stream, queries, keys, values)
            stream = _after_attention(self.model, stream, attended, layer)
        _head(self.model, stream)
        return stream.graph
