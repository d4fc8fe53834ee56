"""Fuzzes the reading of checkpoints: each is served as transformers computes it, or refused with an error of kvseek's.

    python -m tests.builder.fuzz_checkpoints --cases 5000 --seed 1

Cases are those of tests/builder/checkpoints/test_same_as_transformers.py, which takes 200 of them, the same in every run. Exit
status 0 if none broke the property; else 1, and the smallest case of each kind that did is printed: it belongs into that file's
FOUND.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: matrices are tiny

import hypothesis
from tests.builder.checkpoints.drawn_checkpoints import Case, cases, outcome

from kvseek.builder import checking


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000, metavar="N", help="cases to draw (default: 5000)")
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: a random one, which is printed)")
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"{options.cases} checkpoints, seed {seed}")
    counts: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=options.cases,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases())
    def run(case: Case) -> None:
        counts[outcome(case).split(":")[0]] += 1

    try:
        with checking.quiet():
            run()
    except Exception as error:
        for one in error.exceptions if isinstance(error, ExceptionGroup) else [error]:
            notes = getattr(one, "__notes__", [])  # hypothesis notes the case that it has shrunk to
            print("\n".join([f"{type(one).__name__}: {one}", *notes]), file=sys.stderr)
        return 1
    print(f"{counts['equal']} with transformers' logits, {counts['refused']} refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
