"""Other libraries' kernels and ParisKV's own beside kvseek's, on one GPU in one run: `python bench/speed/studies/peers.py`.

- *decode*: dense attention of one layer: the kernel of `full`, beside FlashInfer's batch decode over pages of 16 tokens (the
  package flashinfer-python), once by CUDA cores and once by tensor cores.
- *prompt*: attention of a whole prompt: kvseek's, in chunks, beside PyTorch's flash attention and cuDNN.
- *selection*: how a step finds its rows: the methods' kernels, beside the code that ParisKV's authors published.

A time is of one layer: LAYERS of them, each with memory of its own, follow each other in a CUDA graph between two events, so
that no layer finds its rows in a cache. Contestants take turns. Code that launches on the default stream cannot be captured:
it is launched call by call; `kernels` is then what its kernels take without the gaps that the host leaves between them.

Every part at a context has a process of its own, so that a fault of a kernel costs no other part. What is not there is
skipped, and the result says so. None of it is kvseek's, and github.com/amy-77/ParisKV has no licence: clone it yourself. The
kernel that ClusterKV's authors published does not rank clusters by score (docs/papers.md), so its time would say nothing.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.bench.engines import free_memory
from kvseek.bench.output import Figure, command, figure, numbers, progress, write_result
from kvseek.bench.speed.device.bench import Bench
from kvseek.bench.speed.device.decode import device_seconds
from kvseek.bench.speed.device.filling import Filler, with_empty_buffer
from kvseek.bench.speed.device.floors import elapsed_seconds, timing_event
from kvseek.bench.speed.device.memory_plan import Cell
from kvseek.bench.speed.studies.common import make_bench, print_figures, result, study_parser
from kvseek.bench.timing import Samples, interleave, turns
from kvseek.bench.variants import Variant
from kvseek.core.batch import Batch
from kvseek.core.errors import ConfigError, KvseekError
from kvseek.engine.model.cuda.attention import PromptAttention
from kvseek.engine.model.library_attention import causal_attention_device, cudnn_attention
from kvseek.engine.retrieval import Retrieval

LAYERS = 4
PAGE = 16  # tokens of FlashInfer's pages
CHUNK = 8192  # tokens of a prompt that are read at once
CALLS, BLOCK, WARMUP = 60, 10, 5
PROMPT_CALLS = 3  # of a whole prompt, which takes a second
WORKSPACE = 256 << 20  # bytes, as FlashInfer's documents advise, and more for batches
LARGEST_ERROR = 0.02  # relative, of attention in bfloat16
LEAST_RECALL = 0.1  # of the best rows, by published code that was given what it expects; chance finds 0.03 at most

T = TypeVar("T")
Call = Callable[[], object]
Timed = Callable[[], float]  # a call, made once: device seconds


def attempt(name: str, skipped: dict[str, str], call: Callable[[], T]) -> T | None:
    """What a call returns; None if the code of others fails, and then why in `skipped`."""
    try:
        return call()
    except (ImportError, OSError, RuntimeError, KvseekError) as error:
        skipped[name] = (str(error).splitlines() or [type(error).__name__])[0]
        progress(f"{name}: {skipped[name]}")
        return None


def timed(makers: Mapping[str, Callable[[], Timed]], skipped: dict[str, str]) -> dict[str, Timed]:
    """Those of these contestants that can be made."""
    made = {name: attempt(name, skipped, make) for name, make in makers.items()}
    return {name: one for name, one in made.items() if one is not None}


def captured(call: Call) -> Timed:
    """The call as a graph, on a stream of its own, after one that is not captured."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()

    def replay(kept: Call = call) -> None:
        """Replay the graph, which does not keep what its kernels read: the call does. A capture gives free memory back."""
        graph.replay()

    return between_events(replay)


def between_events(call: Call) -> Timed:
    """The call as it is, between two events; made once before the next contestant is, so that a fault is its own."""
    call()
    torch.cuda.synchronize()

    def seconds() -> float:
        first, last = timing_event(), timing_event()
        first.record()
        call()
        last.record()
        last.synchronize()
        return elapsed_seconds(first, last)

    return seconds


def kernel_seconds(call: Call) -> float:
    """Device seconds that the kernels of a call take, without the gaps between them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in found.key_averages())) * 1e-6


def take_turns(
    part: str, cell: Cell, contestants: Mapping[str, Timed], calls: int = CALLS, layers: int = LAYERS
) -> list[dict[str, Any]]:
    """An entry for each contestant: seconds of one layer, medians and extremes of turns."""
    if not contestants:
        return []
    found = interleave(contestants, calls, min(BLOCK, calls), min(WARMUP, calls), timer=device_seconds)
    each = {name: turns(samples, BLOCK if calls > BLOCK else 1).seconds for name, samples in found.items()}
    head = {"part": part, "context": cell.context, "batch": cell.batch}
    return [{**head, "name": n, "seconds": Samples([s / layers for s in own]).summary()} for n, own in each.items()]


def retrieval_of(bench: Bench, variant: Variant, cell: Cell, filler: Filler) -> tuple[Retrieval, Batch]:
    """A variant's retrieval over synthetic rows in GPU memory, and the batch of a decode step behind the cell's context."""
    cache = bench.new_cache(bench.row_storage("never", [cell]), variant, [cell])
    indexes, slots = bench.indexes(variant, cache, [cell]), list(range(cell.batch))
    filler.fill(cell, [(cache, [indexes])])
    for slot in slots:
        cache.tokens[slot] = with_empty_buffer(cache, cell.context)
    retrieval = bench.retrieval(variant, cache, indexes, [cell], hot_rows=False)
    states, _ = retrieval.begin_step([1] * cell.batch, slots)
    return retrieval, Batch(states.to(bench.device), cache.extents.device_table)


def queries_of(bench: Bench, filler: Filler, batch: int) -> list[Tensor]:
    """Queries [batch, H, D] of each layer, which seek what its keys have."""
    drawn = filler.queries[:, :batch].transpose(0, 1)
    signs = (one.repeat_interleave(bench.model.group_size, dim=0)[:, 0] for one in filler.signs)
    return [(drawn * sign).contiguous() for sign in signs]


# Dense attention of decode steps


def decode(
    own: argparse.Namespace, bench: Bench, filler: Filler, cell: Cell, skipped: dict[str, str]
) -> list[dict[str, Any]]:
    """`full` and FlashInfer over as many rows."""
    queries = queries_of(bench, filler, cell.batch)
    retrieval, batch = retrieval_of(bench, bench.variants[0], cell, filler)

    def ours() -> None:
        for layer in range(LAYERS):
            retrieval.attend(layer, queries[layer], batch)

    def theirs(cores: str) -> Timed:
        return captured(flashinfer_decode(bench, cell, pages, queries, cores == "tensor cores"))

    pages = flashinfer_pages(bench, cell)
    made = {"kvseek full": lambda: captured(ours)} | {
        f"FlashInfer, {cores}": partial(theirs, cores) for cores in ("CUDA cores", "tensor cores")
    }
    return take_turns("decode", cell, timed(made, skipped))


def flashinfer_pages(bench: Bench, cell: Cell) -> list[Tensor]:
    """Random rows of each layer, [pages, 2, 16, G, D]."""
    pages = -(-cell.context // PAGE) * cell.batch
    shape = (pages, 2, PAGE, bench.model.num_kv_heads, bench.model.head_dim)
    return [torch.empty(shape, dtype=bench.dtype, device=bench.device).normal_() for _ in range(LAYERS)]


def flashinfer_decode(bench: Bench, cell: Cell, pages: list[Tensor], queries: list[Tensor], tensor_cores: bool) -> Call:
    """FlashInfer's batch decode as servers use it, planned for a CUDA graph; raises KvseekError if it computes another thing."""
    flashinfer: Any = importlib.import_module("flashinfer")
    model, each = bench.model, -(-cell.context // PAGE)
    indptr = torch.arange(cell.batch + 1, dtype=torch.int32, device=bench.device) * each
    indices = torch.arange(cell.batch * each, dtype=torch.int32, device=bench.device)
    last = torch.full((cell.batch,), cell.context - (each - 1) * PAGE, dtype=torch.int32, device=bench.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE, dtype=torch.uint8, device=bench.device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    sizes = (model.num_heads, model.num_kv_heads, model.head_dim, PAGE)
    wrapper.plan(indptr, indices, last, *sizes, q_data_type=bench.dtype, kv_data_type=bench.dtype)
    outputs = [torch.empty_like(one) for one in queries]

    def call() -> None:
        for layer in range(LAYERS):
            wrapper.run(queries[layer], pages[layer], out=outputs[layer])

    call()
    keys, values = (pages[0][:each, part].flatten(0, 1)[: cell.context].transpose(0, 1) for part in (0, 1))
    expected = F.scaled_dot_product_attention(
        queries[0][:1].transpose(0, 1)[None], keys[None], values[None], enable_gqa=True
    )
    error = float((outputs[0][0] - expected[0, :, 0]).float().norm() / expected.float().norm())
    if error > LARGEST_ERROR:
        raise KvseekError(f"FlashInfer: its attention differs from PyTorch's by {error:.1%}: its call is wrong here")
    return call


# Attention of prompts


def prompts(
    own: argparse.Namespace, bench: Bench, filler: Filler, cell: Cell, skipped: dict[str, str]
) -> list[dict[str, Any]]:
    """Causal attention of a whole prompt; the calls take milliseconds, so no graph is needed."""
    model, scaling, context = bench.model, bench.model.scaling, cell.context
    ours = PromptAttention(bench.kernels(bench.variants[0]), model, bench.dtype, CHUNK, context)
    if ours.refusal is not None:
        skipped["kvseek's prompts by cuDNN"] = ours.refusal
    keys, values = filler.source.keys(context, bench.dtype), filler.source.values(context, bench.dtype)
    queries = filler.source.queries(model.num_heads, context, bench.dtype)

    def in_chunks() -> None:
        for start in range(0, context, CHUNK):
            stop = min(start + CHUNK, context)
            ours(queries[:, start:stop], keys[:, :stop], values[:, :stop], scaling)

    calls: dict[str, Call] = {
        "kvseek, in chunks": in_chunks,
        "PyTorch, flash attention": lambda: causal_attention_device(queries, keys, values, scaling),
        "PyTorch, cuDNN": lambda: cudnn_attention(queries[None], keys[None], values[None], scaling, causal=True),
    }
    contestants = timed({name: partial(between_events, call) for name, call in calls.items()}, skipped)
    return take_turns("prompt", cell, contestants, PROMPT_CALLS, 1)


# Selections


def selections(
    own: argparse.Namespace, bench: Bench, filler: Filler, cell: Cell, skipped: dict[str, str]
) -> list[dict[str, Any]]:
    """The methods' selections, and ParisKV's by the code that its authors published."""
    queries = queries_of(bench, filler, cell.batch)
    contestants = dict[str, Timed]()
    for variant in bench.variants:
        retrieval, batch = retrieval_of(bench, variant, cell, filler)

        def select(retrieval: Retrieval = retrieval, batch: Batch = batch) -> None:
            for layer in range(LAYERS):
                retrieval.indexes[layer].select(queries[layer], batch)

        contestants |= timed({f"kvseek {variant.label}": partial(captured, select)}, skipped)
    name = "ParisKV's code"
    published = attempt(name, skipped, partial(pariskv, bench, filler, cell, own.pariskv, queries))
    if published is not None:
        contestants |= timed({name: partial(between_events, published[0])}, skipped)
    found = take_turns("selection", cell, contestants)
    for entry in found:
        if published is not None and entry["name"] == name:
            call, entry["recall"] = published
            entry["kernels"] = statistics.median(kernel_seconds(call) for _ in range(BLOCK)) / LAYERS
    return found


def pariskv(
    bench: Bench, filler: Filler, cell: Cell, checkout: Path | None, queries: list[Tensor]
) -> tuple[Call, float]:
    """The selection of ParisKV's own cache (cache_hub/polar_cache.py), with its settings for Llama; and its recall."""
    if checkout is None:
        raise KvseekError("no checkout of its code: name one with --pariskv")
    sys.path.insert(0, str(checkout))
    model, tokens, room = bench.model, cell.context, 512
    sizes = {"num_key_value_heads": model.num_kv_heads, "num_heads": model.num_heads, "head_dim": model.head_dim}
    unused = {"core": 0, "nprobe": 0, "cache_unit_size": 8, "cache_cluster_num": 0, "num_gpus": 1, "model_size": 8}
    with redirect_stdout(sys.stderr):
        cache = importlib.import_module("cache_hub").polar_cache(
            valid_start=[0] * cell.batch,
            layer_num=LAYERS,
            batch_size=cell.batch,
            max_length=tokens + room,
            max_new_length=room,
            dtype=bench.dtype,
            layer_mapping={str(layer): str(bench.device) for layer in range(LAYERS)},
            sink_size=4,
            local_size=64,
            enable_offload=False,
            **sizes,
            **unused,
        )
    for layer in range(LAYERS):
        keys = filler.keys(layer, 0, tokens).transpose(0, 1)[None].contiguous()
        cache.prefill_update_kv_cache(None, keys, torch.zeros_like(keys), layer, 0)
    region = slice(4, tokens - 64)
    candidates, collisions = cache._get_adaptive_ratios(region.stop - region.start)
    means = [one.view(1, model.num_kv_heads, -1, model.head_dim).mean(2) for one in queries]

    def select(layer: int) -> Tensor:
        found: Tensor = cache.collision_based_topk_batch(
            query=means[layer].unsqueeze(2),
            codebook=cache.codebook_gpu[layer][..., region],
            key_block_weight=cache.key_block_weight_gpu[layer][..., region],
            key_4bit=cache.key_4bit_packed_gpu[layer][..., region, :],
            collision_ratio=collisions,
            candidate_ratio=candidates,
            layer_idx=layer,
        )
        return found

    share = recall(select(0)[0], filler.keys(0, 0, tokens)[:, region], means[0][0])
    return lambda: [select(layer) for layer in range(LAYERS)], share


def recall(found: Tensor, keys: Tensor, queries: Tensor) -> float:
    """Share of the best rows among those found [heads, k]: keys [heads, n, D], queries [heads, D]; KvseekError if few are."""
    scores = (keys.float() @ queries.float().unsqueeze(-1))[..., 0]
    best = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(found.shape[1]).indices, value=True)
    share = float(best.gather(1, found.long()).float().mean())
    if share < LEAST_RECALL:
        raise KvseekError(f"it finds {share:.1%} of the best rows: it was not given what it expects")
    return share


def run(own: argparse.Namespace) -> dict[str, Any]:
    """All parts, at every context; what fails is listed with its reason."""
    document, skipped, results = dict[str, Any](), dict[str, str](), list[dict[str, Any]]()
    if unknown := sorted(set(own.parts.split(",")) - set(PARTS)):
        raise ConfigError(f"--parts: {', '.join(unknown)}: must be of {', '.join(PARTS)}; leave it out for all")
    for part in own.parts.split(","):
        for context in numbers("contexts", own.contexts):
            name = f"{part} at {context:,}"
            progress(name)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                found = attempt(name, skipped, pool.submit(run_part, own, part, context).result)
            if found is not None:
                results += found["results"]
                skipped |= found["skipped"]
                document = {**found, "results": results, "skipped": skipped}
                if own.output:
                    write_result(own.output, document)
    if not results:
        raise KvseekError(f"nothing could be measured: {next(iter(skipped.values()))}")
    return document


def run_part(own: argparse.Namespace, part: str, context: int) -> dict[str, Any]:
    """The document of one part at one context, in a process of its own."""
    own.contexts = str(context)
    if part != "decode":
        own.batches = "1"
    if part != "selection":
        own.methods = "full"
    bench = make_bench(own, "--batches", own.batches, "--offload", "never", layers=LAYERS)
    filler, skipped, results = bench.filler(), dict[str, str](), list[dict[str, Any]]()
    for cell in bench.cells:
        failed = dict[str, str]()
        with torch.inference_mode():
            results += attempt("all", failed, partial(PARTS[part], own, bench, filler, cell, failed)) or []
        attempt("memory", failed, free_memory)  # raises after a fault
        skipped |= {f"{name}, {part} at {context:,} x {cell.batch}": reason for name, reason in failed.items()}
    packages = {name: version(name) for name in ("flashinfer-python",) if find_spec("flashinfer")}
    return result("peers", bench, results, layers=LAYERS, packages=packages, skipped=skipped)


Part = Callable[[argparse.Namespace, Bench, Filler, Cell, dict[str, str]], list[dict[str, Any]]]
PARTS: dict[str, Part] = {"decode": decode, "prompt": prompts, "selection": selections}


def print_report(document: dict[str, Any]) -> None:
    """Print a row for each contestant, and what was skipped."""
    print_figures(document, FIGURES, "name")
    for name, reason in document["skipped"].items():
        print(f"{name}: skipped: {reason}")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser."""
    methods = "nested,pariskv,pariskv:paper"
    parser = study_parser(__doc__, methods=methods, contexts="32768,131072")
    parser.add_argument("--parts", default="decode,prompt,selection", help="comma list of these (default: %(default)s)")
    parser.add_argument("--batches", default="1,4,8", help="comma list, of decode steps (default: %(default)s)")
    parser.add_argument("--pariskv", type=Path, metavar="FOLDER", help="a checkout of its repository")
    return parser


FIGURES: dict[str, Figure] = {
    "part": lambda entry: str(entry["part"]),
    "tokens": lambda entry: f"{entry['context']:,}",
    "batch": lambda entry: str(entry["batch"]),
    "µs": figure("seconds.median", ",.1f", 1e6),
    "kernels\nµs": lambda entry: f"{entry['kernels'] * 1e6:,.1f}" if "kernels" in entry else "",
    "recall": lambda entry: f"{entry['recall']:.2f}" if "recall" in entry else "",
}
main = command(make_parser().parse_args, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
