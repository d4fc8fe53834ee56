"""Where the sources of kernels lie."""

from __future__ import annotations

from pathlib import Path

import kvseek.kernels
import kvseek.plugins


def package_roots() -> list[Path]:
    """Return the folders of this installation that hold kernels/ and plugins/; the kernels' includes are relative to them."""
    return sorted({Path(path).parent for package in (kvseek.kernels, kvseek.plugins) for path in package.__path__})
