"""Tables of steps and prompts on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from kvseek.bench.speed.parts import part_groups

from .results import Results, Rows, Tables, one


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


TABLES: Tables = {
    "steps on two CPU cores": cpu_steps("decode-cpu-8k-int8-two-cores"),
    "steps of clusterkv on a CPU core": cpu_steps("decode-cpu-8k-int8-clusterkv"),
    "beside llama.cpp on two CPU cores": cpu_contestants,
    "prompts on a CPU core": cpu_prompts,
    "sampled steps on a CPU core": cpu_sampling,
}
