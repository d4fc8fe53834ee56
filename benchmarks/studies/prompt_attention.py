"""Attention of prompts on a GPU, by flash attention alone and with cuDNN: `python benchmarks/studies/prompt_attention.py`.

Each time is of one layer, on the device, the contestants in turns. The last line is a whole prompt, chunk by chunk.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvseek.benchmarks.device.memory_rates import elapsed_seconds, product_rate, timing_event
from kvseek.benchmarks.timing import interleave
from kvseek.core.config import ModelConfig
from kvseek.core.cuda import cuda_device
from kvseek.core.errors import ConfigError
from kvseek.engine.model.attention import causal_attention_device
from kvseek.engine.model.prompt_attention import FLASH, PromptAttention
from kvseek.measurement.flags import numbers
from kvseek.measurement.gpu_kernels import method_kernels
from kvseek.measurement.machine import describe
from kvseek.measurement.output import run_command
from kvseek.plugins.registry import get_method

SHAPES = {"llama-3.1-8b": (32, 8, 128), "llama-3.2-1b": (32, 8, 64), "qwen2.5-7b": (28, 4, 128)}  # H, G, D
DTYPE = torch.bfloat16
WAIT_CYCLES = 4_000_000  # about 2 ms


class Prompt:
    """Queries of a chunk, and keys and values of a prompt as an engine has them, of random numbers."""

    def __init__(self, shape: str, tokens: int, chunk: int, device: torch.device) -> None:
        heads, kv_heads, dim = SHAPES[shape]
        self.model = ModelConfig("llama", 16, 64, 64, 1, heads, kv_heads, dim, 1e-5, 1e4, tokens)
        self.tokens, self.chunk = tokens, chunk
        self.queries = torch.randn(chunk, heads, dim, device=device, dtype=DTYPE).transpose(0, 1)
        self.keys, self.values = torch.randn(2, kv_heads, tokens, dim, device=device, dtype=DTYPE)

    def read(self, attention: Callable[[Tensor, Tensor, Tensor, float], Tensor], past: int) -> None:
        """Attend in the chunk that follows `past` tokens."""
        stop = past + self.chunk
        attention(self.queries, self.keys[:, :stop], self.values[:, :stop], self.model.head_dim**-0.5)

    def read_all(self, attention: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> None:
        """Attend in every chunk."""
        for past in range(0, self.tokens, self.chunk):
            self.read(attention, past)

    def operations(self, past: int) -> int:
        """Additions and multiplications of both products, for the pairs of a query and a key that it may attend to."""
        pairs = self.chunk * past + self.chunk * (self.chunk + 1) // 2
        return 4 * self.model.num_heads * self.model.head_dim * pairs


def device_seconds(call: Callable[[], object]) -> float:
    """Seconds between events before and behind what a call launches; the device waits first, so that the host is ahead."""
    start, end = timing_event(), timing_event()
    torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return elapsed_seconds(start, end)


def measure(prompt: Prompt, cases: Sequence[int | None], repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Time both contestants in chunks behind `cases` tokens, None: in all; first calls have cuDNN compile plans."""
    model = prompt.model
    kernels = method_kernels("full", get_method("full").configure({}), "bfloat16", model.head_dim, model.group_size)
    ours = PromptAttention(kernels, model, DTYPE, prompt.chunk)
    if ours.refusal is not None:
        raise ConfigError(
            f"cuDNN refuses {model.num_heads} heads of {model.head_dim}: {ours.refusal}; leave the shape out"
        )
    results = []
    for past in cases:
        read = prompt.read_all if past is None else partial(prompt.read, past=past)
        calls = {FLASH: partial(read, causal_attention_device), ours.name: partial(read, ours)}
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        calls[ours.name]()
        torch.cuda.synchronize(device)
        first = time.perf_counter() - start
        samples = interleave(calls, repeats, 1, 1, timer=device_seconds)
        pasts = range(0, prompt.tokens, prompt.chunk) if past is None else (past,)
        results.append(
            {
                "past": past,
                "operations": sum(map(prompt.operations, pasts)),
                "first_call_seconds": first,
                "seconds": {name: values.summary() for name, values in samples.items()},
            }
        )
    return results


def print_report(document: dict[str, Any]) -> None:
    """A line for each case: milliseconds, TFLOP/s, how many times as fast, and the first call."""
    console = Console(width=120)
    console.print(
        f"{document['gpu']}, chunks of {document['chunk']:,}, a large product {document['best'] / 1e12:,.0f} TFLOP/s"
    )
    for shape, results in document["results"].items():
        names = list(results[0]["seconds"])
        columns = [f"{name}\n{unit}" for unit in ("ms", "TFLOP/s") for name in names]
        table = Table("past", *columns, "times as fast", "first call\nms", title=shape)
        for entry in results:
            medians = [entry["seconds"][name]["median"] for name in names]
            times = [f"{median * 1e3:,.2f}" for median in medians]
            rates = [f"{entry['operations'] / median / 1e12:,.0f}" for median in medians]
            last = f"{medians[0] / medians[1]:.2f}", f"{entry['first_call_seconds'] * 1e3:,.0f}"
            past = "a whole prompt" if entry["past"] is None else f"{entry['past']:,}"
            table.add_row(past, *times, *rates, *last)
        console.print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="llama-3.1-8b", help=f"comma list of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of the prompt, a multiple of --chunk")
    parser.add_argument("--pasts", default="2048,8192,30720,129024", help="comma list of tokens before the chunk")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each contestant")
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file."""
    shapes, tokens, chunk = arguments.shapes.split(","), arguments.tokens, arguments.chunk
    if not set(shapes) <= set(SHAPES):
        raise ConfigError(f"--shapes = {arguments.shapes!r}: must be a comma list of {', '.join(SHAPES)}")
    if arguments.repeats < 1 or chunk < 1 or tokens < chunk or tokens % chunk:
        raise ConfigError(
            f"--tokens, --chunk, --repeats = {tokens}, {chunk}, {arguments.repeats}: must be positive, and --tokens a "
            "multiple of --chunk"
        )
    pasts = numbers("pasts", arguments.pasts, 0)
    if max(pasts) + chunk > tokens:
        raise ConfigError(f"--pasts = {max(pasts)}: must leave a chunk of {chunk} of {tokens} tokens; raise --tokens")
    device = cuda_device()
    torch.manual_seed(0)
    results = {}
    for shape in shapes:
        prompt = Prompt(shape, tokens, chunk, device)
        results[shape] = measure(prompt, [*pasts, None], arguments.repeats, device)
    return {
        "benchmark": "prompt_attention",
        "machine": describe(),
        "gpu": torch.cuda.get_device_name(device),
        "best": product_rate(device, DTYPE),
        "chunk": chunk,
        "tokens": tokens,
        "results": results,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 after printing why not."""
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
