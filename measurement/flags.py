"""Values of command line flags that benchmarks and evaluations share."""

from __future__ import annotations

from kvseek.core.errors import ConfigError


def numbers(name: str, text: str, least: int) -> list[int]:
    """A comma list of numbers, ascending, each once; raises ConfigError."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ConfigError(f"--{name} = {text!r}: must be a comma list of numbers >= {least}; e.g. {max(least, 131072)}")
    return sorted({int(part) for part in parts})
