"""Perplexity of given text through the methods: each token behind a prompt is a decode step with the method's own selection.

    kvseek evaluate perplexity --model MODEL --methods full,nested,pariskv --top_k 64,256 --text FILE

The engines run as they serve, and draw the text's own tokens (LLM.score). What a method loses is the rise of
its loss over the first one's, token by token: of equal tokens, so that it is known far better than either loss. A run that
was cut off goes on with its result file: engines that it has are not measured again.

With --own_answers each engine also answers, and the tokens that count are those of the first one's answer: how far a
method drifts from it over a long answer, and whether its own begins to repeat itself, as small models' greedy ones soon do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvseek import LLM, SamplingParams
from kvseek.bench.accuracy.haystack import read_text
from kvseek.bench.budgets import add_budget_flags, read_budgets
from kvseek.bench.engines import free_memory, variant_engines
from kvseek.bench.machine import describe, describe_gpu, digest_of_model
from kvseek.bench.output import (
    Figure,
    at_least_one,
    figure,
    figures_table,
    print_whole,
    progress,
    read_result,
    write_result,
)
from kvseek.bench.variants import FORM
from kvseek.core.config import CHOICES, read_config
from kvseek.core.errors import require
from kvseek.core.manifest import read_manifest
from kvseek.engine.tokenizer import Tokenizer

LIKELY = -math.log(0.5)  # largest loss, by the first engine, of a token that is called likely
PARTS = 4  # of the steps: a method that loses more and more has it in the last one
NGRAM = 8  # neighbouring tokens of an answer that are looked for before them
Losses = list[list[float]]  # minus the log probability of each token, by text
Pair = tuple[float, float]  # losses of one token: by an engine, and by the first engine


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `kvseek evaluate perplexity`."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face directory or GGUF file")
    add("--methods", required=True, help=f"the first is what the others are compared with: comma list of {FORM}")
    add_budget_flags(parser)
    add("--text", nargs="+", required=True, help="UTF-8 files, or PACKAGE:PATH in an installed Python package")
    add("--prompt_tokens", type=int, default=4096, help="first tokens of each text, which are read")
    add("--tokens", type=int, default=500, help="the next ones, each a step that counts")
    add(
        "--own_answers",
        action="store_true",
        help="in place of the next ones: the first method's own answer, which no end token ends",
    )
    add("--temperature", type=float, help="of --own_answers (greedy if left out), with one seed for all methods")
    add("--block", type=int, default=50, help="neighbouring tokens that are one sample of standard errors")
    add("--device", choices=CHOICES["device"], default="cpu")
    add("--dtype", default="float32")
    add("--weight_only_precision", choices=CHOICES["weight_only_precision"], help="of all engines")
    add("--threads", type=int, help="CPU threads; torch's choice if left out")


def read(arguments: argparse.Namespace) -> None:
    """Read the flags' values; raises ConfigError on those that cannot work."""
    at_least_one(arguments, "prompt_tokens", "tokens", "block")
    fits = arguments.tokens % arguments.block == 0 and arguments.tokens > arguments.block
    limit = f"a multiple of --block = {arguments.block}, twice that or more"
    require(fits, "--tokens", arguments.tokens, limit, "change one of them")
    least = NGRAM + PARTS if arguments.own_answers else 1
    require(arguments.tokens >= least, "--tokens", arguments.tokens, f">= {least} with --own_answers", "take more")
    drawn = arguments.temperature is None or arguments.own_answers
    require(drawn, "--temperature", arguments.temperature, "left out without --own_answers", "drop it, or add that")
    names = [text if ":" in text else Path(text).name for text in arguments.text]  # without folders of the machine
    require(len(set(names)) == len(names), "--text", names, "of different names", "rename one, or leave it out")
    arguments.text = dict(zip(names, map(read_text, arguments.text), strict=True))
    arguments.methods = read_budgets(arguments)
    if arguments.weight_only_precision:
        precision = {"weight_only_precision": arguments.weight_only_precision}
        arguments.methods = [[one.with_engine(**precision) for one in listed] for listed in arguments.methods]


def texts(arguments: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens of each text that are read, and that stand behind them; raises ConfigError if one has too few.

    The first that is forced does not count: its loss comes from reading the prompt.
    """
    read, forced = arguments.prompt_tokens, 0 if arguments.own_answers else 1 + arguments.tokens
    for name, text in arguments.text.items():
        ids = tokenizer.encode(text)
        limit = f"<= {len(ids) - forced}, as {name} has {len(ids)} tokens"
        require(len(ids) >= read + forced, "--prompt_tokens", read, limit, "or give a longer text")
        yield ids[:read], ids[read : read + forced]


def score(
    arguments: argparse.Namespace, directory: Path, answers: Sequence[Sequence[int]] | None
) -> tuple[Losses, dict[str, Any]]:
    """Load an engine and score every text; also the tokens that its steps attended to, and those in the cache, on average.

    With --own_answers also its answers, and where they repeat themselves; `answers` are the first engine's, None if this is it.
    """
    own: dict[str, Any] = {}
    with LLM(directory, threads=arguments.threads) as llm:
        prompts, forced = zip(*texts(arguments, llm.tokenizer), strict=True)
        if arguments.own_answers:
            params = SamplingParams(
                max_tokens=1 + arguments.tokens, ignore_eos=True, temperature=arguments.temperature or 0
            )
            given = [list(output.token_ids) for output in llm.generate(prompts, params)]
            own = {"repeated": repeated(given), "answers": given}
            forced = tuple(given if answers is None else answers)
        outputs = llm.score(prompts, forced)
    # Rounded as in the result file, so that a run that goes on with one finds what an uninterrupted run does.
    losses = [[-round(one.token, 4) for one in output.logprobs[1:]] for output in outputs if output.logprobs]
    names = ("attended_tokens", "cached_tokens")
    return losses, own | {name: statistics.fmean(getattr(output, name) for output in outputs) for name in names}


def repeated(answers: Sequence[Sequence[int]]) -> list[float]:
    """In each of PARTS parts of answers of one length, the share in % of n-grams that have stood in their answer before."""
    known = []
    for answer in answers:
        seen = set[tuple[int, ...]]()
        own = []
        for at in range(len(answer) - NGRAM + 1):
            ngram = tuple(answer[at : at + NGRAM])
            own.append(ngram in seen)
            seen.add(ngram)
        known.append(own)
    part = -(-len(known[0]) // PARTS)
    return [
        100 * statistics.fmean(one for own in known for one in own[at : at + part])
        for at in range(0, len(known[0]), part)
    ]


def risen(pairs: Sequence[Pair]) -> float:
    """What perplexity has risen by, in %; `pairs` are losses of tokens and those by the first engine."""
    return 100 * math.expm1(statistics.fmean(ours - theirs for ours, theirs in pairs))


def with_error(listed: Sequence[Sequence[Pair]], block: int) -> dict[str, Any]:
    """What perplexity has risen by, in %, and the standard error by blocks of tokens of a text; None of a single block."""
    blocks = [pairs[at : at + block] for pairs in listed for at in range(0, len(pairs), block)]
    means = [statistics.fmean(ours - theirs for ours, theirs in pairs) for pairs in blocks]
    percent = risen([pair for pairs in listed for pair in pairs])
    error = (100 + percent) * statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return {"percent": percent, "error": error}


def paired(losses: Losses, first: Losses) -> list[list[Pair]]:
    """The pairs of each text."""
    return [list(zip(own, other, strict=True)) for own, other in zip(losses, first, strict=True)]


def by_part(listed: Sequence[Sequence[Pair]], block: int) -> list[dict[str, Any]]:
    """The rise in each of PARTS parts of the steps, see with_error; of each part and text there are at least two blocks."""
    part = -(-len(listed[0]) // PARTS)
    block = max(1, min(block, part // 2))
    return [with_error([pairs[at : at + part] for pairs in listed], block) for at in range(0, len(listed[0]), part)]


def figures_of(losses: Losses, first: Losses, block: int) -> dict[str, Any]:
    """The figures of an engine: of all tokens, of each text, of each part of the steps, and of likely and unlikely tokens."""
    listed = paired(losses, first)
    everything = [pair for pairs in listed for pair in pairs]
    likely = [pair for pair in everything if pair[1] <= LIKELY]
    unlikely = [pair for pair in everything if pair[1] > LIKELY]
    return {
        "perplexity": math.exp(statistics.fmean(loss for loss, _ in everything)),
        **with_error(listed, block),
        "by_text": [with_error([pairs], block) for pairs in listed],
        "by_part": [one["percent"] for one in by_part(listed, block)],
        "likely": risen(likely) if likely else None,
        "unlikely": risen(unlikely) if unlikely else None,
    }


def losses_of(entry: dict[str, Any]) -> Losses:
    """The losses that an entry of a result file was computed from."""
    return [[-one for one in of_text] for of_text in entry["log_probabilities"]]


def begun(arguments: argparse.Namespace) -> dict[str, Any]:
    """The document so far: that of --output, if it is there; raises ConfigError if that is of another run."""
    names = ("prompt_tokens", "tokens", "block", "dtype", "weight_only_precision", "device")
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in arguments.text.values()]
    head = {"model": arguments.model.name, "weights": digest_of_model(arguments.model)}
    head |= {"texts": list(arguments.text), "digests": digests}
    head |= {name: getattr(arguments, name) for name in names}
    # which older files do not have
    head |= {"own_answers": arguments.own_answers or None, "temperature": arguments.temperature}
    if arguments.output is None or not arguments.output.exists():
        return {"evaluation": "perplexity", "machines": [], **head, "results": []}
    document = read_result(arguments.output, evaluation="perplexity")
    found, first = {name: document.get(name) for name in head}, arguments.methods[0][0].label
    require(found == head, "--output", found, f"of {head}, as this run", "name another file")
    measured = [entry["name"] for entry in document["results"]]
    require(
        measured[:1] in ([], [first]), "--output", measured, f"beside {first}, the first of --methods", "name it first"
    )
    return document


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Score the texts with every engine that --output lacks; the document, which is written after each of them."""
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    document = begun(arguments)
    results, machines = document["results"], document["machines"]
    gpu = {"gpu": describe_gpu(torch.device("cuda"))} if arguments.device == "cuda" else {}
    machine = json.loads(json.dumps({**describe(), **gpu}))
    done = {entry["name"] for entry in results}
    left = [[one for one in listed if one.label not in done] for listed in arguments.methods]
    if machine not in machines and any(left):
        machines.append(machine)
    with tempfile.TemporaryDirectory(prefix="kvseek-evaluate-") as folder:
        directory = Path(folder) / "engine"
        longest = arguments.prompt_tokens + 1 + arguments.tokens
        for name, _ in variant_engines(arguments, left, directory, longest, len(arguments.text)):
            losses, counts = score(
                arguments, directory, results[0]["answers"] if results and arguments.own_answers else None
            )
            free_memory()
            figures = figures_of(losses, losses_of(results[0]) if results else losses, arguments.block)
            built = {
                "settings": read_config(directory).method_config,
                "fingerprint": read_manifest(directory).fingerprint,
                "machine": machines.index(machine),
            }
            own = [[-loss for loss in of_text] for of_text in losses]
            results.append({"name": name, **built, **figures, **counts, "log_probabilities": own})
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
    if report.get("own_answers"):
        figures["repeated, % by step"] = lambda entry: " ".join(f"{percent:.0f}" for percent in entry["repeated"])
    tokens = f"{report['tokens']} tokens behind {report['prompt_tokens']:,}"
    title = f"{tokens}; rise of perplexity over {report['results'][0]['name']}"
    print_whole(figures_table(title, "", figures, report["results"], "name"))
