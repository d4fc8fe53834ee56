"""Time to the first token, on a GPU, of a question about a document whose rows are in the cache (docs/conversations.md).

    python benchmarks/studies/cached_prompts.py --methods full,pariskv,nested --offload always,never --forms dense,sparse

An engine over random weights of a shape. The document is not read, but left as an ended request leaves it: its rows, and the
index that a method builds on them, are synthetic. What is timed is what a client waits for: from submitting a question to its
first token.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvseek.benchmarks.device.bench import Bench, engine_config
from kvseek.benchmarks.device.memory_plan import Cell
from kvseek.benchmarks.device.options import parse
from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.extents import extents_for
from kvseek.core.request import Request
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import RowLayout, layer_extent_bytes
from kvseek.engine.cache.prefixes.tree import pack_tokens
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.engine import Engine
from kvseek.engine.loading.indexes import IndexMaker, device_retrieval
from kvseek.engine.loading.runtime import TorchRuntime
from kvseek.measurement.machine import describe, describe_gpu
from kvseek.measurement.output import write_result
from kvseek.measurement.variants import Variant
from kvseek.plugins.contract import LAST_QUERIES

SPARE_EXTENTS = 8  # of the pool, for questions and what they leave


def ask(engine: Engine, document: Sequence[int], count: int, generator: torch.Generator) -> tuple[float, int]:
    """Ask about a document in `count` tokens; returns the seconds to the first token, and the tokens that were reused."""
    question = torch.randint(engine.config.model.vocab_size, (count,), generator=generator).tolist()
    started = time.perf_counter()
    engine.submit(Request((*document, *question), 1))
    while engine.has_work:
        outputs = engine.step()
    seconds, found = time.perf_counter() - started, outputs[-1].statistics
    assert found is not None, "a request's last output has its statistics"
    return seconds, found.reused_tokens


def make_rows(bench: Bench, config: EngineConfig, context: int, offload: str) -> RowStorage:
    """Random rows for a document, and room for a copy of them if a method's requests share none."""
    copies = any(variant.entry.traits(variant.settings).prefix_reuse == "copies" for variant in bench.variants)
    layers, capacity = config.model.num_layers, (1 + copies) * extents_for(context) + SPARE_EXTENTS
    on_device = layers if offload == "never" else 0
    layout = RowLayout(capacity, on_device, layers - on_device, layer_extent_bytes(config, bench.dtype))
    rows = RowStorage(config, bench.dtype, bench.device, layout)
    whole, shape = slice(0, EXTENT_TOKENS), (layers, config.model.num_kv_heads, EXTENT_TOKENS, 2, config.model.head_dim)
    for extent in range(capacity):
        values = torch.randn(shape, dtype=bench.dtype, device=bench.device)
        rows.write(0, values, [(extent, whole, whole)])
    torch.cuda.synchronize()
    return rows


def make_engine(bench: Bench, config: EngineConfig, variant: Variant, rows: RowStorage) -> Engine:
    """An engine over the bench's random weights and these rows."""
    cache, kernels = Cache(config, bench.dtype, bench.device, rows), bench.kernels(variant)
    cache.window.normal_()
    codebooks = variant.entry.traits(variant.settings).codebooks(config.model.head_dim)
    retrieval = device_retrieval(config, cache, IndexMaker(config, codebooks, None, kernels).over(cache), kernels)
    tokenizer: Any = SimpleNamespace(file=None)  # requests are token ids
    return Engine(config, TorchRuntime(config, bench.weights.tensors).decoder(retrieval, kernels), tokenizer)


@torch.inference_mode()
def leave(engine: Engine, document: Sequence[int]) -> float:
    """Make the engine keep a document, in the rows that its pool has, and index these.

    Returns the seconds from the end of its request until the rows are kept, for which decode steps of others would wait.
    """
    cache, prefixes, model = engine._cache, engine._prefixes, engine.config.model
    cache.open(0, len(document) + 1)
    cache.begin_prefill(0, len(document))
    length, window = cache.lengths[0], cache.window
    spans = cache.extents.spans(0, 0, length)
    queries = torch.randn(model.num_heads, LAST_QUERIES, model.head_dim, dtype=window.dtype, device=window.device)
    for layer, index in enumerate(engine.decoder.retrieval.indexes):
        blocks = cache.rows.blocks(layer, [extent for extent, _, _ in spans])
        keys = torch.cat([block[:, inside, 0] for block, (_, inside, _) in zip(blocks, spans, strict=True)], dim=1)
        index.build(0, keys, queries)
    packed = pack_tokens(document)
    prefixes.share(0, packed, None)
    torch.cuda.synchronize()
    start = time.perf_counter()
    prefixes.close(0, packed)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(engine: Engine, context: int, questions: Sequence[int], rounds: int, seed: int) -> dict[str, Any]:
    """Seconds to the first token of questions of so many tokens, the median; the first question of each length warms up."""
    generator = torch.Generator().manual_seed(seed)
    document = torch.randint(engine.config.model.vocab_size, (context,), generator=generator).tolist()
    found: dict[str, Any] = {"left": leave(engine, document)}
    for count in questions:
        asked = [ask(engine, document, count, generator) for _ in range(rounds + 1)][1:]
        assert all(reused >= context for _, reused in asked), "the whole document is reused"
        found[str(count)] = {"seconds": statistics.median(one for one, _ in asked), "all": [one for one, _ in asked]}
    return found


def run(own: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods and forms over one pool of rows for each place."""
    questions = [int(count) for count in own.questions.split(",")]
    flags = ["--shape", own.shape, "--methods", own.methods, "--contexts", str(own.context)]
    arguments = parse([*flags, "--offload", own.offload, "--prefill"])
    cells = [Cell(own.context, 1)]
    bench, results = Bench(arguments, cells), list[dict[str, Any]]()
    bench.load()
    for offload in arguments.offload:
        rows: RowStorage | None = None
        for variant in bench.variants:
            shares = variant.entry.traits(variant.settings).prefix_reuse == "entries"
            for form in own.forms.split(","):
                if form == "sparse" and not shares:  # such an engine is refused (engine/loading/supported.py)
                    continue
                config = engine_config(arguments.dtype, bench.model, variant, cells)
                cache = dataclasses.replace(config.cache, offload=offload, reuse=True, cached_prefill=form)
                longest = own.context + max(questions) + 2
                config = dataclasses.replace(
                    config, cache=cache, max_batch_size=own.max_batch_size, max_seq_len=longest, max_input_len=longest
                )
                rows = rows or make_rows(bench, config, own.context, offload)
                engine = make_engine(bench, config, variant, rows)
                if form == "sparse" and not engine.decoder.retrieval.selects(own.context):
                    continue
                found = measure(engine, own.context, questions, own.rounds, arguments.seed)
                left = found.pop("left")
                place = {"method": variant.label, "form": form, "offload": offload}
                results.append({**place, "questions": found, "left": left})
                times = "  ".join(f"{count}: {one['seconds']:.3f} s" for count, one in found.items())
                print(f"{variant.label:12} {form:7} rows {offload:7} {times}  kept in {left:.3f} s", flush=True)
                del engine
                torch.cuda.empty_cache()
    machine = {**describe(), "gpu": describe_gpu(bench.device)}
    settings = {"shape": own.shape, "context": own.context, "max_batch_size": own.max_batch_size}
    return {"benchmark": "cached_prompts", "machine": machine, **settings, "results": results}


def study_parser(description: str | None, context: int) -> argparse.ArgumentParser:
    """Flags that studies of kept documents have in common; documents have `context` tokens by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="default: %(default)s")
    parser.add_argument("--methods", default="full,pariskv,nested", help="default: %(default)s")
    parser.add_argument("--offload", default="always,never", help="where rows lie (default: %(default)s)")
    parser.add_argument("--context", type=int, default=context, help="tokens of a document (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write JSON there")
    return parser


def run_study(own: argparse.Namespace, study: Callable[[argparse.Namespace], dict[str, Any]]) -> int:
    """Run a study, which prints its lines, and write what it returns to `--output`; returns 0."""
    document = study(own)
    if own.output:
        write_result(own.output, document)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each engine; with --output, write JSON too."""
    parser = study_parser(__doc__, 131_000)
    parser.add_argument("--forms", default="dense,sparse", help="cache.cached_prefill (default: %(default)s)")
    parser.add_argument("--questions", default="100", help="comma list of tokens of a question (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="questions of each length (default: %(default)s)")
    parser.add_argument("--max_batch_size", type=int, default=32, help="default: %(default)s")
    return run_study(parser.parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
