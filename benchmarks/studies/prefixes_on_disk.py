"""A document that is read, and loaded from disk; and the steps of another request while it is written and loaded.

    python benchmarks/studies/prefixes_on_disk.py --engine_dir DIR --document FILE --disk_dir EMPTY_DIR

Loading is timed with the files in the page cache, and after the system was asked to forget them (posix_fadvise). Times of steps
are medians and maxima: of some alone, and of all that begin while the disk's thread works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvseek.core.request import Request
from kvseek.core.statistics import RequestStatistics
from kvseek.engine.cache.prefix_folder import Match
from kvseek.engine.cache.prefix_store import PrefixStore
from kvseek.engine.cache.prefix_tree import pack_tokens
from kvseek.engine.engine import Engine
from kvseek.engine.loading.prefixes import DiskSettings
from kvseek.measurement.machine import describe
from kvseek.measurement.output import write_result

STEPS_ALONE = 60
ROUNDS = 3


class Study:
    """An engine with an empty directory, and the tokens of a document."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.engine = Engine.load(arguments.engine_dir, arguments.threads, disk=DiskSettings(arguments.disk_dir))
        text = arguments.document.read_text(encoding="utf-8")
        self.ids = tuple(self.engine.tokenizer.encode(text)[: arguments.tokens])
        self.directory: Path = arguments.disk_dir
        self._questions = iter(range(1000))

    @property
    def store(self) -> PrefixStore:
        """The prefixes on disk."""
        store = self.engine._prefixes.store
        assert store is not None
        return store

    def ask(self) -> RequestStatistics:
        """Answer a question of 40 tokens about the document that nobody has asked before."""
        number = next(self._questions)
        self.engine.submit(Request((*self.ids, *((100 + number,) * 40)), 8))
        while self.engine.has_work:
            for output in self.engine.step():
                if output.statistics is not None and output.finish_reason is not None:
                    found = output.statistics
        while self.works():
            time.sleep(0.001)
        return found

    def works(self) -> bool:
        """Whether the disk's thread has anything to do."""
        return bool(self.store._writes or self.store._loads or self.store._busy_since is not None)

    def forget(self, cached: bool) -> None:
        """Evict everything from memory; not `cached`: have the system forget the files' contents too."""
        self.engine._prefixes._evict(self.engine._cache.extents.capacity)
        for path in self.directory.glob("*/*"):
            if not cached:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    def steps(self, goes_on: Callable[[int], bool]) -> dict[str, float]:
        """Time steps of the engine."""
        times = list[float]()
        while goes_on(len(times)):
            begun = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - begun)
        return {"steps": len(times), "median_seconds": statistics.median(times), "longest_seconds": max(times)}

    def beside(self) -> dict[str, Any]:
        """Times of another request's steps: alone, while the document is written, and while it is loaded."""
        stream = self.engine.submit(Request(tuple(reversed(self.ids))[:3000], 1000))
        while not self.engine._scheduler.decoding():
            self.engine.step()
        alone = self.steps(lambda count: count < STEPS_ALONE)
        nodes = self.engine._prefixes._tree.match(None, pack_tokens(self.ids)).nodes
        for entry in list(self.store.folder._entries.values()):
            self.store.folder.remove(entry)
        self.store.keep(nodes, self.engine._prefixes.rows.sink_rows[nodes[0].extent])
        writing = self.steps(lambda count: self.works() or not count)
        matches = [Match(self.store.folder._entries[node.key], 0) for node in nodes]
        self.store.load(matches, self.engine._cache.extents._free[-len(nodes) :])
        loading = self.steps(lambda count: self.works() or not count)
        self.engine.cancel(stream)
        return {"alone": alone, "writing": writing, "loading": loading}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure; returns a document for JSON."""
    study, rounds = Study(arguments), list[dict[str, Any]]()
    read = study.ask()
    counts = study.store.counts
    result: dict[str, Any] = {
        "tokens": len(study.ids),
        "read_seconds": read.ttft_seconds,
        "write_seconds": counts.write_seconds,
        "files": counts.written,
        "bytes": study.store.usage().bytes,
    }
    for cached in (True, False):
        for _ in range(ROUNDS):
            study.forget(cached)
            before = counts.load_seconds
            asked = study.ask()
            found = {"cached": cached, "load_seconds": counts.load_seconds - before, "ttft_seconds": asked.ttft_seconds}
            rounds.append(found | {"reused_tokens": asked.reused_tokens})
    steps = [study.beside() for _ in range(ROUNDS)]
    study.engine.close()
    return {"benchmark": "prefixes_on_disk", "machine": describe(), **result, "loads": rounds, "steps": steps}


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was measured; with --output, write JSON too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--document", type=Path, required=True, help="a text")
    parser.add_argument("--disk_dir", type=Path, required=True, help="a directory that is empty, or not there")
    parser.add_argument("--tokens", type=int, default=6160, help="of the document (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--output", type=Path, help="write JSON there")
    arguments = parser.parse_args(argv)
    document = run(arguments)
    print(
        f"{document['tokens']:,} tokens read in {document['read_seconds']:.2f} s; {document['files']} files, "
        f"{document['bytes'] / 1e6:.0f} MB, written in {document['write_seconds']:.2f} s"
    )
    for load in document["loads"]:
        print(
            f"{'cached' if load['cached'] else 'disk  '}: {load['reused_tokens']:,} tokens loaded in "
            f"{load['load_seconds']:.2f} s, time to first token {load['ttft_seconds']:.2f} s"
        )
    for steps in document["steps"]:
        for name, found in steps.items():
            median, longest = (1e3 * found[f"{which}_seconds"] for which in ("median", "longest"))
            print(f"{name:8} {found['steps']:3} steps, median {median:.1f} ms, longest {longest:.1f} ms")
    if arguments.output:
        write_result(arguments.output, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
