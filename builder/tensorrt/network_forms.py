"""The two forms of a decoder's network: segments cut at attention, and one network with attention as layers.

Segments are for TensorRT for RTX, which has no plugin layers. Segment 0 embeds and goes up to the first layer's
attention; each of the others goes from one layer's attention to the next, the last to the logits:

    segment 0           ids, positions                   → queries, keys, values, next_hidden, cos, sin
    segment 1 .. L - 1  attended, hidden, cos, sin       → queries, keys, values, next_hidden
    segment L           attended, hidden, rows           → logits
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvseek.core.config import ModelConfig

from .api import ITensor, TensorRt
from .graph import Graph, WeightSource
from .network import Stream, write_decoder

ROTATION = ("cos", "sin")
AttentionLayer = Callable[[Graph, int, ITensor, ITensor, ITensor], ITensor]
"""Adds an attention layer to a graph: from layer number, queries, keys and values to what was attended to."""


class NetworkWriter:
    """Writes the networks of one model.

    Parameters
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

    def __init__(
        self,
        api: TensorRt,
        builder: Any,
        model: ModelConfig,
        max_positions: int,
        dtype: torch.dtype,
        weights: WeightSource,
    ) -> None:
        self.api, self.builder = api, builder
        self.model, self.max_positions, self.dtype, self.weights = model, max_positions, dtype, weights

    def write_segments(self, consume: Callable[[Graph], None]) -> None:
        """Write segment after segment, each handed to `consume` before the next is begun: one is in memory at a time.

        Raises
        ------
        KernelError
            TensorRT refuses a layer.
        """
        last = write_decoder(self.model, self.max_positions, self.begin("segment_0"), _Cut(self, consume))
        consume(last)

    def write_whole(self, attention: AttentionLayer) -> Graph:
        """Write one network, in which `attention` adds a layer for each layer's attention; raises as write_segments."""

        def attend(
            layer: int, stream: Stream, queries: ITensor, keys: ITensor, values: ITensor
        ) -> tuple[Stream, ITensor]:
            return stream, attention(stream.graph, layer, queries, keys, values)

        return write_decoder(self.model, self.max_positions, self.begin("decoder"), attend)

    def begin(self, name: str) -> Graph:
        """An empty, strongly typed network."""
        # TensorRT 10 needs the flag; 11 and TensorRT for RTX 1.7 know no other networks and ignore it.
        typed = 1 << int(self.api.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = self.builder.create_network(typed)
        network.name = name
        return Graph(self.api, network, self.dtype, self.weights)


class _Cut:
    """Attention outside of the networks: ends the segment and begins the next."""

    def __init__(self, writer: NetworkWriter, consume: Callable[[Graph], None]) -> None:
        self._writer, self._consume = writer, consume

    def __call__(
        self, layer: int, stream: Stream, queries: ITensor, keys: ITensor, values: ITensor
    ) -> tuple[Stream, ITensor]:
        outputs = {"queries": queries, "keys": keys, "values": values, "next_hidden": stream.hidden}
        if layer == 0:  # the other segments take them as inputs: looked up once
            outputs |= dict(zip(ROTATION, stream.rotation(), strict=True))
        for name, tensor in outputs.items():
            stream.graph.output(tensor, name)
        self._consume(stream.graph)
        return self._begin(layer + 1)

    def _begin(self, number: int) -> tuple[Stream, ITensor]:
        writer, model = self._writer, self._writer.model
        graph = writer.begin(f"segment_{number}")

        def tensor(name: str, *shape: int) -> ITensor:
            return graph.input(name, writer.dtype, (-1, *shape), "tokens")

        def rotation() -> tuple[ITensor, ITensor]:
            cos, sin = (tensor(name, 1, model.head_dim // 2) for name in ROTATION)
            return cos, sin

        attended = tensor("attended", model.num_heads, model.head_dim)
        return Stream(graph, tensor("hidden", model.hidden_size), rotation), attended
