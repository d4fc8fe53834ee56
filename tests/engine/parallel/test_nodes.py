"""Ranks of other hosts: who may join rank 0, and what is refused. tests/server/test_nodes.py has whole servers."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
from tests.support.waiting import SECONDS, wait_for

from kvseek.core.errors import ConfigError
from kvseek.engine.leading.commands import decode
from kvseek.engine.parallel import nodes as module
from kvseek.engine.parallel.channel import Channel, TamperedError
from kvseek.engine.parallel.nodes import (
    KEY_VARIABLE,
    LOOPBACK,
    NONCE_BYTES,
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

    def join(self, rank: int, fingerprint: str = ENGINE, **other: object) -> Future[Channel]:
        nodes = Nodes(**{"count": 2, "host": LOOPBACK, "port": self.nodes.port, "key": KEY, **other})  # type: ignore[arg-type]
        return self._pool.submit(join_ranks, nodes, rank, fingerprint)

    def finish(self) -> dict[int, Joined]:
        """Let those join that are left."""
        joining = [self.join(2), self.join(3)]
        joined = dict(self.joined.result(SECONDS))
        for rank, future in zip((2, 3), joining, strict=True):
            own = future.result(SECONDS)
            joined[rank].channel.send(b"to rank %d" % rank)
            assert own.receive() == b"to rank %d" % rank
            own.send(b"back")
            assert joined[rank].channel.receive() == b"back"
            own.close()
            joined[rank].channel.close()
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
        rendezvous.join(2, key="another key of some length").result(SECONDS)
    assert not rendezvous.joined.done()
    rendezvous.finish()


def test_rank_0_without_the_key_is_refused_too() -> None:
    """It could tell a rank to run any code."""
    with socket.create_server((LOOPBACK, 0)) as listening, ThreadPoolExecutor(1) as pool:
        nodes = Nodes(2, LOOPBACK, listening.getsockname()[1], KEY)
        joining = pool.submit(join_ranks, nodes, 1, ENGINE)
        peer, _ = listening.accept()
        with Connection(peer.detach()) as connection:
            connection.send_bytes(connection.recv_bytes())  # its own nonce
            connection.send_bytes(connection.recv_bytes())  # what it has sealed itself
        with pytest.raises(JoinError, match="has another key"):
            joining.result(SECONDS)


@dataclass
class Relayed:
    """Ranks 0 and 1 of two hosts, and the two connections of somebody on the way who sees and chooses all they receive."""

    ends: tuple[Channel, Channel]
    ways: tuple[Connection, Connection]

    @classmethod
    def make(cls) -> Relayed:
        with (
            Ports(0, 0, 0, 0).hold(LOOPBACK, socket.SO_REUSEADDR) as ports,
            socket.create_server((LOOPBACK, 0)) as relay,
            ThreadPoolExecutor(2) as pool,
        ):
            joined = pool.submit(accept_ranks, Nodes(2, LOOPBACK, ports.http, KEY), 2, ENGINE)
            own = pool.submit(join_ranks, Nodes(2, LOOPBACK, relay.getsockname()[1], KEY), 1, ENGINE)
            to_1, to_0 = Connection(relay.accept()[0].detach()), Connection(connect((LOOPBACK, ports.http)).detach())
            for source, target in ((to_0, to_1), (to_1, to_0), (to_1, to_0), (to_0, to_1)):
                target.send_bytes(source.recv_bytes())  # nonces, who joins, that it is admitted
            return cls((joined.result(SECONDS)[1].channel, own.result(SECONDS)), (to_0, to_1))

    def received(self, to: int, messages: list[bytes], deliver: Callable[[list[bytes]], list[bytes]]) -> list[bytes]:
        """Send messages to a rank, of which it gets what `deliver` makes of them; returns what it takes as sent."""
        for message in messages:
            self.ends[1 - to].send(message)
        for data in deliver([self.ways[1 - to].recv_bytes() for _ in messages]):
            self.ways[to].send_bytes(data)
        return [self.ends[to].receive() for _ in messages]


class Bomb:
    """Where a pickled object of this class is read, a folder is made."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


ATTACKS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "one bit is changed": lambda sent: [bytes([sent[0][0] ^ 1]) + sent[0][1:]],
    "one bit of the code is changed": lambda sent: [sent[0][:-1] + bytes([sent[0][-1] ^ 1])],
    "it is cut": lambda sent: [sent[0][1:]],
    "it has no code": lambda sent: [sent[0][:5]],
    "it is empty": lambda _: [b""],
    "it is longer": lambda sent: [b"x" + sent[0]],
    "one is left out": lambda sent: sent[1:],
    "the order is another": lambda sent: [sent[1], sent[0]],
}


@pytest.mark.parametrize("to", [0, 1])
def test_what_somebody_on_the_way_makes_of_messages_is_refused(to: int) -> None:
    """By a rank that would do what they say, and by rank 0, to which they would lie."""
    messages = [b"first", b"second"]
    for attack, deliver in ATTACKS.items():
        with pytest.raises(TamperedError, match="not what the other rank has sent"):
            pytest.fail(f"{attack}: {Relayed.make().received(to, messages, deliver)}")
    relayed = Relayed.make()
    assert relayed.received(to, messages, lambda sent: sent) == messages
    with pytest.raises(TamperedError):
        relayed.received(to, [b"third"], lambda sent: [bytes(len(sent[0])), sent[0]])
    with pytest.raises(TamperedError):  # the right one, behind a wrong one
        relayed.ends[to].receive()


@pytest.mark.parametrize("to", [0, 1])
def test_messages_of_other_times_directions_and_connections_are_refused(to: int) -> None:
    first, second = Relayed.make(), Relayed.make()
    kept = list[bytes]()
    assert first.received(to, [b"first"], lambda sent: kept.extend(sent) or sent) == [b"first"]  # type: ignore[func-returns-value]
    for deliver in (lambda _: kept, lambda sent: kept + sent):
        with pytest.raises(TamperedError):
            first.received(to, [b"second"], deliver)
    with pytest.raises(TamperedError):
        second.received(to, [b"first"], lambda _: kept)
    third = Relayed.make()
    third.ends[to].send(b"first")  # and it comes back
    third.ways[to].send_bytes(third.ways[to].recv_bytes())
    with pytest.raises(TamperedError):
        third.ends[to].receive()


def test_no_code_of_somebody_on_the_way_runs(tmp_path: Path) -> None:
    """Neither before the code of a message is checked nor behind it: no message is a pickled object."""
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    with pytest.raises(TamperedError):
        Relayed.make().received(1, [b"told"], lambda _: [bomb])
    with pytest.raises(msgspec.MsgspecError):
        decode(bomb)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4\0\0\0\0", b"\x7f\xff\xff\xff"])
@pytest.mark.parametrize("closes", [True, False])
def test_what_is_no_rank_is_closed_and_the_others_join(sent: bytes, closes: bool, rendezvous: Rendezvous) -> None:
    place = (LOOPBACK, rendezvous.nodes.port)
    with connect(place) as stranger:
        stranger.sendall(sent)
        if closes:
            stranger.close()
        rendezvous.finish()


@pytest.mark.parametrize("sent", [b"", struct.pack("!i", 255), struct.pack("!i", NONCE_BYTES)])
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


def test_a_stranger_has_a_deadline_for_all_that_it_sends(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as brief, connect((LOOPBACK, rendezvous.nodes.port)) as stranger:
        brief.setattr(module, "HANDSHAKE_SECONDS", 0.5)
        stranger.sendall(struct.pack("!i", NONCE_BYTES) + bytes(NONCE_BYTES) + struct.pack("!i", 254))
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < SECONDS:
                stranger.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < SECONDS
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
        rendezvous.join(rank, fingerprint, **other).result(SECONDS)
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
    first = rendezvous.join(2).result(SECONDS)
    with pytest.raises(JoinError, match=r"rank = 2: is there already, from 127.0.0.1"):
        rendezvous.join(2).result(SECONDS)
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
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("nnodes", "endpoint", "message"),
    [
        (0, None, "nnodes = 0: must be >= 1"),
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
