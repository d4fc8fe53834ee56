"""Starts engine processes and doors for tests, and speaks to the HTTP door byte by byte where a client library would not."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import requests
from openai import OpenAI
from tests.support.forks import ForkedProgram
from tests.support.waiting import SECONDS, wait_for

from kvseek.server.settings import ServeSettings

CLOSED_PORT = "127.0.0.1:1"
JSON = dict[str, Any]


@dataclass
class Door:
    """A running process of doors."""

    process: ForkedProgram
    port: int
    metrics_port: int
    openai_port: int = 0

    @property
    def openai_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"http://127.0.0.1:{self.openai_port}/v1"

    def openai_client(self, key: str) -> OpenAI:
        """OpenAI's client that sends this key."""
        return OpenAI(base_url=self.openai_url, api_key=key, max_retries=0, timeout=SECONDS)

    @property
    def url(self) -> str:
        """Of the root of its API."""
        return f"http://127.0.0.1:{self.port}/v2"

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        """POST to /v2/models/PATH; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return requests.post(f"{self.url}/models/{path}", data=data, timeout=SECONDS, **options)

    def metrics(self) -> str:
        """Text of the metrics port."""
        return requests.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=SECONDS).text

    def connect(self, path: str, body: bytes = b"", *headers: str) -> socket.socket:
        """Begin a POST: its headers and what there is of its body."""
        connection = socket.create_connection(("127.0.0.1", self.port), SECONDS)
        lines = (f"POST /v2/models/{path} HTTP/1.1", "Host: door", *headers, "", "")
        connection.sendall("\r\n".join(lines).encode() + body)
        return connection

    def send(self, path: str, body: JSON) -> socket.socket:
        """A whole POST, on a connection that the caller can close when it likes."""
        data = json.dumps(body).encode()
        return self.connect(path, data, f"Content-Length: {len(data)}")


@contextmanager
def engine_process(
    directory: Path, socket_path: Path, settings: ServeSettings, module: str = "kvseek.server.engine.process"
) -> Iterator[ForkedProgram]:
    """An engine process; killed at the end if it still runs."""
    arguments = ["--engine_dir", str(directory), "--socket", str(socket_path), "--settings", settings.to_json()]
    process = ForkedProgram(module, arguments)
    try:
        wait_for(socket_path.exists)
        yield process
    finally:
        process.kill()
        process.wait()
        socket_path.unlink(missing_ok=True)


@contextmanager
def doors(
    directory: Path,
    socket_path: Path,
    settings: ServeSettings,
    triton_grpc: str = CLOSED_PORT,
    triton_metrics: str = CLOSED_PORT,
    *more: str,
) -> Iterator[Door]:
    """The doors on free ports."""
    arguments = ["--engine_dir", str(directory), "--socket", str(socket_path), "--settings", settings.to_json()]
    arguments += ["--host", "127.0.0.1", "--http_port", "0", "--metrics_port", "0"]
    arguments += ["--triton_grpc", triton_grpc, "--triton_metrics", triton_metrics, *more]
    process = ForkedProgram("kvseek.server.frontend", arguments)
    try:
        line = process.stdout.readline()
        ports = {name: int(port) for name, port in re.findall(r"(\w+) 127\.0\.0\.1:(\d+)", line)}
        openai = re.findall(r"OpenAI http://127\.0\.0\.1:(\d+)/v1", line) or ["0"]
        yield Door(process, ports.get("HTTP", 0), ports.get("metrics", 0), int(openai[0]))
    finally:
        process.kill()
        process.wait()


def write_keys(path: Path, *keys: str) -> Path:
    """Write a file of keys that a server takes."""
    path.write_text("".join(f"{key}\n" for key in keys))
    path.chmod(0o600)
    return path


def reply(connection: socket.socket) -> tuple[int, JSON]:
    """Status and JSON of the response on a connection, which is closed."""
    with connection, HTTPResponse(connection, method="POST") as response:
        response.begin()
        return response.status, json.loads(response.read() or b"{}")


def events(response: requests.Response) -> Iterator[JSON]:
    """JSON of the events of a stream, as they come."""
    for line in response.iter_lines(chunk_size=1):
        if line.startswith(b"data: "):
            yield json.loads(line[len(b"data: ") :])
