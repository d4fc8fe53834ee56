"""Structs of C++ sources as ctypes classes: what a kernel takes is declared once, in its source, with a comment on each field."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

from kvseek.core.errors import KernelError

ROOT = Path(__file__).parent.parent  # sources are named from here, as their #include lines name each other
NUMBERS = {
    "int": ctypes.c_int32,
    "int32_t": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "long long": ctypes.c_int64,
    "unsigned long long": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
FIELD = re.compile(
    r"(?:const )?(?P<type>[\w:]+(?: \w+)*?)(?P<pointer>\*?) (?P<names>\w+(?:, \w+)*)(?:\[(?P<length>\d+)\])?;"
)


@cache
def c_struct(source: str, name: str, *members: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """Make the ctypes class of a struct: its fields in order, and no attribute besides, so that a misspelt one is an error.

    A line of the struct declares pointers, numbers of NUMBERS, arrays of a given length of these, or a struct:
    ``const Row* rows;``, ``int kv_heads, tokens;``, ``void* outputs[32];``. Only a line of numbers may name several fields.
    Anything else is refused, preprocessor lines too, because Python could not know how the compiler lays it out.

    Parameters
    ----------
    source : str
        File that defines the struct once, relative to the folder of kernels/ and plugins/.
    members : classes
        Of the structs that are fields of this one.

    Raises
    ------
    KernelError
        If the file does not define the struct, or declares a field that is not understood; the message names file and line.
    """
    try:
        text = (ROOT / source).read_text(encoding="utf-8")
    except OSError as error:
        raise KernelError(f"{source}: {error.strerror}: kvseek's own files are missing; install it again") from None
    found = list(re.finditer(rf"^struct {name} {{\n(.*?)^}};$", text, re.MULTILINE | re.DOTALL))
    if len(found) != 1:
        raise KernelError(f"{source}: defines struct {name} {len(found)} times: must be once, from the first column on")
    first = text.count("\n", 0, found[0].start(1)) + 1
    types: dict[str, Any] = NUMBERS | {member.__name__: member for member in members}
    fields: list[tuple[str, Any]] = []
    for number, line in enumerate(found[0][1].splitlines(), first):
        declaration = line.partition("//")[0].strip()
        if declaration:
            fields += _fields(declaration, types, f"{source}, line {number}")

    class Struct(ctypes.Structure):
        __slots__ = ()
        _fields_ = fields

    Struct.__name__ = Struct.__qualname__ = name
    return Struct


def _fields(declaration: str, types: dict[str, Any], where: str) -> list[tuple[str, Any]]:
    """Understand one line of a struct; raises KernelError, which says `where` the line is, if that cannot be."""
    field = FIELD.fullmatch(declaration)
    kind = field and (ctypes.c_void_p if field["pointer"] else types.get(field["type"]))
    if field is None or kind is None:
        limit = f"a pointer, or a number or struct of {', '.join(types)}, on a line of its own"
        raise KernelError(f"{where}: {declaration!r}: must be {limit}; declare it so, or teach kernels/structs.py")
    names = field["names"].split(", ")
    if len(names) > 1 and (field["pointer"] or field["length"]):
        raise KernelError(f"{where}: {declaration!r}: pointers and arrays must be on lines of their own")
    return [(name, kind * int(field["length"]) if field["length"] else kind) for name in names]
