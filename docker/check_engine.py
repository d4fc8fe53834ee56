"""Shows that an installation works: builds an engine of a tiny random model, generates a token, serves it. `make check-install`.

Runs with the Python of the installation. The server is started with the image's own command and asked by its health check.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from random_models import save_random_model  # tests/support, on PYTHONPATH

import kvseek.engine
from kvseek.builder import build
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.server.ports import Ports

READY_SECONDS = 120.0
STOP_SECONDS = 25.0  # a server that is told to end takes 20 at most


def main(folder: Path, healthcheck: Path, command: list[str]) -> None:
    """Build, generate, serve; raises if any of it fails. `command` is the image's ENTRYPOINT and CMD, on `folder`/engine."""
    installed = Path(kvseek.engine.__file__ or "").resolve()
    assert installed.is_relative_to(sys.prefix), f"kvseek comes from {installed}, not from the installation"
    model, engine_dir = save_random_model(folder / "model", "llama"), folder / "engine"
    flags = [
        "--max_batch_size",
        "2",
        "--max_seq_len",
        "256",
        "--max_input_len",
        "128",
        "--kernels",
        "reference",
        "--quiet",
    ]
    assert build.main(["--model", str(model), "--method", "pariskv", "--output_dir", str(engine_dir), *flags]) == 0
    (tokens,) = Engine.load(engine_dir).generate([Request((5, 6, 7), 1)])
    assert len(tokens) == 1, tokens
    print(f"kvseek from {installed.parent.parent}: generated token {tokens[0]}")
    serve(command, healthcheck)


def serve(command: list[str], healthcheck: Path) -> None:
    """Start the server on free ports, wait for the health check, ask once, end it as `docker stop` does."""
    with Ports(0, 0, 0, 0).hold("127.0.0.1", socket.SO_REUSEADDR) as free:
        serve_at(free, command, healthcheck)


def serve_at(free: Ports, command: list[str], healthcheck: Path) -> None:
    """See serve."""
    ports = ["--http_port", str(free.http), "--grpc_port", str(free.grpc), "--metrics_port", str(free.metrics)]
    ports += ["--openai_port", str(free.openai)]
    asking = [sys.executable, str(healthcheck)]
    environment = {**os.environ, "KVSEEK_METRICS_PORT": str(free.metrics)}
    refused = subprocess.run(asking, env=environment, check=False, stderr=subprocess.DEVNULL)
    assert refused.returncode == 1, "healthy before it was started"
    started = time.monotonic()
    with subprocess.Popen([*command, *ports]) as server:
        try:
            while subprocess.run(asking, env=environment, check=False, stderr=subprocess.DEVNULL).returncode != 0:
                assert server.poll() is None, f"the server ended with status {server.returncode}"
                assert time.monotonic() - started < READY_SECONDS, "the server is not ready"
                time.sleep(0.2)
            print(f"healthy after {time.monotonic() - started:.1f} s")
            show_answer(free.http, free.metrics)
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(STOP_SECONDS) == 0, f"the server ended with status {server.returncode}"
    print("ended with status 0 after SIGTERM")


def show_answer(http: int, metrics: int) -> None:
    """One generated token over HTTP, and kvseek's metrics."""
    body = json.dumps({"text_input": "the light", "max_tokens": 1}).encode()
    address = f"http://127.0.0.1:{http}/v2/models/tensorrt_llm_bls/generate"
    with urllib.request.urlopen(urllib.request.Request(address, body), timeout=60) as response:
        answer = json.load(response)
    assert answer["text_output"].startswith("the light"), answer
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=10) as response:
        text = response.read().decode()
    assert re.search(r"^kvseek:generation_tokens_total\{.*\} 1\.0$", text, re.MULTILINE), text
    print(f"answered over HTTP: {answer['text_output']!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
