"""What sources say of structs that Python takes from them, and the compiler's word on how these lie in memory."""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Set

from kvseek.kernels.structs import c_struct
from kvseek.plugins.sources import package_roots

(ROOT,) = package_roots()
NVRTC_OFFSET = "__INTADDR__(&(({}*)0)->{})"
# A kernel's name and the type of its arguments.
KERNEL = re.compile(r'extern "C" __global__[^{;]*?\b(kvseek_\w+)\(\s*const __grid_constant__ ([\w:]+) a\)')


def declared_structs() -> dict[str, dict[str, type[ctypes.Structure]]]:
    """Every class that a module makes of a struct, by the struct's source and its name with all namespaces."""
    found: dict[str, dict[str, type[ctypes.Structure]]] = {}
    call = re.compile(r'c_struct\("([^"]+)", "(\w+)"(?:, (\w+))?\)')
    for room in ("engine", "kernels", "plugins"):
        for path in (ROOT / room).rglob("*.py"):
            for source, name, member in call.findall(path.read_text(encoding="utf-8")):
                module = ".".join(("kvseek", *path.relative_to(ROOT).with_suffix("").parts))
                members = [getattr(importlib.import_module(module), member)] if member else []
                found.setdefault(source, {})[_qualified(source, name)] = c_struct(source, name, *members)
    return found


def _qualified(source: str, name: str) -> str:
    before = (ROOT / source).read_text(encoding="utf-8").partition(f"\nstruct {name} {{\n")[0]
    spaces: list[str] = []
    for begun in re.findall(r"^(?:namespace (\w+) \{|\}  // namespace.*)$", before, re.MULTILINE):
        spaces = [*spaces, begun] if begun else spaces[:-1]
    return "::".join((*spaces, name))


def layout_assertions(name: str, made: type[ctypes.Structure], offset: str = "__builtin_offsetof({}, {})") -> str:
    """C++ that compiles if a struct, given by its full name, lies in memory as the class that was made of it.

    `offset` is how the compiler is asked for a member's: NVRTC has no offsetof (NVRTC_OFFSET).
    """
    offsets = [f"{offset.format(name, field)} == {getattr(made, field).offset}" for field, *_ in made._fields_]
    return "".join(f"static_assert({true});\n" for true in (f"sizeof({name}) == {ctypes.sizeof(made)}", *offsets))


def compiled_part(text: str, macros: Set[str]) -> str:
    """Leave out what a C++ source has between #if, #ifdef or #ifndef of a macro, #else and #endif and does not compile.

    Only macros of a method's options are asked for: #if with more than a name, and #elif, stay as they are, and none is nested.
    """
    option = re.compile(r"^#(if|ifdef|ifndef) (\w+)\n(.*?)^(?:#else\n(.*?)^)?#endif$", re.DOTALL | re.MULTILINE)

    def kept(found: re.Match[str]) -> str:
        kind, name, first, second = found.groups()
        return first if (name in macros) == (kind != "ifndef") else second or ""

    return option.sub(kept, text)
