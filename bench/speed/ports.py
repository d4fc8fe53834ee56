"""What the processes around an engine cost a token: many streams at once of an engine that computes nothing (stand_in.py).

`bench/speed/serving.py --streams N` runs it. Times are of processors, so that other work of the machine matters less.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvloop

from kvseek.bench.output import Figure, markdown, rows
from kvseek.server.errors import ServerError
from kvseek.server.settings import ServeSettings

STAND_IN = Path(__file__).with_name("stand_in.py")
TICKS = os.sysconf("SC_CLK_TCK")
READY_SECONDS, END_SECONDS, POLL_SECONDS = 60.0, 10.0, 0.05
SECONDS = 120.0  # most of a load
WARM_TOKENS = 16
EVENT, LAST_CHUNK = b"data: ", b"\r\n0\r\n\r\n"
PROMPT_CHARACTERS = 800  # some 200 tokens
PORTS = OPENAI, GENERATE = "openai", "http"
MODEL = "stand-in"
COLUMNS: dict[str, Figure] = {
    "port": lambda one: one["port"],
    "commit": lambda one: one["tree"],
    "ms a step": lambda one: f"{one['step_seconds'] * 1e3:g}",
    "tokens/s": lambda one: f"{one['tokens_per_second']:,.0f}",
    "events/s": lambda one: f"{one['events_per_second']:,.0f}",
    "TTFT p50, ms": lambda one: f"{one['ttft_p50_seconds'] * 1e3:.0f}",
    "door, µs a token": lambda one: f"{one['door_seconds_per_token'] * 1e6:.1f}",
    "engine process, µs a token": lambda one: f"{one['engine_seconds_per_token'] * 1e6:.1f}",
}


@dataclass(frozen=True)
class Load:
    """Streams of one port."""

    port: str
    streams: int
    tokens: int


class Stream(asyncio.Protocol):
    """Sends one request and counts the events of its answer, which takes as little time as possible."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self._request, self._ended, self.rest = request, ended, b""
        self.events, self.first_at, self.ended_at = 0, 0.0, 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport, self.sent_at = cast(asyncio.Transport, transport), time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count the events that have come."""
        found = self.rest + data
        self.events += found.count(EVENT)
        if self.events and not self.first_at:
            self.first_at = time.perf_counter()
        self.rest = found[found.rfind(EVENT) + len(EVENT) :] if EVENT in found else found
        if found.endswith(LAST_CHUNK):
            self.ended_at = time.perf_counter()
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """End the stream."""
        if self._ended.done():
            return
        if self.ended_at and self.events > 1:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(ServerError(f"a stream broke off: {self.rest[-500:]!r}"))


def request_of(load: Load, number: int, text: str) -> bytes:
    """The bytes of a request; each has another prompt."""
    start = number * 97 % max(1, len(text) - PROMPT_CHARACTERS)
    prompt = text[start : start + PROMPT_CHARACTERS]
    if load.port == OPENAI:
        path = "/v1/completions"
        body = {"model": MODEL, "prompt": prompt, "max_tokens": load.tokens, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
    else:
        path = "/v2/models/tensorrt_llm_bls/generate_stream"
        body = {"text_input": prompt, "max_tokens": load.tokens, "end_id": -1, "stream": True}
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def send(load: Load, port: int, text: str) -> dict[str, float]:
    """Send all requests at once and read their answers; raises ServerError."""
    loop = asyncio.get_running_loop()
    ends = [loop.create_future() for _ in range(load.streams)]
    streams = [Stream(request_of(load, n, text), end) for n, end in enumerate(ends)]
    began = time.perf_counter()
    await asyncio.gather(*(loop.create_connection(lambda s=s: s, "127.0.0.1", port) for s in streams))  # type: ignore[misc]
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*ends)
    seconds, first = max(s.ended_at for s in streams) - began, min(s.first_at for s in streams)
    return {
        "events": sum(s.events for s in streams),
        "seconds": seconds,
        "streaming_seconds": max(s.ended_at for s in streams) - first,
        "ttft_p50": statistics.median(s.first_at - s.sent_at for s in streams),
    }


def processor_seconds(pid: int) -> float:
    """Time that all threads of a process have computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@dataclass
class Processes:
    """A running engine process and door, and the door's ports."""

    engine: int
    door: int
    ports: Mapping[str, int]

    def measure(self, load: Load, text: str) -> dict[str, float]:
        """Figures of one load."""
        before = {name: processor_seconds(pid) for name, pid in self.ids().items()}
        found = uvloop.run(send(load, self.ports[load.port], text))
        tokens = load.streams * load.tokens
        spent = {name: processor_seconds(pid) - before[name] for name, pid in self.ids().items()}
        return {
            "tokens_per_second": tokens / found["streaming_seconds"],
            "events_per_second": found["events"] / found["streaming_seconds"],
            "tokens_per_event": tokens / found["events"],
            "ttft_p50_seconds": found["ttft_p50"],
            **{f"{name}_seconds_per_token": seconds / tokens for name, seconds in spent.items()},
        }

    def ids(self) -> dict[str, int]:
        """Process ids."""
        return {"door": self.door, "engine": self.engine}


@contextlib.contextmanager
def processes(
    engine_dir: Path, text: Path, step_seconds: float, tree: Path, profile: Path | None = None
) -> Iterator[Processes]:
    """Start both with the code of a tree, and end them; raises ServerError if they do not start.

    `profile`: file that gets cProfile's figures of the door, which then takes about twice the time.
    """
    with tempfile.TemporaryDirectory(prefix="kvseek-load-") as name, contextlib.ExitStack() as stack:
        socket, log = Path(name) / "engine.sock", Path(name) / "log"
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
        own = ("--engine_dir", str(engine_dir.resolve()), "--socket", str(socket))

        def start(*arguments: str) -> int:
            with log.open("a") as file:
                command = [sys.executable, "-P", *arguments]
                process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=name)
            stack.callback(_end, process)
            return process.pid

        engine = start(str(STAND_IN), *own, "--text", str(text.resolve()), "--step_seconds", f"{step_seconds}")
        settings = ServeSettings(served_model_name=MODEL)
        profiled = () if profile is None else ("-m", "cProfile", "-o", str(profile.resolve()))
        door = start(
            *(*profiled, "-m", "kvseek.server.frontend", *own, "--settings", settings.to_json(), "--host", "127.0.0.1"),
            *(
                "--http_port",
                "0",
                "--metrics_port",
                "0",
                "--triton_grpc",
                "127.0.0.1:1",
                "--triton_metrics",
                "127.0.0.1:1",
            ),
        )
        limit = time.monotonic() + READY_SECONDS
        while not (socket.exists() and (found := re.search(r"^listening: .*", log.read_text(), re.MULTILINE))):
            if time.monotonic() > limit:
                raise ServerError(f"the processes do not start; their log:\n{log.read_text()[-4000:]}")
            time.sleep(POLL_SECONDS)
        port = dict(re.findall(r"(HTTP|OpenAI) (?:http://)?[\d.]+:(\d+)", found[0]))
        time.sleep(1.0)  # the door tries to connect to the engine ten times a second
        yield Processes(engine, door, {GENERATE: int(port["HTTP"]), OPENAI: int(port["OpenAI"])})


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measure_ports(
    engine_dir: Path,
    text: Path,
    trees: Mapping[str, Path],
    load: tuple[int, int],
    steps: Sequence[float],
    rounds: int,
    profile: Path | None = None,
) -> list[dict[str, Any]]:
    """Medians over rounds of each port and pace of steps, for each tree; the trees take turns.

    Parameters
    ----------
    load : (int, int)
        Streams, and tokens of each.
    steps : sequence of float
        Seconds between two steps of the engine.
    """
    prompts = text.read_text(encoding="utf-8")
    found: dict[tuple[str, str, float], list[dict[str, float]]] = {}
    for _, (name, tree), step in itertools.product(range(rounds), trees.items(), steps):
        with processes(engine_dir, text, step, tree, profile) as running:
            for port in PORTS:
                running.measure(Load(port, load[0], WARM_TOKENS), prompts)
                found.setdefault((port, name, step), []).append(running.measure(Load(port, *load), prompts))
    return [
        {"port": port, "tree": name, "step_seconds": step}
        | {key: statistics.median(each[key] for each in results) for key in results[0]}
        for (port, name, step), results in sorted(found.items())
    ]


def print_ports(document: Mapping[str, Any]) -> None:
    """Print a result of `measure_ports` as a table."""
    print(f"{document['machine']['cpu']}; {document['streams']} streams of {document['tokens']} tokens\n")
    print(markdown(rows(COLUMNS, document["results"])))
