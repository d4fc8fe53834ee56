"""What the tables of measured figures show: by its name in the documents, each table's cells, read from result files.

`documents.py` writes them into the documents. A figure that is not read here from a result file is in no document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kvseek.bench.accuracy.perplexity import rise
from kvseek.bench.load import report
from kvseek.bench.output import GIB, Figure, read_result, rows
from kvseek.bench.speed.parts import part_groups
from kvseek.bench.speed.shapes import LLAMA_3_1_8B
from kvseek.bench.variants import Variant, parse_variants
from kvseek.core.errors import KvseekError
from kvseek.plugins.registry import get_method

ROOT = Path(__file__).resolve().parents[1]  # also where the folder is reached through a link
FOLDER = ROOT / "bench/results"
K, M = 1 << 10, 1 << 20
METHODS = ("full", "nested", "pariskv", "prkv", "clusterkv", "ctkvr")
INT8 = "nested:weight_only_precision=int8"
SPARSE = ":prefill_attention=block_sparse"
CHUNKS = ",prefill_chunk_tokens=4096"
TASKS = {  # of the suite needle, and their headings
    "niah_single": "single",
    "niah_multikey": "multikey",
    "niah_multikey_dense": "dense",
    "niah_multivalue": "multivalue",
    "niah_multiquery": "multiquery",
    "variable_tracking": "variables",
}

PERPLEXITY = "perplexity-cpu-smollm2"
BUDGETS = (256, 1024)  # tokens that a step attends to, of all methods
WITHIN = 3  # points of `full` within which wide answers should be
NEEDLE = ("needle-gpu-32k-layers-together", "needle-h100-128k-layers-together")

Row = tuple[str, ...]
Rows = Iterable[Row]  # headings first
Columns = Mapping[str, Figure]  # by their headings


class TableError(KvseekError):
    """A result file lacks what a table shows, or a document has marks that fit no table; the message names which."""


class Results:
    """The result files, and which of them have been read.

    Attributes
    ----------
    read : dict
        Documents by their files' names without ".json".
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self.read: dict[str, dict[str, Any]] = {}

    def __call__(self, name: str) -> dict[str, Any]:
        """The document of a file; raises ResultError if there is none."""
        if name not in self.read:
            self.read[name] = read_result(self.folder / f"{name}.json")
        return self.read[name]


def one(entries: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The only entry with these values; raises TableError if there is none or several."""
    found = [entry for entry in entries if all(entry[name] == value for name, value in wanted.items())]
    if len(found) != 1:
        raise TableError(f"{wanted}: must be one entry of the result file; there are {len(found)}")
    return found[0]


def step(document: dict[str, Any], method: str, offload: str, context: int) -> dict[str, Any]:
    """A decode step of one request; with hot rows where the benchmark timed both ways, because serving has them."""
    phase = one(document["phases"], offload=offload)
    entries = one(phase["cells"], context=context, batch=1)["results"]
    hot = [entry for entry in entries if entry["hot_rows"]]
    return one(
        [*hot, *(entry for entry in entries if entry["method"] not in {e["method"] for e in hot})], method=method
    )


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


COLUMNS: Columns = {  # that several tables have
    "tokens": lambda entry: f"{entry['context']:,}",
    "method": lambda entry: f"`{entry['method'].partition(':')[0]}`",
    "layers with rows in host memory": lambda entry: str(entry["host_layers"]),
}


def with_ratio(entry: dict[str, Any]) -> str:
    """Milliseconds of a step; in brackets those over the baseline's, of every method but the baseline."""
    ratio = entry["to_baseline"]
    return milliseconds(entry["step_seconds"]["median"]) + ("" if entry["method"] == "full" else f" ({ratio:.2f})")


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
    """A step of one request of 131,072 tokens of other shapes than that of most tables."""
    yield ("shape", "method", "rows", "a step, ms")
    for name, offload in (("moe-h200", "always"), ("decode-72b-int4-h200", "never")):
        document = results(name)
        for entry in one(document["phases"], offload=offload)["cells"][0]["results"]:
            where = "host" if entry["host_layers"] else "GPU"
            time = milliseconds(entry["step_seconds"]["median"]) if entry["to_baseline"] == 1 else with_ratio(entry)
            yield (f"`{document['shape']}`", f"`{entry['method']}`", where, time)


def speculation(results: Results) -> Rows:
    """Time per token of a request whose drafts are right so often."""
    yield ("a drafted token is right", "ms a token", "× without drafts")
    for entry in results("speculation-h200")["results"]:
        yield (
            "no drafts" if entry["speculation"] == "none" else f"{float(entry['speculation']):.0%}",
            milliseconds(entry["tpot_seconds"]),
            f"{entry['to_none']:.2f}",
        )


def conversation(results: Results) -> Rows:
    """A conversation that grows: how long turns wait."""
    yield ("", "tokens read", "TTFT, s")
    talk = one(results("conversation-h200")["conversations"], method="nested")
    read, waited, alone = f"{talk['read_tokens']['p50']:.0f}", talk["ttft_seconds"], talk["fresh_ttft_seconds"]["p50"]
    yield (f"a turn of {talk['turns']}, p50; p99", read, f"{waited['p50']:.2f}; {waited['p99']:.2f}")
    yield ("as many tokens alone", read, f"{alone:.2f}")
    for name, what in (("edited", "an edit in the middle"), ("forked", "another turn from the middle on")):
        yield (what, f"{talk[name]['read_tokens']:,}", f"{talk[name]['ttft_seconds']:.2f}")


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


PROMPTS = (
    ("prefill-sparse-h200", "full"),
    ("prefill-chunks-h200", "full" + ":prefill_chunk_tokens=4096"),
    ("prefill-sparse-h200", "full" + SPARSE),
    ("prefill-sparse-h200", "full" + SPARSE + ",block_sparse.samples=8"),
    ("prefill-chunks-h200", "full" + SPARSE + CHUNKS),
)
PROMPT_TOKENS = (32 * K, 128 * K, 512 * K)


def prompts(results: Results) -> Rows:
    yield ("", *(f"{tokens:,} tokens" for tokens in PROMPT_TOKENS))
    for name, method in PROMPTS:
        cells = []
        for tokens in PROMPT_TOKENS:
            longest = tokens == PROMPT_TOKENS[-1]
            entries = results("prefill-sparse-512k-h200" if longest else name)["results"]
            found = [entry for entry in entries if (entry["method"], entry["tokens"]) == (method, tokens)]
            cells.append(_prompt(found[0], method) if found else "")
        yield (f"`{method}`", *cells)


def _prompt(entry: dict[str, Any], method: str) -> str:
    seconds = f"{entry['seconds']['median']:.2f} s"
    return seconds if method == "full" else f"{seconds} ({entry['to_baseline']:.2f})"


def answers(results: Results) -> Rows:
    """Needle questions, one a context, in two lengths."""
    documents = [results(name) for name in NEEDLE]
    yield ("", *(f"{document['cells'][0]['length']:,} tokens" for document in documents))
    for engine in documents[0]["engines"]:
        cells = ([cell for cell in document["cells"] if cell["engine"] == engine] for document in documents)
        yield (f"`{engine}`", *map(_answers, cells))


def _answers(cells: Sequence[dict[str, Any]]) -> str:
    """Right answers of all tasks, and of the tasks in which some were wrong; of a single task with its name."""
    if len(cells) == 1:
        return f"{TASKS[cells[0]['task']]} {_counted(cells[0])}"
    wrong = [f"{TASKS[cell['task']]} {_counted(cell)}" for cell in cells if _right(cell) < cell["questions"]]
    return _total(cells) + (f" ({', '.join(wrong)})" if wrong else "")


def _total(cells: Sequence[dict[str, Any]]) -> str:
    return f"{sum(map(_right, cells))} of {sum(cell['questions'] for cell in cells)}"


def _right(cell: dict[str, Any]) -> int:
    return sum(answers.count("1") for answers in cell["right"])


def _counted(cell: dict[str, Any]) -> str:
    return f"{_right(cell)} of {cell['questions']}"


def wide_tasks(results: Results) -> Rows:
    """Parts of wide answers that are right, of `full`; and by how many points those of each method differ, fewest rows first."""
    chains = [cell for cell in results("wide-tasks-cpu-needle")["cells"] if cell["task"] == "long_chain"]
    cells = {(c["task"], c["length"], c["engine"]): c["parts"] for c in [*chains, *results("wide-tasks-h200")["cells"]]}
    asked = dict.fromkeys(key[:2] for key in cells)
    settings = {name: parse_variants(name)[0] for name in dict.fromkeys(engine for *_, engine in cells)}
    yield ("", *(f"`{task}` at {length:,}" for task, length in asked))
    full = [cells[*key, "full"] for key in asked]
    yield ("`full`", *(f"{100 * fmean(parts):.1f}" for parts in full))
    for method in METHODS[1:]:
        own = sorted((one.settings.top_k, name) for name, one in settings.items() if one.method == method)
        shown = []
        for key, reference in zip(asked, full, strict=True):
            found = (cells.get((*key, name)) for _, name in own)
            shown.append("; ".join(_points(parts, reference) for parts in found if parts is not None))
        yield (f"`{method}`", *shown)


def _points(parts: Sequence[float], reference: Sequence[float]) -> str:
    """The difference on the contexts that both have read; bold beyond WITHIN points."""
    points = 100 * fmean(own - other for own, other in zip(parts, reference, strict=False))
    return f"**{points:+.1f}**" if points < -WITHIN else f"{points:+.1f}"


def rounded_rows(results: Results) -> Rows:
    """Perplexity with rows of the engine's type and with rows in 8 bits, of each method."""
    found = {entry["name"]: entry["perplexity"] for entry in results("perplexity-rows-cpu-smollm2")["results"]}
    yield ("perplexity", "16-bit rows", "8-bit rows", "%")
    for name in (name for name in found if ":" not in name):
        exact, rounded = found[name], found[f"{name}:cache.row_dtype=int8"]
        yield (f"`{name}`", f"{exact:.2f}", f"{rounded:.2f}", f"{100 * (rounded / exact - 1):+.1f}")


def losses(results: Results) -> Rows:
    """What each method loses at its default: of perplexity and of needle answers; bold beyond 1 % or a point."""
    entries = results(PERPLEXITY)["results"]
    documents = [results(name) for name in NEEDLE]
    asked = (
        (document["cells"][0]["length"], sum(c["questions"] for c in document["cells"] if c["engine"] == "full"))
        for document in documents
    )
    lost = (f"needle answers lost of {questions} at {length:,} tokens" for length, questions in asked)
    yield ("method", "rows by default", "perplexity over `full`, %", "on the worst text, %", *lost)
    for method in METHODS[1:]:
        (default,) = parse_variants(method)
        own = [entry for entry in entries if _is_default(entry["name"], method)]
        worst = max((text["percent"] for text in own[0]["by_text"]), default=0.0) if own else 0.0
        shown = (_bold(rise(own[0]), own[0]["percent"]), _bold(f"{worst:+.1f}", worst)) if own else ("not measured", "")
        cells = (_lost(document, method, default.settings.top_k) for document in documents)
        yield (f"`{method}`", f"{default.settings.top_k:,}", *shown, *cells)


def long_losses(results: Results) -> Rows:
    """Loss of perplexity behind a long context, by methods and budgets."""
    budgets, losses = (100, 256, 512), dict[str, list[tuple[int, str]]]()
    for entry in results("perplexity-64k-h200")["results"][1:]:
        if "candidates" not in entry["name"]:  # choosing.md has their time
            (variant,) = parse_variants(entry["name"])
            losses.setdefault(variant.method, []).append((variant.settings.top_k, rise(entry)))
    yield ("", *(f"{budget} rows" for budget in budgets))
    for method in METHODS[1:]:
        own = zip(budgets, sorted(losses[method]), strict=True)
        yield (f"`{method}`", *(text if rows == budget else f"{text} ({rows})" for budget, (rows, text) in own))


def drift(results: Results) -> Rows:
    """What is lost the further an answer has come."""
    found = results("long-answers-cpu-smollm2")
    tokens, parts = found["tokens"], len(found["results"][0]["by_part"])
    yield ("", *(f"to {tokens * (part + 1) // parts:,}" for part in range(parts)))
    for entry in found["results"][1:]:
        yield (f"`{entry['name']}`", *(f"{percent:+.1f}" for percent in entry["by_part"]))


def peer_losses(results: Results) -> Rows:
    """Loss of perplexity of all methods and competing systems, by budget; those that lose least first."""
    losses = dict[str, dict[int, dict[str, Any]]]()
    for budget in BUDGETS:
        for entry in results(f"perplexity-{budget}-cpu-smollm2")["results"][1:]:
            losses.setdefault(entry["name"].partition(":")[0], {})[budget] = entry
    yield ("", "", *(f"{budget:,} tokens" for budget in BUDGETS))
    for method, own in sorted(losses.items(), key=lambda item: float(item[1][BUDGETS[0]]["percent"])):
        kind = "evicts" if get_method(method).evicts else ""
        yield (f"`{method}`", kind, *(rise(own[budget]) for budget in BUDGETS))


def _is_default(name: str, method: str) -> bool:
    (variant,), (default,) = parse_variants(name), parse_variants(method)
    same = (variant.method, variant.settings, variant.cache, variant.engine)
    return same == (default.method, default.settings, default.cache, default.engine)


def _bold(text: str, loss: float) -> str:
    return f"**{text}**" if loss > 1 else text


def _lost(document: dict[str, Any], method: str, rows: int) -> str:
    """Answers fewer than those of `full`; the rows, where the result is of others than `rows`."""
    own, full = ([cell for cell in document["cells"] if cell["engine"] == name] for name in (method, "full"))
    fewer = sum(map(_right, full)) - sum(map(_right, own))
    measured = document["engines"][method]["method_config"]["top_k"]
    share = 100 * fewer / sum(cell["questions"] for cell in own)
    return _bold(str(max(fewer, 0)), share) + ("" if measured == rows else f" (with {measured} rows)")


def loss_and_time(results: Results) -> Rows:
    """What settings lose of perplexity beside what their steps take, where both were measured."""
    losses, times = results(PERPLEXITY)["results"], results("budgets-h200")
    yield ("", "perplexity over `full`, %", "on the worst text, %", "a step, rows in GPU memory", "rows in host memory")
    settings = {entry["name"]: parse_variants(entry["name"])[0] for entry in losses[1:]}
    for entry in sorted(losses[1:], key=lambda one: _method_and_rows(settings[one["name"]])):
        if entry["name"] not in times["methods"]:
            continue
        steps = [with_ratio(step(times, entry["name"], place, 128 * K)) for place in ("never", "always")]
        worst = max(text["percent"] for text in entry["by_text"])
        yield (f"`{entry['name']}`", rise(entry), f"{worst:+.1f}", *steps)


def _method_and_rows(variant: Variant) -> tuple[str, int]:
    return variant.method, variant.settings.top_k


def ctkvr_lists(results: Results) -> Rows:
    document = results("needle-128k-ctkvr-lists")
    tasks = ("niah_multikey_dense", "niah_multivalue")
    yield ("", *(TASKS[task] for task in tasks))
    for engine in document["engines"]:
        yield (f"`{engine}`", *(_counted(one(document["cells"], engine=engine, task=task)) for task in tasks))


def sparse_answers(results: Results) -> Rows:
    cells = results("needle-sparse-h100")["cells"]
    lengths = (32 * K, 130_048)
    yield ("", *(f"{length:,} tokens" for length in lengths))
    for engine in ("full", *(f"{m}{SPARSE}{chunks}" for chunks in ("", CHUNKS) for m in ("full", "pariskv"))):
        found = [[c for c in cells if (c["engine"], c["length"]) == (engine, length)] for length in lengths]
        yield (f"`{engine}`", *(_answers(some) if some else "" for some in found))


def sparse_settings(results: Results) -> Rows:
    cells, times = results("needle-sparse-h100")["cells"], results("prefill-sparse-settings-h100")["results"]
    yield ("", "right answers", "a prompt, s")
    for setting in ("", "query_block=256", "budget=16384"):
        field = f",block_sparse.{setting}" if setting else ""
        cell = one(cells, engine=f"full{SPARSE}{field}{CHUNKS}", task="niah_multivalue", length=130_048)
        entry = one(times, method=f"full{SPARSE}{CHUNKS}{field}")
        ratio = f" ({entry['to_baseline']:.2f} ×)" if setting else ""
        yield (f"`{setting}`" if setting else "defaults", _counted(cell), f"{entry['seconds']['median']:.2f}{ratio}")


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


def ranks_steps(results: Results) -> Rows:
    device, host = results("ranks-h200-128k-device")["results"], results("ranks-h200-128k-host")["results"]
    yield ("", "1 rank", "2 ranks", "× 1 rank")
    for method in ("full", "nested", "pariskv"):
        before, after = (one(device, method=method, tp_size=size) for size in (1, 2))
        times = (milliseconds(entry["seconds"]["median"]) for entry in (before, after))
        yield (f"`{method}`, rows in GPU memory", *times, f"{after['to_one_rank']:.2f}")
    for entry in host:
        time = milliseconds(entry["seconds"]["median"])
        yield (f"`{entry['method']}`, rows in host memory", "", time, "")


def ranks_prompts(results: Results) -> Rows:
    yield ("", "1 rank, s", "2 ranks, s", "× 1 rank")
    found: dict[str, list[dict[str, Any]]] = {}  # the later file has newer times of a method
    for name in ("ranks-h200-prefill", "ranks-h200-prefill-chunks"):
        entries = results(name)["results"]
        found |= {entry["method"]: entries for entry in entries}
    for method, entries in found.items():
        before, after = (one(entries, method=method, tp_size=size) for size in (1, 2))
        times = (f"{entry['seconds']['median']:.2f}" for entry in (before, after))
        yield (f"`{method}`", *times, f"{after['to_one_rank']:.2f}")


def ranks_long(results: Results) -> Rows:
    columns: Columns = {
        "tokens": COLUMNS["tokens"],
        "method": COLUMNS["method"],
        "ranks": lambda entry: str(entry["tp_size"]),
        "layers with rows in host memory": COLUMNS["layers with rows in host memory"],
        "a step, ms": lambda entry: milliseconds(entry["seconds"]["median"]),
        "× 1 rank": lambda entry: f"{entry['to_one_rank']:.2f}" if entry["tp_size"] > 1 else "",
        "the prompt, s": lambda entry: f"{entry['prefill_seconds']:.1f}",
    }
    found = (results(name)["results"] for name in ("ranks-h200-1m-auto", "ranks-h200-2m-auto"))
    return rows(columns, (entry for one in found for entry in sorted(one, key=lambda entry: int(entry["tp_size"]))))


def ranks_72b(results: Results) -> Rows:
    (entry,) = results("ranks-h200-72b-int8")["results"]
    memory = entry["device_memory"]["after"]
    return [
        ("", ""),
        ("a step", f"{milliseconds(entry['seconds']['median'])} ms"),
        ("a prompt", f"{entry['prefill_seconds']:.1f} s"),
        ("GPU memory that tensors took at most, a GPU", f"{memory['most_tensors'] / GIB:.2f} GiB"),
        ("GPU memory in use, with CUDA's own, a GPU", f"{memory['in_use'] / GIB:.2f} GiB"),
    ]


def cpu_steps(name: str) -> Callable[[Results], Rows]:
    """The table of a result of `kvseek bench` on the CPU with one context."""

    def table(results: Results) -> Rows:
        (part,) = results(name)["contexts"]
        yield ("", "a step, ms", "× `full`", "products", "selection", "attention", "the rest")
        for entry in part["results"]:
            shown = (f"{seconds * 1e3:.1f}" for seconds in part_groups(entry["parts"]).values())
            time = f"{entry['tpot_seconds']['median'] * 1e3:.1f}"
            yield (f"`{entry['name']}`", time, f"{entry['to_baseline']:.2f}", *shown)

    return table


def cpu_contestants(results: Results) -> Rows:
    (part,) = results("decode-cpu-llama-cpp")["contexts"]
    yield ("", "a step, ms", "× `full`", "first token, s")
    for entry in part["results"]:
        time, first = entry["tpot_seconds"]["median"] * 1e3, entry["prefill_seconds"]
        yield (f"`{entry['name']}`", f"{time:.1f}", f"{entry['to_baseline']:.2f}", f"{first:.1f}")


def cpu_prompts(results: Results) -> Rows:
    found = results("prompts-cpu-smollm2")
    names = [f"`{one['text']}`" for one in found["results"][0]["texts"]]
    yield (
        "",
        f"first token after {found['tokens']:,} tokens",
        f"× {found['results'][0]['engine']}",
        *(f"{figure}, {name}" for name in names for figure in ("perplexity ×", "same likeliest token")),
    )
    for entry in found["results"]:
        texts = (cell for one in entry["texts"] for cell in (f"{one['perplexity_ratio']:.4f}", f"{one['same']:.1%}"))
        yield entry["engine"], f"{entry['seconds']['min']:.1f} s", f"{entry['to_first']:.2f}", *texts


SAMPLED = (  # of those that were measured
    "T 0.6, top_p 0.95, top_k 20",
    "T 0.7, three penalties",
    "log probabilities 20",
    "T 0.6, top_p 0.95, top_k 20, log probabilities 20",
)


def cpu_sampling(results: Results) -> Rows:
    found = results("sampled-steps-cpu-smollm2")["results"]
    counts = sorted({entry["requests"] for entry in found})
    greedy = (one(found, kind="greedy", requests=count)["seconds"] * 1e3 for count in counts)
    heads = (
        f"{count} request{'s' * (count > 1)}: {ms:.1f} ms greedy" for count, ms in zip(counts, greedy, strict=True)
    )
    yield "", *heads
    for kind in SAMPLED:
        entries = (one(found, kind=kind, requests=count) for count in counts)
        yield kind, *(f"{entry['added_seconds'] * 1e3:+.2f} ms ({entry['added_share']:+.1%})" for entry in entries)


def server(results: Results) -> Rows:
    found, tiny = results("serving-cpu-smollm2"), results("serving-cpu-openai")
    more = found["over_engine_seconds"]
    rates = found["tokens_per_second"]
    stream = found["stream_tpot_seconds"]
    return [
        ("", "measured", "goal"),
        ("a token of SmolLM2-135M with the bare engine", f"{milliseconds(found['tpot_seconds']['engine'])} ms", ""),
        ("more for a token over HTTP", f"{milliseconds(more['http'])} ms", "at most 2 ms"),
        ("more for a token over gRPC", f"{milliseconds(more['grpc'])} ms", "at most 2 ms"),
        (
            "more over the OpenAI port, HTTP, gRPC: a model of two tiny layers",
            ", ".join(milliseconds(tiny["over_engine_seconds"][door]) for door in ("openai", "http", "grpc")) + " ms",
            "at most 2 ms",
        ),
        ("tokens/s with 8 requests over those with one", f"{rates['8'] / rates['1']:.2f}", "at least 3"),
        (
            "four short prompts at once: the last first token over that of one prompt alone",
            f"{found['first_token_ratio']:.2f}",
            "at most 3",
        ),
        (
            f"a stream's time per token while {found['prompt_tokens']:,} tokens are read, over its time alone",
            f"{found['stream_tpot_ratio']:.2f}",
            "at most 2",
        ),
        ("the longest time between two tokens of that stream", f"{stream['the longest of these'] * 1e3:.0f} ms", ""),
    ]


def served(results: Results) -> Rows:
    shown = {name: figure for name, figure in report.SERVED.items() if name not in ("load", "asked", "requests")}
    yield tuple(shown)
    for entry in results("served-mixture-h200")["results"]:
        yield tuple(figure(entry) for figure in shown.values())


def served_and_bare(results: Results) -> Rows:
    """Tokens a second through the OpenAI port beside those of the bare engine."""
    yield ("", "at a time", "served, tokens/s", "bare engine", "ratio")
    for name in ("served-reasoning-h200", "served-small-h200"):
        document = results(name)
        port, bare = (
            one(document["results"], asked=asked)["tokens_per_second"] for asked in (report.SERVER, report.BARE)
        )
        layers = f", {document['layers']} layers" if document["layers"] else ""
        drawn = f"temperature {document['sampling']['temperature']:g}"
        count = str(document["results"][0]["concurrency"])
        yield f"{document['shape']}{layers}, {drawn}", count, f"{port:,.0f}", f"{bare:,.0f}", f"{port / bare:.2f}"


def streams_beside(results: Results) -> Rows:
    """Running streams while prompts arrive."""
    names = ("what arrives", "TPOT p50, ms", "TPOT p99, ms", "short prompts, TTFT p50, s", "long prompts, TTFT, s")
    yield names
    for entry in results("served-beside-h200")["beside"]:
        alone = " alone" * (not entry["streams"])
        yield tuple(report.BESIDE[name](entry) + alone * (name == "what arrives") for name in names)


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


def load(results: Results) -> Rows:
    """A line a cell, with the medians of both tools; the picture of the document has the other percentiles."""
    found = results("load-cpu-smollm2")["results"]
    shown = {name: figure for name, figure in report.TIMES.items() if "p99" not in name}
    yield ("concurrency", "prompt tokens", *shown)
    for cell in [entry for entry in found if entry["tool"] == "perf_analyzer"]:
        same = {name: cell[name] for name in ("concurrency", "prompt_tokens")}
        both = [cell, one(found, tool="aiperf", **same)]
        figures = (", ".join(figure(entry) for entry in both) for figure in shown.values())
        yield (str(cell["concurrency"]), f"{cell['prompt_tokens']:,}", *figures)


CODES = {  # what is said of it, and the changes from the defaults under which the result file has it
    "**the defaults: 2 bits find 8 candidates a row, 4 bits choose**": "defaults",
    "1 bit finds candidates": "first_bits 1",
    "the mean of the whole region": "block 1073741824",
    "no mean subtracted": "block 0",
    "one pass of 4 bits over all keys": "first_bits 0",
    "one pass of 4 bits, not rotated": "first_bits 0, rotated False",
    "one pass of 2 bits": "bits 2, first_bits 0",
    "codes of 2 bits alone, with a scale and cells of their own": "bits 2, first_bits 0, step 0.25, scale own",
}


def codes(results: Results) -> Rows:
    found = results("key-codes-smollm2-8k")["results"]
    yield ("", "recall", "mass")
    for words, changes in CODES.items():
        entry = one(found, changes=changes)
        yield (words, f"{entry['recall']:.3f}", f"{entry['mass']:.3f}")


def summary(results: Results) -> Rows:
    """The page that a busy engineer finishes: one line a question."""
    yield "", "`full`", "`nested`", "other"
    yield from _summary(results)


def _summary(results: Results) -> Iterator[Row]:
    today, narrow = results("methods-h200"), results("methods-h200-layers-together")
    dense = step(today, "full", "never", 128 * K)
    for offload, where in (("never", "GPU"), ("always", "host")):
        int8 = step(narrow, INT8, offload, 128 * K)["step_seconds"]["median"]
        yield (
            f"a step at 128K tokens, rows in {where} memory",
            f"{with_ratio(dense)} ms" if offload == "never" else "",
            _with_unit(step(today, "nested", offload, 128 * K)),
            f"int8 weights: {milliseconds(int8)} ms",
        )
    far = results("decode-512k-h200")
    host = _with_unit(step(far, "nested", "always", 512 * K))
    yield (
        "at 512K tokens, rows in GPU memory",
        _with_unit(step(far, "full", "never", 512 * K)),
        _with_unit(step(far, "nested", "never", 512 * K)),
        f"`nested`, rows in host memory: {host}",
    )
    for words, name, context, other in (
        ("at a million tokens, rows in GPU memory as far as they fit", "decode-1m-h200", M, "decode-1m-int8-h200"),
        ("at two million tokens, host memory of 256 GiB", "decode-2m-h200", 2 * M, ""),
    ):
        entry = step(results(name), "nested", "auto", context)
        int8_time = step(results(other), INT8, "auto", context)["step_seconds"]["median"] if other else 0.0
        two = one(results("ranks-h200-2m-auto")["results"], tp_size=2)["seconds"]["median"]
        yield (
            words,
            f"at least {entry['dense_floor_seconds'] * 1e3:,.0f} ms",
            f"{milliseconds(entry['step_seconds']['median'])} ms",
            f"int8 weights: {milliseconds(int8_time)} ms" if other else f"two H200s: {milliseconds(two)} ms",
        )
    rates = results("throughput-nested-int8-h200")["peaks"]
    wide, small = (one(rates, method=method)["tokens_per_second"] for method in ("nested", INT8))
    yield "tokens/s at 128K with as many requests as are best", "", f"{wide:,.0f}", f"int8 weights: {small:,.0f}"
    prefill = results("prefill-sparse-h200")["results"]
    longest = results("prefill-sparse-512k-h200")["results"]
    for tokens, entries in ((128 * K, prefill), (512 * K, longest)):
        full, sparse = (one(entries, method="full" + form, tokens=tokens) for form in ("", SPARSE))
        seconds = f"{full['seconds']['median']:.1f} s"
        yield f"reading a prompt of {tokens // K}K tokens", seconds, "", f"sparse prompts: {_prompt(sparse, 'sparse')}"
    asked = results("cached-prompts-h200")["results"]
    again = {
        (entry["offload"], entry["form"]): f"{entry['questions']['100']['seconds']:.2f} s"
        for entry in asked
        if entry["method"] == "nested"
    }
    yield (
        "a further question of 100 tokens about 128K, rows in GPU memory",
        "",
        again["never", "dense"],
        f"rows in host memory: {again['always', 'dense']}; read sparsely {again['always', 'sparse']}",
    )
    for name, words in zip(NEEDLE, ("needle questions at 32K tokens, right answers", "at 127K tokens"), strict=True):
        cells = results(name)["cells"]
        right = {method: _total([cell for cell in cells if cell["engine"] == method]) for method in METHODS}
        others = "; ".join(f"`{method}` {right[method]}" for method in METHODS[2:])
        yield words, right["full"], right["nested"], others
    ranks = results("ranks-h200-128k-device")["results"]
    shares = [
        f"{one(ranks, method=method, tp_size=2)['to_one_rank']:.2f} ×" for method in ("full", "nested", "pariskv")
    ]
    yield "a step of two H200s over that of one, 128K tokens", shares[0], shares[1], f"`pariskv` {shares[2]}"
    rows = {row[0].strip("`"): row for row in cpu_steps("decode-cpu-8k-int8-two-cores")(results)}
    times = {name: f"{row[1]} ms ({row[2]})" for name, row in rows.items()}
    others = "; ".join(f"`{name}` {times[name]}" for name in ("pariskv", "prkv"))
    words = "two CPU cores, SmolLM2-135M, 8,000 tokens, int8 weights"
    yield words, f"{rows['full'][1]} ms", times["nested"], others
    more = results("serving-cpu-smollm2")["over_engine_seconds"]
    doors = ", ".join(
        f"{milliseconds(more[door])} ms over {words}" for door, words in (("http", "HTTP"), ("grpc", "gRPC"))
    )
    yield "what the server adds to a token", "", "", doors


def _with_unit(entry: dict[str, Any]) -> str:
    time, space, ratio = with_ratio(entry).partition(" ")
    return f"{time} ms{space}{ratio}"


SUMMARY = "summary"
TABLES: Mapping[str, Callable[[Results], Rows]] = {  # by their names in the documents
    SUMMARY: summary,
    "one request": one_request,
    "short contexts": short_contexts,
    "parts of a step": parts,
    "long contexts": long_contexts,
    "throughput": throughput,
    "weights": weights,
    "other shapes": other_shapes,
    "speculation": speculation,
    "a conversation": conversation,
    "evictions": evictions,
    "selections": selections,
    "prompts": prompts,
    "answers": answers,
    "losses": losses,
    "rounded rows": rounded_rows,
    "loss and time": loss_and_time,
    "losses at 64K": long_losses,
    "losses within long answers": drift,
    "losses of competing systems": peer_losses,
    "wide tasks": wide_tasks,
    "lists of ctkvr": ctkvr_lists,
    "answers with sparse prompts": sparse_answers,
    "settings of sparse prompts": sparse_settings,
    "further questions": cached_prompts,
    "prefixes on disk": prefixes_on_disk,
    "steps of two ranks": ranks_steps,
    "prompts of two ranks": ranks_prompts,
    "long contexts of two ranks": ranks_long,
    "72B on two ranks": ranks_72b,
    "steps on two CPU cores": cpu_steps("decode-cpu-8k-int8-two-cores"),
    "steps of clusterkv on a CPU core": cpu_steps("decode-cpu-8k-int8-clusterkv"),
    "beside llama.cpp on two CPU cores": cpu_contestants,
    "prompts on a CPU core": cpu_prompts,
    "sampled steps on a CPU core": cpu_sampling,
    "server": server,
    "served": served,
    "served beside the bare engine": served_and_bare,
    "streams beside prompts": streams_beside,
    "steps by how tokens are drawn": drawn_steps,
    "steps of mixed lengths": mixed_steps,
    "load": load,
    "key codes": codes,
}
