"""TensorRT plans without a GPU: the real networks, evaluated in NumPy, behind the interface that decoders call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.builder.tensorrt import network_interpreter
from tests.builder.tensorrt.network_interpreter import Array, evaluate
from tests.support.device_stand_ins import layer_ops, make_retrieval
from tests.support.draws import make_draws
from torch import Tensor

from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import weight_reader
from kvseek.builder.tensorrt.graph import Graph
from kvseek.builder.tensorrt.network import NetworkWriter
from kvseek.core.batch import BUCKETS
from kvseek.core.config import EngineConfig, TensorRtConfig
from kvseek.core.tensorrt_api import logger
from kvseek.engine.model.cuda.steps import GraphDecoder
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.model.library_attention import causal_attention_device
from kvseek.engine.tensorrt.models import SegmentsModel, WholeModel

FORMS = ("segments", "engine")
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


class NumpyPlan:
    """Runs a network as engine/tensorrt/session.py runs its plan, and is as strict.

    Attributes
    ----------
    contexts : list of int
        Of the calls.
    """

    def __init__(self, api: Any, graph: Graph) -> None:
        self.api, self.graph = api, graph
        self.contexts: list[int] = []

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], context: int = 0) -> None:
        for name, tensor in (*inputs.items(), *outputs.items()):
            assert tensor.is_contiguous(), name
            assert tensor.storage_offset() == 0, f"{name} may begin at an odd address"
        tokens = {len(tensor) for name, tensor in inputs.items() if name != "rows"}
        assert tokens == {context} or context == 0, "the context of a bucket runs nothing else"
        self.contexts.append(context)
        found = evaluate(self.api, self.graph.network, {name: tensor.numpy() for name, tensor in inputs.items()})
        assert set(found) == set(outputs)
        for name, tensor in outputs.items():
            made = torch.from_numpy(found[name])
            assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype), name
            assert all(tensor.data_ptr() != other.data_ptr() for other in inputs.values()), f"{name} is an input too"
            tensor.copy_(made)


class ServedLayers:
    """Attention layers of a network, and `serving` for them. TensorRT RTX has none: slices by their names stand in."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        self.attend: Attend | None = None

    def add(self, graph: Graph, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        joined = graph.join((queries, keys, values), 1, f"attention.{layer}.joined")
        return graph.part(joined, 1, 0, self.heads, f"attention.{layer}")

    @contextmanager
    def serving(self, attend: Attend) -> Iterator[None]:
        self.attend = attend
        try:
            yield
        finally:
            self.attend = None

    def slice(self, layer: Any, x: Array, start: Array | None = None, sizes: Array | None = None) -> Array:
        """What the interpreter does with a slice; memory of an attention's inputs is of no worth after the call."""
        name = re.fullmatch(r"attention\.(\d+)", layer.name)
        if name is None:
            return network_interpreter.slice_(layer, x, start, sizes)
        assert self.attend is not None, "outside of serving"
        parts = np.split(x, [self.heads, self.heads + self.kv_heads], axis=1)
        queries, keys, values = (torch.from_numpy(part.copy()) for part in parts)
        out = torch.full_like(queries, torch.nan)
        self.attend(int(name[1]), queries, keys, values, out)
        for spent in (queries, keys, values):
            spent.fill_(torch.nan)
        return out.numpy()


def make_tensorrt_decoder(
    api: Any, model: Path, directory: Path, form: str, monkeypatch: Any, offload: str = "always"
) -> Decoder:
    """A decoder over the networks of a checkpoint, and cache and indexes of its CPU engine."""
    settings = TensorRtConfig("tensorrt" if form == "engine" else "tensorrt_rtx", form)
    retrieval = make_retrieval(directory, offload, runtime="tensorrt", tensorrt=settings)
    ops, shape = layer_ops(retrieval), retrieval.config.model
    writer = make_writer(api, model, retrieval.config)
    if form == "segments":
        graphs: list[Graph] = []
        writer.write_segments(graphs.append)
        segments = SegmentsModel([NumpyPlan(api, graph) for graph in graphs], retrieval, ops, causal_attention_device)
        return GraphDecoder(segments, retrieval, make_draws("native"), graphs=False)
    layers = ServedLayers(shape.num_heads, shape.num_kv_heads)
    monkeypatch.setitem(network_interpreter.LAYERS, "SLICE", ("ISliceLayer", layers.slice))
    whole = WholeModel(NumpyPlan(api, writer.write_whole(layers.add)), layers.serving, retrieval, ops)
    return GraphDecoder(whole, retrieval, make_draws("native"), graphs=False)


def make_writer(api: Any, model: Path, config: EngineConfig) -> NetworkWriter:
    checkpoint = open_checkpoint(model)
    weights = weight_reader(checkpoint, torch.float32)
    return NetworkWriter(api, api.Builder(logger(api)), checkpoint.config, config.max_seq_len, torch.float32, weights)


def plans_of(decoder: Decoder) -> list[NumpyPlan]:
    """The plans that a decoder runs."""
    model: Any = decoder.model
    return list(model._plans) if isinstance(model, SegmentsModel) else [model._plan]


def is_context(number: int) -> bool:
    """Whether loading makes an execution context of this number."""
    return number in (0, *BUCKETS)
