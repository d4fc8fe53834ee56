"""Time of a prompt: the decoder's own prefill with each method, its index built and its rows stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvseek.engine.errors import ConfigError

from .device_decode import progress, release
from .device_memory import Cell
from .device_results import prefill_result
from .device_setup import Bench
from .timing import interleave

if TYPE_CHECKING:
    from kvseek.engine.device_decoder import DeviceDecoder


def run_prefill(bench: Bench, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every context as a prompt of random tokens, the methods in turns, by the host's clock until the device is done."""
    if len(bench.arguments.offload) != 1:
        raise ConfigError(
            f"--offload = {','.join(bench.arguments.offload)!r}: must be one mode with --prefill; name one"
        )
    (offload,) = bench.arguments.offload
    document: dict[str, Any] = {"offload": offload, "results": [], "skipped": []}
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
        release()
    return document


def _measure(bench: Bench, offload: str, cell: Cell) -> list[dict[str, Any]]:
    cache = bench.cache(offload, [cell])
    decoders = {
        method: bench.decoder(method, cache, bench.indexes(method, cache, [cell]), [cell], hot_rows=False)
        for method in bench.methods
    }
    generator = torch.Generator().manual_seed(bench.arguments.seed)
    ids = torch.randint(0, bench.model.vocab_size, (cell.context,), generator=generator).tolist()
    calls = {method: lambda decoder=decoder: prefill(decoder, ids) for method, decoder in decoders.items()}
    samples = interleave(calls, bench.arguments.repeats, block=1, warmup=1)
    results = [prefill_result(method, cell.context, samples[method].seconds) for method in bench.methods]
    for entry in results:
        entry["to_baseline"] = entry["seconds"]["median"] / results[0]["seconds"]["median"]
    return results


def prefill(decoder: DeviceDecoder, ids: list[int]) -> None:
    """Process a prompt in slot 0, wait for its logits and rows, and forget it."""
    decoder.cache.open(0, len(ids) + 1)
    for _ in decoder.prefill(0, ids):
        pass
    torch.cuda.synchronize()
    decoder.cache.close(0)
