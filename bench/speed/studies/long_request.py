"""One request of a million tokens from prompt to answer: `python bench/speed/studies/long_request.py --model DIR`.

The model is a small one. Its config.json is copied with as many positions as the request needs: what it answers has no meaning,
but kernels, cache, index and engine do what they do for any model. Its rows and its memory are compared with what
`kvseek build --plan` says of the same flags.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvseek.bench.machine import describe
from kvseek.bench.output import GIB, Figure, add_output_flags, command, figures_table, print_whole
from kvseek.builder.build import build_engine
from kvseek.builder.capacity.report import fit_document
from kvseek.builder.options import BuildOptions, FitOptions, parse
from kvseek.core.errors import ConfigError
from kvseek.core.request import Request
from kvseek.engine.engine import Engine

SEED = 3
HOST_MEMORY = "1024GiB"  # of the plan, which is asked what the engine takes, not what fits


def stretched(model: Path, folder: Path, tokens: int) -> Path:
    """Return a folder with the checkpoint's files, and positions for `tokens` tokens in its config.json."""
    if not (model / "config.json").is_file():
        raise ConfigError(f"model = {model}: has no config.json; name a Hugging Face directory")
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = max(tokens, config["max_position_embeddings"])
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def serve(engine: Engine, tokens: int, answer: int) -> dict[str, Any]:
    """Read a prompt of random tokens and generate `answer` tokens, as a server would, one step after another."""
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(engine.config.model.vocab_size, (tokens,), generator=generator).tolist()
    started, times, attended, ended = time.perf_counter(), [], 0.0, None
    engine.submit(Request(tuple(prompt), answer))
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise ConfigError(f"tokens = {tokens}: the request failed: {output.error}")
            if output.token_id is not None:
                times.append(time.perf_counter() - started)
                attended = output.attended_tokens
            ended = output.finish_reason or ended
    return {
        "first_token": times[0],
        "token": (times[-1] - times[0]) / max(1, len(times) - 1),
        "generated": len(times),
        "attended_tokens": attended,
        "finish_reason": str(ended),
    }


def planned(arguments: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """What `kvseek build --plan` says of the engine."""
    memory = ["--host_memory", HOST_MEMORY]
    if arguments.device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        memory += ["--gpu_memory", f"{free >> 20}MiB"]
    options = parse(["--plan", *flags, *memory])
    assert isinstance(options, FitOptions), "--plan is among the flags"
    engine: dict[str, Any] = fit_document(options)["engine"]
    if not engine["fits"]:
        raise ConfigError(f"tokens = {arguments.tokens}: {engine['reason']}")
    return engine


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file."""
    length = arguments.tokens + arguments.answer
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        limits = ["--max_seq_len", str(length), "--max_batch_size", "1", "--dtype", arguments.dtype]
        flags = ["--model", str(stretched(arguments.model, folder / "model", length)), "--method", arguments.method]
        flags += ["--device", arguments.device, "--cache.offload", arguments.offload, *limits]
        plan = planned(arguments, flags)
        options = parse([*flags, "--output_dir", str(folder / "engine"), "--no-check"])
        assert isinstance(options, BuildOptions), "there is no other mode among the flags"
        build_engine(options)
        on_gpu = arguments.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        engine = Engine.load(folder / "engine", arguments.threads)
        loaded = time.perf_counter() - started
        found = serve(engine, arguments.tokens, arguments.answer)
        memory = (
            {"device_peak": torch.cuda.max_memory_allocated(), "device_planned": plan["device_total"]} if on_gpu else {}
        )
        memory["host_rows_planned"] = plan["host_rows"]
        engine.close()
    return {
        "benchmark": "long_request",
        "machine": describe(),
        "model": arguments.model.name,
        "method": arguments.method,
        "offload": arguments.offload,
        "tokens": arguments.tokens,
        "load_seconds": loaded,
        "device_row_layers": plan["device_layers"],
        **found,
        "memory": memory,
    }


def _device_memory(name: str) -> Figure:
    return lambda entry: f"{entry['memory'][name] / GIB:.2f} GiB" if name in entry["memory"] else ""


FIGURES: dict[str, Figure] = {
    "loaded": lambda entry: f"{entry['load_seconds']:.1f} s",
    "first\ntoken": lambda entry: f"{entry['first_token']:.2f} s",
    "a token\nafter it": lambda entry: f"{1e3 * entry['token']:.2f} ms",
    "tokens": lambda entry: str(entry["generated"]),
    "attended": lambda entry: f"{entry['attended_tokens']:,.0f}",
    "device,\nplanned": _device_memory("device_planned"),
    "device,\npeak": _device_memory("device_peak"),
}


def print_report(document: dict[str, Any]) -> None:
    """Print seconds and gibibytes."""
    title = f"one request of {document['tokens']:,} tokens, offload {document['offload']}"
    print_whole(figures_table(title, "method", FIGURES, [document], "method"))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description="One very long request, from prompt to answer.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory of a small model")
    parser.add_argument("--method", default="nested", help="(default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"), help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--offload", default="auto", help="where rows lie (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the prompt (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=64, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads")
    add_output_flags(parser)
    return parser.parse_args(argv)


main = command(parse_arguments, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
