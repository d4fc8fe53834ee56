"""The OpenAI door's port: which addresses it listens on."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kvseek.server.errors import ServerError
from kvseek.server.openai_door.listener import Listener

ABSENT = "192.0.2.1"  # reserved for documentation, so no machine has it


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def give(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let every host have these addresses."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr("kvseek.server.openai_door.listener.socket.getaddrinfo", lambda *_, **__: found)


async def status(address: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(address, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return line.strip()


@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.2"), (ABSENT, "127.0.0.2"), ("127.0.0.1", ABSENT)])
def test_every_address_of_a_host_has_the_same_port(monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]) -> None:
    async def run() -> None:
        listener = Listener(10)
        with monkeypatch.context() as patch:
            give(patch, *addresses)
            port = await listener.start(app, "a host", 0, "--openai_port")
        for address in addresses:
            if address != ABSENT:
                assert await status(address, port) == b"HTTP/1.1 204 No Content"
        await listener.close()

    asyncio.run(run())


def test_a_host_that_is_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, ABSENT)
    with pytest.raises(ServerError, match=r"--openai_port = 0: cannot listen on a host \(.*assign requested address"):
        asyncio.run(Listener(10).start(app, "a host", 0, "--openai_port"))
