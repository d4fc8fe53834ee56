"""Tables of decode steps on a GPU."""

from __future__ import annotations

import re
from typing import Any

from kvseek.bench.output import GIB, rows
from kvseek.bench.speed.parts import part_groups
from kvseek.bench.speed.shapes import LLAMA_3_1_8B

from .results import COLUMNS, INT8, METHODS, Columns, K, M, Results, Rows, Tables, milliseconds, one, step, with_ratio


def one_request(results: Results) -> Rows:
    today, narrow = results("methods-h200"), results("methods-h200-layers-together")
    yield ("method", "index bytes a key and KV head", "rows in GPU memory", "rows in host memory")
    for method, document in (*((method, today) for method in METHODS), (INT8, narrow)):
        entries = [step(document, method, offload, 128 * K) for offload in ("never", "always")]
        index = entries[0]["index_bytes_per_token_and_kv_head"]
        times = [with_ratio(entry) for entry in entries]
        yield (f"`{method}`", f"{index:.1f}" if index else "", times[0], times[1] if method != "full" else "")


def short_contexts(results: Results) -> Rows:
    cells = one(results("short-contexts-h200")["phases"], offload="never")["cells"]
    batches = sorted({cell["batch"] for cell in cells})
    yield ("tokens a request", *(f"{batch} at a time" if batch > 1 else "one request" for batch in batches))
    for context in sorted({cell["context"] for cell in cells}):
        found = [one(cells, context=context, batch=batch)["results"] for batch in batches]
        yield (f"{context:,}", *(with_ratio(one(entries, method="nested")) for entries in found))


def parts(results: Results) -> Rows:
    document = results("methods-h200")
    yield ("method", "products", "selection", "attention", "the rest", "bytes read, GB")
    for method in METHODS:
        entry = step(document, method, "never", 128 * K)
        groups = part_groups(entry["stages"])
        yield (f"`{method}`", *map(milliseconds, groups.values()), f"{sum(entry['bytes'].values()) / 1e9:.1f}")


LONG = (  # result file, contexts, method, where its rows lie
    ("decode-512k-h200", 512 * K, "full", "never"),
    ("decode-512k-h200", 512 * K, "nested", "never"),
    ("decode-512k-h200", 512 * K, "nested", "always"),
    ("decode-1m-h200", M, "nested", "auto"),
    ("decode-1m-h200", M, "pariskv", "auto"),
    ("decode-1m-int8-h200", M, INT8, "auto"),
    ("decode-2m-h200", 2 * M, "nested", "auto"),
    ("decode-2m-h200", 2 * M, "pariskv", "auto"),
)


def long_contexts(results: Results) -> Rows:
    yield ("tokens", "method", "layers with rows in host memory", "index, GiB", "a step, ms", "`full`, at least, ms")
    for name, context, method, offload in LONG:
        entry = step(results(name), method, offload, context)
        fits = entry["to_baseline"] is not None
        floor = "" if fits else f"{entry['dense_floor_seconds'] * 1e3:,.0f}"
        index = f"{entry['index_bytes'] / GIB:.1f}" if entry["index_bytes"] else ""
        time = with_ratio(entry) if fits else milliseconds(entry["step_seconds"]["median"])
        yield (f"{context:,}", f"`{method}`", str(entry["host_layers"]), index, time, floor)


def throughput(results: Results) -> Rows:
    entries = results("throughput-nested-int8-h200")["results"]
    peaks = {one["tokens_per_second"] for one in results("throughput-nested-int8-h200")["peaks"]}

    def rate(entry: dict[str, Any]) -> str:
        mark = "**" if entry["tokens_per_second"] in peaks else ""
        return f"{mark}{entry['tokens_per_second']:,.0f}{mark}"

    columns: Columns = {
        "method": lambda entry: f"`{entry['method']}`",
        "requests": lambda entry: str(entry["batch"]),
        "layers with rows in host memory": COLUMNS["layers with rows in host memory"],
        "a step, ms": lambda entry: milliseconds(entry["step_seconds"]["median"]),
        "tokens/s": rate,
    }
    return rows(columns, entries)


WEIGHTS = {  # what is said of them, and the fields of a variant
    "16 bits": "",
    "int8": ":weight_only_precision=int8",
    "int4, groups of 128": ":weight_only_precision=int4,weight_group=128",
    "fp8": ":weight_only_precision=fp8",
    "fp8, `--prefill_precision fp8`": ":weight_only_precision=fp8,prefill_precision=fp8",
}


def weights(results: Results) -> Rows:
    """What weights of fewer bits gain: a step of one request, tokens a second of eight, a prompt."""
    alone = {  # the baseline's rows always lie on the device
        phase["offload"]: [
            entry
            for entry in phase["cells"][0]["results"]
            if (phase["offload"] == "always") == (entry["host_layers"] > 0)
        ]
        for phase in results("decode-weights-h200")["phases"]
    }
    eight, read = (results(name)["results"] for name in ("throughput-weights-h200", "prefill-fp8-h200"))
    yield (
        "weights",
        "a step of one request, ms",
        "rows in host memory",
        "8 requests, tokens/s",
        f"a prompt of {read[0]['tokens']:,} tokens, s",
    )
    for words, fields in WEIGHTS.items():
        row = (
            *(
                [
                    milliseconds(entry["step_seconds"]["median"])
                    for entry in alone[offload]
                    if entry["method"] == "nested" + fields
                ]
                for offload in ("never", "always")
            ),
            [f"{entry['tokens_per_second']:,.0f}" for entry in eight if entry["method"] == "nested" + fields],
            [f"{entry['seconds']['median']:.2f}" for entry in read if entry["method"] == "full" + fields],
        )
        yield (words, *("".join(found) for found in row))


def other_shapes(results: Results) -> Rows:
    """Steps of other shapes than that of most tables."""
    yield ("shape", "requests × tokens", "method", "rows", "a step, ms")
    decoded = ("moe-h200", "always"), ("decode-72b-int4-h200", "never"), ("decode-hybrid-27b-int4-h200", "always")
    for name, offload in decoded:
        document = results(name)
        for cell in one(document["phases"], offload=offload)["cells"]:
            # Of steps with hot rows and without, the first.
            for method in dict.fromkeys(entry["method"] for entry in cell["results"]):
                entry = next(entry for entry in cell["results"] if entry["method"] == method)
                where = "host" if entry["host_layers"] else "GPU"
                alone = entry["to_baseline"] in (None, 1)
                time = milliseconds(entry["step_seconds"]["median"]) if alone else with_ratio(entry)
                yield (f"`{document['shape']}`", f"1 × {cell['context']:,}", f"`{method}`", where, time)
    document = results("throughput-hybrid-35b-h200")
    baseline = document["results"][0]["step_seconds"]["median"]
    for entry in document["results"]:
        seconds, requests = entry["step_seconds"]["median"], f"{entry['batch']} × {entry['context']:,}"
        ratio = "" if seconds == baseline else f" ({seconds / baseline:.2f})"
        yield (f"`{document['shape']}`", requests, f"`{entry['method']}`", "GPU", milliseconds(seconds) + ratio)


def speculation(results: Results) -> Rows:
    """Time per token of a request whose drafts are right so often."""
    yield ("a drafted token is right", "ms a token", "× without drafts")
    for entry in results("speculation-h200")["results"]:
        yield (
            "no drafts" if entry["speculation"] == "none" else f"{float(entry['speculation']):.0%}",
            milliseconds(entry["tpot_seconds"]),
            f"{entry['to_none']:.2f}",
        )


def evictions(results: Results) -> Rows:
    columns: Columns = {
        **COLUMNS,
        "a step, ms": lambda entry: milliseconds(entry["step_seconds"]),
        "the longest beside an eviction, ms": lambda entry: milliseconds(entry["longest_seconds"]),
    }
    names = ("evictions-1m-h100-nested", "evictions-1m-h100-pariskv", "evictions-2m-h200")
    return rows(columns, (entry for name in names for entry in results(name)["results"]))


def selections(results: Results) -> Rows:
    """The part of a step that selects, a layer of it."""
    yield ("method", "tokens", "a layer, µs", "bytes read, TB/s")
    for name, context, offload in (("methods-h200", 128 * K, "never"), ("decode-1m-h200", M, "auto")):
        for method in ("pariskv", "nested"):
            entry = step(results(name), method, offload, context)
            seconds, read = entry["stages"]["select"], entry["bytes"]["scan"] + entry["bytes"]["rerank"]
            layer = seconds / LLAMA_3_1_8B.num_layers * 1e6
            yield (f"`{method}`", f"{context:,}", f"{layer:.1f}", f"{read / seconds / 1e12:.2f}")


DRAWN = ("T 0.6, top_p 0.95, top_k 20", "T 0.7, three penalties", "log probabilities 20", "guided")


def drawn_steps(results: Results) -> Rows:
    """What drawing adds to a step of the whole engine, in milliseconds."""
    found = results("engine-steps-h200")["results"]
    batches = ("4096", "8x4096")
    greedy = (one(found, batch=batch, kind="greedy")["seconds"] for batch in batches)
    counts = ("1 request", "8 requests")
    yield ("", *(f"{count}: {milliseconds(time)} ms greedy" for count, time in zip(counts, greedy, strict=True)))
    for kind in DRAWN:
        added = (one(found, batch=batch, kind=kind)["added_seconds"] for batch in batches)
        yield (kind, *(f"+{milliseconds(time)} ms" for time in added))


def mixed_steps(results: Results) -> Rows:
    """Steps of the whole engine for requests of different lengths."""
    yield ("requests × tokens", "a step, ms")
    for entry in results("engine-steps-mixed-h200")["results"]:
        parts = re.sub(r"\d{4,}", lambda tokens: f"{int(tokens[0]):,}", entry["batch"])
        yield (parts.replace("x", " × ").replace("+", ", "), milliseconds(entry["seconds"]))


TABLES: Tables = {
    "one request": one_request,
    "short contexts": short_contexts,
    "parts of a step": parts,
    "long contexts": long_contexts,
    "throughput": throughput,
    "weights": weights,
    "other shapes": other_shapes,
    "speculation": speculation,
    "evictions": evictions,
    "selections": selections,
    "steps by how tokens are drawn": drawn_steps,
    "steps of mixed lengths": mixed_steps,
}
