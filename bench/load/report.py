"""How the results of load tests are shown: the columns of their tables, and what figures are of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvseek.bench.output import Figure

SERVER, BARE = "server", "bare engine"  # who was asked


def _percentile(quantity: str, name: str, scale: float = 1.0) -> Figure:
    """What a column says of a percentile of a result; nothing where there is none."""
    return lambda result: f"{result[quantity][name] * scale:.3g}" if result[quantity] else ""


TPOT: Mapping[str, Figure] = {
    "TPOT p50, ms": _percentile("tpot_seconds", "p50", 1e3),
    "TPOT p99, ms": _percentile("tpot_seconds", "p99", 1e3),
}
ITL: Mapping[str, Figure] = {"ITL p99, ms": _percentile("itl_seconds", "p99", 1e3)}
TIMES: Mapping[str, Figure] = {
    "tokens/s": lambda result: f"{result['tokens_per_second']:.3g}",
    "TTFT p50, s": _percentile("ttft_seconds", "p50"),
    "TTFT p99, s": _percentile("ttft_seconds", "p99"),
    **TPOT,
}
TOOLS: Mapping[str, Figure] = {  # of main.py
    "tool": lambda result: str(result["tool"]),
    "port": lambda result: str(result["door"]),
    "concurrency": lambda result: str(result["concurrency"]),
    "prompt tokens": lambda result: f"{result['prompt_tokens']:,}",
    "requests": lambda result: str(result["requests"]),
    **TIMES,
}
SERVED: Mapping[str, Figure] = {  # of served.py
    "method": lambda result: f"`{result['method']}`",
    "load": lambda result: str(result["load"]),
    "asked": lambda result: str(result["asked"]),
    "at a time": lambda result: str(result["concurrency"]) if result["rate"] is None else f"{result['rate']:g}/s",
    "requests": lambda result: str(result["requests"]),
    "prompt, answer": lambda result: f"{result['prompt_tokens']:,}, {result['output_tokens']:,}",
    **TIMES,
    **ITL,
}
DOOR: Mapping[str, Figure] = {  # what a token costs the processor in the process that clients reach
    "door, µs a token": lambda result: (
        f"{result['door_seconds_per_token'] * 1e6:.3g}" if result["asked"] == SERVER else ""
    ),
}
BESIDE: Mapping[str, Figure] = {  # of beside.py
    "method": SERVED["method"],
    "streams": lambda result: str(result["streams"]),
    "what arrives": lambda result: str(result["part"]),
    **TPOT,
    **ITL,
    "short prompts, TTFT p50, s": _percentile("short_ttft_seconds", "p50"),
    "p99, s": _percentile("short_ttft_seconds", "p99"),
    "long prompts, TTFT, s": lambda result: ", ".join(f"{seconds:.3g}" for seconds in result["long_ttft_seconds"]),
}


def _turn(name: str) -> Figure:
    """What a column says of one turn of a conversation."""
    return lambda result: f"{result[name]['read_tokens']:,}; {result[name]['ttft_seconds']:.3g}"


CONVERSATION: Mapping[str, Figure] = {  # of conversation.py
    "method": SERVED["method"],
    "turns": lambda result: str(result["turns"]),
    "tokens": lambda result: f"{result['tokens']:,}",
    "read a turn, p99": lambda result: f"{result['read_tokens']['p99']:,.0f}",
    "as many alone, TTFT, s": _percentile("fresh_ttft_seconds", "p50"),
    "a turn, TTFT p50, s": _percentile("ttft_seconds", "p50"),
    "beyond alone, p99, s": _percentile("beyond_seconds", "p99"),
    "max, s": _percentile("beyond_seconds", "max"),
    "edited: read; TTFT, s": _turn("edited"),
    "forked: read; TTFT, s": _turn("forked"),
}


def comparisons(document: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Method, what is compared, and the ratio: the server over the bare engine, and streams and prompts disturbed over not."""

    def key(one: dict[str, Any], asked: str) -> tuple[Any, ...]:
        return one["method"], one["load"], one["concurrency"], one["rate"], asked

    rates = {key(one, one["asked"]): one["tokens_per_second"] for one in document["results"]}
    for one in document["results"]:
        if one["asked"] == BARE and (served := rates.get(key(one, SERVER))):
            yield one["method"], f"{one['load']}: tokens/s over the bare engine's", served / one["tokens_per_second"]
    parts = {(one["method"], one["part"], one["streams"] > 0): one for one in document["beside"]}
    for (method, part, _), one in parts.items():
        if one["streams"] and one["long_ttft_seconds"]:
            for quantity, what, without in (
                ("tpot_seconds", "TPOT of streams", ("nothing", True)),
                ("short_ttft_seconds", "TTFT of short prompts", ("short prompts", False)),
            ):
                undisturbed = parts[method, *without][quantity]
                for name, seconds in (one[quantity] or {}).items():
                    yield method, f"{part} arriving: {name} of {what} over undisturbed", seconds / undisturbed[name]


def captions(document: dict[str, Any]) -> tuple[str, str]:
    """What the figures of a load test are of: engine and machine; server, answers and how they are drawn."""
    machine, gpu = document["machine"], document.get("gpu")
    where = gpu["name"] if gpu else f"{machine['cores']} cores of {machine['cpu']}"
    where += f", kvseek commit {str(machine['commit'])[:10]}"
    if document["benchmark"] == "served":
        drawn = ", ".join(f"{name} {value:g}" for name, value in document["sampling"].items())
        first = f"{document['shape']}, random weights, {document['dtype']}, max_batch_size {document['max_batch_size']}"
        return f"{first}, on {where}.", f"kvseek openai, streams; {drawn}."
    engine, server = document["engine"], document["server"]
    limits = f"--threads {server['threads']}, --max_queue_size {server['max_queue_size']}"
    answers = f"Answers of {document['results'][0]['output_tokens']} tokens."
    first = f"{engine['name']} ({engine['method']}, max_batch_size {engine['max_batch_size']}) on {where}."
    return first, f"Server: {limits}. {answers}"
