"""Help texts of a config class's flags, from the Attributes section of its docstring, so that they are written only once."""

from __future__ import annotations

import inspect

SECTION, RULE = "Attributes", "-"


def field_texts(config_class: type) -> dict[str, str]:
    """Read the text of each attribute in the class's NumPy-style docstring, on one line; empty without docstrings."""
    lines = inspect.cleandoc(config_class.__doc__ or "").splitlines()
    texts: dict[str, list[str]] = {}
    current: list[str] = []
    for line in _section(lines):
        if line and not line[0].isspace():  # "name : type", or "name, other : type"
            current = []
            texts |= {name.strip(): current for name in line.partition(" : ")[0].split(",")}
        elif line:
            current.append(line.strip())
    return {name: " ".join(parts) for name, parts in texts.items()}


def _section(lines: list[str]) -> list[str]:
    """Lines of the Attributes section, without its heading."""
    headings = [i for i, line in enumerate(lines[1:]) if line and not line.strip(RULE) and lines[i]]
    starts = [i for i in headings if lines[i] == SECTION]
    if not starts:
        return []
    stop = next((i for i in headings if i > starts[0]), len(lines))
    return lines[starts[0] + 2 : stop]
