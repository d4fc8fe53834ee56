"""`kvseek evaluate`: what a method loses, by its kinds of evaluation, and a page of what was found."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from kvseek.bench import survey
from kvseek.bench.accuracy import perplexity, tasks
from kvseek.bench.charts import report
from kvseek.bench.output import add_output_flags, command
from kvseek.core.command_line import Parser

KINDS: dict[str, tuple[Any, str, str]] = {  # with what each is about, and when it writes its result
    "perplexity": (perplexity, "of given text, through the methods' own decode steps", ", after every engine"),
    "tasks": (
        tasks,
        "right answers to questions on long contexts",
        ", after every few contexts; one there is gone on with",
    ),
    "report": (report, "one HTML page of result files", ""),
    "all": (survey, "perplexity, tasks, steps and the page of them, in one folder", ", the rows of the page"),
}


def make_parser() -> Parser:
    """Make the parser of `kvseek evaluate`."""
    whole = Parser(prog="kvseek evaluate", description="Measure what a method loses.")
    kinds: Any = whole.add_subparsers(dest="evaluation", required=True)
    for name, (module, summary, written) in KINDS.items():
        parser = kinds.add_parser(name, help=summary)
        module.add_flags(parser)
        add_output_flags(parser, written)
    return whole


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings; raises ConfigError on those that cannot work."""
    arguments: argparse.Namespace = make_parser().parse_args(argv)
    KINDS[arguments.evaluation][0].read(arguments)
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure; the document of the result."""
    document: dict[str, Any] = KINDS[arguments.evaluation][0].run(arguments)
    return document


def print_report(document: dict[str, Any]) -> None:
    """Print what was found."""
    KINDS[document["evaluation"]][0].print_report(document)


main = command(parse, run, print_report)

if __name__ == "__main__":
    sys.exit(main())
