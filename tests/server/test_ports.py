"""Free ports stay free for the process that they are chosen for, and one that is taken nevertheless is replaced."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from kvseek.server import launch, replicas
from kvseek.server.errors import ServerError
from kvseek.server.launch import LOOPBACK, running_server
from kvseek.server.ports import NAMES, Ports, start_on_free_ports
from kvseek.server.replicas import running_replicas
from kvseek.server.settings import ServeSettings

FREE = Ports(0, 0, 0, 0)
IP_LOCAL_PORT_RANGE = 51  # linux/in.h


def listen(port: int, *options: int) -> socket.socket:
    """A socket as another server would have it."""
    taking = socket.socket()
    try:
        for option in options:
            taking.setsockopt(socket.SOL_SOCKET, option, 1)
        taking.bind((LOOPBACK, port))
        taking.listen()
    except BaseException:
        taking.close()
        raise
    return taking


def held_ports(ports: Ports) -> list[int]:
    return [getattr(ports, name) for name in NAMES]


@pytest.mark.parametrize("port", [-1, 70000])
def test_ports_out_of_range(port: int) -> None:
    message = rf"--metrics_port = {port}: must be in \[0, 65535\]; 0 picks a free port"
    with pytest.raises(ServerError, match=message), Ports(0, 0, port).hold(LOOPBACK):
        pass


def test_a_busy_port_is_named() -> None:
    with listen(0) as taken:
        busy = taken.getsockname()[1]
        with (
            pytest.raises(ServerError, match=f"--http_port = {busy}: cannot listen on 127.0.0.1"),
            Ports(busy, 0, 0).hold(LOOPBACK),
        ):
            pass


def test_nobody_else_listens_at_a_port_held_for_our_processes() -> None:
    with FREE.hold(LOOPBACK) as ports:
        assert len(set(held_ports(ports))) == len(NAMES)
        for port in held_ports(ports):
            for options in ((), (socket.SO_REUSEADDR,)):
                with pytest.raises(OSError, match="in use") as refused:
                    listen(port, *options)
                assert refused.value.errno == errno.EADDRINUSE
            listen(port, socket.SO_REUSEADDR, socket.SO_REUSEPORT).close()
            with pytest.raises(ConnectionRefusedError):  # what holds a port takes no connections
                socket.create_connection((LOOPBACK, port))
    for port in held_ports(ports):
        listen(port).close()


def test_who_asks_for_any_port_gets_none_that_is_held_for_others_processes() -> None:
    with FREE.hold(LOOPBACK, socket.SO_REUSEADDR) as ports:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:  # there is no other port to choose
                other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("HH", ports.http, ports.http))
            except OSError:
                pytest.skip("Linux before 6.3 has no range of ports of a socket's own")
            with pytest.raises(OSError, match="in use"):
                other.bind((LOOPBACK, 0))
        listen(ports.http, socket.SO_REUSEADDR).close()


def test_a_named_port_is_not_held_and_no_free_one_is_equal() -> None:
    with FREE.hold(LOOPBACK) as some:
        named = some.http
    with Ports(named, 0, 0, 0).hold(LOOPBACK) as ports:
        assert ports.http == named
        assert named not in held_ports(ports)[1:]
        listen(named).close()


class Starts:
    """A start that fails at the first `failures` calls; another process then listens at the given port."""

    def __init__(self, stack: ExitStack, name: str, failures: int) -> None:
        self._stack, self._name, self._failures = stack, name, failures
        self.seen: list[int] = []
        self.ended = 0

    def __call__(self, running: ExitStack, ports: Sequence[Ports]) -> int:
        running.callback(self._end)
        port = getattr(ports[0], self._name)
        self.seen.append(port)
        if len(self.seen) <= self._failures:
            self._stack.enter_context(listen(port, socket.SO_REUSEADDR))
            raise ServerError("the process ended")
        return port

    def _end(self) -> None:
        self.ended += 1


def test_processes_start_again_where_a_free_port_is_taken() -> None:
    with ExitStack() as others, ExitStack() as running:
        starts = Starts(others, "metrics", 2)
        port = start_on_free_ports(running, [(LOOPBACK, FREE)], starts)
        assert len(set(starts.seen)) == 3
        assert port == starts.seen[2]
        assert starts.ended == 2, "the failed ones are over, the third runs"
    assert starts.ended == 3


def test_a_start_that_fails_for_another_reason_or_always_is_an_error() -> None:
    def fail(running: ExitStack, ports: Sequence[Ports]) -> None:
        raise ServerError("no engine")

    with ExitStack() as running, pytest.raises(ServerError, match="no engine"):
        start_on_free_ports(running, [(LOOPBACK, FREE)], fail)
    with ExitStack() as others, ExitStack() as running:
        starts = Starts(others, "grpc", 100)
        with pytest.raises(ServerError, match="the process ended"):
            start_on_free_ports(running, [(LOOPBACK, FREE)], starts)
        assert len(starts.seen) == 5


def test_a_port_that_the_user_named_is_never_replaced() -> None:
    with FREE.hold(LOOPBACK) as some:
        named = some.openai
    with ExitStack() as others, ExitStack() as running:
        starts = Starts(others, "openai", 1)
        with pytest.raises(ServerError, match="the process ended"):
            start_on_free_ports(running, [(LOOPBACK, Ports(0, 0, 0, named))], starts)
        assert starts.seen == [named]


@pytest.mark.server
@pytest.mark.slow
def test_a_server_comes_up_where_tritons_port_is_taken(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, seen = launch._programs, list[int]()

    with ExitStack() as others:

        def take(
            scratch: Path, engine: Path, host: str, ports: Ports, held: Sequence[str], inner: Ports, *rest: Any
        ) -> Any:
            for port in held_ports(ports):
                with pytest.raises(OSError, match="in use"):
                    listen(port, socket.SO_REUSEADDR)
            if not seen:
                others.enter_context(listen(inner.metrics, socket.SO_REUSEADDR))
            seen.append(inner.metrics)
            return programs(scratch, engine, host, ports, held, inner, *rest)

        monkeypatch.setattr(launch, "_programs", take)
        with running_server(directory, settings=ServeSettings(threads=1)) as server:
            assert len(set(seen)) == 2
            for url in (server.http_url, server.metrics_url):
                assert requests.get(f"http://{url}/v2/health/ready", timeout=30).status_code == 200
            assert requests.get(f"{server.openai_url}/models", timeout=30).status_code == 200


def test_replicas_start_their_router_again_where_its_ports_are_taken(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI's port, and that of its metrics. Nothing of it runs but the choice of ports."""
    seen = list[int]()

    def flags(workers: Sequence[str], host: str, openai: int, metrics: int, *_: Any) -> tuple[str, ...]:
        seen.extend((openai, metrics))
        return ()

    with ExitStack() as others:

        def start() -> None:
            if len(seen) == 2:
                for port in seen:
                    others.enter_context(listen(port, socket.SO_REUSEADDR))
                raise ServerError("the router ended")

        server = SimpleNamespace(openai_url="http://127.0.0.1:1/v1", metrics_url="127.0.0.1:1")
        supervisor = SimpleNamespace(start=start, stop=lambda: None, wait_until=lambda *_: None)
        monkeypatch.setattr(replicas, "running_server", lambda *_, **__: nullcontext(server))
        monkeypatch.setattr(replicas, "supervisor_of", lambda *_: supervisor)
        monkeypatch.setattr(replicas, "flags", flags)
        with running_replicas(directory, 1, openai_port=0, metrics_port=0) as running:
            assert len(set(seen)) == 4
            assert running.openai_url.endswith(f":{seen[2]}/v1")
