"""Fuses weights of an engine from checkpoint tensors, divides them among ranks (core/ranks.py says by what) and writes
safetensors shards, with one tensor in memory at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from kvseek.core.config import GROUPED, WEIGHT_GROUP, EngineConfig, ModelConfig
from kvseek.core.errors import ConfigError
from kvseek.core.ranks import first_kv_head, rank_model, vocabulary_rows
from kvseek.core.weight_only import INT8_GROUPS, NONE, NOT_FINITE, is_quantised, layout, number_format, quantise
from kvseek.engine.model.weights import EXPERTS, Weight, index_file, list_weights, source_shape

from .checkpoint import Checkpoint
from .files import FLOAT_TYPES

NONE_MEASURED: Mapping[str, Tensor] = {}
SHARD_BYTES = 4 << 30  # most bytes of a shard, unless a single tensor is larger
HEADER_ALIGNMENT = 64  # bytes of a cache line, because tensors are read in place from the mapped file
OTHER_TYPE = {True: "is not quantised", False: "is of another type"}  # of a checkpoint that states it, or a GGUF file
STORED_NAMES = {  # safetensors' own names
    **{dtype: name for name, dtype in FLOAT_TYPES.items()},
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True)
class Stored:
    """One tensor of a shard: a weight in the engine's dtype, a quantised weight, or the scales of a quantised weight."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightFormat:
    """The format of stored weights: `dtype`, or `precision`, unless it is "none", for those that is_quantised accepts."""

    dtype: torch.dtype
    precision: str = NONE
    quantize_lm_head: bool = False
    weight_group: int = WEIGHT_GROUP

    @classmethod
    def of(cls, config: EngineConfig) -> WeightFormat:
        """Return the format of an engine's weights."""
        dtype = getattr(torch, config.dtype)
        return cls(dtype, config.weight_only_precision, config.quantize_lm_head, config.weight_group)

    def stored(self, weight: Weight) -> tuple[Stored, ...]:
        """List the tensors that a weight is stored as."""
        own = self.number_format(weight.name)
        if own == NONE:
            return (Stored(weight.name, weight.shape, self.dtype),)
        numbers, scale = layout(weight.shape, own, self.weight_group)
        return Stored(weight.name, *numbers), Stored(f"{weight.name}_scale", *scale)

    def convert(self, tensor: Tensor, name: str, importance: Tensor | None = None) -> tuple[Tensor, ...]:
        """Convert a weight to the tensors of `stored`; raises ConfigError on a value that they cannot hold.

        `importance` is that of `quantise`; None: all inputs have the same.
        """
        own = self.number_format(name)
        if own == NONE:
            return (_convert(tensor, name, self.dtype),)
        try:
            return quantise(tensor, own, self.weight_group, torch.ones(1) if importance is None else importance)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    def number_format(self, name: str) -> str:
        """The format of a weight, as core/weight_only.py names it."""
        return number_format(name, self.precision, quantize_lm_head=self.quantize_lm_head)


def write_weights(
    checkpoint: Checkpoint,
    directory: Path,
    weight_format: WeightFormat,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
    tp_size: int = 1,
    importance: Mapping[str, Tensor] = NONE_MEASURED,
) -> None:
    """Write rank{r}-*.safetensors and their index into `directory` for each rank r, holding one fused tensor at a time.

    Parameters
    ----------
    shard_bytes : int
        Most bytes of all ranks' tensors in the shards of a number, if no single weight is larger.
    tp_size : int
        Ranks among which the weights are divided (core/ranks.py). Weights of 8 bits are those of one rank.
    progress : callable, optional
        Called with the bytes just written after every tensor.
    importance : mapping of str to Tensor
        That of `quantise`, by the names of weights.

    Raises
    ------
    ConfigError
        If a tensor is missing, has another shape than the configuration says, or has no place in the decoder, or if a
        value is too large for its dtype.
    """
    model, ranks = checkpoint.config, range(tp_size)
    weights = list_weights(model, quantize_lm_head=weight_format.quantize_lm_head)
    check_tensors(checkpoint, weights)
    shards = _split(weights, weight_format, shard_bytes)
    weight_maps: list[dict[str, str]] = [{} for _ in ranks]
    for number, shard in enumerate(shards, start=1):
        files = [f"rank{rank}-{number:05}-of-{len(shards):05}.safetensors" for rank in ranks]
        whole = [stored for weight in shard for stored in weight_format.stored(weight)]
        tensors = [replace(stored, shape=rank_shape(stored.name, stored.shape, model, tp_size)) for stored in whole]
        with ExitStack() as opened:
            outputs = [opened.enter_context((directory / file).open("wb")) for file in files]
            for rank in ranks:
                _write_header(outputs[rank], tensors)
                weight_maps[rank] |= dict.fromkeys((stored.name for stored in tensors), files[rank])
            for weight in shard:
                converted = _converted(checkpoint, weight, weight_format, importance.get(weight.name))
                for stored, tensor in zip(weight_format.stored(weight), converted, strict=True):
                    for rank in ranks:
                        _write_tensor(outputs[rank], rank_part(stored.name, tensor, model, tp_size, rank))
                if progress is not None:
                    progress(_size(weight, weight_format))
    size = total_size(model, weight_format, tp_size) // tp_size
    for rank in ranks:
        index = {"metadata": {"total_size": size}, "weight_map": weight_maps[rank]}
        (directory / index_file(rank)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class OwnNumbers:
    """How an engine computes with a checkpoint's own numbers.

    Attributes
    ----------
    precision : str
        Its weight_only_precision; "none": it rounds what the numbers mean to its dtype.
    head : bool
        Its quantize_lm_head.
    group : int
        Its weight_group, at most.
    why : str
        Why precision is "none": a weight, and what it has.
    stated : bool
        Whether quantization_config states the quantisation. An engine has these numbers then, or their values.
    """

    precision: str
    head: bool = False
    group: int = WEIGHT_GROUP
    why: str = ""
    stated: bool = True


def own_numbers(checkpoint: Checkpoint, device: str) -> OwnNumbers | None:
    """Find how an engine computes with a quantised checkpoint's own numbers.

    Every matrix of the layers must be of one format that the device multiplies. With 4 bits embedding and head may be of any; the
    latter stays as it is if it is of GGUF's Q8_0. Groups of several sizes are divided into the smallest of them.

    Returns
    -------
    OwnNumbers or None
        None: the checkpoint states no quantisation, and has no blocks of GGUF that an engine may keep.

    Raises
    ------
    ConfigError
        If a weight is of a format that is not supported.
    """
    weights = [weight for weight in list_weights(checkpoint.config) if weight.name.endswith(".weight")]
    found = {name: checkpoint.quantised(name) for weight in weights for name in weight.sources}
    stated = checkpoint.quantised_by is not None
    if not stated and not any(found.values()):
        return None
    layers = [name for weight in weights if is_quantised(weight.name) for name in weight.sources]
    first, why = found[layers[0]], ""
    precision = None if first is None else first.precision
    for name in layers:
        own = found[name]
        same = own is None or own.precision in (precision, None)
        why = (
            OTHER_TYPE[stated]
            if own is None
            else own.expanded(device)
            if same
            else f"has other numbers than {layers[0]}"
        )
        if why:
            why = f"{name} {why}"
            break
    others = [name for weight in weights if not is_quantised(weight.name) for name in weight.sources if found[name]]
    if others and not why and precision not in GROUPED:
        why = f"{others[0]} is quantised, too"
    if why or precision is None:
        return OwnNumbers(NONE, why=why, stated=stated)
    head = found[weights[0 if checkpoint.config.tie_word_embeddings else -1].sources[0]]
    group = min(own.group for name in layers if (own := found[name]) is not None)
    return OwnNumbers(precision, head is not None and head.precision == INT8_GROUPS, group, stated=stated)


def weight_reader(checkpoint: Checkpoint, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Make a function that takes a name of `list_weights`, and reads and fuses that weight, in `dtype`, on the CPU.

    Raises
    ------
    ConfigError
        If a tensor has no place in the decoder; the function raises as `write_weights` does.
    """
    weights = {weight.name: weight for weight in list_weights(checkpoint.config)}
    check_tensors(checkpoint, list(weights.values()))
    return lambda name: _convert(fuse(checkpoint, weights[name]), name, dtype)


def total_size(model: ModelConfig, weight_format: WeightFormat, tp_size: int = 1) -> int:
    """Return the bytes of all weights of an engine, in all ranks together."""
    weights = list_weights(model, quantize_lm_head=weight_format.quantize_lm_head)
    stored = [one for weight in weights for one in weight_format.stored(weight)]
    parts = [replace(one, shape=rank_shape(one.name, one.shape, model, tp_size)) for one in stored]
    return tp_size * sum(part.nbytes for part in parts)


def fuse(checkpoint: Checkpoint, weight: Weight) -> Tensor:
    """Read and concatenate the sources of a weight, in the widest of their types if the types differ."""
    parts = [checkpoint.tensor(name) for name in weight.sources]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _converted(
    checkpoint: Checkpoint, weight: Weight, weight_format: WeightFormat, importance: Tensor | None
) -> tuple[Tensor, ...]:
    """Read a weight as the tensors that it is stored as: a quantised one with its own numbers, if they are of the format."""
    wanted = weight_format.number_format(weight.name)
    if wanted != NONE:
        parts = [own for name in weight.sources if (own := checkpoint.quantised(name)) and own.precision == wanted]
        if len(parts) == len(weight.sources):
            numbers, scales = zip(*(part.as_stored(weight_format.weight_group) for part in parts), strict=True)
            return torch.cat(numbers), torch.cat(scales)
    return weight_format.convert(fuse(checkpoint, weight), weight.name, importance)


def _convert(tensor: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Round to `dtype`; raises ConfigError on a value beyond its range, as may happen with float16."""
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(tensor.dtype).max:
        least, most = tensor.aminmax()  # only the extremes: abs() of all would need memory for a second tensor
        if (largest := max(-least.item(), most.item())) > limit:
            if largest == math.inf:
                raise ConfigError(f"{name} holds infinity: must be finite; {NOT_FINITE}")
            wider = "bfloat16" if dtype is torch.float16 and largest <= torch.finfo(torch.bfloat16).max else "float32"
            raise ConfigError(
                f"{name} holds {largest:.6g}: {str(dtype).removeprefix('torch.')} holds at most {limit:.6g}; build with "
                f"--dtype {wider}"
            )
    return tensor.to(dtype)


def check_tensors(checkpoint: Checkpoint, weights: list[Weight]) -> None:
    """Raise ConfigError unless the checkpoint holds the sources of the weights, as configured, and nothing else.

    Only headers are read, so that a fault in the last tensor is found before the first tensor is written.
    """
    names = [source for weight in weights for source in weight.sources]
    unused = sorted(checkpoint.unused({*names, "lm_head.weight"}))  # a tied checkpoint may repeat the embedding
    if unused:
        raise ConfigError(
            f"{checkpoint.path}: tensor {unused[0]} ({len(unused)} in all) has no place in a "
            f"{checkpoint.config.architecture} decoder of this configuration; use a plain checkpoint, with adapters merged"
        )
    for name in names:
        header, expected = checkpoint.header(name), source_shape(checkpoint.config, name)
        if header.shape != expected:
            raise ConfigError(
                f"{header.place}: shape {header.shape}: must be {expected} by the model's configuration; config and "
                "weights are of different models"
            )


def _split(weights: list[Weight], weight_format: WeightFormat, limit: int) -> list[list[Weight]]:
    shards: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        size = _size(weight, weight_format)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += size
    return shards


def _size(weight: Weight, weight_format: WeightFormat) -> int:
    return sum(stored.nbytes for stored in weight_format.stored(weight))


def _write_header(output: BinaryIO, tensors: list[Stored]) -> None:
    """Write a safetensors header: its length as 8 bytes, then JSON padded with spaces.

    The library's own writer needs all tensors of a file in memory, while the format only needs their shapes beforehand.
    """
    header, offset = {}, 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {
            "dtype": STORED_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    output.write(len(text).to_bytes(8, "little") + text)


def _write_tensor(output: BinaryIO, tensor: Tensor) -> None:
    output.write(tensor.contiguous().view(torch.uint8).numpy().data)


Shape = tuple[int, ...]


def rank_shape(name: str, shape: Shape, model: ModelConfig, tp_size: int) -> Shape:
    """Return the shape of each rank's part of a stored tensor, whose shape in an engine of one rank is `shape`."""
    return tuple(rank_part(name, torch.empty(shape, device="meta"), model, tp_size, 0).shape)


def rank_part(name: str, tensor: Tensor, model: ModelConfig, tp_size: int, rank: int) -> Tensor:
    """Cut a rank's part out of a stored tensor.

    Biases of products whose outputs the ranks sum up are rank 0's, zeros on the others. Rows beyond the vocabulary are zeros.
    """
    if tp_size == 1:
        return tensor
    part, kind = _kind(name)
    if part in ("embed", "lm_head"):
        rows = vocabulary_rows(model, tp_size)
        own = tensor[rank * rows : (rank + 1) * rows]
        return torch.cat((own, own.new_zeros(rows - own.shape[0], *own.shape[1:])))
    if part in ("o", "down"):
        if kind == "bias":
            return tensor if rank == 0 else torch.zeros_like(tensor)
        divided = tensor.ndim > 1  # scales of rows are not
        return tensor.tensor_split(tp_size, dim=1)[rank] if divided else tensor
    if part == "gate_up":  # gates, then ups, of each expert
        experts = model.experts.num_experts if model.experts is not None and f".{EXPERTS}." in name else 1
        halves = tensor.reshape(experts, 2, tp_size, -1, *tensor.shape[1:])
        return halves[:, :, rank].flatten(0, 2)
    if part == "qkv":
        return _heads(tensor, model, tp_size, rank)
    return tensor


def _heads(tensor: Tensor, model: ModelConfig, tp_size: int, rank: int) -> Tensor:
    """Cut a rank's query, key and value heads out of the rows of qkv."""
    own, dim = rank_model(model, tp_size), model.head_dim
    queries, keys, values = torch.split(
        tensor, [heads * dim for heads in (model.num_heads, *2 * (model.num_kv_heads,))]
    )
    first = first_kv_head(model, tp_size, rank) * dim
    parts = [part[first : first + own.num_kv_heads * dim] for part in (keys, values)]
    return torch.cat((queries.tensor_split(tp_size)[rank], *parts))


def _kind(name: str) -> tuple[str, str]:
    """Split the name of a stored tensor: what it is a part of, and `weight`, `bias` or `weight_scale`."""
    *_, part, kind = name.split(".")
    return part, kind
