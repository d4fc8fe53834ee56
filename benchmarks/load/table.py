"""A load test's result as a Markdown table."""

from __future__ import annotations

from typing import Any

HEADINGS = (
    *("tool", "port", "concurrency", "prompt tokens", "requests", "tokens/s"),
    *("TTFT p50, s", "TTFT p99, s", "TPOT p50, ms", "TPOT p99, ms"),
)


def captions(document: dict[str, Any]) -> tuple[str, str]:
    """What the figures are of: engine and machine, server and answers."""
    engine, server, machine = document["engine"], document["server"], document["machine"]
    where = f"{machine['cores']} cores of {machine['cpu']}, kvseek commit {str(machine['commit'])[:10]}"
    limits = f"--threads {server['threads']}, --max_queue_size {server['max_queue_size']}"
    answers = f"Answers of {document['results'][0]['output_tokens']} tokens."
    first = f"{engine['name']} ({engine['method']}, max_batch_size {engine['max_batch_size']}) on {where}."
    return first, f"Server: {limits}. {answers}"


def table(document: dict[str, Any]) -> str:
    """The figures, a line a cell."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(row(result) for result in document["results"])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def row(result: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    ttft, tpot = result["ttft_seconds"], result["tpot_seconds"]
    return (
        *(result["tool"], result["door"], str(result["concurrency"]), f"{result['prompt_tokens']:,}"),
        *(str(result["requests"]), f"{result['tokens_per_second']:.3g}"),
        *(f"{ttft[name]:.3g}" for name in ("p50", "p99")),
        *(f"{tpot[name] * 1e3:.3g}" for name in ("p50", "p99")),
    )


def print_table(document: dict[str, Any]) -> None:
    """Print captions and table."""
    print(f"{' '.join(captions(document))}\n\n{table(document)}")
