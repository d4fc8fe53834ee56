"""Time per output token of decoding at long context: kvseek's methods and Hugging Face transformers, in one run.

    python bench/speed/decode.py --model MODEL --methods BASELINE,NAME --contexts 8000 --text FILE --compare_transformers

The contestants take turns of a few decode steps, so drift of the machine hits all alike; the prompt of each is
processed once. bench/README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import itertools
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from kvseek.bench.machine import PlainRead, describe, peak_memory_bytes
from kvseek.bench.output import Figure, add_output_flags, at_least_one, figures_table, numbers, print_whole, run_command
from kvseek.bench.speed.device.options import make_parser as make_device_parser
from kvseek.bench.speed.shapes import matrix_bytes, row_numbers
from kvseek.bench.timing import CLOCKS, GROUPS, Clock, HostClock, Samples, interleave, part_groups
from kvseek.bench.variants import FORM, Variant, parse_variants
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.core.command_line import Parser
from kvseek.core.config import CHOICES, MOST_POSITIONS, EngineConfig
from kvseek.core.errors import ConfigError, KvseekError
from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.core.weight_only import NONE
from kvseek.engine.engine import Engine
from kvseek.engine.observer import Observer

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

OUTSIDE = "outside"  # what a step takes beside its parts
PART_STEPS = 9  # steps after the timed ones, whose parts are timed


class Contestant(ABC):
    """Processes a prompt, then generates greedily, one token a step.

    Attributes
    ----------
    threads : int
        That this process must have in each call (torch.set_num_threads); other ranks have theirs.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.threads = name, threads
        self.prefill_seconds = 0.0
        self.tokens: list[int] = []
        self.attended_tokens = 0.0  # per KV head, mean over the layers, in the last step
        self.cached_tokens = 0

    @abstractmethod
    def prefill(self, prompt_ids: list[int], steps: int) -> None:
        """Process a prompt up to its first token and set `prefill_seconds`; `steps` decode steps are to follow."""

    @abstractmethod
    def step(self) -> None:
        """Generate one more token."""

    @abstractmethod
    def close(self) -> None:
        """Forget the prompt."""

    @abstractmethod
    def step_bytes(self) -> dict[str, float]:
        """Bytes that the last step had to read: weights, attended rows, and the whole index at most."""


class EngineContestant(Contestant):
    """An engine, run through the same `step` that serves. `threads` are those of all its ranks together."""

    def __init__(self, engine: Engine, threads: int, name: str | None = None) -> None:
        self.engine, self.config = engine, engine.config
        size = self.config.tp_size
        super().__init__(name or ranked(self.config.method, size), max(1, threads // size))
        self._weight_bytes = float(matrix_bytes(self.config))
        self._request_id = 0

    def prefill(self, prompt_ids: list[int], steps: int) -> None:
        start = time.perf_counter()
        salt = f"prefill {time.perf_counter_ns()}"  # every prompt is read, also one that was read before
        self._request_id = self.engine.submit(
            Request(tuple(prompt_ids), max_tokens=steps + PART_STEPS + 2, cache_salt=salt)
        )
        while not self._run():
            pass
        self.prefill_seconds = time.perf_counter() - start

    def step(self) -> None:
        if not self._run():
            raise KvseekError(f"{self.name}: a decode step gave no token")

    def close(self) -> None:
        self.engine.cancel(self._request_id)
        self.tokens = []

    def step_bytes(self) -> dict[str, float]:
        row = row_bytes(self.config)
        sparse = self.attended_tokens < self.cached_tokens
        index = self.engine.index_bytes_per_token * self.cached_tokens if sparse else 0.0
        return {"weights": self._weight_bytes, "rows": self.attended_tokens * row, "index": index}

    def part_seconds(self, steps: int, clock: Clock = time.perf_counter) -> dict[str, float]:
        """Median seconds of the parts of `steps` further steps; "outside" is what a step takes beside them."""
        parts, samples = HostClock(clock), list[dict[str, float]]()
        decoder = self.engine.decoder
        decoder.observe(parts)
        try:
            for _ in range(steps):
                start = clock()
                parts.restart()
                self.step()
                outside = clock() - start - sum(parts.seconds.values())
                samples.append({**parts.seconds, OUTSIDE: outside})
        finally:
            decoder.observe(Observer())
        return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}

    def _run(self) -> bool:
        """One engine step; whether it gave a token."""
        tokens = [output for output in self.engine.step() if self._is_token(output)]
        for output in tokens:
            assert output.token_id is not None
            self.tokens.append(output.token_id)
            self.attended_tokens, self.cached_tokens = output.attended_tokens, output.cached_tokens
        return bool(tokens)

    def _is_token(self, output: StepOutput) -> bool:
        if output.finish_reason is FinishReason.ERROR:
            raise KvseekError(f"{self.name}: {output.error}")
        return output.token_id is not None


class TransformersContestant(Contestant):
    """Hugging Face transformers with its default cache (DynamicCache) and one attention implementation.

    Contestants of one model share its weights; those created with `like` take over the prompt's cache from another,
    as eager attention would need gigabytes for the prompt.
    """

    def __init__(
        self,
        model: Any,
        attention: str,
        config: EngineConfig,
        threads: int,
        like: TransformersContestant | None = None,
    ) -> None:
        super().__init__(f"transformers {attention}", threads)
        self._model, self._attention, self._config, self._like = model, attention, config, like
        self._cache: Any = None

    @torch.inference_mode()
    def prefill(self, prompt_ids: list[int], steps: int) -> None:
        if self._like is not None:
            self._cache, self.tokens = copy.deepcopy(self._like._cache), list(self._like.tokens)
            self.prefill_seconds = self._like.prefill_seconds
        else:
            from transformers import DynamicCache

            self._cache = DynamicCache(config=self._model.config)
            start = time.perf_counter()
            self._forward(prompt_ids)
            self.prefill_seconds = time.perf_counter() - start

    @torch.inference_mode()
    def step(self) -> None:
        self._forward(self.tokens[-1:])
        self.attended_tokens = self.cached_tokens = self._cache.get_seq_length()

    def close(self) -> None:
        self._cache, self.tokens = None, []

    def step_bytes(self) -> dict[str, float]:
        return {
            "weights": float(matrix_bytes(self._config)),
            "rows": self.cached_tokens * row_bytes(self._config),
            "index": 0.0,
        }

    def _forward(self, ids: list[int]) -> None:
        self._model.set_attn_implementation(self._attention)
        inputs = torch.tensor([ids])
        logits = self._model(inputs, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        self.tokens.append(int(logits[0, -1].argmax()))


def load_transformers(model: Path, config: EngineConfig, threads: int) -> list[Contestant]:
    """transformers' contestants of a Hugging Face directory or GGUF file, in the dtype of `config`: sdpa and eager."""
    from transformers import AutoModelForCausalLM

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(model)}
    if model.is_file():
        source = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    config = dataclasses.replace(config, weight_only_precision=NONE)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, config.dtype)).eval()
    sdpa = TransformersContestant(loaded, "sdpa", config, threads)
    return [sdpa, TransformersContestant(loaded, "eager", config, threads, like=sdpa)]


def ranked(name: str, tp_size: int) -> str:
    """Return what an engine of so many ranks is called."""
    return name if tp_size == 1 else f"{name}, {tp_size} ranks"


def row_bytes(config: EngineConfig) -> float:
    """Bytes of one cached token: its key and value rows of all layers and KV heads."""
    return float(row_numbers(config.model) * getattr(torch, config.dtype).itemsize)


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
    """Everything that was measured, as it goes into the result file: the engines race at every context."""
    with engine_directories(arguments) as directories, contextlib.ExitStack() as loaded:
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
        title, results = (
            f"{document['model']} {kind}, {part['context']:,} tokens of {document['text']}",
            part["results"],
        )
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
    if wants_gpu(argv):
        from kvseek.bench.speed.device.main import main as device_main

        return device_main(argv)
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
