"""Rank 1 of an engine whose GPUs cannot sum: test_loading_faults.py starts it in the place of a rank's program.

    python -m tests.engine.leading.failing_rank CASE DESCRIPTOR

CASE says what the rank does once it has joined the others. There is no GPU, so it loads nothing.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, NoReturn

import torch.distributed as dist

from kvseek.engine.leading import follower
from kvseek.engine.parallel.cuda.ranks import DeviceRanks, make_together
from kvseek.engine.parallel.ranks import Ranks

WAY = "NCCL"
REASON = "RuntimeError: no way to the other GPUs"


def wait_for_ever() -> NoReturn:
    """As NCCL does for a rank that never comes."""
    threading.Event().wait()
    raise AssertionError("nobody sets it")


def join(ranks: Ranks, case: str) -> None:
    """Do what DeviceRanks.over does, as far as that needs no GPU: "fails" and "waits" make a way to sum, "raises" does not."""
    assert dist.group.WORLD is not None
    if case == "raises":
        raise ZeroDivisionError("a fault of the program")
    make_together(ranks, dist.group.WORLD, WAY, wait_for_ever if case == "waits" else lambda: (None, REASON))


def over(ranks: Ranks, *_: Any) -> Ranks:
    """In the place of DeviceRanks.over."""
    join(ranks, sys.argv[1])
    return ranks


if __name__ == "__main__":
    follower.load_rank = lambda *_: wait_for_ever()  # type: ignore[assignment]
    DeviceRanks.over = over  # type: ignore[assignment, method-assign]
    sys.exit(follower.main(sys.argv[2:]))
