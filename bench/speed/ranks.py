"""Engines of several ranks beside those of one, of a model's shape: `kvseek bench --shape NAME --tp_size 1,2`.

What is timed is `Engine.step`, the path that serves, by the host's clock. Engines come one after the other, as two of them seldom
fit a GPU, and a process has one of several ranks at a time: so their steps do not take turns. The prompt is of random tokens, and
read as any other: rows lie where an engine puts them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from kvseek.bench.engines import free_memory, random_engine, without_reuse
from kvseek.bench.machine import describe, describe_gpu
from kvseek.bench.output import GIB, Figure, figure, figures_table, print_whole, progress
from kvseek.bench.speed.contestants import EngineContestant
from kvseek.bench.speed.device.bench import ROOM, engine_config
from kvseek.bench.speed.device.decode import describe_variant
from kvseek.bench.speed.device.options import cells_of
from kvseek.bench.speed.device.prefill import WARM_TOKENS
from kvseek.bench.speed.shapes import get_shape
from kvseek.bench.timing import Samples, interleave
from kvseek.bench.variants import Variant
from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError, KvseekError

WARMUP = 5  # steps that are not counted
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Contest:
    """An engine to time: a variant, where its rows lie, and its number of ranks."""

    variant: Variant
    offload: str
    tp_size: int

    def named(self) -> dict[str, Any]:
        """What tells it from others in a result file."""
        return {"method": self.variant.label, "offload": self.offload, "tp_size": self.tp_size}


def contests(arguments: argparse.Namespace) -> Iterator[Contest]:
    """All engines; the rows of `full` lie on the device, where dense attention is fastest, if there is one."""
    for variant in arguments.methods:
        on_device = variant.method == "full" and arguments.device == "cuda"
        for offload, tp_size in itertools.product(["never"] if on_device else arguments.offload, arguments.tp_size):
            yield Contest(variant, offload, tp_size)


def config_of(arguments: argparse.Namespace, contest: Contest) -> EngineConfig:
    """An engine for one request of the longest context; raises ConfigError."""
    cells = cells_of(arguments)
    model = get_shape(arguments.shape, max(cell.context for cell in cells) + ROOM)
    config = engine_config(arguments.dtype, model, contest.variant, cells)
    cache: dict[str, Any] = {}
    if arguments.device == "cuda":
        cache["offload"] = contest.offload
        if contest.offload != "never" and config.cache.kv_cache_host_memory_bytes is None:
            cache["kv_cache_host_memory_bytes"] = arguments.host_memory
    return without_reuse(config, device=arguments.device, tp_size=contest.tp_size, cache=cache)


def run_ranks(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    """Everything that was measured; `save` gets the document whenever it has grown."""
    threads, mode = torch.get_num_threads(), "prefill" if arguments.prefill else "decode"
    document: dict[str, Any] = {"benchmark": "ranks", "mode": mode, "machine": describe()}
    if arguments.device == "cuda":
        from kvseek.core.cuda import cuda_device

        document["gpu"], document["gpus"] = describe_gpu(cuda_device()), torch.cuda.device_count()
    document |= {name: getattr(arguments, name) for name in ("shape", "dtype", "device", "seed", "steps", "block")}
    document["methods"] = {variant.label: describe_variant(variant) for variant in arguments.methods}
    document |= {"results": [], "errors": []}
    for contest in contests(arguments):
        progress(f"{contest.variant.label}, rows {contest.offload}, {contest.tp_size} ranks")
        try:
            for entry in _measure(arguments, contest, config_of(arguments, contest), threads):
                document["results"].append(entry)
                add_ratios(document["results"], arguments.methods[0].label)
                save(document)
        except (KvseekError, torch.OutOfMemoryError) as error:
            reason = str(error).splitlines()[0]
            document["errors"].append({**contest.named(), "error": reason})
            progress(reason)
        free_memory()
    if not document["results"]:
        reasons = "; ".join(one["error"] for one in document["errors"])
        raise ConfigError(f"--contexts, --tp_size, --offload: no engine could be timed ({reasons})")
    return document


def _measure(
    arguments: argparse.Namespace, contest: Contest, config: EngineConfig, threads: int
) -> Iterator[dict[str, Any]]:
    """Load an engine, and yield the result of each context."""
    generator = torch.Generator().manual_seed(arguments.seed)
    if config.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with random_engine(config, arguments.seed, threads) as engine:
        contestant, decoder = EngineContestant(engine, threads, contest.variant.label), engine.decoder
        place = {"sums": decoder.sums, "host_layers": decoder.cache.rows.layout.host_layers}
        loaded = device_memory(decoder.cache.window.device)
        for context in arguments.contexts:
            ids = torch.randint(config.model.vocab_size, (context,), generator=generator).tolist()
            timed = _timed(arguments, contestant, ids)
            after = device_memory(decoder.cache.window.device)
            memory = None if loaded is None else {"loaded": loaded, "after": after}
            yield {**contest.named(), "context": context, **place, **timed, "device_memory": memory}


def device_memory(device: torch.device) -> dict[str, int] | None:
    """Return the bytes of rank 0's GPU that tensors take, the most that they took, and all that is in use; None on the CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    tensors, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return {"tensors": tensors, "most_tensors": peak, "in_use": total - free}


def _timed(arguments: argparse.Namespace, contestant: EngineContestant, ids: list[int]) -> dict[str, Any]:
    """Time steps behind a prompt, or the prompt."""
    if arguments.prefill:
        samples = _prompts(contestant, ids, arguments.repeats)
        return {"seconds": samples.summary(), "samples": samples.seconds}
    contestant.prefill(ids, WARMUP + arguments.steps)
    samples = interleave({"step": contestant.step}, arguments.steps, arguments.block, WARMUP)["step"]
    found = {"prefill_seconds": contestant.prefill_seconds, "cached_tokens": contestant.cached_tokens}
    found["attended_tokens"] = contestant.attended_tokens
    contestant.close()
    return {**found, "seconds": samples.summary(), "samples": samples.seconds}


def _prompts(contestant: EngineContestant, ids: list[int], repeats: int) -> Samples:
    """Time prompts up to their first token, after one of WARM_TOKENS at most that is not counted."""
    seconds = list[float]()
    for prompt in (ids[:WARM_TOKENS], *[ids] * repeats):
        contestant.prefill(prompt, 0)
        contestant.close()
        seconds.append(contestant.prefill_seconds)
    return Samples(seconds[1:])


def add_ratios(results: list[dict[str, Any]], baseline: str) -> None:
    """Add the time over that of one rank, and over the baseline's of as many ranks; None without.

    Both are of the same context and offload; the baseline's may be "never", as that of `full` is.
    """
    medians = {_key(entry): entry["seconds"]["median"] for entry in results}
    for entry in results:
        own, (method, offload, context, tp_size) = entry["seconds"]["median"], _key(entry)
        one = medians.get((method, offload, context, 1))
        base = medians.get((baseline, offload, context, tp_size)) or medians.get((baseline, "never", context, tp_size))
        entry["to_one_rank"] = None if one is None else own / one
        entry["to_baseline"] = None if base is None else own / base


def _key(entry: dict[str, Any]) -> tuple[str, str, int, int]:
    return entry["method"], entry["offload"], entry["context"], entry["tp_size"]


def _gpu_memory(entry: dict[str, Any]) -> str:
    memory = entry["device_memory"]
    return "" if memory is None else f"{memory['after']['most_tensors'] / GIB:.1f}"


def print_ranks(document: dict[str, Any]) -> None:
    """Print the table of a document of `run_ranks`, and what could not be timed."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    machine, prompts = document["machine"], document["mode"] == "prefill"
    place = f"{document['gpus']} × {document['gpu']['name']}" if "gpu" in document else machine["cpu"]
    console.print(f"{place}; torch {machine['versions']['torch']}; commit {machine['commit']}")
    unit, scale = ("s", 1.0) if prompts else ("ms", 1e3)
    figures: dict[str, Figure] = {
        "tokens": lambda entry: f"{entry['context']:,}",
        "offload": lambda entry: str(entry["offload"]),
        "layers\non\nhost": lambda entry: str(entry["host_layers"]),
        "tp": lambda entry: str(entry["tp_size"]),
        unit: figure("seconds.median", ".2f", scale),
        "fastest": figure("seconds.min", ".2f", scale),
        "slowest": figure("seconds.max", ".2f", scale),
        "tokens/s": lambda entry: f"{(entry['context'] if prompts else 1) / entry['seconds']['median']:,.1f}",
        "×\n1\nrank": figure("to_one_rank", ".3f"),
        "×\nbase": figure("to_baseline", ".3f"),
        "GPU\nGiB": _gpu_memory,
        "sums": lambda entry: str(entry["sums"]),
    }
    title = f"{document['shape']} {document['dtype']}, random weights, {'prompts' if prompts else 'decode steps'}"
    table = figures_table(title, "method", figures, document["results"], "method")
    table.caption = (
        "engines one after the other; × 1 rank: over one rank of the same method and offload; "
        "× base: over the first method with as many ranks; GPU GiB: the most that tensors of rank 0 took"
    )
    print_whole(table)
    for failed in document["errors"]:
        console.print(f"{failed['method']}, {failed['offload']}, {failed['tp_size']} ranks ended by: {failed['error']}")
