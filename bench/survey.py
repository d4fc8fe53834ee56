"""`kvseek evaluate all`: perplexity, answers and steps of methods by budget, and one page of them, in one folder.

    kvseek evaluate all --model MODEL --folder DIR --quick

The folder gets perplexity.json, tasks.json, speed.json and report.html. A run that was cut off goes on when it is started again:
behind the last engine of perplexity, the last contexts of tasks, or with the steps, which take a minute or two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvseek.bench.accuracy import perplexity, tasks
from kvseek.bench.accuracy.haystack import read_text
from kvseek.bench.budgets import add_budget_flags, read_budgets
from kvseek.bench.charts import report
from kvseek.bench.machine import digest_of_model
from kvseek.bench.output import Document, at_least_one, progress, read_result, write_result
from kvseek.bench.speed import decode
from kvseek.bench.variants import FORM
from kvseek.core.config import CHOICES
from kvseek.core.errors import require

TEXTS = (
    "pydoc_data:topics.py",
    "asyncio:base_events.py",
    "idlelib:NEWS.txt",
)  # a reference, a program, a list of changes
QUICK: dict[str, Any] = {
    "top_k": "100,512",
    "tokens": 200,
    "tasks": "niah_single,qa_single",
    "n": 5,
    "steps": 20,
}
WHOLE: dict[str, Any] = {"top_k": "64,100,256,512,1024", "tokens": 500, "tasks": "all", "n": 25, "steps": 50}
SHAPE_CONTEXT = 131_072  # of steps on a GPU, which need no checkpoint


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `kvseek evaluate all`."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face directory or GGUF file")
    add("--folder", type=Path, required=True, help="of the results and the page; one that is there is gone on with")
    add(
        "--quick", action="store_true", help="fewer budgets, tasks and tokens: 15 minutes for SmolLM2-135M on two cores"
    )
    add("--methods", default="full,nested,pariskv", help=f"the first is what the others are compared with: {FORM}")
    add_budget_flags(parser)
    add("--length", type=int, default=4000, help="tokens of prompts (default: %(default)s)")
    add("--text", nargs="+", default=list(TEXTS), help="of perplexity, as there (default: of Python's own)")
    add("--device", choices=CHOICES["device"], default="cpu")
    add("--dtype", default="bfloat16", help="of all engines (default: %(default)s)")
    add("--shape", default="llama-3.1-8b", help="of the model whose steps are timed on a GPU (default: %(default)s)")
    add("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")


def read(arguments: argparse.Namespace) -> None:
    """Check the flags; raises ConfigError, also where the folder is of a run with others."""
    at_least_one(arguments, "length", "threads")
    sizes = QUICK if arguments.quick else WHOLE
    if arguments.top_k is arguments.budget is None:
        arguments.top_k = sizes["top_k"]
    own = read_budgets(arguments)
    arguments.variants = ",".join(variant.label for listed in own for variant in listed)
    names = ("quick", "variants", "length", "device", "dtype", "shape", "text")
    settings = {name: getattr(arguments, name) for name in names}
    settings |= {"model": arguments.model.name, "weights": digest_of_model(arguments.model)}
    path = arguments.folder / "settings.json"
    begun = read_result(path) if path.exists() else settings
    require(begun == settings, "--folder", str(arguments.folder), f"of {settings}, not of {begun}", "name another")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_result(path, settings)


def run(arguments: argparse.Namespace) -> Document:
    """Measure what the folder lacks, and write the page; the document has its rows."""
    sizes, folder = QUICK if arguments.quick else WHOLE, arguments.folder
    common = ["--methods", arguments.variants, "--dtype", arguments.dtype, "--device", arguments.device]
    built = [*common, "--model", str(arguments.model), "--threads", str(arguments.threads)]
    prompts = ["--prompt_tokens", str(arguments.length), "--tokens", str(sizes["tokens"]), "--text", *arguments.text]
    _measure(perplexity, [*built, *prompts], folder / "perplexity.json")
    asked = ["--tasks", str(sizes["tasks"]), "--lengths", str(arguments.length), "--n", str(sizes["n"])]
    _measure(tasks, [*built, *asked], folder / "tasks.json")
    if not (speed := folder / "speed.json").exists():
        progress("steps")
        write_result(speed, _steps(arguments, common, built, sizes["steps"]))
    results = [folder / f"{name}.json" for name in ("perplexity", "tasks", "speed")]
    page = argparse.Namespace(results=results, html=folder / "report.html")
    return report.run(page) | {"evaluation": "all"}


def _measure(kind: Any, flags: list[str], output: Path) -> None:
    """Run a kind of evaluation as its own command does; it goes on with its result file."""
    parser = argparse.ArgumentParser()
    kind.add_flags(parser)
    arguments = parser.parse_args(flags)
    arguments.output = output
    kind.read(arguments)
    kind.run(arguments)


def _steps(arguments: argparse.Namespace, common: list[str], built: list[str], steps: int) -> Document:
    """Time decode steps: of the model on the CPU, of a shape on a GPU."""
    if arguments.device == "cuda":
        from kvseek.bench.speed.device import main, options

        shape = ["--shape", arguments.shape, "--contexts", str(SHAPE_CONTEXT), "--offload", "never,always"]
        return main.run(options.parse([*common, *shape, "--steps", str(steps)]))
    text = arguments.folder / "text.txt"
    text.write_text("\n\n".join(map(read_text, arguments.text)), encoding="utf-8")
    own = ["--text", str(text), "--contexts", str(arguments.length), "--tokens", str(steps)]
    parse: Callable[[list[str]], argparse.Namespace] = decode.parse
    return decode.run(parse([*built, *own]))


def print_report(document: Document) -> None:
    """Print what is on the page, by kind."""
    report.print_report(document)
