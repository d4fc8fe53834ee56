"""Threads that compile beside each other."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


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
