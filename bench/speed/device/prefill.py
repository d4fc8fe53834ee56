"""Time of a prompt: the decoder's own prefill with each method, its index built and its rows stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvseek.bench.engines import free_memory
from kvseek.bench.output import progress
from kvseek.bench.speed.parts import part_groups
from kvseek.bench.speed.shapes import prompt_operations
from kvseek.bench.timing import Samples, interleave
from kvseek.bench.variants import Variant
from kvseek.core.errors import ConfigError
from kvseek.engine.model.cuda.attention import PromptAttention, described_attention

from .bench import Bench
from .contestant import PromptClock, observing
from .decode import compared_variants
from .floors import product_rate
from .memory_plan import Cell

if TYPE_CHECKING:
    from kvseek.engine.cache.row_storage import RowStorage

    from .bench import BenchDecoder

WARM_TOKENS = 131_072  # cuDNN has met all its sizes by then; an uncounted prompt of 512K tokens would take minutes


def run_prefill(bench: Bench, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every context as a prompt of random tokens, the methods in turns, by the host's clock until the device is done."""
    if len(bench.arguments.offload) != 1:
        raise ConfigError(
            f"--offload = {','.join(bench.arguments.offload)!r}: must be one mode with --prefill; name one"
        )
    (offload,) = bench.arguments.offload
    document: dict[str, Any] = {"offload": offload, "results": [], "skipped": []}
    document["best_product_rate"] = product_rate(bench.device, bench.dtype)
    bench.load()
    for context in bench.arguments.contexts:
        cell = Cell(context, 1)
        (phase,) = bench.phases([offload], [cell])
        if cell in phase.skipped:
            document["skipped"].append({"context": context, "reason": phase.skipped[cell]})
            continue
        progress(f"prefill: {context:,} tokens")
        document["results"] += _measure(bench, offload, cell)
        save(document)
        free_memory()
    return document


def _measure(bench: Bench, offload: str, cell: Cell) -> list[dict[str, Any]]:
    """The methods one after the other, each in turns with the baseline; the baseline's figures are of all turns.

    What all methods have in common is timed by parts, with the baseline; with other variants, if their prompts attend otherwise.
    Prompts of more than WARM_TOKENS are not timed by parts, which takes one more prompt.
    """
    rows = bench.row_storage(offload, [cell])
    generator = torch.Generator().manual_seed(bench.arguments.seed)
    ids = torch.randint(0, bench.model.vocab_size, (cell.context,), generator=generator).tolist()
    baseline, results, seconds = bench.variants[0], [], []
    by_parts = cell.context <= WARM_TOKENS
    parts: dict[str, Any] = {}
    for variant in compared_variants(bench.variants):
        turns = [baseline] if variant is None else [baseline, variant]
        decoders = _decoders(bench, rows, cell, turns)
        samples = _take_turns(bench, decoders, ids)
        if by_parts and not parts:
            parts = _parts(bench, decoders[baseline.label], ids)
        seconds += samples[baseline.label].seconds
        if variant is not None:
            entry = prefill_result(variant.label, cell.context, samples[variant.label].seconds)
            entry["to_baseline"] = entry["seconds"]["median"] / samples[baseline.label].median
            if by_parts and variant.prompt_attention != baseline.prompt_attention:
                entry |= _parts(bench, decoders[variant.label], ids)
            results.append(entry)
        del decoders
        free_memory()
    return [{**prefill_result(baseline.label, cell.context, seconds), "to_baseline": 1.0, **parts}, *results]


def _decoders(bench: Bench, rows: RowStorage, cell: Cell, variants: Sequence[Variant]) -> dict[str, BenchDecoder]:
    """Decoders of the variants by label, on one cache, which has the windows of the last of them."""
    cache = bench.new_cache(rows, variants[-1], [cell])
    return {
        variant.label: bench.decoder(variant, cache, bench.indexes(variant, cache, [cell]), [cell], hot_rows=False)
        for variant in (one.laid_out_as(cache.config) for one in variants)
    }


def _parts(bench: Bench, decoder: BenchDecoder, ids: list[int]) -> dict[str, Any]:
    """Device seconds and operations of attention and of matrix products, in one more prompt."""
    attention, clock = decoder.model.attention, PromptClock()
    assert isinstance(attention, PromptAttention)
    with observing(decoder.retrieval, clock):
        clock.restart()
        prefill(decoder, ids)
    groups = part_groups(clock.seconds())
    return {
        "attention": described_attention(decoder.config, attention.name),
        "part_seconds": {"attention": groups["attend"], "products": groups["GEMMs"], "others": groups["others"]},
        "operations": prompt_operations(decoder.config, len(ids)),
    }


def _take_turns(bench: Bench, decoders: dict[str, BenchDecoder], ids: list[int]) -> dict[str, Samples]:
    """Prompts of the decoders in turns, after one of each, of WARM_TOKENS at most, that is not counted."""
    for decoder in decoders.values():
        prefill(decoder, ids[:WARM_TOKENS])
    calls = {label: lambda decoder=decoder: prefill(decoder, ids) for label, decoder in decoders.items()}
    return interleave(calls, bench.arguments.repeats, block=1, warmup=0)


def prefill(decoder: BenchDecoder, ids: list[int]) -> None:
    """Process a prompt in slot 0, wait for its logits and rows, and forget it."""
    decoder.cache.open(0, len(ids) + 1)
    prompt = decoder.prefill([(0, ids)])
    while prompt.progress < 1:
        prompt.advance(decoder.config.prefill_chunk_tokens)
    prompt.finish()
    torch.cuda.synchronize()
    decoder.cache.close(0)


def prefill_result(method: str, tokens: int, seconds: Sequence[float]) -> dict[str, Any]:
    """Figures of one method's prompts of one length."""
    samples = Samples(list(seconds))
    return {"method": method, "tokens": tokens, "seconds": samples.summary(), "rate": tokens / samples.median}
