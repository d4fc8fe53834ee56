"""Ranks of other hosts: who may join rank 0, and what is refused. tests/server/test_nodes.py has whole servers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.support.waiting import wait_for

from kvseek.core.errors import ConfigError
from kvseek.engine.parallel import nodes as module
from kvseek.engine.parallel.nodes import (
    KEY_VARIABLE,
    LOOPBACK,
    Joined,
    JoinError,
    Nodes,
    accept_ranks,
    interface_to,
    join_ranks,
)
from kvseek.engine.parallel.ranks import create_store
from kvseek.server.ports import Ports

KEY = "a key of the test's own"
ENGINE = "fingerprint"


class Rendezvous:
    """Rank 0 of four ranks on two nodes, which waits for ranks 2 and 3."""

    def __init__(self, port: int) -> None:
        self.nodes = Nodes(2, LOOPBACK, port, KEY)
        self._pool = ThreadPoolExecutor(8)
        self.joined = self._pool.submit(accept_ranks, self.nodes, 4, ENGINE)

    def join(self, rank: int, fingerprint: str = ENGINE, **other: object) -> Future[Connection]:
        nodes = Nodes(**{"count": 2, "host": LOOPBACK, "port": self.nodes.port, "key": KEY, **other})  # type: ignore[arg-type]
        return self._pool.submit(join_ranks, nodes, rank, fingerprint)

    def finish(self) -> dict[int, Joined]:
        """Let those join that are left."""
        joining = [self.join(2), self.join(3)]
        joined = dict(self.joined.result(60))
        for rank, future in zip((2, 3), joining, strict=True):
            own = future.result(60)
            joined[rank].connection.send(f"to rank {rank}")
            assert own.recv() == f"to rank {rank}"
            own.send_bytes(b"back")
            assert joined[rank].connection.recv_bytes() == b"back"
            own.close()
            joined[rank].connection.close()
        self._pool.shutdown()
        return joined


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 1)
    with Ports(0, 0, 0, 0).hold(LOOPBACK, socket.SO_REUSEADDR) as ports:
        yield Rendezvous(ports.http)


def test_ranks_of_the_other_node_join_and_are_known_by_their_number(rendezvous: Rendezvous) -> None:
    joined = rendezvous.finish()
    assert sorted(joined) == [2, 3]
    assert {one.address for one in joined.values()} == {LOOPBACK}


def test_who_does_not_know_the_key_is_refused(rendezvous: Rendezvous) -> None:
    with pytest.raises(JoinError, match="has another key; give both the same"):
        rendezvous.join(2, key="another key of some length").result(60)
    assert not rendezvous.joined.done()
    rendezvous.finish()


def test_rank_0_without_the_key_is_refused_too() -> None:
    """It could tell a rank to run any code."""
    with socket.create_server((LOOPBACK, 0)) as listening, ThreadPoolExecutor(1) as pool:
        nodes = Nodes(2, LOOPBACK, listening.getsockname()[1], KEY)
        joining = pool.submit(join_ranks, nodes, 1, ENGINE)
        peer, _ = listening.accept()
        with Connection(peer.detach()) as connection:
            connection.send_bytes(b"#CHALLENGE#" + b"x" * 20)
            connection.recv_bytes()
            connection.send_bytes(b"#WELCOME#")
            connection.recv_bytes()  # its challenge, to which only who has the key knows the answer
            connection.send_bytes(b"y" * 16)
            assert connection.recv_bytes() == b"#FAILURE#"
        with pytest.raises(JoinError, match="has another key"):
            joining.result(60)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4\0\0\0\0", b"\x7f\xff\xff\xff"])
@pytest.mark.parametrize("closes", [True, False])
def test_what_is_no_rank_is_closed_and_the_others_join(sent: bytes, closes: bool, rendezvous: Rendezvous) -> None:
    place = (LOOPBACK, rendezvous.nodes.port)
    with connect(place) as stranger:
        stranger.sendall(sent)
        if closes:
            stranger.close()
        rendezvous.finish()


@pytest.mark.parametrize("sent", [b"", b"\0\0\0\xff", b"\0\0\0\x14"])
def test_strangers_that_stay_hold_up_nobody(
    sent: bytes, rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by their number nor by sending a byte now and then of a message that they have announced."""
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 600.0)  # so that it is not this that ends them
    place = (LOOPBACK, rendezvous.nodes.port)
    with contextlib.ExitStack() as strangers:
        for _ in range(module.MOST_UNKNOWN + 10):
            strangers.enter_context(connect(place)).sendall(sent)
        rendezvous.finish()


def test_a_stranger_has_a_deadline_for_all_that_it_sends(rendezvous: Rendezvous) -> None:
    with connect((LOOPBACK, rendezvous.nodes.port)) as stranger:
        stranger.sendall(b"\0\0\0\xfe")  # 254 bytes follow
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 30:
                stranger.sendall(b"x")
                time.sleep(0.25)
        assert time.monotonic() - began < 30
    rendezvous.finish()


def connect(place: tuple[str, int]) -> socket.socket:
    found = list[socket.socket]()

    def listens() -> bool:
        try:
            found.append(socket.create_connection(place))
        except ConnectionRefusedError:
            return False
        return True

    wait_for(listens, "rank 0 listens")
    return found[0]


@pytest.mark.parametrize(
    ("rank", "fingerprint", "other", "message"),
    [
        (2, "another", {}, "fingerprint = 'another': must be rank 0's, 'fingerprint'"),
        (2, ENGINE, {"count": 4}, "nnodes = 4: must be rank 0's, 2"),
        (1, ENGINE, {}, "rank = 1: must be one of another host than rank 0's, and < tp_size = 4"),
        (4, ENGINE, {}, "rank = 4: must be one of another host than rank 0's, and < tp_size = 4"),
    ],
)
def test_ranks_of_another_engine_are_told_why_they_cannot_join(
    rank: int, fingerprint: str, other: dict[str, int], message: str, rendezvous: Rendezvous
) -> None:
    with pytest.raises(JoinError, match=f"refuses rank {rank}: {message}"):
        rendezvous.join(rank, fingerprint, **other).result(60)
    rendezvous.finish()


def test_another_version_cannot_join(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    own, lock = module.version, threading.local()

    def version(name: str) -> str:
        return "0.0.1" if getattr(lock, "other", False) else own(name)

    monkeypatch.setattr(module, "version", version)
    lock.other = True
    with pytest.raises(JoinError, match=r"refuses rank 2: version = '0.0.1': must be rank 0's"):
        join_ranks(rendezvous.nodes, 2, ENGINE)
    rendezvous.finish()


def test_a_rank_that_has_died_while_it_waited_is_replaced(rendezvous: Rendezvous) -> None:
    first = rendezvous.join(2).result(60)
    with pytest.raises(JoinError, match=r"rank = 2: is there already, from 127.0.0.1"):
        rendezvous.join(2).result(60)
    first.close()
    rendezvous.finish()


def test_an_endpoint_of_another_host_is_refused() -> None:
    nodes = Nodes(2, "192.0.2.1", 29400, KEY)
    with pytest.raises(
        ConfigError, match=r"rdzv_endpoint = '192.0.2.1:29400': must be free on this host \(.*\); name an"
    ):
        accept_ranks(nodes, 2, ENGINE)


def test_the_store_listens_where_it_is_told_alone() -> None:
    """PyTorch's own would listen at all addresses of the host."""
    store = create_store(5.0, "127.0.0.2")
    store.set("key", "value")
    socket.create_connection(("127.0.0.2", store.port)).close()
    for other in (LOOPBACK, "127.0.0.3"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, store.port))


def test_the_interface_of_an_address() -> None:
    assert interface_to(LOOPBACK) == "lo"


def write_key(folder: Path, key: str) -> Path:
    path = folder / "key"
    path.write_text(key)
    return path


@pytest.mark.parametrize(
    ("nnodes", "endpoint", "message"),
    [
        (0, None, "nnodes = 0: must be >= 1"),
        (1, "host:1", "rdzv_endpoint = 'host:1': must be left out with nnodes = 1"),
        (2, None, "rdzv_endpoint = None: must be HOST:PORT with nnodes = 2"),
        (2, "host", "rdzv_endpoint = 'host': must be HOST:PORT with nnodes = 2"),
        (2, "host:0", "rdzv_endpoint = 'host:0': must be HOST:PORT"),
        (2, "host:70000", "rdzv_endpoint = 'host:70000': must be HOST:PORT"),
        (2, ":7000", "rdzv_endpoint = ':7000': must be HOST:PORT"),
    ],
)
def test_what_nodes_cannot_be(nnodes: int, endpoint: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Nodes.of(nnodes, endpoint, None)


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make: Callable[[Path | None], Nodes] = lambda path: Nodes.of(2, "host:7000", path)  # noqa: E731
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="variable KVSEEK_RANKS_KEY: the key has 0 characters, must have at least 16"):
        make(None)
    with pytest.raises(ConfigError, match=f"ranks_key_file = {tmp_path}/none: cannot be read"):
        make(tmp_path / "none")
    with pytest.raises(ConfigError, match="the key has 5 characters") as refused:
        make(write_key(tmp_path, "short\n"))
    assert "short" not in str(refused.value)
    monkeypatch.setenv(KEY_VARIABLE, "the variable's own key")
    assert make(None).key == "the variable's own key"
    nodes = make(write_key(tmp_path, "the key of the file\n"))
    assert nodes.key == "the key of the file"
    assert nodes.key not in repr(nodes)


def test_each_node_has_as_many_ranks() -> None:
    nodes = Nodes(2, "host", 7000, KEY)
    assert [list(nodes.ranks(4, node)) for node in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match="nnodes = 2: must be a divisor of tp_size = 3"):
        nodes.ranks(3, 0)
    with pytest.raises(ConfigError, match=r"node_rank = 2: must be in \[0, 1\]"):
        nodes.ranks(4, 2)
