"""Fuses weights of an engine from checkpoint tensors, divides them among ranks (core/ranks.py says by what) and writes
safetensors shards, with one tensor in memory at a time.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from kvseek.core.config import GROUPED, WEIGHT_GROUP, EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.core.model_config import ModelConfig
from kvseek.core.ranks import first_kv_head, rank_model, vocabulary_rows
from kvseek.core.weight_only import (
    HEAD,
    INT4,
    INT8_ASYMMETRIC,
    NONE,
    NOT_FINITE,
    is_quantised,
    layout,
    number_format,
    quantise,
)
from kvseek.engine.model.weights import EXPERTS, Weight, index_file, list_weights, source_shape, stored_dtype

from .checkpoint import Checkpoint
from .files import FLOAT_TYPES, naming
from .quantised import NarrowWeight

NONE_MEASURED: Mapping[str, Tensor] = {}
SHARD_BYTES = 4 << 30  # most bytes of a shard, unless a single tensor is larger
HEADER_ALIGNMENT = 64  # bytes of a cache line, because tensors are read in place from the mapped file
OTHER_TYPE = {True: "is not quantised", False: "is of another type"}  # of a checkpoint that states it, or a GGUF file
OTHER = "has other numbers than"
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
    """The format of stored weights: `dtype`, or `precision`, unless it is "none", for those that is_quantised accepts.

    `weight_formats` are those of EngineConfig.
    """

    dtype: torch.dtype
    precision: str = NONE
    quantize_lm_head: bool = False
    weight_group: int = WEIGHT_GROUP
    weight_formats: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: EngineConfig) -> WeightFormat:
        """Return the format of an engine's weights."""
        dtype, own = getattr(torch, config.dtype), config.weight_formats
        return cls(dtype, config.weight_only_precision, config.quantize_lm_head, config.weight_group, own)

    def stored(self, weight: Weight) -> tuple[Stored, ...]:
        """List the tensors that a weight is stored as."""
        own = self.number_format(weight.name)
        if own == NONE:
            return (Stored(weight.name, weight.shape, stored_dtype(weight.name, self.dtype)),)
        numbers, scale = layout(weight.shape, own, self.weight_group)
        return Stored(weight.name, *numbers), Stored(f"{weight.name}_scale", *scale)

    def convert(self, tensor: Tensor, name: str, importance: Tensor | None = None) -> tuple[Tensor, ...]:
        """Convert a weight to the tensors of `stored`; raises ConfigError on a value that they cannot hold.

        `importance` is that of `quantise`; None: all inputs have the same.
        """
        own = self.number_format(name)
        if own == NONE:
            return (_convert(tensor, name, stored_dtype(name, self.dtype)),)
        try:
            return quantise(tensor, own, self.weight_group, torch.ones(1) if importance is None else importance)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    def number_format(self, name: str) -> str:
        """The format of a weight, as core/weight_only.py names it."""
        head, own = self.quantize_lm_head, self.weight_formats
        return number_format(name, self.precision, quantize_lm_head=head, weight_formats=own)


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
                with naming(checkpoint.path):
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
    formats : mapping of str to str
        Its weight_formats.
    why : str
        Why matrices of the layers, or all of them, are rounded: the first weight, and what it has.
    stated : bool
        Whether quantization_config states the quantisation. An engine has these numbers then, or their values.
    """

    precision: str
    head: bool = False
    group: int = WEIGHT_GROUP
    formats: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    stated: bool = True

    def describe(self, config: EngineConfig, quantised_by: str | None) -> str:
        """Say what becomes of the numbers in an engine."""
        precision = config.weight_only_precision
        by = f"quantised by {quantised_by}" if self.stated else "of the GGUF file's blocks"
        if precision == NONE or precision != self.precision:
            again = f"quantised again, to {precision}"
            rounded = f"rounded to {config.dtype}{f': {self.why}' if self.why else ''}"
            return f"weights {by}: {rounded if precision == NONE else again}"
        kept = f"kept as they are, {precision}{f' in groups of {config.weight_group}' * (precision == INT4)}"
        for name, count in Counter(self.formats.values()).items():
            rounded = f"in {config.dtype}: {self.why}"
            kept += f"; {count} matrices {rounded if name == NONE else name}"
        return f"weights {by}: {kept}"


def own_numbers(checkpoint: Checkpoint, device: str) -> OwnNumbers | None:
    """Find how an engine computes with a quantised checkpoint's own numbers.

    A matrix is kept if the device multiplies its numbers, and all that are fused in it have the same or fit into
    INT8_ASYMMETRIC; else it is rounded. On a GPU all experts must be kept, or all matrices are rounded. The engine's
    precision is the one with which the layers take the fewest bytes. The embedding may be of any. Groups of several sizes are
    divided into the smallest of them.

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
    layers = [weight for weight in weights if is_quantised(weight.name)]
    kept = {weight: _precisions(weight, found, device, stated) for weight in layers}
    choices = {}
    for precision in dict.fromkeys(one for formats, _ in kept.values() for one in formats):
        chosen = {weight: _chosen(formats, precision) for weight, (formats, _) in kept.items()}
        of_experts = {one for weight, one in chosen.items() if device == "cuda" and f".{EXPERTS}." in weight.name}
        if NONE in of_experts:
            continue  # kernels multiply all experts with their own numbers, or none
        choices[precision] = (sum(_narrow_bytes(weight, one) for weight, one in chosen.items()), chosen)
    why = next((why for _, why in kept.values() if why), "")
    if not choices:
        why = why or f"{layers[-1].sources[0]} has other numbers than experts before it"
        return OwnNumbers(NONE, why=why, stated=stated)
    precision = min(choices, key=lambda one: choices[one][0])
    own = {weight.name.removesuffix(".weight"): one for weight, one in choices[precision][1].items()}
    formats = {name: one for name, one in own.items() if one != precision}
    head = weights[0 if checkpoint.config.tie_word_embeddings else -1]
    of_head, _ = _precisions(head, found, device, stated)
    usual = number_format(HEAD, precision, quantize_lm_head=True)
    keeps_head = precision in (*GROUPED, "int8") and _chosen(of_head, usual) != NONE
    if keeps_head and usual not in of_head:
        formats[HEAD.removesuffix(".weight")] = INT8_ASYMMETRIC
    group = min((one.group for name in found if (one := found[name]) and INT4 in one.precisions), default=WEIGHT_GROUP)
    return OwnNumbers(precision, keeps_head, group, formats, why if NONE in formats.values() else "", stated)


Found = Mapping[str, NarrowWeight | None]


def _precisions(weight: Weight, found: Found, device: str, stated: bool) -> tuple[tuple[str, ...], str]:
    """Formats that keep all numbers of a fused weight on a device; if there are none, why."""
    parts = {name: found[name] for name in weight.sources}
    first, why, formats = weight.sources[0], "", []
    for name, part in parts.items():
        if part is None:
            return (), f"{name} {OTHER_TYPE[stated]}"
        if not part.precisions:
            return (), f"{name} {part.why}"
    narrow = {name: part for name, part in parts.items() if part is not None}
    for precision in narrow[first].precisions:
        faults = (
            f"{name} {fault}"
            for name, part in narrow.items()
            if (fault := part.expanded(precision, device) if precision in part.precisions else f"{OTHER} {first}")
        )
        fault = next(faults, "")
        formats += [] if fault else [precision]
        why = why or fault
    return tuple(formats), "" if formats else why


def _chosen(formats: tuple[str, ...], precision: str) -> str:
    """The format of a matrix that these formats keep, in an engine of a precision."""
    asymmetric = INT8_ASYMMETRIC in formats and precision in GROUPED
    return precision if precision in formats else INT8_ASYMMETRIC if asymmetric else NONE


def _narrow_bytes(weight: Weight, precision: str) -> int:
    parts = WeightFormat(torch.bfloat16, precision).stored(weight)
    return sum(part.nbytes for part in parts)


def weight_reader(checkpoint: Checkpoint, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Make a function that takes a name of `list_weights`, and reads and fuses that weight, in `dtype`, on the CPU.

    Raises
    ------
    ConfigError
        If a tensor has no place in the decoder; the function raises as `write_weights` does.
    """
    weights = {weight.name: weight for weight in list_weights(checkpoint.config)}
    check_tensors(checkpoint, list(weights.values()))
    return lambda name: _convert(fuse(checkpoint, weights[name]), name, stored_dtype(name, dtype))


def total_size(model: ModelConfig, weight_format: WeightFormat, tp_size: int = 1) -> int:
    """Return the bytes of all weights of an engine, in all ranks together."""
    weights = list_weights(model, quantize_lm_head=weight_format.quantize_lm_head)
    stored = [one for weight in weights for one in weight_format.stored(weight)]
    parts = [replace(one, shape=rank_shape(one.name, one.shape, model, tp_size)) for one in stored]
    return tp_size * sum(part.nbytes for part in parts)


def fuse(checkpoint: Checkpoint, weight: Weight) -> Tensor:
    """Read and concatenate the sources of a weight, in the widest of their types if the types differ."""
    parts = [checkpoint.tensor(name) for name in weight.sources]
    return _ordered(parts[0] if len(parts) == 1 else torch.cat(parts), weight).view(weight.shape)


def _ordered(rows: Tensor, weight: Weight) -> Tensor:
    return rows if weight.order is None else rows[weight.order]


def _converted(
    checkpoint: Checkpoint, weight: Weight, weight_format: WeightFormat, importance: Tensor | None
) -> tuple[Tensor, ...]:
    """Read a weight as the tensors that it is stored as: a quantised one with its own numbers, if they are of the format."""
    wanted = weight_format.number_format(weight.name)
    if wanted != NONE:
        parts = [own for name in weight.sources if (own := checkpoint.quantised(name)) and wanted in own.precisions]
        if len(parts) == len(weight.sources):
            numbers, scales = zip(*(part.as_stored(wanted, weight_format.weight_group) for part in parts), strict=True)
            return _ordered(torch.cat(numbers), weight), _ordered(torch.cat(scales), weight)
    return weight_format.convert(fuse(checkpoint, weight), weight.name, importance)


def _convert(tensor: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Round to `dtype`; raises ConfigError on a value beyond its range, as may happen with float16."""
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(tensor.dtype).max:
        least, most = tensor.aminmax()  # only the extremes: abs() of all would need memory for a second tensor
        if not (largest := max(-least.item(), most.item())) <= limit:
            if not largest < math.inf:
                raise ConfigError(f"{name} holds infinity or NaN: must be finite; {NOT_FINITE}")
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
    if part in ("qkvz", "conv", "ba", "a_log", "dt"):
        return _delta_heads(tensor, part, model, tp_size, rank)
    return tensor


def _delta_heads(tensor: Tensor, part: str, model: ModelConfig, tp_size: int, rank: int) -> Tensor:
    """Cut a rank's heads out of the rows of a Gated DeltaNet layer's weight."""
    states = model.delta_net
    assert states is not None, "the layer is one"
    heads = states.num_value_heads
    sizes = {"ba": [heads, heads], "a_log": [heads], "dt": [heads]}.get(part, [states.keys, states.keys, states.values])
    sizes = [*sizes, states.values] if part == "qkvz" else sizes
    return torch.cat([each.tensor_split(tp_size)[rank] for each in torch.split(tensor, sizes)])


def _heads(tensor: Tensor, model: ModelConfig, tp_size: int, rank: int) -> Tensor:
    """Cut a rank's query, key and value heads, and their gates, out of the rows of qkv."""
    own, dim, gates = rank_model(model, tp_size), model.head_dim, model.num_heads * model.gated_attention
    queries, keys, values, gated = torch.split(
        tensor, [heads * dim for heads in (model.num_heads, *2 * (model.num_kv_heads,), gates)]
    )
    first = first_kv_head(model, tp_size, rank) * dim
    parts = [part[first : first + own.num_kv_heads * dim] for part in (keys, values)]
    return torch.cat((queries.tensor_split(tp_size)[rank], *parts, gated.tensor_split(tp_size)[rank]))


def _kind(name: str) -> tuple[str, str]:
    """Split the name of a stored tensor: what it is a part of, and `weight`, `bias` or `weight_scale`."""
    *_, part, kind = name.split(".")
    return part, kind
