"""Time to the first token, on a GPU, of a question about a document whose rows are in the cache (docs/conversations.md).

    python bench/speed/studies/cached_prompts.py --methods full,pariskv,nested --offload always,never --forms dense,sparse

An engine over random weights of a shape. The document is not read, but left as an ended request leaves it: its rows, and the
index that a method builds on them, are synthetic. What is timed is what a client waits for: from submitting a question to its
first token.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from kvseek.bench.engines import bare_engine
from kvseek.bench.output import Figure, command, numbers
from kvseek.bench.speed.device.bench import Bench
from kvseek.bench.speed.studies.common import make_bench, print_figures, result, study_parser
from kvseek.bench.variants import Variant
from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.extents import extents_for
from kvseek.core.request import Request
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import RowLayout, layer_extent_bytes
from kvseek.engine.cache.prefixes.tree import pack_tokens
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.engine import Engine
from kvseek.engine.loading.indexes import IndexMaker, device_retrieval
from kvseek.engine.loading.runtime import torch_decoder
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
    layers, capacity = len(config.model.row_layers), (1 + copies) * extents_for(context) + SPARE_EXTENTS
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
    return bare_engine(config, torch_decoder(config, bench.tensors(variant), None, retrieval, kernels))


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


def engine_config(bench: Bench, variant: Variant, offload: str, form: str, own: argparse.Namespace) -> EngineConfig:
    """An engine that keeps documents, with room for a question about one."""
    config = bench.config(variant, bench.cells)
    cache = dataclasses.replace(config.cache, offload=offload, reuse=True, cached_prefill=form)
    longest = own.context + max(numbers("questions", own.questions)) + 2
    limits = {"max_batch_size": own.max_batch_size, "max_seq_len": longest, "max_input_len": longest}
    return dataclasses.replace(config, cache=cache, **limits)


def run(own: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods and forms over one pool of rows for each place."""
    own.contexts, questions = str(own.context), numbers("questions", own.questions)
    bench, results = make_bench(own, "--prefill"), list[dict[str, Any]]()
    bench.load()
    for offload in bench.arguments.offload:
        rows: RowStorage | None = None
        for variant, form in itertools.product(bench.variants, own.forms.split(",")):
            shares = variant.entry.traits(variant.settings).prefix_reuse == "entries"
            if form == "sparse" and not shares:  # such an engine is refused (engine/loading/supported.py)
                continue
            config = engine_config(bench, variant, offload, form, own)
            rows = rows or make_rows(bench, config, own.context, offload)
            engine = make_engine(bench, config, variant, rows)
            if form == "dense" or engine.decoder.retrieval.selects(own.context):
                found = measure(engine, own.context, questions, own.rounds, bench.arguments.seed)
                left = found.pop("left")
                place = {"method": variant.label, "form": form, "offload": offload}
                results.append({**place, "questions": found, "left": left})
            del engine
            torch.cuda.empty_cache()
    return result("cached_prompts", bench, results, context=own.context, max_batch_size=own.max_batch_size)


def print_report(document: dict[str, Any]) -> None:
    """Print a row for each engine, a column for each length of a question."""
    figures: dict[str, Figure] = {"form": lambda entry: entry["form"], "rows": lambda entry: entry["offload"]}
    for count in document["results"][0]["questions"]:
        figures[f"{count}\ntokens, s"] = lambda entry, count=count: f"{entry['questions'][count]['seconds']:.3f}"  # type: ignore[misc]
    print_figures(document, {**figures, "kept\nin s": lambda entry: f"{entry['left']:.3f}"})


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = study_parser(__doc__, methods="full,pariskv,nested", offload="always,never")
    add = parser.add_argument
    add("--context", type=int, default=131_000, help="tokens of a document (default: %(default)s)")
    add("--forms", default="dense,sparse", help="cache.cached_prefill (default: %(default)s)")
    add("--questions", default="100", help="comma list of tokens of a question (default: %(default)s)")
    add("--rounds", type=int, default=5, help="questions of each length (default: %(default)s)")
    add("--max_batch_size", type=int, default=32, help="default: %(default)s")
    return parser


main = command(make_parser().parse_args, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
