"""NVIDIA's aiperf, over the OpenAI port: its command line for a cell, and the times of its answers.

aiperf has a virtual environment of its own (`make load-tools`), because its pins are not kvseek's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from .cells import Answer, Cell
from .tool import run_tool

NAME, DOOR = "aiperf", "OpenAI"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
RECORDS = "profile_export.jsonl"  # aiperf's own name, in its artifact folder


def input_file(prompts: Sequence[str]) -> str:
    """The text of --input-file for --custom-dataset-type single_turn."""
    return "".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts)


def command(
    binary: Path, url: str, model: str, tokenizer: Path, cell: Cell, data: Path, artifacts: Path, endpoint: str
) -> list[str]:
    """The command line of a cell.

    Parameters
    ----------
    url : str
        Of the OpenAI port, without /v1.
    tokenizer : Path
        Folder of a Hugging Face tokenizer: aiperf does not start without one, though the server counts the tokens.
    endpoint : str
        chat or completions.
    """
    return [
        *(str(binary), "profile", "-m", model, "--url", url, "--endpoint-type", endpoint, "--streaming"),
        *("--tokenizer", str(tokenizer), "--use-server-token-count"),
        *("--input-file", str(data), "--custom-dataset-type", "single_turn"),
        *("--output-tokens-mean", str(cell.output_tokens), "--extra-inputs", "ignore_eos:true"),
        *("--concurrency", str(cell.concurrency), "--request-count", str(len(cell.lengths))),
        *("--output-artifact-dir", str(artifacts), "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"),
    ]


def environment() -> dict[str, str]:
    """This process's environment without OFFLINE, with which aiperf 0.13 takes a tokenizer's folder for a name."""
    return {name: value for name, value in os.environ.items() if name not in OFFLINE}


def answers(records: Iterable[Mapping[str, Any]]) -> list[Answer]:
    """The answers of aiperf's records, a JSON object a line; times are nanoseconds there, durations milliseconds.

    A request that failed has no metrics and so no answer, which `figures` finds.
    """
    found = []
    for record in records:
        metrics = {name: metric["value"] for name, metric in (record.get("metrics") or {}).items()}
        if "time_to_first_token" in metrics:
            sent = record["metadata"]["request_start_ns"] / 1e9
            times = (metrics["time_to_first_token"], *metrics.get("inter_chunk_latency", ()))
            arrivals = tuple(sent + milliseconds / 1e3 for milliseconds in accumulate(times))
            found.append(Answer(sent, arrivals, int(metrics["usage_completion_tokens"])))
    return found


def measure(
    binary: Path,
    url: str,
    model: str,
    tokenizer: Path,
    cell: Cell,
    prompts: Sequence[str],
    folder: Path,
    endpoint: str = "completions",
) -> list[Answer]:
    """Run the program for one cell, with its files in an empty folder; raises LoadTestError if it fails."""
    data, artifacts = folder / "inputs.jsonl", folder / "artifacts"
    data.write_text(input_file(prompts), encoding="utf-8")
    tool = command(binary, url, model, tokenizer, cell, data, artifacts, endpoint)
    records = run_tool(tool, environment(), artifacts / RECORDS)
    return answers(json.loads(line) for line in records.splitlines())
