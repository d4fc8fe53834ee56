"""Perplexity of given text through the methods: each token behind a prompt is a decode step with the method's own selection.

    kvseek evaluate perplexity --model MODEL --methods full,nested,pariskv --top_k 64,256 --text FILE

The engines run as they serve, and draw the text's own tokens (Request.sampling.forced_tokens). What a method loses is the rise of
its loss over the first one's, token by token: of equal tokens, so that it is known far better than either loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvseek.bench.engines import build_variant, free_memory, write_own_kernels
from kvseek.bench.machine import describe, describe_gpu
from kvseek.bench.output import (
    Figure,
    add_output_flags,
    at_least_one,
    command,
    figure,
    figures_table,
    numbers,
    print_whole,
    progress,
    write_result,
)
from kvseek.bench.variants import FORM, Variant, parse_variants
from kvseek.core.command_line import Parser
from kvseek.core.config import CHOICES, EngineConfig
from kvseek.core.config_file import read_config
from kvseek.core.cuda import KERNELS_FOLDER
from kvseek.core.errors import ConfigError, KvseekError, require
from kvseek.core.request import FinishReason, Request, SamplingConfig
from kvseek.engine.engine import Engine
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.tokenizer import Tokenizer

LIKELY = -math.log(0.5)  # largest loss, by the first engine, of a token that is called likely
PARTS = 4  # of the steps: a method that loses more and more has it in the last one
Losses = list[list[float]]  # minus the log probability of each token, by text
Pair = tuple[float, float]  # losses of one token: by an engine, and by the first engine


def make_parser() -> Parser:
    """Make the parser of `kvseek evaluate`."""
    whole = Parser(prog="kvseek evaluate", description="Measure what a method loses.")
    kinds: Any = whole.add_subparsers(dest="evaluation", required=True)
    parser = kinds.add_parser("perplexity", help="of given text, through the methods' own decode steps")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face directory or GGUF file")
    add("--methods", required=True, help=f"the first is what the others are compared with: comma list of {FORM}")
    add("--top_k", help="comma list: each method that has the field, and does not name it, with each of these budgets")
    add("--text", nargs="+", required=True, help="UTF-8 files, or PACKAGE:PATH in an installed Python package")
    add("--prompt_tokens", type=int, default=4096, help="first tokens of each text, which are read")
    add("--tokens", type=int, default=500, help="the next ones, each a step that counts")
    add("--block", type=int, default=50, help="neighbouring tokens that are one sample of standard errors")
    add("--device", choices=CHOICES["device"], default="cpu")
    add("--dtype", default="float32")
    add("--weight_only_precision", choices=CHOICES["weight_only_precision"], help="of all engines")
    add("--threads", type=int, help="CPU threads; torch's choice if left out")
    add_output_flags(parser, ", after every engine, e.g. bench/results/NAME.json")
    return whole


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings; raises ConfigError on those that cannot work."""
    arguments: argparse.Namespace = make_parser().parse_args(argv)
    at_least_one(arguments, "prompt_tokens", "tokens", "block")
    fits = arguments.tokens % arguments.block == 0 and arguments.tokens > arguments.block
    limit = f"a multiple of --block = {arguments.block}, twice that or more"
    require(fits, "--tokens", arguments.tokens, limit, "change one of them")
    names = [text if ":" in text else Path(text).name for text in arguments.text]  # without folders of the machine
    require(len(set(names)) == len(names), "--text", names, "of different names", "rename one, or leave it out")
    arguments.text = dict(zip(names, map(read_text, arguments.text), strict=True))
    top_k = [] if arguments.top_k is None else numbers("top_k", arguments.top_k)
    variants = parse_variants(arguments.methods)
    if arguments.weight_only_precision:
        precision = {"weight_only_precision": arguments.weight_only_precision}
        variants = [variant.with_engine(**precision) for variant in variants]
    arguments.methods = [budgets(variant, top_k) for variant in variants]
    return arguments


def read_text(name: str) -> str:
    """The text of a file, or of one in a package, which is not imported; raises ConfigError if there is no such package."""
    package, colon, inner = name.partition(":")
    if not colon:
        return Path(name).read_text(encoding="utf-8")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"--text = {name!r}: there is no package {package!r}; install it, or name a file")
    return Path(spec.submodule_search_locations[0], inner).read_text(encoding="utf-8")


def budgets(variant: Variant, top_k: Sequence[int]) -> list[Variant]:
    """The variant with each budget, of a method that has budgets and where none is named; else the variant alone.

    Raises ConfigError on a budget that the method cannot have.
    """
    if not top_k or "top_k" in variant.fields or not hasattr(variant.settings, "top_k"):
        return [variant]
    label = variant.label + ("," if ":" in variant.label else ":")
    found = [dataclasses.replace(variant.with_fields(top_k=k), label=f"{label}top_k={k}") for k in top_k]
    return [one for one in found if one.settings]


def engines(arguments: argparse.Namespace, directory: Path) -> Iterator[tuple[str, EngineConfig]]:
    """Name each engine, with what to load `directory` with, where one is built of each variant for all of its budgets."""
    longest, batch = arguments.prompt_tokens + 1 + arguments.tokens, len(arguments.text)
    for listed in arguments.methods:
        build_variant(arguments, listed[0], directory, longest, batch)
        built = read_config(directory)
        for one in listed:
            config = dataclasses.replace(built, method_config=dataclasses.asdict(one.settings))
            if config.device == "cuda":  # whose kernels some methods compile for a budget
                shutil.rmtree(directory / KERNELS_FOLDER)
                write_own_kernels(directory, config)
            yield one.label, config


def texts(arguments: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tokens of each text that are read, and that are forced behind them; raises ConfigError if one has too few.

    The first that is forced does not count: its loss comes from reading the prompt.
    """
    read, forced = arguments.prompt_tokens, 1 + arguments.tokens
    for name, text in arguments.text.items():
        ids = tokenizer.encode(text)
        limit = f"<= {len(ids) - forced}, as {name} has {len(ids)} tokens"
        require(len(ids) >= read + forced, "--prompt_tokens", read, limit, "or give a longer text")
        yield tuple(ids[:read]), tuple(ids[read : read + forced])


def score(arguments: argparse.Namespace, directory: Path, config: EngineConfig) -> tuple[Losses, dict[str, float]]:
    """Load an engine and score every text; also the tokens that its steps attended to, and those in the cache, on average."""
    with closing(Engine(config, load_decoder(directory, config), Tokenizer(directory))) as engine:
        requests = [
            Request(prompt, len(forced), SamplingConfig(forced_tokens=forced, logprobs=0))
            for prompt, forced in texts(arguments, engine.tokenizer)
        ]
        losses: dict[int, list[float]] = {engine.submit(request): [] for request in requests}
        counts: dict[str, list[float]] = {"attended_tokens": [], "cached_tokens": []}
        while engine.has_work:
            for output in engine.step():
                if output.finish_reason is FinishReason.ERROR:
                    raise KvseekError(f"{config.method}: {output.error}")
                if output.cached_tokens and output.logprobs is not None:
                    losses[output.request_id].append(-output.logprobs.token)
                    for name, values in counts.items():
                        values.append(getattr(output, name))
    return list(losses.values()), {name: statistics.fmean(values) for name, values in counts.items()}


def risen(pairs: Sequence[Pair]) -> float:
    """What perplexity has risen by, in %; `pairs` are losses of tokens and those by the first engine."""
    return 100 * math.expm1(statistics.fmean(ours - theirs for ours, theirs in pairs))


def with_error(listed: Sequence[Sequence[Pair]], block: int) -> dict[str, float]:
    """What perplexity has risen by, in %, and the standard error by blocks of tokens of a text."""
    blocks = [pairs[at : at + block] for pairs in listed for at in range(0, len(pairs), block)]
    means = [statistics.fmean(ours - theirs for ours, theirs in pairs) for pairs in blocks]
    percent = risen([pair for pairs in listed for pair in pairs])
    return {"percent": percent, "error": (100 + percent) * statistics.stdev(means) / math.sqrt(len(means))}


def figures_of(losses: Losses, first: Losses, block: int) -> dict[str, Any]:
    """The figures of an engine: of all tokens, of each text, of each part of the steps, and of likely and unlikely tokens."""
    listed = [list(zip(own, other, strict=True)) for own, other in zip(losses, first, strict=True)]
    everything, part = [pair for pairs in listed for pair in pairs], -(-len(listed[0]) // PARTS)
    likely = [pair for pair in everything if pair[1] <= LIKELY]
    unlikely = [pair for pair in everything if pair[1] > LIKELY]
    return {
        "perplexity": math.exp(statistics.fmean(loss for loss, _ in everything)),
        **with_error(listed, block),
        "by_text": [with_error([pairs], block) for pairs in listed],
        "by_part": [
            risen([pair for pairs in listed for pair in pairs[at : at + part]]) for at in range(0, len(listed[0]), part)
        ],
        "likely": risen(likely) if likely else None,
        "unlikely": risen(unlikely) if unlikely else None,
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Score the texts with every engine; the document, which is written after each of them."""
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    settings = ("prompt_tokens", "tokens", "block", "dtype", "weight_only_precision")
    gpu = {"gpu": describe_gpu(torch.device("cuda"))} if arguments.device == "cuda" else {}
    results, first = list[dict[str, Any]](), Losses()
    document = {
        "evaluation": "perplexity",
        "machine": {**describe(), **gpu},
        "model": arguments.model.name,
        "texts": list(arguments.text),
        **{name: getattr(arguments, name) for name in settings},
        "results": results,
    }
    with tempfile.TemporaryDirectory(prefix="kvseek-evaluate-") as folder:
        directory = Path(folder) / "engine"
        for name, config in engines(arguments, directory):
            losses, counts = score(arguments, directory, config)
            free_memory()
            first = first or losses
            figures = figures_of(losses, first, arguments.block)
            own = [[round(-loss, 4) for loss in of_text] for of_text in losses]
            results.append({"name": name, **figures, **counts, "log_probabilities": own})
            progress(f"{name}: perplexity {figures['perplexity']:.3f}, {rise(figures)} %")
            if arguments.output:
                write_result(arguments.output, document)
    return document


def rise(entry: dict[str, Any]) -> str:
    """What perplexity has risen by, and its standard error, in %."""
    return f"{entry['percent']:+.1f} ± {entry['error']:.1f}"


def rise_of(text: int) -> Figure:
    """The same of one text."""
    return lambda entry: rise(entry["by_text"][text])


def print_report(report: dict[str, Any]) -> None:
    """Print a row for each engine."""
    figures = {
        "perplexity": figure("perplexity", ".3f"),
        "rise, %": rise,
        **{name: rise_of(number) for number, name in enumerate(report["texts"])},
        "by step": lambda entry: " ".join(f"{percent:+.1f}" for percent in entry["by_part"]),
        **{name: figure(name, "+.1f") for name in ("likely", "unlikely")},
        "attended": figure("attended_tokens", ",.0f"),
        "cached": figure("cached_tokens", ",.0f"),
    }
    tokens = f"{report['tokens']} tokens behind {report['prompt_tokens']:,}"
    title = f"{tokens}; rise of perplexity over {report['results'][0]['name']}"
    print_whole(figures_table(title, "", figures, report["results"], "name"))


main = command(parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
