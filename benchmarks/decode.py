"""Time per output token of decoding at long context: kvseek's methods and Hugging Face transformers, in one run.

    python benchmarks/decode.py --model MODEL --methods BASELINE,NAME --contexts 8000 --text FILE --compare_transformers

The contestants take turns of a few decode steps, so drift of the machine hits all alike; the prompt of each is
processed once. benchmarks/README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvseek.benchmarks.contestants import PART_STEPS, Contestant, EngineContestant, load_transformers
from kvseek.benchmarks.report import add_ratios, print_report, result
from kvseek.benchmarks.timing import interleave
from kvseek.core.config import CHOICES
from kvseek.core.errors import ConfigError, KvseekError
from kvseek.engine.model.weight_only import NONE
from kvseek.measurement.machine import PlainRead, describe, peak_memory_bytes
from kvseek.measurement.output import run_command
from kvseek.measurement.variants import FORM, Variant, parse_variants

WARMUP = 2  # steps of each contestant that are not counted
READ_BYTES = 1 << 30  # of a plain read: more than a last-level cache holds
READ = "plain read"  # takes turns with the contestants


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings; exits with a message on unknown or missing flags."""
    parser = argparse.ArgumentParser(prog="kvseek bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu; cuda has flags of its own: --device cuda --help")
    parser.add_argument("--model", type=Path, help="Hugging Face directory or GGUF file, to build and to compare with")
    engines = parser.add_mutually_exclusive_group(required=True)
    engines.add_argument("--engine_dirs", type=Path, nargs="+", help="engine directories, the baseline first")
    engines.add_argument("--methods", help=f"to build from --model, the baseline first: comma list of {FORM}")
    parser.add_argument("--dtype", default="float32", help="of the engines that --methods builds")
    parser.add_argument(
        "--weight_only_precision", choices=CHOICES["weight_only_precision"], help="of all engines that --methods builds"
    )
    parser.add_argument("--contexts", default="8000", help="comma list of prompt lengths in tokens")
    parser.add_argument("--tokens", type=int, default=32, help="decode steps that are timed")
    parser.add_argument("--block", type=int, default=4, help="decode steps in a turn")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--text", type=Path, required=True, help="text whose first tokens are the prompt")
    parser.add_argument("--compare_transformers", action="store_true", help="time Hugging Face transformers too")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument(
        "--output", type=Path, help="write the JSON to this file too, e.g. benchmarks/results/NAME.json"
    )
    return check(parser.parse_args(argv))


def check(arguments: argparse.Namespace) -> argparse.Namespace:
    """Convert lists and raise ConfigError on settings that cannot work together."""
    if arguments.device != "cpu":
        raise ConfigError(f"--device = {arguments.device!r}: must be cpu or cuda; cpu is the default")
    if arguments.model is None and (arguments.methods or arguments.compare_transformers):
        raise ConfigError("--model = None: must be given with --methods or --compare_transformers; name the model")
    for name in ("tokens", "block", "threads"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} = {getattr(arguments, name)}: must be >= 1; leave it out for the default")
    contexts = arguments.contexts.split(",")
    if not all(c.isdecimal() and int(c) >= 1 for c in contexts):
        message = "must be a comma list of lengths >= 1; 8000 is the default"
        raise ConfigError(f"--contexts = {arguments.contexts!r}: {message}")
    arguments.contexts = [int(c) for c in contexts]
    arguments.methods = parse_variants(arguments.methods) if arguments.methods else None
    if arguments.weight_only_precision is not None:
        if arguments.methods is None:
            raise ConfigError("--weight_only_precision: must come with --methods; engine directories have their own")
        own = [variant.label for variant in arguments.methods if variant.weight_only_precision != NONE]
        if own:
            raise ConfigError(f"--methods: {own[0]!r}: must not name a precision beside --weight_only_precision")
        change = {"weight_only_precision": arguments.weight_only_precision}
        arguments.methods = [dataclasses.replace(variant, **change) for variant in arguments.methods]
    return arguments


@contextlib.contextmanager
def engine_directories(arguments: argparse.Namespace) -> Iterator[list[tuple[Path, str | None]]]:
    """The engine directories to time, with what to call each (None: its method); those of --methods are built here."""
    if arguments.engine_dirs:
        yield [(directory, None) for directory in arguments.engine_dirs]
        return
    longest = max(arguments.contexts) + WARMUP + arguments.tokens + PART_STEPS + 2
    with tempfile.TemporaryDirectory(prefix="kvseek-bench-") as name:
        built = [(Path(name) / str(number), variant.label) for number, variant in enumerate(arguments.methods)]
        for (directory, _), variant in zip(built, arguments.methods, strict=True):
            build_variant(arguments, variant, directory, longest)
        yield [*built]


def build_variant(arguments: argparse.Namespace, variant: Variant, directory: Path, longest: int) -> None:
    """Build an engine for requests of up to `longest` tokens; raises KvseekError."""
    from kvseek.builder.build import main as build

    flags = [*variant.flags(), "--output_dir", str(directory), "--dtype", arguments.dtype, "--quiet"]
    sizes = ["--max_seq_len", str(longest), "--max_input_len", str(longest), "--max_batch_size", "1"]
    if build(["--model", str(arguments.model), *flags, *sizes]) != 0:
        raise KvseekError(f"--methods: the build of {variant.label!r} failed; its message stands above")


def prompt(contestant: EngineContestant, text: Path, context: int) -> list[int]:
    """The first `context` tokens of a text."""
    ids = contestant.engine.tokenizer.encode(text.read_text(encoding="utf-8"))
    if len(ids) < context:
        raise ConfigError(f"--contexts = {context}: {text} has {len(ids)} tokens; lower it or give a longer --text")
    return ids[:context]


def race(
    contestants: Sequence[Contestant], read: PlainRead, prompt_ids: list[int], tokens: int, block: int
) -> dict[str, Any]:
    """Prefill, then time decode steps and plain reads in turns."""
    for contestant in contestants:
        contestant.prefill(prompt_ids, WARMUP + tokens)
    samples = interleave({READ: read, **{c.name: c.step for c in contestants}}, tokens, block, WARMUP)
    results = [result(c, samples[c.name], contestants[0]) for c in contestants]
    bandwidth = READ_BYTES / samples[READ].median
    add_ratios(results, bandwidth)
    for contestant, entry in zip(contestants, results, strict=True):
        if isinstance(contestant, EngineContestant):
            entry["parts"] = contestant.part_seconds(PART_STEPS)
    for contestant in contestants:
        contestant.close()
    return {"context": len(prompt_ids), "read_bandwidth": bandwidth, "results": results}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file."""
    with engine_directories(arguments) as directories:
        return time_engines(arguments, directories)


def time_engines(arguments: argparse.Namespace, directories: Sequence[tuple[Path, str | None]]) -> dict[str, Any]:
    """Race the engines at every context; see `run`."""
    engines = [EngineContestant(directory, arguments.threads, name) for directory, name in directories]
    config = engines[0].config
    for engine in engines[1:]:
        if (engine.config.model, engine.config.dtype) != (config.model, config.dtype):
            raise ConfigError(
                f"--engine_dirs: {engine.name} and {engines[0].name} differ in model or dtype; build both alike"
            )
    contestants: list[Contestant] = [*engines]
    if arguments.compare_transformers:
        contestants += load_transformers(arguments.model, config)
    names = [contestant.name for contestant in contestants]
    if len(set(names)) < len(names):
        raise ConfigError(f"--engine_dirs: methods {names}: must be different; time engines of one method in two runs")
    prompts = [prompt(engines[0], arguments.text, context) for context in arguments.contexts]
    read = PlainRead(READ_BYTES)
    contexts = [race(contestants, read, ids, arguments.tokens, arguments.block) for ids in prompts]
    return {
        "benchmark": "decode",
        "machine": describe(),
        "model": Path(arguments.model or directories[0][0]).name,
        "text": arguments.text.name,
        "dtype": config.dtype,
        "weight_only_precision": config.weight_only_precision,
        "kernels": config.kernels,
        "tokens": arguments.tokens,
        "block": arguments.block,
        "peak_memory_bytes": peak_memory_bytes() - READ_BYTES,
        "contexts": contexts,
    }


def wants_gpu(argv: Sequence[str] | None) -> bool:
    """Whether the flags are those of the GPU benchmark: --device cuda, or a --shape, which only that knows."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device")
    parser.add_argument("--shape")
    known, _ = parser.parse_known_args(argv)
    return known.device == "cuda" or known.shape is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    if wants_gpu(argv):
        from kvseek.benchmarks.device.main import main as device_main

        return device_main(argv)
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
