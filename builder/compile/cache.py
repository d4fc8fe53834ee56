"""The user's folder of compiled kernels, which are compiled once and used by every engine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/kvseek``, or ``~/.cache/kvseek`` without that variable; the folder need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvseek"
