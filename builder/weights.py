"""Weights of an engine: fused from checkpoint tensors and streamed into safetensors shards, one tensor in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from kvseek.engine.config import ModelConfig
from kvseek.engine.errors import ConfigError
from kvseek.engine.weights import INDEX_FILE

from .checkpoint import Checkpoint

SHARD_BYTES = 4 << 30  # a shard grows no larger unless a single tensor is
HEADER_ALIGNMENT = 64  # a cache line: tensors are read in place from the mapped file
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' own names


@dataclass(frozen=True)
class Weight:
    """One tensor of an engine: `sources` are Hugging Face names, concatenated along the first axis."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]


def plan_weights(model: ModelConfig) -> list[Weight]:
    """Every tensor of an engine, in the order of the computation.

    embed.weight, then per layer i layers.{i}.attention_norm, qkv, q_norm, k_norm, o, mlp_norm, gate_up, down (norms that the
    model lacks are left out; qkv and o may have a .bias), then norm.weight and, unless tied to the embedding, lm_head.weight.
    """
    vocabulary = (model.vocab_size, model.hidden_size)
    weights = [Weight("embed.weight", ("model.embed_tokens.weight",), vocabulary)]
    for layer in range(model.num_layers):
        weights += _plan_layer(model, layer)
    weights.append(Weight("norm.weight", ("model.norm.weight",), (model.hidden_size,)))
    if not model.tie_word_embeddings:
        weights.append(Weight("lm_head.weight", ("lm_head.weight",), vocabulary))
    return weights


def _plan_layer(model: ModelConfig, layer: int) -> list[Weight]:
    hidden, intermediate, head_dim = model.hidden_size, model.intermediate_size, model.head_dim
    queries, qkv = model.num_heads * head_dim, (model.num_heads + 2 * model.num_kv_heads) * head_dim

    def weight(name: str, sources: str, *shape: int, kind: str = "weight") -> Weight:
        full = tuple(f"model.layers.{layer}.{source}.{kind}" for source in sources.split())
        return Weight(f"layers.{layer}.{name}.{kind}", full, shape)

    projections = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
    weights = [weight("attention_norm", "input_layernorm", hidden), weight("qkv", projections, qkv, hidden)]
    if model.qkv_bias:
        weights.append(weight("qkv", projections, qkv, kind="bias"))
    if model.qk_norm:
        weights += [weight(f"{x}_norm", f"self_attn.{x}_norm", head_dim) for x in ("q", "k")]
    weights.append(weight("o", "self_attn.o_proj", hidden, queries))
    if model.output_bias:
        weights.append(weight("o", "self_attn.o_proj", hidden, kind="bias"))
    return [
        *weights,
        weight("mlp_norm", "post_attention_layernorm", hidden),
        weight("gate_up", "mlp.gate_proj mlp.up_proj", 2 * intermediate, hidden),
        weight("down", "mlp.down_proj", hidden, intermediate),
    ]


def write_weights(
    checkpoint: Checkpoint,
    directory: Path,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write weights-*.safetensors and their index into `directory`, holding one fused tensor at a time.

    Parameters
    ----------
    shard_bytes : int
        Most bytes of tensors in a shard, if no single tensor is larger.
    progress : callable, optional
        Called with the bytes just written after every tensor.

    Raises
    ------
    ConfigError
        If a tensor is missing, has another shape than the configuration says, or has no place in the decoder, or if a
        value is too large for `dtype`.
    """
    weights = plan_weights(checkpoint.config)
    _refuse_unused(checkpoint, weights)
    shards = _split(weights, dtype.itemsize, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"weights-{number:05}-of-{len(shards):05}.safetensors"
        with (directory / file).open("wb") as output:
            _write_header(output, shard, dtype)
            for weight in shard:
                _write_tensor(output, _convert(fuse(checkpoint, weight), weight.name, dtype))
                weight_map[weight.name] = file
                if progress is not None:
                    progress(_size(weight, dtype.itemsize))
    index = {"metadata": {"total_size": total_size(checkpoint.config, dtype)}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def weight_reader(checkpoint: Checkpoint, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """A function that reads and fuses the weight of a name that `plan_weights` lists, in `dtype`, on the CPU.

    Raises
    ------
    ConfigError
        If a tensor has no place in the decoder; the function raises as `write_weights` does.
    """
    weights = {weight.name: weight for weight in plan_weights(checkpoint.config)}
    _refuse_unused(checkpoint, list(weights.values()))
    return lambda name: _convert(fuse(checkpoint, weights[name]), name, dtype)


def total_size(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights of an engine."""
    return sum(_size(weight, dtype.itemsize) for weight in plan_weights(model))


def fuse(checkpoint: Checkpoint, weight: Weight) -> Tensor:
    """Read and concatenate the sources of a weight; raises ConfigError if the shape is not the configuration's."""
    parts = [checkpoint.tensor(name) for name in weight.sources]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    if tuple(tensor.shape) != weight.shape:
        raise ConfigError(
            f"shape of {' + '.join(weight.sources)} = {tuple(tensor.shape)}: must be {weight.shape} by the model's "
            "configuration; config and weights are of different models"
        )
    return tensor


def _convert(tensor: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Round to `dtype`; raises ConfigError on a value beyond its range, as may happen with float16."""
    converted = tensor.to(dtype)
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(tensor.dtype).max and (largest := tensor.abs().max().item()) > limit:
        raise ConfigError(
            f"{name} holds {largest:.6g}: {str(dtype).removeprefix('torch.')} holds at most {limit:.6g}; build with "
            "--dtype bfloat16"
        )
    return converted


def _refuse_unused(checkpoint: Checkpoint, weights: list[Weight]) -> None:
    names = {source for weight in weights for source in weight.sources}
    unused = sorted(checkpoint.unused(names | {"lm_head.weight"}))  # a tied checkpoint may repeat the embedding
    if unused:
        raise ConfigError(
            f"{checkpoint.path}: tensor {unused[0]} ({len(unused)} in all) has no place in a "
            f"{checkpoint.config.architecture} decoder of this configuration; use a plain checkpoint, with adapters merged"
        )


def _split(weights: list[Weight], itemsize: int, limit: int) -> list[list[Weight]]:
    shards: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        if shards[-1] and filled + _size(weight, itemsize) > limit:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += _size(weight, itemsize)
    return shards


def _size(weight: Weight, itemsize: int) -> int:
    return math.prod(weight.shape) * itemsize


def _write_header(output: BinaryIO, weights: list[Weight], dtype: torch.dtype) -> None:
    """Write a safetensors header: its length as 8 bytes, then JSON padded with spaces.

    The library's own writer wants all tensors of a file in memory; the format needs only their shapes beforehand.
    """
    header, offset = {}, 0
    for weight in weights:
        end = offset + _size(weight, dtype.itemsize)
        header[weight.name] = {"dtype": DTYPE_NAMES[dtype], "shape": weight.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    output.write(len(text).to_bytes(8, "little") + text)


def _write_tensor(output: BinaryIO, tensor: Tensor) -> None:
    output.write(tensor.contiguous().view(torch.uint8).numpy().data)
