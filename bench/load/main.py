"""Load test of a whole server with two public load testers: throughput, time to first token, time per output token.

    make perf
    python -m kvseek.bench.load.main --engine_dir ENGINE --output RESULT.json

Starts a server over an engine directory and has perf_analyzer ask it over gRPC, then aiperf over the OpenAI port, both with the
same prompts: pieces of a text, answered with exactly --output_tokens tokens. There is one cell for each --concurrency, with
prompts of --base_prompt_tokens, and one for each of --prompt_tokens, at --base_concurrency. docs/load_testing.md says how to
read the figures.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvseek.bench.machine import describe
from kvseek.bench.output import add_output_flags, at_least_one, command, markdown, progress, rows
from kvseek.core.config import read_config
from kvseek.engine.tokenizer import TOKENIZER_FOLDER, Tokenizer
from kvseek.server.launch import RunningServer, running_server
from kvseek.server.settings import ServeSettings

from . import aiperf, perf_analyzer
from .cells import Answer, Cell, LoadTestError, cells, figures, prompts
from .report import TOOLS, captions
from .tool import NothingWrittenError

PORTS = {tool.NAME: tool.DOOR for tool in (perf_analyzer, aiperf)}
MODEL = "kvseek"  # at the OpenAI port
INSTALLED = Path(".cache/load")  # by make load-tools
Measure = Callable[[Cell, Sequence[str], Path], list[Answer]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True, help="what kvseek build wrote")
    parser.add_argument("--tools", nargs="+", choices=PORTS, default=list(PORTS), help="default: both")
    for name in PORTS:
        path = INSTALLED / name / "bin" / name
        parser.add_argument(f"--{name}", type=Path, default=path, help="the program (default: %(default)s)")
    for flag, numbers in (("concurrency", [1, 2, 4, 8, 16, 48]), ("prompt_tokens", [8, 128, 512, 2048])):
        shown = " ".join(map(str, numbers))
        parser.add_argument(f"--{flag}", type=int, nargs="+", default=numbers, help=f"default: {shown}")
    for flag, number, text in (
        ("base_concurrency", 1, "of the cells of --prompt_tokens"),
        ("base_prompt_tokens", 128, "of the cells of --concurrency"),
        ("requests", 8, "of a cell; a concurrency of more than half of that gets twice its number"),
        ("output_tokens", 16, "of each answer"),
        # aiperf keeps a core busy all the time, and an engine whose threads share cores with others waits for them.
        ("threads", max(1, (os.cpu_count() or 1) - 1), "CPU threads of the engine: all cores but one"),
        ("max_queue_size", 256, "of the server"),
    ):
        parser.add_argument(f"--{flag}", type=int, default=number, help=f"{text} (default: {number})")
    parser.add_argument("--text", type=Path, default=Path("examples/harbour_log.txt"), help="prompts are its pieces")
    add_output_flags(parser)
    arguments = parser.parse_args(argv)
    at_least_one(arguments, "concurrency", "prompt_tokens", "base_concurrency", "base_prompt_tokens", "requests")
    if arguments.output_tokens < 2:
        raise LoadTestError(f"--output_tokens = {arguments.output_tokens}: must be >= 2, to have a time between tokens")
    return arguments


def ways(arguments: argparse.Namespace, server: RunningServer) -> dict[str, Measure]:
    """How each of the chosen tools measures a cell."""
    tokenizer = arguments.engine_dir / TOKENIZER_FOLDER
    url = server.openai_url.removesuffix("/v1")
    found: dict[str, Measure] = {
        perf_analyzer.NAME: partial(perf_analyzer.measure, arguments.perf_analyzer, server.grpc_url),
        aiperf.NAME: partial(aiperf.measure, arguments.aiperf, url, MODEL, tokenizer),
    }
    return {name: found[name] for name in arguments.tools}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all cells with all tools."""
    settings = ServeSettings(
        threads=arguments.threads, max_queue_size=arguments.max_queue_size, served_model_name=MODEL
    )
    base = (arguments.base_concurrency, arguments.base_prompt_tokens)
    sweep = cells(arguments.concurrency, arguments.prompt_tokens, base, arguments.requests, arguments.output_tokens)
    tokenizer, text = Tokenizer(arguments.engine_dir), arguments.text.read_text(encoding="utf-8")
    texts = {cell: prompts(tokenizer, text, cell) for cell in sweep}
    results = []
    with running_server(arguments.engine_dir, settings=settings) as server:
        for tool, measure in ways(arguments, server).items():
            measure_cell(measure, Cell(((base[1], arguments.output_tokens),) * 2), texts[sweep[0]][:2])  # warm
            for cell in sweep:
                answers = measure_cell(measure, cell, texts[cell])
                results.append({"tool": tool, "door": PORTS[tool], **figures(cell, answers)})
                progress(f"{tool}: {cell.name}: {results[-1]['seconds']:.1f} s")
    config = read_config(arguments.engine_dir)
    return {
        "benchmark": "load",
        "machine": describe(),
        "engine": {
            "name": arguments.engine_dir.name,
            "method": config.method,
            "max_batch_size": config.max_batch_size,
            "max_seq_len": config.max_seq_len,
        },
        "server": {"threads": arguments.threads, "max_queue_size": arguments.max_queue_size},
        "base": {"concurrency": base[0], "prompt_tokens": base[1]},
        "results": results,
    }


def measure_cell(measure: Measure, cell: Cell, texts: Sequence[str]) -> list[Answer]:
    """Measure a cell, a second time if the tool loses its result: perf_analyzer 2.51 did once in some thirty runs."""

    def attempt() -> list[Answer]:
        with tempfile.TemporaryDirectory(prefix="kvseek-load-") as folder:
            return measure(cell, texts, Path(folder))

    try:
        return attempt()
    except NothingWrittenError as error:
        progress(f"measured again, because {error}")
    return attempt()


def print_table(document: dict[str, Any]) -> None:
    """Print captions and table."""
    print(f"{' '.join(captions(document))}\n\n{markdown(rows(TOOLS, document['results']))}")


main = command(parse, run, print_table)


if __name__ == "__main__":
    raise SystemExit(main())
