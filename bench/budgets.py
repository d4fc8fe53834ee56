"""--top_k and --budget: each of --methods with several numbers of rows."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from kvseek.bench.output import numbers
from kvseek.bench.variants import Variant, parse_variants
from kvseek.core.errors import require
from kvseek.plugins.registry import CACHE_PREFIX


def add_budget_flags(parser: argparse.ArgumentParser) -> None:
    """Add --top_k and --budget."""
    each = "comma list: each method that has top_k, and does not name it, with each of these"
    parser.add_argument("--top_k", help=f"{each} numbers of rows")
    parser.add_argument("--budget", help=f"{each} budgets of tokens, window included")


def read_budgets(arguments: argparse.Namespace) -> list[list[Variant]]:
    """The variants of --methods, each with every one of --top_k or --budget.

    Raises ConfigError, also on rows that a method cannot have.
    """
    both = arguments.top_k is not None and arguments.budget is not None
    require(not both, "--budget", arguments.budget, "left out with --top_k", "drop one")
    rows, budgets = (
        [] if listed is None else numbers(name, listed)
        for name, listed in (("top_k", arguments.top_k), ("budget", arguments.budget))
    )
    return [_with_budgets(variant, rows, budgets) for variant in parse_variants(arguments.methods)]


def _with_budgets(variant: Variant, rows: Sequence[int], budgets: Sequence[int]) -> list[Variant]:
    if not (rows or budgets) or "top_k" in variant.fields or not hasattr(variant.settings, "top_k"):
        return [variant]
    sized = [variant.with_fields(top_k=k) for k in rows] + [variant.within(budget) for budget in budgets]
    return [_labelled(one, variant) for one in sized if one.settings]


def _labelled(sized: Variant, named: Variant) -> Variant:
    """Name what has been added to a variant, so that parse_variants makes the same of the label."""
    added = [f"{name}={sized.fields[name]}" for name in sized.fields if name not in named.fields]
    added += [
        f"{CACHE_PREFIX}{name}={value}" for name, value in sized.cache_fields.items() if name not in named.cache_fields
    ]
    return dataclasses.replace(sized, label=f"{named.label}{',' if ':' in named.label else ':'}{','.join(added)}")
