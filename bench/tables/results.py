"""Result files, and what tables of several ideas read from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvseek.bench.output import Figure, read_result
from kvseek.core.errors import KvseekError

ROOT = Path(__file__).resolve().parents[2]  # also where the folder is reached through a link
FOLDER = ROOT / "bench/results"
K, M = 1 << 10, 1 << 20
METHODS = ("full", "nested", "pariskv", "prkv", "clusterkv", "ctkvr")
INT8 = "nested:weight_only_precision=int8"
SPARSE = ":prefill_attention=block_sparse"
ALSO_SPARSE = SPARSE.replace(":", ",")  # behind other fields
CHUNKS = ",prefill_chunk_tokens=4096"
FP8 = ":prefill_precision=fp8"
NEEDLE = ("needle-gpu-32k-layers-together", "needle-h100-128k-layers-together")
Row = tuple[str, ...]
Rows = Iterable[Row]  # headings first
Columns = Mapping[str, Figure]  # by their headings


class TableError(KvseekError):
    """A result file lacks what a table shows, or a document has marks that fit no table; the message names which."""


class Results:
    """The result files, and which of them have been read.

    Attributes
    ----------
    read : dict
        Documents by their files' names without ".json".
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self.read: dict[str, dict[str, Any]] = {}

    def __call__(self, name: str) -> dict[str, Any]:
        """The document of a file; raises ResultError if there is none."""
        if name not in self.read:
            self.read[name] = read_result(self.folder / f"{name}.json")
        return self.read[name]


def one(entries: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The only entry with these values; raises TableError if there is none or several."""
    found = [entry for entry in entries if all(entry[name] == value for name, value in wanted.items())]
    if len(found) != 1:
        raise TableError(f"{wanted}: must be one entry of the result file; there are {len(found)}")
    return found[0]


def step(document: dict[str, Any], method: str, offload: str, context: int) -> dict[str, Any]:
    """A decode step of one request; with hot rows where the benchmark timed both ways, because serving has them."""
    phase = one(document["phases"], offload=offload)
    entries = one(phase["cells"], context=context, batch=1)["results"]
    hot = [entry for entry in entries if entry["hot_rows"]]
    return one(
        [*hot, *(entry for entry in entries if entry["method"] not in {e["method"] for e in hot})], method=method
    )


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


COLUMNS: Columns = {  # that several tables have
    "tokens": lambda entry: f"{entry['context']:,}",
    "method": lambda entry: f"`{entry['method'].partition(':')[0]}`",
    "layers with rows in host memory": lambda entry: str(entry["host_layers"]),
}


def with_ratio(entry: dict[str, Any]) -> str:
    """Milliseconds of a step; in brackets those over the baseline's, of every method but the baseline."""
    ratio = entry["to_baseline"]
    return milliseconds(entry["step_seconds"]["median"]) + ("" if entry["method"] == "full" else f" ({ratio:.2f})")


Tables = Mapping[str, Callable[[Results], Rows]]  # by their names in the documents
