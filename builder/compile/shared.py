"""What both compilers use: the user's folder of compiled kernels, and threads that compile beside each other."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/kvseek``, or ``~/.cache/kvseek`` without that variable; the folder need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvseek"


@contextmanager
def compiling_threads() -> Generator[ThreadPoolExecutor]:
    """Make a thread for each core; what has not begun when the context ends, as after Ctrl-C, is not begun any more.

    An executor's own context would go through all of it, if the interrupt came while it was being submitted.
    """
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
