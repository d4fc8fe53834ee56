"""Compile a decoder's segments with TensorRT into serialised plans, one file a segment, and describe them."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvseek.engine.config import EngineConfig, require
from kvseek.engine.errors import ConfigError, KernelError

from .network_forms import Decoder
from .tensorrt_api import ITensor, Network, TensorRt
from .tensorrt_graph import Graph, WeightSource
from .tensorrt_messages import logger, why

INDEX_FILE = "plans.json"


@dataclass(frozen=True)
class Range:
    """Sizes of a dynamic dimension: TensorRT admits minimum to maximum and is at its best at `optimum`."""

    minimum: int
    optimum: int
    maximum: int

    def __post_init__(self) -> None:
        ordered = 1 <= self.minimum <= self.optimum <= self.maximum
        limit = "1 <= minimum <= optimum <= maximum"
        require(ordered, "range", (self.minimum, self.optimum, self.maximum), limit, "check the engine's limits")


@dataclass(frozen=True)
class Limits:
    """Dynamic dimensions of a decoder: tokens of a call, and the rows of them whose logits are wanted."""

    tokens: Range
    rows: Range


def limits_of(config: EngineConfig) -> Limits:
    """Calls of an engine: decode steps of up to max_batch_size tokens, which come first in speed, and chunks of prompts."""
    batch, chunk = config.max_batch_size, min(config.prefill_chunk_tokens, config.max_input_len)
    return Limits(tokens=Range(1, batch, max(batch, chunk)), rows=Range(1, batch, batch))


def write_plans(api: TensorRt, config: EngineConfig, weights: WeightSource, directory: Path) -> None:
    """Write segment-*.plan and plans.json into a new directory, with one segment's weights in memory at a time.

    Parameters
    ----------
    api : TensorRt
        The module `tensorrt` or `tensorrt_rtx`.
    weights : callable
        Source of the weights, such as `weight_reader` of builder/weights.py.

    Raises
    ------
    ConfigError
        If `directory` exists.
    KernelError
        If TensorRT finds no GPU where it needs one, refuses a layer or cannot build a segment, with its last messages. The
        directory is removed.
    """
    if directory.exists():
        raise ConfigError(f"directory of the plans = {str(directory)!r}: exists; name a new one")
    segments: list[dict[str, Any]] = []
    builder, limits = _begin(api), limits_of(config)
    decoder = Decoder(api, builder, config.model, config.max_seq_len, getattr(torch, config.dtype), weights)

    def write(graph: Graph) -> None:
        file = f"segment-{len(segments):05}-of-{config.model.num_layers + 1:05}.plan"
        (directory / file).write_bytes(build_plan(api, builder, graph.network, limits))
        segments.append({"file": file, **describe(graph.network)})

    directory.mkdir(parents=True)
    try:
        decoder.write_segments(write)
        index = {
            "module": api.__name__,
            "version": api.__version__,  # a plan runs with the version that built it, and with no other
            "dtype": config.dtype,
            "max_seq_len": config.max_seq_len,
            "limits": asdict(limits),
            "segments": segments,
        }
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(directory)
        raise


def _begin(api: TensorRt) -> Any:
    """A Builder of TensorRT; raises KernelError if it has none to give."""
    try:
        return api.Builder(logger(api))
    except (TypeError, RuntimeError) as error:  # TypeError: what the bindings make of a null pointer
        remedy = "tensorrt needs a GPU of the kind that it builds for, tensorrt_rtx needs none"
        raise KernelError(f"cannot begin to build with {why(api)} ({error}); {remedy}") from None


def build_plan(api: TensorRt, builder: Any, network: Network, limits: Limits) -> memoryview:
    """Compile one network; raises KernelError with TensorRT's last messages if it cannot.

    The plan stays in TensorRT's memory: it holds the weights, so a copy may be gigabytes.
    """
    config = builder.create_builder_config()
    config.clear_flag(api.BuilderFlag.TF32)  # float32 shall not be products of 10 bits
    config.profiling_verbosity = api.ProfilingVerbosity.DETAILED
    profile = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        tensor = network.get_input(number)
        profile.set_shape(tensor.name, *_shapes(tensor, limits))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise KernelError(
            f"cannot build network {network.name!r} with {why(api)}; install a version that docs/tensorrt.md names"
        )
    return memoryview(plan)


def _shapes(tensor: ITensor, limits: Limits) -> list[tuple[int, ...]]:
    """Smallest, best and largest shape of an input, by the name of its first dimension."""
    sizes: Range = getattr(limits, tensor.get_dimension_name(0))
    return [(size, *tensor.shape[1:]) for size in (sizes.minimum, sizes.optimum, sizes.maximum)]


def describe(network: Network) -> dict[str, dict[str, dict[str, Any]]]:
    """Inputs and outputs of a network by name, each with its dtype and shape, in which -1 is dynamic."""

    def entry(tensor: ITensor) -> dict[str, Any]:
        return {"dtype": tensor.dtype.name, "shape": list(tensor.shape)}

    inputs = [network.get_input(number) for number in range(network.num_inputs)]
    outputs = [network.get_output(number) for number in range(network.num_outputs)]
    return {
        "inputs": {tensor.name: entry(tensor) for tensor in inputs},
        "outputs": {tensor.name: entry(tensor) for tensor in outputs},
    }
