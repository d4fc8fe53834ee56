"""Time per output token of decoding at long context: kvseek's methods and Hugging Face transformers, in one run.

    python bench/speed/decode.py --model MODEL --methods BASELINE,NAME --contexts 8000 --text FILE --compare_transformers

The contestants take turns of a few decode steps, so drift of the machine hits all alike; the prompt of each is
processed once. bench/README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from kvseek.bench.engines import build_variant
from kvseek.bench.machine import PlainRead, describe, peak_memory_bytes
from kvseek.bench.output import (
    Figure,
    add_output_flags,
    at_least_one,
    command,
    figures_table,
    numbers,
    print_whole,
)
from kvseek.bench.speed.contestants import (
    OUTSIDE,
    PART_STEPS,
    Contestant,
    EngineContestant,
    LlamaCppContestant,
    TransformersContestant,
    load_transformers,
    ranked,
)
from kvseek.bench.speed.device.options import make_parser as make_device_parser
from kvseek.bench.speed.parts import GROUPS, part_groups
from kvseek.bench.timing import CLOCKS, Clock, Samples, interleave
from kvseek.bench.variants import FORM, parse_variants
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.core.command_line import Parser
from kvseek.core.config import CHOICES
from kvseek.core.errors import ConfigError
from kvseek.core.manifest import read_manifest
from kvseek.core.model_config import MOST_POSITIONS
from kvseek.core.weight_only import NONE
from kvseek.engine.engine import Engine

WARMUP = 2  # steps of each contestant that are not counted
READ_BYTES = 1 << 30  # of a plain read: more than a last-level cache holds
READ = "plain read"  # takes turns with the contestants
T = TypeVar("T")


FIGURES: Mapping[str, Figure] = {  # by their headings
    "TPOT\nms": lambda entry: f"{entry['tpot_seconds']['median'] * 1e3:.1f}",
    "×\nbase": lambda entry: f"{entry['to_baseline']:.2f}",
    "×\nHF": lambda entry: "" if entry["to_transformers"] is None else f"{entry['to_transformers']:.2f}",
    "TTFT\ns": lambda entry: f"{entry['prefill_seconds']:.1f}",
    "attended": lambda entry: f"{entry['attended_tokens']:,.0f}",
    "cached": lambda entry: f"{entry['cached_tokens']:,}",
}
DETAILS: Mapping[str, Figure] = {
    "min–max\nms": lambda entry: "–".join(f"{entry['tpot_seconds'][name] * 1e3:.1f}" for name in ("min", "max")),
    "MB/\nstep": lambda entry: f"{sum(entry['bytes'].values()) / 1e6:.0f}",
    "GB/s": lambda entry: f"{entry['bytes_per_second'] / 1e9:.1f}",
    "of\nfloor": lambda entry: f"{entry['floor_share']:.0%}",
    "same\ntokens": lambda entry: f"{entry['tokens_as_baseline']:.0%}",
}


def _part(name: str) -> Figure:
    def write(entry: dict[str, Any]) -> str:
        inside = {part: seconds for part, seconds in entry["parts"].items() if part != OUTSIDE}
        return f"{(part_groups(inside) | {OUTSIDE: entry['parts'][OUTSIDE]})[name] * 1e3:.2f}"

    return write


PARTS: Mapping[str, Figure] = {name: _part(name) for name in (*GROUPS, OUTSIDE)}


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
    parser.add_argument(
        "--llama_cpp", type=Path, metavar="PYTHON", help="time llama.cpp too, by a Python that has llama-cpp-python"
    )
    parser.add_argument("--details", action="store_true", help="print all figures, and the parts of a step")
    add_output_flags(parser, ", e.g. bench/results/NAME.json")
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
    if arguments.llama_cpp and (arguments.model is None or not arguments.model.is_file()):
        raise ConfigError(
            f"--model = {arguments.model}: must be a GGUF file with --llama_cpp, which reads nothing else"
        )
    if arguments.llama_cpp and arguments.clock == "process":
        raise ConfigError("--clock process: must come without --llama_cpp, whose process is another one")
    at_least_one(arguments, "tokens", "block", "threads")
    arguments.contexts = numbers("contexts", arguments.contexts)
    arguments.methods = parse_variants(arguments.methods) if arguments.methods else None
    if arguments.tp_size is not None and arguments.methods is None:
        raise ConfigError("--tp_size: must come with --methods; engine directories have their own")
    if arguments.clock == "process" and arguments.threads > 1:
        raise ConfigError(
            f"--clock process: must come with --threads 1, not {arguments.threads}: threads that wait take time too"
        )
    sizes = arguments.tp_size = numbers("tp_size", arguments.tp_size or "1")
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
    for name in ("weight_only_precision", "quantize_lm_head"):
        if value := getattr(arguments, name):
            if arguments.methods is None:
                raise ConfigError(f"--{name}: must come with --methods; engine directories have their own")
            own = [variant.label for variant in arguments.methods if name in variant.engine_fields]
            if own:
                raise ConfigError(f"--methods: {own[0]!r}: must not have {name} beside --{name}; name it once")
            arguments.methods = [variant.with_engine(**{name: value}) for variant in arguments.methods]
    return arguments


@contextlib.contextmanager
def engine_directories(arguments: argparse.Namespace) -> Iterator[list[tuple[Path, str | None]]]:
    """The engine directories to time, with what to call each (None: its method); those of --methods are built here."""
    if arguments.engine_dirs:
        yield [(directory, None) for directory in arguments.engine_dirs]
        return
    beside = WARMUP + arguments.tokens + PART_STEPS + 2
    longest = max(arguments.contexts) + beside
    model = open_checkpoint(arguments.model).config
    reach = min(model.max_position_embeddings, model.whole_window or MOST_POSITIONS)
    if longest > reach:
        limit = f"<= {reach - beside}, as the model reaches {reach} tokens and the steps take {beside}"
        raise ConfigError(f"--contexts = {max(arguments.contexts)}: must be {limit}; lower it, or --tokens")
    with tempfile.TemporaryDirectory(prefix="kvseek-bench-") as name:
        built = list[tuple[Path, str | None]]()
        for variant, tp_size in itertools.product(arguments.methods, arguments.tp_size):
            directory = Path(name) / str(len(built))
            build_variant(arguments, variant, directory, longest, tp_size=tp_size)
            built.append((directory, ranked(variant.label, tp_size)))
        yield built


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
            entry["settings"], entry["fingerprint"] = contestant.config.method_config, contestant.fingerprint
            if contestant.config.device == "cpu":  # on a GPU the host only launches them
                entry["parts"] = with_threads(contestant.threads, partial(contestant.part_seconds, PART_STEPS, clock))
    for contestant in contestants:
        contestant.close()
    torch.set_num_threads(threads)
    return {"context": len(prompt_ids), "read_bandwidth": bandwidth, "results": results}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file: the engines race at every context."""
    with engine_directories(arguments) as directories, contextlib.ExitStack() as loaded:
        engines = list[EngineContestant]()
        for directory, name in directories:
            engine = Engine.load(directory, arguments.threads)
            loaded.callback(engine.close)
            fingerprint = read_manifest(directory).fingerprint
            engines.append(EngineContestant(engine, arguments.threads, name, fingerprint))
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
    with contextlib.ExitStack() as processes:
        if arguments.llama_cpp:
            longest = max(arguments.contexts) + WARMUP + arguments.tokens + 1
            other = LlamaCppContestant(arguments.llama_cpp, arguments.model, config, arguments.threads, longest)
            processes.callback(other.end)
            contestants.append(other)
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


def result(contestant: Contestant, samples: Samples, baseline: Contestant) -> dict[str, Any]:
    """Figures of one contestant; seconds, bytes and tokens."""
    moved = contestant.step_bytes()
    pairs = zip(contestant.tokens, baseline.tokens, strict=True)
    return {
        "name": contestant.name,
        "reference": isinstance(contestant, TransformersContestant),
        "prefill_seconds": contestant.prefill_seconds,
        "tpot_seconds": samples.summary(),
        "attended_tokens": contestant.attended_tokens,
        "cached_tokens": contestant.cached_tokens,
        "tokens_as_baseline": sum(a == b for a, b in pairs) / len(baseline.tokens),
        "bytes": moved,
        "bytes_per_second": sum(moved.values()) / samples.median,
        "samples": samples.seconds,
    }


def add_ratios(results: list[dict[str, Any]], read_bandwidth: float) -> None:
    """Add to each result its TPOT over the baseline's (the first) and transformers', and the floor."""
    baseline = results[0]["tpot_seconds"]["median"]
    reference = min((entry["tpot_seconds"]["median"] for entry in results if entry["reference"]), default=None)
    for entry in results:
        median = entry["tpot_seconds"]["median"]
        entry["to_baseline"] = median / baseline
        entry["to_transformers"] = None if reference is None else median / reference
        entry["floor_seconds"] = sum(entry["bytes"].values()) / read_bandwidth
        entry["floor_share"] = entry["floor_seconds"] / median


def print_report(document: dict[str, Any], details: bool = False) -> None:
    """Print a table of the figures that matter for each context length, and with `details` all others."""
    console, machine = Console(highlight=False, soft_wrap=True), document["machine"]
    console.print(f"{machine['cpu']}, {machine['threads']} threads; commit {machine['commit']}")
    precision = document["weight_only_precision"]
    kind = document["dtype"] + ("" if precision == NONE else f" with {precision} weights")
    kind += " and head" * document["quantize_lm_head"]
    for part in document["contexts"]:
        title = f"{document['model']} {kind}, {part['context']:,} tokens of {document['text']}"
        results = part["results"]
        print_whole(figures_table(title, "contestant", FIGURES, results, "name"))
        if details:
            table = figures_table("further figures", "contestant", DETAILS, results, "name")
            table.caption = f"floor: the bytes of a step at a plain read's {part['read_bandwidth'] / 1e9:.1f} GB/s"
            print_whole(table)
            timed = [entry for entry in results if "parts" in entry]
            table = figures_table("parts of a step, ms", "contestant", PARTS, timed, "name")
            table.caption = "outside: sampling and what an engine does for a step"
            print_whole(table)
    console.print(
        f"medians of {document['tokens']} steps, {document['clock']} time; base: "
        f"{document['contexts'][0]['results'][0]['name']}; HF: transformers, the faster of the two; peak memory of all "
        f"together {document['peak_memory_bytes'] / 1e9:.1f} GB" + "; --details prints more" * (not details)
    )


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
    if any(word.partition("=")[0] == "--speculation" for word in (sys.argv[1:] if argv is None else argv)):
        from kvseek.bench.speed.speculation import main as speculation_main

        return speculation_main(argv)
    if wants_gpu(argv):
        from kvseek.bench.speed.device.main import main as device_main

        return device_main(argv)
    return command(parse, run, print_report)(argv)


if __name__ == "__main__":
    sys.exit(main())
