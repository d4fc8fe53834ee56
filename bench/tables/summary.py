"""The table that sums up the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .answers import total
from .cpu import cpu_steps
from .prompts import prompt_time
from .results import (
    INT8,
    METHODS,
    NEEDLE,
    SPARSE,
    K,
    M,
    Results,
    Row,
    Rows,
    Tables,
    milliseconds,
    one,
    step,
    with_ratio,
)


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
        yield (
            f"reading a prompt of {tokens // K}K tokens",
            seconds,
            "",
            f"sparse prompts: {prompt_time(sparse, full)}",
        )
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
        right = {method: total([cell for cell in cells if cell["engine"] == method]) for method in METHODS}
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


TABLES: Tables = {
    SUMMARY: summary,
}
