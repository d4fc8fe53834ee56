"""Compile a decoder with TensorRT into serialised plans, one file a segment or one for all, and describe them.

How many there are, for which sizes, and how many bytes they hold, is told without TensorRT.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvseek.builder.checkpoints.weights import WeightFormat, total_size
from kvseek.core.batch import buckets_for
from kvseek.core.config import EngineConfig
from kvseek.core.errors import KernelError
from kvseek.core.tensorrt_api import logger, why
from kvseek.engine.model.weights import list_weights
from kvseek.engine.tensorrt.plan_files import PlanEntry, PlanIndex, PlanLimits, Sizes, write_plan_index
from kvseek.plugins.tensorrt.plugin import add_attention_layer

from .graph import Graph, ITensor, Network, TensorRt, WeightSource
from .network import NetworkWriter

# Names within an engine directory; rank0, as TensorRT-LLM names what one GPU runs.
WHOLE_FILE = "rank0.engine"
SEGMENTS_FOLDER = "rank0"


def limits_of(config: EngineConfig) -> PlanLimits:
    """Calls of an engine: decode steps of up to the largest bucket (core/batch.py), which come first, and prompts.

    Segments read a prompt in chunks, layer by layer. One plan goes through all layers in a call, so it reads prompts whole:
    the attention of a layer wants all of the prompt's keys before the next layer may begin.
    """
    batch, prompt = buckets_for(config.max_batch_size)[-1], config.max_input_len
    most = prompt if config.tensorrt.form == "engine" else min(config.prefill_chunk_tokens, prompt)
    return PlanLimits(tokens=Sizes(1, batch, max(batch, most)), rows=Sizes(1, batch, batch))


def plan_count(config: EngineConfig) -> int:
    """Number of plans of an engine."""
    return 1 if config.tensorrt.form == "engine" else config.model.num_layers + 1


def weight_bytes(config: EngineConfig) -> int:
    """Bytes of the weights of all plans: a tied head's are in the first segment and in the last."""
    own = total_size(config.model, WeightFormat.of(config))
    if not config.model.tie_word_embeddings or plan_count(config) == 1:
        return own
    (embedding,) = (weight for weight in list_weights(config.model) if weight.name == "embed.weight")
    return own + math.prod(embedding.shape) * WeightFormat.of(config).dtype.itemsize


def angle_bytes(config: EngineConfig) -> int:
    """Bytes of the table of cosines and sines, which one plan holds (network.py)."""
    return config.max_seq_len * config.model.head_dim * WeightFormat.of(config).dtype.itemsize


def largest_plan(config: EngineConfig) -> int:
    """Most bytes of constants in one plan: of segments, the embedding or the head, a layer, and the table of angles."""
    if plan_count(config) == 1:
        return weight_bytes(config) + angle_bytes(config)
    model, itemsize = config.model, WeightFormat.of(config).dtype.itemsize
    ends = model.vocab_size * model.hidden_size * itemsize
    whole = total_size(model, WeightFormat.of(config))
    layer = (whole - ends * (1 if model.tie_word_embeddings else 2)) // model.num_layers
    return ends + layer + angle_bytes(config)


def write_plans(
    api: TensorRt,
    config: EngineConfig,
    weights: WeightSource,
    directory: Path,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the plans of an engine, and rank0.plans.json about them, into its directory, which is removed if this raises.

    Of segments, one's weights are in memory at a time; of form "engine", all.

    Parameters
    ----------
    api : TensorRt
        The module `tensorrt` or `tensorrt_rtx`.
    weights : callable
        Source of the weights, such as `weight_reader` of builder/checkpoints/weights.py.
    progress : callable, optional
        Called with 1 after every plan.

    Raises
    ------
    KernelError
        If TensorRT finds no GPU where it needs one, refuses a layer or cannot build a plan, with its last messages.
    """
    plans: list[PlanEntry] = []
    builder, limits = _begin(api), limits_of(config)
    writer = NetworkWriter(api, builder, config.model, config.max_seq_len, getattr(torch, config.dtype), weights)

    def write(graph: Graph) -> None:
        file = _file(len(plans), config)
        path = directory / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(build_plan(api, builder, graph.network, limits))
        plans.append(PlanEntry(file, **describe(graph.network)))
        if progress is not None:
            progress(1)

    if config.tensorrt.form == "engine":
        write(writer.write_whole(functools.partial(add_attention_layer, model=config.model)))
    else:
        writer.write_segments(write)
    origin = {"module": api.__name__, "version": api.__version__, "form": config.tensorrt.form, "dtype": config.dtype}
    index = PlanIndex(**origin, max_seq_len=config.max_seq_len, limits=limits, segments=tuple(plans))
    write_plan_index(directory, index)


def _file(number: int, config: EngineConfig) -> str:
    """Path of a plan within the engine directory."""
    if config.tensorrt.form == "engine":
        return WHOLE_FILE
    return f"{SEGMENTS_FOLDER}/segment-{number:05}-of-{plan_count(config):05}.plan"


def _begin(api: TensorRt) -> Any:
    """A Builder of TensorRT; raises KernelError if it has none to give."""
    try:
        return api.Builder(logger(api))
    except (TypeError, RuntimeError) as error:  # TypeError: what the bindings make of a null pointer
        remedy = "tensorrt needs a GPU of the kind that it builds for, tensorrt_rtx needs none"
        raise KernelError(f"cannot begin to build with {why(api)} ({error}); {remedy}") from None


def build_plan(api: TensorRt, builder: Any, network: Network, limits: PlanLimits) -> memoryview:
    """Compile one network; raises KernelError with TensorRT's last messages if it cannot.

    The plan stays in TensorRT's memory: it holds the weights, so a copy may be gigabytes.
    """
    config = builder.create_builder_config()
    config.clear_flag(api.BuilderFlag.TF32)  # float32 shall not be products of 10 bits
    config.max_aux_streams = 0  # attention, in a plugin or after a segment, is on the stream that a plan is given
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


def _shapes(tensor: ITensor, limits: PlanLimits) -> list[tuple[int, ...]]:
    """Smallest, best and largest shape of an input, by the name of its first dimension."""
    sizes: Sizes = getattr(limits, tensor.get_dimension_name(0))
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
