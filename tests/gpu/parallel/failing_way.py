"""Rank 1 of an engine on GPUs, whose way to sum cannot be made there: test_ranks.py starts it in the place of a rank's program.

python -m tests.gpu.parallel.failing_way DESCRIPTOR
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from kvseek.engine.leading import follower
from kvseek.engine.parallel.cuda import ranks as device_ranks

WAY = "KVSEEK_TEST_WAY"  # environment: the name of a class of sums.py


def fail(*_: Any) -> NoReturn:
    """In the place of the class."""
    raise RuntimeError("no way to the other GPUs")


if __name__ == "__main__":
    way = os.environ[WAY]
    if way == "SymmetricSums":
        device_ranks.SymmetricSums.__init__ = fail  # type: ignore[method-assign]
    else:
        device_ranks.NcclSums = fail  # type: ignore[assignment, misc]
    sys.exit(follower.main(sys.argv[1:]))
