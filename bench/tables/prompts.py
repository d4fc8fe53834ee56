"""Tables of prompts: how long they take to read, whole, sparsely, and where a beginning is kept."""

from __future__ import annotations

from typing import Any

from .answers import counted
from .results import ALSO_SPARSE, CHUNKS, SPARSE, K, Results, Rows, Tables, one

WITH_WEIGHTS = ":weight_only_precision=fp8,prefill_precision=fp8"
PROMPTS = (
    ("prefill-sparse-h200", "full"),
    ("prefill-chunks-h200", "full" + ":prefill_chunk_tokens=4096"),
    ("prefill-sparse-h200", "full" + SPARSE),
    ("prefill-sparse-h200", "full" + SPARSE + ",block_sparse.samples=8"),
    ("prefill-chunks-h200", "full" + SPARSE + CHUNKS),
    ("prefill-fp8-h200", "full" + WITH_WEIGHTS),
    ("prefill-fp8-h200", "full" + WITH_WEIGHTS + ALSO_SPARSE + CHUNKS),
    ("prefill-fp8-h200", "full" + WITH_WEIGHTS + ALSO_SPARSE + CHUNKS + ",block_sparse.query_block=256"),
)
PROMPT_TOKENS = (32 * K, 128 * K, 512 * K)


def prompts(results: Results) -> Rows:
    yield ("", *(f"{tokens:,} tokens" for tokens in PROMPT_TOKENS))
    for name, method in PROMPTS:
        cells = []
        for tokens in PROMPT_TOKENS:
            longest = tokens == PROMPT_TOKENS[-1]
            entries = results("prefill-sparse-512k-h200" if longest else name)["results"]
            found = {entry["method"]: entry for entry in entries if entry["tokens"] == tokens}
            cells.append(prompt_time(found[method], found["full"]) if method in found else "")
        yield (f"`{method}`", *cells)


def prompt_time(entry: dict[str, Any], dense: dict[str, Any]) -> str:
    """Say an entry's time, and its ratio to dense attention in 16 bits: by its turns where these were beside it."""
    seconds, median = f"{entry['seconds']['median']:.2f} s", dense["seconds"]["median"]
    ratio = entry["to_baseline"] if dense["to_baseline"] == 1 else entry["seconds"]["median"] / median
    return seconds if entry is dense else f"{seconds} ({ratio:.2f})"


def sparse_settings(results: Results) -> Rows:
    cells, times = results("needle-sparse-h100")["cells"], results("prefill-sparse-settings-h100")["results"]
    yield ("", "right answers", "a prompt, s")
    for setting in ("", "query_block=256", "budget=16384"):
        field = f",block_sparse.{setting}" if setting else ""
        cell = one(cells, engine=f"full{SPARSE}{field}{CHUNKS}", task="niah_multivalue", length=130_048)
        entry = one(times, method=f"full{SPARSE}{CHUNKS}{field}")
        ratio = f" ({entry['to_baseline']:.2f} ×)" if setting else ""
        yield (f"`{setting}`" if setting else "defaults", counted(cell), f"{entry['seconds']['median']:.2f}{ratio}")


def cached_prompts(results: Results) -> Rows:
    document = results("cached-prompts-h200")
    yield ("method", "rows", "dense", '`cache.cached_prefill = "sparse"`', "steps wait, s")
    for offload, where in (("always", "in host memory"), ("never", "in GPU memory")):
        for method in ("full", "nested", "prkv"):
            entries = [e for e in document["results"] if (e["method"], e["offload"]) == (method, offload)]
            found = {entry["form"]: f"{entry['questions']['100']['seconds']:.2f}" for entry in entries}
            left = f"{one(entries, form='dense')['left']:.3f}"
            yield (f"`{method}`", where, found["dense"], found.get("sparse", ""), left)


def prefixes_on_disk(results: Results) -> Rows:
    found = results("prefixes-on-disk-cpu-smollm2")

    def middle(name: str) -> str:
        values = sorted(load[name] for load in found["loads"] if not load["cached"])
        return f"{values[len(values) // 2]:.2f} s"

    def slowest(name: str) -> str:
        steps = [part[name] for part in found["steps"]]
        low, high = (end(step["median_seconds"] for step in steps) * 1e3 for end in (min, max))
        return f"{low:.1f} to {high:.1f} ms; the longest {max(s['longest_seconds'] for s in steps) * 1e3:.0f} ms"

    return [
        ("", ""),
        (f"reading the document ({found['tokens']:,} tokens), with a question", f"{found['read_seconds']:.1f} s"),
        ("loading it from the disk", middle("load_seconds")),
        ("time to first token of another question, loaded from the disk", middle("ttft_seconds")),
        ("writing it, behind the answer", f"{found['write_seconds']:.2f} s"),
        ("another request's steps, alone", slowest("alone")),
        ("while it is loaded", slowest("loading")),
    ]


def conversation(results: Results) -> Rows:
    """A conversation that grows: how long turns wait."""
    yield ("", "tokens read", "TTFT, s")
    talk = one(results("conversation-h200")["conversations"], method="nested")
    read, waited, alone = f"{talk['read_tokens']['p50']:.0f}", talk["ttft_seconds"], talk["fresh_ttft_seconds"]["p50"]
    yield (f"a turn of {talk['turns']}, p50; p99", read, f"{waited['p50']:.2f}; {waited['p99']:.2f}")
    yield ("as many tokens alone", read, f"{alone:.2f}")
    for name, what in (("edited", "an edit in the middle"), ("forked", "another turn from the middle on")):
        yield (what, f"{talk[name]['read_tokens']:,}", f"{talk[name]['ttft_seconds']:.2f}")


TABLES: Tables = {
    "a conversation": conversation,
    "prompts": prompts,
    "settings of sparse prompts": sparse_settings,
    "further questions": cached_prompts,
    "prefixes on disk": prefixes_on_disk,
}
