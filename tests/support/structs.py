"""Structs of C++ sources beside the ctypes classes that mirror them."""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import re
from collections.abc import Sequence, Set
from pathlib import Path

import kvseek.engine
import kvseek.kernels
import kvseek.plugins

KINDS = {
    "long long": ctypes.c_int64,
    "unsigned long long": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
    "int": ctypes.c_int32,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def mirrors() -> list[type[ctypes.Structure]]:
    """Every ctypes.Structure of the engine, the kernels and the plugins."""
    names = [
        module.name
        for package in (kvseek.engine, kvseek.kernels, kvseek.plugins)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    return [value for value in values if isinstance(value, type) and issubclass(value, ctypes.Structure)]


def mirror_of(struct_name: str) -> type[ctypes.Structure]:
    """The only ctypes.Structure of a name."""
    (found,) = {mirror for mirror in mirrors() if mirror.__name__ == struct_name}
    return found


def compiled_part(text: str, macros: Set[str]) -> str:
    """Leave out what a C++ source has between #if, #ifdef or #ifndef of a macro, #else and #endif and does not compile.

    Only macros of a method's options are asked for: #if with more than a name, and #elif, stay as they are, and none is nested.
    """
    option = re.compile(r"^#(if|ifdef|ifndef) (\w+)\n(.*?)^(?:#else\n(.*?)^)?#endif$", re.DOTALL | re.MULTILINE)

    def kept(found: re.Match[str]) -> str:
        kind, name, first, second = found.groups()
        return first if (name in macros) == (kind != "ifndef") else second or ""

    return option.sub(kept, text)


def fields_of(struct_name: str, paths: Sequence[Path], macros: Set[str] = frozenset()) -> list[tuple[str, type]]:
    """Fields of a struct that one of the sources defines, as a ctypes.Structure lists them; a field may be another struct."""
    texts = [compiled_part(path.read_text(), macros) for path in paths]
    bodies = [re.findall(rf"struct {struct_name} {{(.*?)\n}};", text, re.DOTALL) for text in texts]
    (body,) = [body for found in bodies for body in found]
    fields: list[tuple[str, type]] = []
    for statement in re.sub(r"//[^\n]*", "", body).split(";")[:-1]:
        field = re.fullmatch(r"\s*(?:const )?([\w ]+?)(\*?)\s+(\w+(?:, \w+)*)(?:\[(\d+)\])?", statement)
        assert field, f"{struct_name}: {statement.strip()!r} is none of {', '.join(KINDS)} or a pointer"
        kind, pointer, names, length = field.groups()
        found: type = ctypes.c_void_p if pointer else KINDS.get(kind) or mirror_of(kind)
        if length:
            found = found * int(length)
        fields += [(name, found) for name in names.split(", ")]
    return fields
