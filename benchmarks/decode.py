"""Time per output token of decoding at long context: kvseek's methods and Hugging Face transformers, in one run.

    python benchmarks/decode.py --model MODEL --methods BASELINE,NAME --contexts 8000 --text FILE --compare_transformers

The contestants take turns of a few decode steps, so drift of the machine hits all alike; the prompt of each is
processed once. benchmarks/README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvseek.benchmarks.contestants import PART_STEPS, Contestant, EngineContestant, load_transformers, ranked
from kvseek.benchmarks.device.options import make_parser as make_device_parser
from kvseek.benchmarks.report import add_ratios, print_report, result
from kvseek.benchmarks.timing import CLOCKS, Clock, interleave
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.core.command_line import Parser
from kvseek.core.config import CHOICES, MOST_POSITIONS
from kvseek.core.errors import ConfigError, KvseekError
from kvseek.core.weight_only import NONE
from kvseek.engine.engine import Engine
from kvseek.measurement.machine import PlainRead, describe, peak_memory_bytes
from kvseek.measurement.output import run_command
from kvseek.measurement.variants import FORM, Variant, parse_variants

WARMUP = 2  # steps of each contestant that are not counted
READ_BYTES = 1 << 30  # of a plain read: more than a last-level cache holds
READ = "plain read"  # takes turns with the contestants
T = TypeVar("T")


def make_parser() -> Parser:
    """Make the parser of `kvseek bench` on the CPU."""
    parser = Parser(prog="kvseek bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu; cuda has flags of its own, but for those of --tp_size")
    parser.add_argument("--model", type=Path, help="Hugging Face directory or GGUF file, to build and to compare with")
    engines = parser.add_mutually_exclusive_group(required=True)
    engines.add_argument("--engine_dirs", type=Path, nargs="+", help="engine directories, the baseline first")
    engines.add_argument("--methods", help=f"to build from --model, the baseline first: comma list of {FORM}")
    parser.add_argument("--dtype", default="float32", help="of the engines that --methods builds")
    parser.add_argument(
        "--weight_only_precision", choices=CHOICES["weight_only_precision"], help="of all engines that --methods builds"
    )
    parser.add_argument("--quantize_lm_head", action="store_true", help="of all engines that --methods builds")
    ranks = (
        "comma list: each of --methods is built for each of these numbers of ranks; one engine of several ranks a run"
    )
    parser.add_argument("--tp_size", help=f"{ranks} (default: 1)")
    parser.add_argument("--contexts", default="8000", help="comma list of prompt lengths in tokens")
    parser.add_argument("--tokens", type=int, default=32, help="decode steps that are timed")
    parser.add_argument("--block", type=int, default=4, help="decode steps in a turn")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads, of all ranks together")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="process: time on the processors, for machines that others use; with --threads 1, as threads that wait count",
    )
    parser.add_argument("--text", type=Path, required=True, help="text whose first tokens are the prompt")
    parser.add_argument("--compare_transformers", action="store_true", help="time Hugging Face transformers too")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--details", action="store_true", help="print all figures, and the parts of a step")
    parser.add_argument(
        "--output", type=Path, help="write the JSON to this file too, e.g. benchmarks/results/NAME.json"
    )
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings; exits with a message on unknown or missing flags."""
    return check(make_parser().parse_args(argv))


def check(arguments: argparse.Namespace) -> argparse.Namespace:
    """Convert lists and raise ConfigError on settings that cannot work together."""
    if arguments.device not in CHOICES["device"]:
        raise ConfigError(f"--device = {arguments.device!r}: must be cpu or cuda; cpu is the default")
    if arguments.model is None and (arguments.methods or arguments.compare_transformers):
        raise ConfigError("--model = None: must be given with --methods or --compare_transformers; name the model")
    for name in ("tokens", "block", "threads"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} = {getattr(arguments, name)}: must be >= 1; leave it out for the default")
    arguments.contexts = numbers("contexts", arguments.contexts, "8000")
    arguments.methods = parse_variants(arguments.methods) if arguments.methods else None
    if arguments.tp_size is not None and arguments.methods is None:
        raise ConfigError("--tp_size: must come with --methods; engine directories have their own")
    if arguments.clock == "process" and arguments.threads > 1:
        raise ConfigError(
            f"--clock process: must come with --threads 1, not {arguments.threads}: threads that wait take time too"
        )
    sizes = arguments.tp_size = numbers("tp_size", arguments.tp_size or "1", "1")
    if arguments.clock == "process" and max(sizes) > 1:
        raise ConfigError(
            "--clock process: must come with --tp_size 1: the time of other ranks' processes is not known"
        )
    several = sum(size > 1 for size in sizes) * len(arguments.methods or ())
    if several > 1:
        raise ConfigError(
            f"--tp_size, --methods: ask for {several} engines of several ranks, a process can have one; time the others in "
            "runs of their own, each beside the same engine of one rank"
        )
    if arguments.weight_only_precision is not None:
        if arguments.methods is None:
            raise ConfigError("--weight_only_precision: must come with --methods; engine directories have their own")
        own = [variant.label for variant in arguments.methods if variant.weight_only_precision != NONE]
        if own:
            raise ConfigError(f"--methods: {own[0]!r}: must not name a precision beside --weight_only_precision")
        change = {"weight_only_precision": arguments.weight_only_precision}
        arguments.methods = [dataclasses.replace(variant, **change) for variant in arguments.methods]
    if arguments.quantize_lm_head:
        if arguments.methods is None:
            raise ConfigError("--quantize_lm_head: must come with --methods; engine directories have their own")
        arguments.methods = [dataclasses.replace(variant, quantize_lm_head=True) for variant in arguments.methods]
    return arguments


def numbers(name: str, given: str, default: str) -> list[int]:
    """Read a comma list of different numbers >= 1; raises ConfigError."""
    words = given.split(",")
    if not all(word.isdecimal() and int(word) >= 1 for word in words) or len(set(words)) < len(words):
        raise ConfigError(
            f"--{name} = {given!r}: must be a comma list of different numbers >= 1; {default} is the default"
        )
    return [int(word) for word in words]


@contextlib.contextmanager
def engine_directories(arguments: argparse.Namespace) -> Iterator[list[tuple[Path, str | None]]]:
    """The engine directories to time, with what to call each (None: its method); those of --methods are built here."""
    if arguments.engine_dirs:
        yield [(directory, None) for directory in arguments.engine_dirs]
        return
    beside = WARMUP + arguments.tokens + PART_STEPS + 2
    longest = max(arguments.contexts) + beside
    model = open_checkpoint(arguments.model).config
    reach = min(model.max_position_embeddings, model.sliding_window or MOST_POSITIONS)
    if longest > reach:
        limit = f"<= {reach - beside}, as the model reaches {reach} tokens and the steps take {beside}"
        raise ConfigError(f"--contexts = {max(arguments.contexts)}: must be {limit}; lower it, or --tokens")
    with tempfile.TemporaryDirectory(prefix="kvseek-bench-") as name:
        built = list[tuple[Path, str | None]]()
        for variant, tp_size in itertools.product(arguments.methods, arguments.tp_size):
            directory = Path(name) / str(len(built))
            build_variant(arguments, variant, tp_size, directory, longest)
            built.append((directory, ranked(variant.label, tp_size)))
        yield built


def build_variant(arguments: argparse.Namespace, variant: Variant, tp_size: int, directory: Path, longest: int) -> None:
    """Build an engine for requests of up to `longest` tokens; raises KvseekError."""
    from kvseek.builder.build import main as build

    flags = [*variant.flags(), "--output_dir", str(directory), "--dtype", arguments.dtype, "--quiet"]
    flags += ["--device", arguments.device]
    if arguments.device == "cuda":
        flags += ["--cuda_archs", "{}{}".format(*torch.cuda.get_device_capability())]
    sizes = ["--max_seq_len", str(longest), "--max_input_len", str(longest), "--max_batch_size", "1"]
    if build(["--model", str(arguments.model), *flags, *sizes, "--tp_size", str(tp_size)]) != 0:
        raise KvseekError(f"--methods: the build of {variant.label!r} failed; its message stands above")


def prompt(contestant: EngineContestant, text: Path, context: int) -> list[int]:
    """The first `context` tokens of a text."""
    ids = contestant.engine.tokenizer.encode(text.read_text(encoding="utf-8"))
    if len(ids) < context:
        raise ConfigError(f"--contexts = {context}: {text} has {len(ids)} tokens; lower it or give a longer --text")
    return ids[:context]


def with_threads(count: int, call: Callable[[], T]) -> T:
    """Make a call with so many threads of this process; engines of other numbers of ranks have others."""
    torch.set_num_threads(count)
    return call()


def race(
    contestants: Sequence[Contestant], read: PlainRead, prompt_ids: list[int], tokens: int, block: int, clock: Clock
) -> dict[str, Any]:
    """Prefill, then time decode steps and plain reads in turns."""
    threads = torch.get_num_threads()
    for contestant in contestants:
        with_threads(contestant.threads, partial(contestant.prefill, prompt_ids, WARMUP + tokens))
    calls = {READ: partial(with_threads, threads, read)}
    calls |= {c.name: partial(with_threads, c.threads, c.step) for c in contestants}
    samples = interleave(calls, tokens, block, WARMUP, clock)
    results = [result(c, samples[c.name], contestants[0]) for c in contestants]
    bandwidth = READ_BYTES / samples[READ].median
    add_ratios(results, bandwidth)
    for contestant, entry in zip(contestants, results, strict=True):
        if isinstance(contestant, EngineContestant):
            entry["tp_size"], entry["sums"] = contestant.config.tp_size, contestant.engine.decoder.sums
            if contestant.config.device == "cpu":  # on a GPU the host only launches them
                entry["parts"] = with_threads(contestant.threads, partial(contestant.part_seconds, PART_STEPS, clock))
    for contestant in contestants:
        contestant.close()
    torch.set_num_threads(threads)
    return {"context": len(prompt_ids), "read_bandwidth": bandwidth, "results": results}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file."""
    with engine_directories(arguments) as directories:
        return time_engines(arguments, directories)


def time_engines(arguments: argparse.Namespace, directories: Sequence[tuple[Path, str | None]]) -> dict[str, Any]:
    """Race the engines at every context; see `run`."""
    with contextlib.ExitStack() as loaded:
        engines = list[EngineContestant]()
        for directory, name in directories:
            engine = Engine.load(directory, arguments.threads)
            loaded.callback(engine.close)
            engines.append(EngineContestant(engine, arguments.threads, name))
        return time_contestants(arguments, engines, Path(arguments.model or directories[0][0]).name)


def time_contestants(arguments: argparse.Namespace, engines: Sequence[EngineContestant], model: str) -> dict[str, Any]:
    """Race engines that are loaded, and transformers if that is asked for; see `run`."""
    config = engines[0].config
    for engine in engines[1:]:
        if (engine.config.model, engine.config.dtype) != (config.model, config.dtype):
            raise ConfigError(
                f"--engine_dirs: {engine.name} and {engines[0].name} differ in model or dtype; build both alike"
            )
    contestants: list[Contestant] = [*engines]
    if arguments.compare_transformers:
        contestants += load_transformers(arguments.model, config, arguments.threads)
    names = [contestant.name for contestant in contestants]
    if len(set(names)) < len(names):
        raise ConfigError(f"--engine_dirs: methods {names}: must be different; time engines of one method in two runs")
    prompts = [prompt(engines[0], arguments.text, context) for context in arguments.contexts]
    torch.set_num_threads(arguments.threads)
    read = PlainRead(READ_BYTES)
    clock = CLOCKS[arguments.clock]
    contexts = [race(contestants, read, ids, arguments.tokens, arguments.block, clock) for ids in prompts]
    return {
        "benchmark": "decode",
        "machine": describe(),
        "model": model,
        "text": arguments.text.name,
        "dtype": config.dtype,
        "weight_only_precision": config.weight_only_precision,
        "quantize_lm_head": config.quantize_lm_head,
        "kernels": config.kernels,
        "tokens": arguments.tokens,
        "block": arguments.block,
        "clock": arguments.clock,
        "peak_memory_bytes": peak_memory_bytes() - READ_BYTES,
        "contexts": contexts,
    }


PARSERS = (make_parser, make_device_parser)  # for the completion of flags: which of them parses, wants_gpu says


def wants_gpu(argv: Sequence[str] | None) -> bool:
    """Whether the flags are those of device/: --device cuda, or a --shape, which only that knows.

    Engines of several ranks of a --model are built, and timed as on the CPU.
    """
    parser = Parser(add_help=False)
    parser.add_argument("--device")
    parser.add_argument("--shape")
    parser.add_argument("--tp_size")
    known, _ = parser.parse_known_args(argv)
    return (known.device == "cuda" and known.tp_size is None) or known.shape is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    if wants_gpu(argv):
        from kvseek.benchmarks.device.main import main as device_main

        return device_main(argv)
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
