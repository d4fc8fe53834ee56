"""What the processes of a server share: they end with the process that started them. Linux only, as Triton is."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have this process get SIGKILL when its parent ends, however that ends: no server outlives its launcher."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
