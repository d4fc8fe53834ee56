"""Ranks on several hosts: how those of the other hosts find rank 0, over TCP (docs/parallelism.md).

A host is a *node*, as torchrun calls it. Node 0 has rank 0, which listens at an endpoint while it is loaded; the ranks of other
nodes connect to it. Each side draws a nonce, and from then on every message proves that its sender has the same key (channel.py).
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError, KvseekError, require
from kvseek.core.private_files import LEAST_KEY_CHARACTERS, PrivateFileError, read_key_file

from .channel import Channel, Seal, TamperedError

KEY_VARIABLE = "KVSEEK_RANKS_KEY"
LOOPBACK = "127.0.0.1"
HANDSHAKE_SECONDS = 10.0  # that a peer may take until it is known, whatever it sends
MOST_UNKNOWN = 64  # peers that are not known yet; a further one takes the place of the oldest
LOOK_SECONDS = 0.2  # time between two looks whether all have joined
RETRY_SECONDS = 0.5  # between two attempts to reach rank 0
KEEPALIVE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
}  # seconds, seconds, probes: finds a host that is gone
SIOCGIFADDR = 0x8915  # netdevice(7)
NONCE_BYTES = 32
MAX_HELLO_BYTES = 4096
ADMITTED = b"admitted"
logger = logging.getLogger(__name__)


class JoinError(KvseekError):
    """A rank of another node cannot join rank 0's engine."""


@dataclass(frozen=True)
class Nodes:
    """The hosts of an engine's ranks.

    Attributes
    ----------
    count : int
        Number of hosts, each with as many ranks.
    host, port : str, int
        Where rank 0 listens for the ranks of the others; with one host nothing listens but on loopback.
    key : str
        What all ranks know and nobody else.
    """

    count: int = 1
    host: str = LOOPBACK
    port: int = 0
    key: str = field(default="", repr=False)

    @classmethod
    def of(cls, nnodes: int, rdzv_endpoint: str | None, key_file: Path | None) -> Nodes:
        """Make nodes of the flags of `kvseek serve`; raises ConfigError, whose message never has the key."""
        require(nnodes >= 1, "nnodes", nnodes, ">= 1", "1 is the default")
        if nnodes == 1:
            for name, value in (("rdzv_endpoint", rdzv_endpoint), ("ranks_key_file", key_file)):
                require(value is None, name, str(value), "left out with nnodes = 1", "or give --nnodes")
            return cls()
        host, _, port = (rdzv_endpoint or "").rpartition(":")
        within = bool(host) and port.isdecimal() and 0 < int(port) < 65536
        remedy = "name an address of the host of node_rank 0 that the other hosts reach"
        require(within, "rdzv_endpoint", rdzv_endpoint, f"HOST:PORT with nnodes = {nnodes}", remedy)
        return cls(nnodes, host, int(port), _read_key(key_file))

    def ranks(self, tp_size: int, node: int) -> range:
        """Return the ranks of a node; raises ConfigError."""
        remedy = "each host has as many ranks: choose another --nnodes, or build with another --tp_size"
        require(tp_size % self.count == 0, "nnodes", self.count, f"a divisor of tp_size = {tp_size}", remedy)
        require(0 <= node < self.count, "node_rank", node, f"in [0, {self.count - 1}]", "rank 0's host has 0")
        each = tp_size // self.count
        return range(node * each, node * each + each)


ONE_NODE = Nodes()


def check_nodes(config: EngineConfig, nnodes: int) -> None:
    """Raise ConfigError if the ranks of an engine on GPUs are to be on several hosts."""
    remedy = "give one host as many GPUs, or build with --device cpu"
    together = config.device == "cpu" or nnodes == 1
    require(together, "nnodes", nnodes, "1 with device = 'cuda', whose ranks are on one host", remedy)


@dataclass(frozen=True)
class Hello:
    """Who wants to join, and what must be equal on all nodes."""

    rank: int
    nnodes: int
    fingerprint: str  # of the engine
    version: str = field(default_factory=lambda: version("kvseek"))


@dataclass(frozen=True)
class Joined:
    """A rank of another node, and where it is."""

    channel: Channel
    address: str


def accept_ranks(nodes: Nodes, tp_size: int, fingerprint: str) -> Mapping[int, Joined]:
    """Listen at the endpoint until all ranks of other nodes have joined; raises ConfigError if it is none of this host's."""
    joining = _Joining(nodes, tp_size, fingerprint)
    try:
        listening = socket.create_server((nodes.host, nodes.port), backlog=tp_size + MOST_UNKNOWN)
    except OSError as error:
        remedy = "name an address of this host, that of node_rank 0, and a free port"
        require(False, "rdzv_endpoint", f"{nodes.host}:{nodes.port}", f"free on this host ({error.strerror})", remedy)
        raise
    logger.info("rank 0 waits for %d ranks of other hosts at %s:%d", joining.missing, nodes.host, nodes.port)
    with listening:
        listening.settimeout(LOOK_SECONDS)
        while joining.missing:
            with suppress(TimeoutError):
                joining.take(*listening.accept())
    return joining.end()


class _Joining:
    """Ranks of other nodes while they join. Each peer has a thread of its own, so that none waits for another."""

    def __init__(self, nodes: Nodes, tp_size: int, fingerprint: str) -> None:
        self._nodes, self._tp_size, self._fingerprint = nodes, tp_size, fingerprint
        self._wanted = tp_size - len(nodes.ranks(tp_size, 0))
        self._lock = threading.Lock()  # guards what follows
        self._joined: dict[int, Joined] = {}
        self._unknown: list[socket.socket] = []
        self._ended = False

    @property
    def missing(self) -> int:
        """Ranks that have not joined."""
        with self._lock:
            return self._wanted - len(self._joined)

    def take(self, peer: socket.socket, place: tuple[str, int]) -> None:
        """Let a peer join, if it is a rank."""
        own = peer.dup()  # stays open while the peer's thread closes its own
        with self._lock:
            if len(self._unknown) >= MOST_UNKNOWN:
                _shut_down(self._unknown.pop(0))
            self._unknown.append(own)
        threading.Thread(target=self._join, args=(peer, own, place[0]), name="kvseek-join", daemon=True).start()

    def end(self) -> Mapping[int, Joined]:
        """Return the ranks that have joined; no more can."""
        with self._lock:
            self._ended = True
            for peer in self._unknown:
                _shut_down(peer)
            return self._joined

    def _join(self, peer: socket.socket, own: socket.socket, address: str) -> None:
        try:
            with _limited(peer):
                channel = _agreed(peer, self._nodes.key, leads=True)
                self._answer(_read_hello(channel), Joined(channel, address), own)
        except Exception as error:  # a stranger may send anything
            logger.error("a connection from %s is closed: %s: %s", address, type(error).__name__, error)
        finally:
            with self._lock, own:
                if own in self._unknown:
                    self._unknown.remove(own)

    def _answer(self, hello: Hello, rank: Joined, own: socket.socket) -> None:
        """Admit a rank, or tell it why it cannot join."""
        with self._lock:  # also while the answer is sent, so that rank 0 sends nothing before
            for number in [number for number, one in self._joined.items() if one.channel.poll()]:
                self._joined.pop(number).channel.close()  # who waits says nothing: its process has ended
            reason = _why_not(hello, self._nodes, self._tp_size, self._fingerprint, self._joined)
            if self._ended:
                reason = "all ranks have joined"
            rank.channel.send(reason.encode() or ADMITTED)
            if reason:
                logger.error("rank %d at %s cannot join: %s", hello.rank, rank.address, reason)
            else:
                self._joined[hello.rank] = rank
                if own in self._unknown:
                    self._unknown.remove(own)


def join_ranks(nodes: Nodes, rank: int, fingerprint: str) -> Channel:
    """Connect to rank 0 as this rank, as soon as it listens, however long that takes; raises JoinError if it refuses."""
    logger.info("rank %d waits for rank 0 at %s:%d", rank, nodes.host, nodes.port)
    reason = ""
    while True:
        try:
            peer = socket.create_connection((nodes.host, nodes.port), HANDSHAKE_SECONDS)
            peer.settimeout(None)
            with _limited(peer):
                channel = _agreed(peer, nodes.key, leads=False)
                channel.send(msgspec.json.encode(Hello(rank, nodes.count, fingerprint)))
                answer = channel.receive(MAX_HELLO_BYTES)
        except TamperedError:
            raise JoinError(f"rank 0 at {nodes.host}:{nodes.port} has another key; give both the same") from None
        except (EOFError, OSError) as error:
            if str(error) != reason:
                reason = str(error)
                logger.info("rank %d cannot reach rank 0 yet: %s: %s", rank, type(error).__name__, reason)
            time.sleep(RETRY_SECONDS)
            continue
        if answer != ADMITTED:
            raise JoinError(f"rank 0 at {nodes.host}:{nodes.port} refuses rank {rank}: {answer.decode()}")
        return channel


def interface_to(host: str) -> str:
    """Return the name of the network interface whose IPv4 address packets to `host` come from; raises ConfigError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(found[20:24]) == own:
                return name
    raise ConfigError(
        f"no network interface has the address {own}, from which {host} is reached; set GLOO_SOCKET_IFNAME"
    )


def _why_not(hello: Hello, nodes: Nodes, tp_size: int, fingerprint: str, joined: Mapping[int, Joined]) -> str:
    expected = Hello(hello.rank, nodes.count, fingerprint)
    for name, value in asdict(expected).items():
        if getattr(hello, name) != value:
            return f"{name} = {getattr(hello, name)!r}: must be rank 0's, {value!r}"
    if hello.rank in nodes.ranks(tp_size, 0) or not 0 <= hello.rank < tp_size:
        return f"rank = {hello.rank}: must be one of another host than rank 0's, and < tp_size = {tp_size}"
    return f"rank = {hello.rank}: is there already, from {joined[hello.rank].address}" if hello.rank in joined else ""


@contextmanager
def _limited(peer: socket.socket) -> Iterator[None]:
    """Shut a connection down if the body takes longer than HANDSHAKE_SECONDS, however many bytes come meanwhile."""
    with peer.dup() as own:
        timer = threading.Timer(HANDSHAKE_SECONDS, _shut_down, (own,))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _shut_down(peer: socket.socket) -> None:
    with suppress(OSError):  # it has ended already
        peer.shutdown(socket.SHUT_RDWR)


def _agreed(peer: socket.socket, key: str, leads: bool) -> Channel:
    """Make a channel of a socket, for which both ends draw a nonce. That the other one has the key shows in its first message."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # commands are small, and each is to be done now
    for name, value in KEEPALIVE.items():
        peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection, own = Connection(peer.detach()), secrets.token_bytes(NONCE_BYTES)
    try:
        connection.send_bytes(own)
        other = connection.recv_bytes(NONCE_BYTES)
        if len(other) != NONCE_BYTES:
            raise TamperedError(f"a nonce of {len(other)} bytes: must have {NONCE_BYTES}; the other end is no rank")
    except BaseException:
        connection.close()
        raise
    return Channel(connection, Seal(key.encode(), own + other if leads else other + own, leads))


def _read_hello(channel: Channel) -> Hello:
    """Read the first message of another rank; one that has another key gets an answer that it cannot check."""
    try:
        return msgspec.json.decode(channel.receive(MAX_HELLO_BYTES), type=Hello)
    except TamperedError:
        channel.send(b"")
        raise


def _read_key(path: Path | None) -> str:
    try:
        key = os.environ.get(KEY_VARIABLE, "") if path is None else read_key_file(path).strip()
    except PrivateFileError as error:
        raise ConfigError(f"ranks_key_file = {path}: {error}") from None
    if len(key) < LEAST_KEY_CHARACTERS:
        where = f"variable {KEY_VARIABLE}" if path is None else f"ranks_key_file = {path}"
        raise ConfigError(
            f"{where}: the key has {len(key)} characters, must have at least {LEAST_KEY_CHARACTERS} with nnodes > 1; "
            "give all hosts one that `openssl rand -hex 32` draws"
        )
    return key
