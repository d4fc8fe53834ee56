"""Is this tree slower than a commit? `kvseek bench` in turns in a copy of the commit and here; status 1 beyond 2 %.

    make perf-gate COMMIT=main
    python -m kvseek.bench.perf_gate --commit main --rounds 5 -- --shape llama-3.1-8b --methods full,prkv --contexts 131072

Flags behind -- are those of `kvseek bench`. A process of each tree runs in each round, the other tree's first in every second
round. What is compared are medians over the rounds of the median step of each method, context and place of its rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvseek.bench.machine import ROOT, tree_of
from kvseek.bench.output import at_least_one, figures_table, print_whole, progress, read_result
from kvseek.bench.speed.decode import wants_gpu
from kvseek.core.errors import ConfigError, KvseekError, text_of

FLAGS = (
    *("--shape", "llama-3.1-8b", "--methods", "full,nested,pariskv", "--contexts", "131072"),
    *("--offload", "never,always", "--hot_rows", "on"),
)
BEFORE, NOW = "before", "now"
Steps = dict[str, float]  # seconds of a step, by what was timed


def steps_of(document: Mapping[str, Any]) -> Steps:
    """Median seconds of each contestant's steps in a result of `kvseek bench`, on a GPU or the CPU; raises KvseekError."""
    kind = document["benchmark"], document.get("mode", "decode")
    if kind not in (("decode", "decode"), ("device", "decode")):
        raise KvseekError(
            f"a result of {', '.join(kind)}: must be of decode steps; leave --prefill, --throughput, --tp_size out"
        )
    if document["benchmark"] == "decode":
        parts = [(f"{part['context']:,} tokens", part["results"], "tpot_seconds") for part in document["contexts"]]
    else:
        missing = [one for phase in document["phases"] for one in (*phase["skipped"], *phase["errors"])]
        if missing:  # else nobody would see that a method is not watched
            raise KvseekError(f"not all was timed: {missing[0]}; name what fits this GPU")
        cells = [cell for phase in document["phases"] for cell in phase["cells"]]
        parts = [(f"{cell['context']:,} tokens × {cell['batch']}", cell["results"], "step_seconds") for cell in cells]
    found: dict[str, list[float]] = {}
    for where, results, key in parts:
        for entry in results:
            found.setdefault(f"{entry['name']}, {where}", []).append(entry[key]["median"])
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def run_bench(tree: Path, flags: Sequence[str]) -> Steps:
    """`kvseek bench` in a process of a tree; raises KvseekError if it fails."""
    with tempfile.TemporaryDirectory(prefix="kvseek-perf-gate-") as folder:
        output = Path(folder) / "result.json"
        # The tree's own package comes first, as the process's folder is the first to be searched.
        command = [sys.executable, "-m", "kvseek.cli.main", "bench", *flags, "--output", str(output)]
        ended = subprocess.run(
            command, cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        if ended.returncode:
            raise KvseekError(
                f"kvseek bench in {tree} ended with status {ended.returncode}:\n{ended.stderr.strip()[-2000:]}"
            )
        return steps_of(read_result(output))


def take_turns(trees: Mapping[str, Path], rounds: int, bench: Callable[[Path], Steps]) -> dict[str, list[Steps]]:
    """What `bench` finds in each tree, by round; another tree begins each round."""
    found: dict[str, list[Steps]] = {name: [] for name in trees}
    for number in range(rounds):
        for name in sorted(trees, reverse=bool(number % 2)):
            progress(f"round {number + 1} of {rounds}: {name}")
            found[name].append(bench(trees[name]))
    return found


def compared(found: Mapping[str, Sequence[Steps]]) -> list[dict[str, Any]]:
    """Each contestant's medians over the rounds and their ratio; raises KvseekError where the trees timed different ones."""
    timed = {name: sorted({contestant for steps in rounds for contestant in steps}) for name, rounds in found.items()}
    if timed[BEFORE] != timed[NOW] or not timed[NOW]:
        raise KvseekError(f"the trees timed different steps, {timed}: name methods and contexts that both can run")
    results = []
    for contestant in timed[NOW]:
        seconds = {name: statistics.median(steps[contestant] for steps in rounds) for name, rounds in found.items()}
        results.append({"contestant": contestant, **seconds, "ratio": seconds[NOW] / seconds[BEFORE]})
    return results


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags; raises ConfigError, also where they need a GPU and there is none."""
    given = list(sys.argv[1:] if argv is None else argv)
    own, flags = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True, help="to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each tree (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=2.0, help="per cent that are not yet slower (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    arguments = parser.parse_args(own)
    arguments.flags = flags or FLAGS
    at_least_one(arguments, "rounds")
    if wants_gpu(arguments.flags) and not torch.cuda.is_available():
        raise ConfigError("PyTorch sees no CUDA device: must have one for these flags; run it where a GPU is")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; returns 0, 1 if a contestant is slower, 2 if nothing could be compared."""
    try:
        arguments = parse(argv)
        with tree_of(arguments.commit) as before:
            trees = {BEFORE: before, NOW: ROOT}
            results = compared(take_turns(trees, arguments.rounds, lambda tree: run_bench(tree, arguments.flags)))
    except (KvseekError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {text_of(error)}", file=sys.stderr)
        return 2
    slower = [one for one in results if one["ratio"] > 1 + arguments.limit / 100]
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        figures = {f"{name}\nms": lambda one, name=name: f"{one[name] * 1e3:.3f}" for name in (BEFORE, NOW)}
        title = f"this tree beside {arguments.commit}, {arguments.rounds} rounds"
        table = figures_table(
            title, "contestant", {**figures, "ratio": lambda one: f"{one['ratio']:.3f}"}, results, "contestant"
        )
        print_whole(table)
    for one in slower:
        print(f"slower by more than {arguments.limit:g} %: {one['contestant']}, {one['ratio']:.3f} ×", file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    raise SystemExit(main())
