"""Triton's perf_analyzer, over gRPC: its command line for a cell, and the times of its answers.

The wheel tritonclient==2.51.0 has the program, current ones have not. It needs two libraries that Debian does not have, libb64
and libcudart; `make load-tools` puts copies of nvidia-pytriton's into the folder lib beside the program's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .cells import Answer, Cell
from .tool import run_tool

NAME, DOOR = "perf_analyzer", "gRPC"
LIBRARIES = "LD_LIBRARY_PATH"
MODEL = "tensorrt_llm_bls"


def input_data(prompts: Sequence[str], cell: Cell) -> dict[str, Any]:
    """The document of --input-data: one request a prompt, streamed, of exactly so many tokens as the cell says."""

    def fields(prompt: str, output_tokens: int) -> dict[str, Any]:
        values = {"text_input": prompt, "max_tokens": output_tokens, "stream": True, "end_id": -1}
        return {name: {"content": [value], "shape": [1]} for name, value in values.items()}

    return {"data": [fields(prompt, tokens) for prompt, (_, tokens) in zip(prompts, cell.lengths, strict=True)]}


def command(binary: Path, url: str, cell: Cell, data: Path, export: Path, model: str = MODEL) -> list[str]:
    """The command line of a cell; `url` is host:port of the gRPC door."""
    return [
        *(str(binary), "-m", model, "-u", url, "-i", "grpc", "--async", "--streaming"),
        *("--input-data", str(data), "--shape", "text_input:1", "--shape", "max_tokens:1", "-b", "1"),
        *("--concurrency-range", str(cell.concurrency), "--request-count", str(len(cell.lengths))),
        *("--stability-percentage", "999", "--profile-export-file", str(export)),
    ]


def environment(binary: Path) -> dict[str, str]:
    """This process's environment, with the program's libraries first."""
    libraries = [str(binary.resolve().parent.parent / "lib"), os.environ.get(LIBRARIES, "")]
    return {**os.environ, LIBRARIES: os.pathsep.join(filter(None, libraries))}


def answers(export: Mapping[str, Any]) -> list[Answer]:
    """The answers of a document of --profile-export-file, whose times are nanoseconds; a response is a token."""
    found = []
    for experiment in export["experiments"]:
        for request in experiment["requests"]:
            if times := request["response_timestamps"]:  # else the answer is missing, which `figures` finds
                arrivals = tuple(nanoseconds / 1e9 for nanoseconds in times)
                found.append(Answer(request["timestamp"] / 1e9, arrivals, len(arrivals)))
    return found


def measure(binary: Path, url: str, cell: Cell, prompts: Sequence[str], folder: Path) -> list[Answer]:
    """Run the program for one cell, with its files in an empty folder; raises LoadTestError if it fails."""
    data, export = folder / "inputs.json", folder / "profile_export.json"
    data.write_text(json.dumps(input_data(prompts, cell)), encoding="utf-8")
    return answers(json.loads(run_tool(command(binary, url, cell, data, export), environment(binary), export)))
