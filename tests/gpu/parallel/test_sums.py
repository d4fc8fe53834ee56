"""Sums in symmetric memory by two processes, apart from any engine, and how their kernels are freed when one of them ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvseek.engine.parallel.cuda.gpus import SHARE_VARIABLE
from kvseek.engine.parallel.ranks import create_store

pytestmark = pytest.mark.gpu

SECONDS = 150.0  # of both processes; kernels that wait for ever end with them


def test_two_processes_sum_in_symmetric_memory() -> None:
    store = create_store(SECONDS)
    environment = os.environ | {SHARE_VARIABLE: "1"}
    command = [sys.executable, "-m", "tests.gpu.parallel.sum_of_two"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store.port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    print(*outputs)
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "100 sums were freed" in outputs[0]
