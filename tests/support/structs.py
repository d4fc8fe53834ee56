"""Structs of C++ sources beside the ctypes classes that mirror them."""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path

import kvseek.engine
import kvseek.plugins

KINDS = {
    "long long": ctypes.c_int64,
    "int64_t": ctypes.c_int64,
    "int": ctypes.c_int32,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def mirrors() -> list[type[ctypes.Structure]]:
    """Every ctypes.Structure of the engine and the plugins."""
    names = [
        module.name
        for package in (kvseek.engine, kvseek.plugins)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    return [value for value in values if isinstance(value, type) and issubclass(value, ctypes.Structure)]


def fields_of(struct_name: str, paths: Sequence[Path]) -> list[tuple[str, type]]:
    """Fields of a struct that one of the sources defines, as a ctypes.Structure lists them."""
    bodies = [re.findall(rf"struct {struct_name} {{(.*?)\n}};", path.read_text(), re.DOTALL) for path in paths]
    (body,) = [body for found in bodies for body in found]
    fields: list[tuple[str, type]] = []
    for statement in re.sub(r"//[^\n]*", "", body).split(";")[:-1]:
        field = re.fullmatch(r"\s*(?:const )?([\w ]+?)(\*?)\s+(\w+(?:, \w+)*)", statement)
        assert field, f"{struct_name}: {statement.strip()!r} is none of {', '.join(KINDS)} or a pointer"
        kind, pointer, names = field.groups()
        fields += [(name, ctypes.c_void_p if pointer else KINDS[kind]) for name in names.split(", ")]
    return fields
