"""Tables of docs/papers.md: what the methods of the papers keep with the papers' settings, and without single pieces."""

from __future__ import annotations

from typing import Any

from kvseek.bench.accuracy.perplexity import rise

from .answers import total
from .results import K, Results, Rows, Tables, step, with_ratio

PRESETS = ("pariskv:paper", "ctkvr:paper", "clusterkv:paper", "prkv:paper")
BESIDE = ("quest:top_k=1024", "infinigen:top_k=1024", "arkvale:top_k=1024", "snapkv:top_k=1024")
PERPLEXITY, RECALL, PIECES = "perplexity-papers-cpu-smollm2", "recall-papers-smollm2-8k", "ablations-papers-smollm2"
ANSWERS = "needle-papers-cpu"
FIELDS = ("recall-fields-smollm2-8k", "recall-updates-smollm2-8k")


def presets(results: Results) -> Rows:
    """Each method with its paper's settings, and competing systems with as many rows: what is lost, and a step at 128K tokens."""
    losses, kept = (
        {e[key]: e for e in results(name)["results"]} for name, key in ((PERPLEXITY, "name"), (RECALL, "method"))
    )
    answers = results(ANSWERS)["cells"]
    yield (
        "",
        "perplexity over `full`, %",
        "needle answers",
        "recall",
        "mass",
        "a step, rows in GPU memory",
        "in host memory",
    )
    for name in (*PRESETS, *BESIDE):
        loss = rise(losses[name]) if name in losses else ""
        times = [_step(results, name, offload) for offload in ("never", "always")] if name in PRESETS else ["", ""]
        found = kept[name]
        yield (
            f"`{name}`",
            loss,
            total([cell for cell in answers if cell["engine"] == name]),
            f"{found['recall']:.3f}",
            f"{found['ratio']:.3f}",
            *times,
        )


def _step(results: Results, name: str, offload: str) -> str:
    on_host_cores = (name, offload) == ("ctkvr:paper", "always")
    return with_ratio(
        step(results("paper-ctkvr-h200" if on_host_cores else "paper-presets-h200"), name, offload, 128 * K)
    )


FORMS = {
    "pariskv, paper": "the paper's, 8,192 tokens",
    "4096": "4,096 tokens",
    "pariskv, one tier": "one tier",
    "pariskv, no rotation": "not rotated",
    "pariskv, no alpha": "codes without α",
    "pariskv, learned 1": "centroids learned from all keys as they are",
    "pariskv, learned 0.25": "from the first quarter",
    "pariskv, learned 1 rotated": "from all keys, rotated",
    "pariskv, learned 0.25 rotated": "from the first quarter, rotated",
}


def collisions(results: Results) -> Rows:
    """ParisKV's recall of the 100 best keys of the mean query, after each stage."""
    found = _pieces(results)
    yield ("", "100 by votes", "a tenth by votes", "100 of these by codes")
    for name, words in FORMS.items():
        yield (words, *(f"{found[name][stage]:.3f}" for stage in ("coarse", "candidates", "recall")))


CTKVR, CLUSTERKV, PRKV = "ctkvr:paper,top_k=512", "clusterkv:paper,dense_layers=0", "prkv:paper"
SWAPS = {  # of captured attention, in the order of the rows; what other files have too is read from FIELDS
    CTKVR: "`ctkvr`, 512 rows: centroids are the last queries",
    f"{CTKVR}, equidistant": "equidistant ones",
    f"{CTKVR}, random": "random ones",
    f"{CTKVR}, first": "the first ones",
    "ctkvr:paper,top_k=328": "328 rows, 4 %",
    CLUSTERKV: "`clusterkv`, all layers: 80 keys a cluster, by cosine",
    f"{CLUSTERKV}, L2": "by L2 distance",
    f"{CLUSTERKV}, inner product": "by inner product",
    f"{CLUSTERKV},tokens_per_cluster=40": "40 keys a cluster",
    f"{PRKV},static_share=0": "`prkv`: S 0",
    PRKV: "S 0.25",
    f"{PRKV},static_share=0.5": "S 0.5",
    f"{PRKV},static_share=1": "S 1",
    f"{PRKV}, fixed pages": "S 0.25, pages of all tokens",
}
LONGER = {
    f"{PRKV},update_interval=64": "192 steps, two layers: `prkv`, updated every 64",
    f"{PRKV},update_interval=256": "never updated",
    f"{PRKV},static_share=1,update_interval=256": "never updated, S 1",
}


def swaps(results: Results) -> Rows:
    """Recall and mass with one piece or field changed."""
    yield ("", "recall", "mass")
    short, long = ({entry["method"]: entry for entry in results(name)["results"]} for name in FIELDS)
    for words, found in ((SWAPS, _pieces(results) | short), (LONGER, long)):
        for name, label in words.items():
            entry = found[name]
            yield (label, f"{entry['recall']:.3f}", f"{entry['mass'] / entry['flat_mass']:.3f}")


def _pieces(results: Results) -> dict[str, Any]:
    return {entry["name"]: entry for entry in results(PIECES)["results"]}


def peers(results: Results) -> Rows:
    """Microseconds of a layer of kvseek and of others, for batches that grow."""
    found = results("peers-h200")["results"]
    contexts = sorted({entry["context"] for entry in found})
    yield ("", *(f"{context:,} tokens" for context in contexts))
    for part, name in dict.fromkeys((entry["part"], entry["name"]) for entry in found):
        own = [entry for entry in found if (entry["part"], entry["name"]) == (part, name)]
        times = {c: [f"{e['seconds']['median'] * 1e6:,.1f}" for e in own if e["context"] == c] for c in contexts}
        yield (f"{part}: {name}", *map("; ".join, times.values()))


TABLES: Tables = {
    "settings of papers": presets,
    "votes of pariskv": collisions,
    "pieces of papers": swaps,
    "beside other kernels": peers,
}
