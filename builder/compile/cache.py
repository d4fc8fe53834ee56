"""The user's folder of what was compiled once and serves every engine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/kvseek``, or ``~/.cache/kvseek`` without that variable; it need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvseek"
