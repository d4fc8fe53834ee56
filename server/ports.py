"""Ports of a server on one host."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from .errors import ServerError


@dataclass(frozen=True)
class Ports:
    """HTTP, gRPC, metrics and OpenAI port; 0 asks for a free port."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002
    openai: int = 9000

    def resolve(self, host: str) -> Ports:
        """Replace zeros by free ports; raises ServerError that names the flag of a busy or impossible port."""
        names = ("http", "grpc", "metrics", "openai")
        return Ports(*(_resolve(host, getattr(self, name), f"--{name}_port") for name in names))


def _resolve(host: str, port: int, flag: str) -> int:
    if not 0 <= port <= 65535:
        raise ServerError(f"{flag} = {port}: must be in [0, 65535]; 0 picks a free port")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerError(
                f"{flag} = {port}: cannot listen on {host} ({error.strerror}); choose another port, or 0 for a free one"
            ) from None
        return int(probe.getsockname()[1])
