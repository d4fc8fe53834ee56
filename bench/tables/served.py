"""Tables of the server, and of the load that it bears."""

from __future__ import annotations

from kvseek.bench.load import report

from .results import Results, Rows, Tables, milliseconds, one


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


TABLES: Tables = {
    "server": server,
    "served": served,
    "served beside the bare engine": served_and_bare,
    "streams beside prompts": streams_beside,
    "load": load,
}
