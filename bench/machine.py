"""Describes what a result depends on beside the code (machine, versions, commit), and measures the machine's best read rate."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from kvseek.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("kvseek", "torch", "transformers", "numpy")


def describe() -> dict[str, object]:
    """Describe machine, versions and commit, as they go into every result file."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in VERSIONS},
        "commit": commit(Path(__file__).parent),
    }


def installed_version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed (kvseek itself may run from its checkout)."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_gpu(device: torch.device) -> dict[str, object]:
    """Describe the GPU, as it goes into result files beside `describe`."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def cpu_model() -> str:
    """Name of the CPU, or its architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def commit(directory: Path) -> str | None:
    """Commit of the checkout that `directory` lies in, with "+changes" if files differ from it; None outside of one."""
    command = ["git", "-C", str(directory), "describe", "--always", "--abbrev=40", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def peak_memory_bytes() -> int:
    """Largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


class PlainRead:
    """Reads `size` bytes of memory in order with all threads: no program that reads as many bytes can be faster."""

    def __init__(self, size: int) -> None:
        # Integers, because a sum of floats is limited by the latency of additions.
        self._numbers = torch.ones(size // 8, dtype=torch.int64)

    def __call__(self) -> None:
        """Read everything once."""
        self._numbers.sum()


@contextmanager
def tree_of(commit: str, repository: Path = ROOT) -> Iterator[Path]:
    """A copy of a commit that can be run, for as long as the context lasts; raises ConfigError if there is no such commit."""
    with tempfile.TemporaryDirectory(prefix="kvseek-perf-gate-") as folder:
        archive, tree = Path(folder) / "tree.tar", Path(folder) / "tree"
        command = ["git", "-C", str(repository), "archive", "--output", str(archive), commit]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise ConfigError(f"--commit = {commit!r}: must be one of this repository: {made.stderr.strip()}; fetch it")
        tree.mkdir()
        subprocess.run(["tar", "-xf", str(archive), "-C", str(tree)], check=True)
        subprocess.run(["make", "-s", "links"], cwd=tree, check=True)
        yield tree


def digest_of_model(model: Path) -> str:
    """Tell a checkpoint from others of its name: by its files' names, sizes and last 64 KiB, which training changes."""
    found = hashlib.sha256()
    for path in [model] if model.is_file() else sorted(one for one in model.iterdir() if one.is_file()):
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - (1 << 16)))
            found.update(f"{path.name} {size} ".encode() + file.read())
    return found.hexdigest()[:16]
