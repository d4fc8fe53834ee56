"""The fields of an attention layer of a TensorRT plan, and their conversion to and from TensorRT's plugin fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvseek.core.errors import ConfigError, require

from .tensors import ELEMENTS

REBUILD = "build the engine again with this kvseek"
NUMBERS = ("layer", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class AttentionFields:
    """Fields of an attention layer: its number, and the shape and dtype of its queries, keys and values.

    Raises
    ------
    ConfigError
        If a field is out of range.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name in NUMBERS:
            least = 0 if name == "layer" else 1
            value = getattr(self, name)
            require(value >= least, f"attention plugin's {name}", value, f">= {least}", REBUILD)
        divides, limit = self.num_heads % self.num_kv_heads == 0, f"a divisor of num_heads = {self.num_heads}"
        require(divides, "attention plugin's num_kv_heads", self.num_kv_heads, limit, REBUILD)
        require(self.dtype in ELEMENTS, "attention plugin's dtype", self.dtype, f"one of {tuple(ELEMENTS)}", REBUILD)

    @classmethod
    def read(cls, api: Any, collection: Iterable[Any]) -> AttentionFields:
        """Read a PluginFieldCollection of `api`; raises ConfigError that names a missing, unknown or malformed field."""
        found = {field.name: field for field in collection}
        names = [field.name for field in dataclasses.fields(cls)]
        if wrong := sorted(set(found) ^ set(names)):
            what = "unknown" if wrong[0] in found else "missing"
            raise ConfigError(f"attention plugin's {wrong[0]} is {what}: its fields are {', '.join(names)}; {REBUILD}")
        values: dict[str, Any] = {name: _value(api, found[name]) for name in names}
        return cls(**values)

    def packed(self, api: Any) -> PackedFields:
        """Convert to plugin fields of `api`: numbers as int32, the dtype's name as characters."""
        return _pack(api, {name: [getattr(self, name)] for name in NUMBERS}, self.dtype)


@dataclass(frozen=True)
class PackedFields:
    """A PluginFieldCollection with the fields and arrays that it refers to.

    These must be kept as long as the collection is used, because a collection copies only addresses and keeps nothing alive.
    """

    collection: Any
    owners: tuple[Any, ...]


def field_names(api: Any) -> PackedFields:
    """Make the fields that a creator announces, without values."""
    return _pack(api, {name: [] for name in NUMBERS}, "")


def _pack(api: Any, numbers: dict[str, list[int]], dtype: str) -> PackedFields:
    kinds, text = api.PluginFieldType, np.array(list(dtype.encode()), np.int8)
    arrays = {name: np.array(values, np.int32) for name, values in numbers.items()}
    fields = [api.PluginField(name, values, kinds.INT32) for name, values in arrays.items()]
    fields.append(api.PluginField("dtype", text, kinds.CHAR))
    return PackedFields(api.PluginFieldCollection(fields), (*fields, *arrays.values(), text))


def _value(api: Any, field: Any) -> int | str:
    """Read a plugin field's number or text."""
    number = field.name in NUMBERS
    kind = api.PluginFieldType.INT32 if number else api.PluginFieldType.CHAR
    name = f"attention plugin's {field.name}"
    require(field.type == kind, f"type of {name}", field.type.name, kind.name, REBUILD)
    if not number:
        return bytes(field.data).decode(errors="replace")
    require(field.size == 1, f"size of {name}", field.size, "1", REBUILD)
    return int(field.data[0])
