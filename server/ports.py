"""Ports of a server on one host.

A free port is held from the moment it is chosen until the server ends, by a socket that is bound and does not listen. Otherwise
another process could be given it before ours listens.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from .errors import ServerError

NAMES = ("http", "grpc", "metrics", "openai")
CLOSED, OFF = -(1 << 16), "off"  # instead of a port: nothing listens; and how that is written
STARTS = 5  # most starts of processes that find one of their free ports taken
Started = TypeVar("Started")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ports:
    """HTTP, gRPC, metrics and OpenAI port; 0 asks for a free port, CLOSED for none."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002
    openai: int = 9000

    @property
    def free(self) -> tuple[str, ...]:
        """Names of the ports that are 0."""
        return tuple(name for name in NAMES if getattr(self, name) == 0)

    def describe(self, host: str) -> str:
        """Say where each port is; those that are closed are left out."""
        places = {
            "grpc": f"gRPC {host}:{self.grpc}",
            "http": f"HTTP {host}:{self.http}",
            "metrics": f"metrics {host}:{self.metrics}/metrics",
            "openai": f"OpenAI http://{host}:{self.openai}/v1",
        }
        return ", ".join(place for name, place in places.items() if getattr(self, name) != CLOSED)

    def health(self, host: str) -> str:
        """Return a URL that answers whether the server is ready; raises ServerError if all ports of HTTP are closed."""
        for name, path in (("metrics", "/v2/health/ready"), ("http", "/v2/health/ready"), ("openai", "/health")):
            if (port := getattr(self, name)) != CLOSED:
                return f"http://{host}:{port}{path}"
        raise ServerError(
            f"--http_port, --metrics_port, --openai_port = {OFF}: one must be open, at which health is asked; leave one flag out"
        )

    @contextmanager
    def hold(self, host: str, option: int = socket.SO_REUSEPORT) -> Iterator[Ports]:
        """Replace zeros by free ports, which are held until the context ends; ports that were named are only looked at.

        Parameters
        ----------
        option : int
            Who can listen at a port that is held. socket.SO_REUSEPORT: sockets of this user that have this option as well, for
            processes of ours. socket.SO_REUSEADDR: sockets that have this one, as those of nearly every server do, for
            processes that are not ours; nobody who asks for any free port gets one that is held so.

        Raises
        ------
        ServerError
            Names the flag of a busy or impossible port, of one that is given twice, or of a host that is none of this machine's.
        """
        for number, name in enumerate(NAMES):
            for other in NAMES[:number]:
                port = getattr(self, name)
                if port == getattr(self, other) and port not in (0, CLOSED):
                    raise ServerError(
                        f"--{name}_port = {port}: must be another port than --{other}_port; 0 picks a free one"
                    )
        with ExitStack() as held:
            with ExitStack() as looking:  # until the free ones are chosen, so that these are others
                closed = [name for name in NAMES if getattr(self, name) == CLOSED]
                named = [name for name in NAMES if name not in (*self.free, *closed)]
                chosen = {name: _bind(looking, host, getattr(self, name), name, socket.SO_REUSEADDR) for name in named}
                chosen |= {name: _bind(held, host, 0, name, option) for name in self.free}
            yield Ports(**chosen, **dict.fromkeys(closed, CLOSED))

    def taken(self, host: str, names: Sequence[str]) -> list[int]:
        """Return those of these ports at which a process listens."""
        return [port for port in (getattr(self, name) for name in names) if not _can_listen(host, port)]


def read_port(text: str) -> int:
    """Read a port from a flag, CLOSED from "off"; raises ValueError."""
    if text == OFF:
        return CLOSED
    if (port := int(text)) < 0:
        raise ValueError(f"{text} is no port")
    return port


def written(port: int) -> str:
    """Write a port as `read_port` reads it."""
    return OFF if port == CLOSED else str(port)


def start_on_free_ports(
    running: ExitStack, wanted: Sequence[tuple[str, Ports]], start: Callable[[ExitStack, Sequence[Ports]], Started]
) -> Started:
    """Start processes that are not ours, and again at other ports if another process listens at one of the free ones.

    Parameters
    ----------
    running : ExitStack
        Gets what ends the processes and gives the ports up.
    wanted : sequence of (str, Ports)
        Hosts and what is wanted there. A port that is not 0 stays as it is.
    start : callable
        Starts the processes at the ports that it is given, one for each of `wanted`, and pushes what ends them; raises
        ServerError if they have not started.
    """
    for left in reversed(range(STARTS)):
        with ExitStack() as attempt:
            held = [attempt.enter_context(ports.hold(host, socket.SO_REUSEADDR)) for host, ports in wanted]
            try:
                started = start(attempt, held)
            except ServerError:
                attempt.pop_all().close()  # end the processes, so that a port at which one listens is another's
                taken = [
                    port
                    for (host, ports), found in zip(wanted, held, strict=True)
                    for port in found.taken(host, ports.free)
                ]
                if not taken or not left:
                    raise
                logger.warning("another process has taken port %d: starting again with another one", taken[0])
                continue
            running.push(attempt.pop_all())
            return started
    raise AssertionError("the last start returns or raises")


def _bind(bound: ExitStack, host: str, port: int, name: str, option: int) -> int:
    """Bind a socket until the end of `bound`; returns its port."""
    flag = f"--{name}_port"
    if not 0 <= port <= 65535:
        raise ServerError(f"{flag} = {port}: must be in [0, 65535]; 0 picks a free port")
    own = bound.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    own.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        own.bind((host, port))
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name"
        raise ServerError(
            f"--host = {host!r}: must be an IPv4 address of this machine, or a name of one ({reason}); 127.0.0.1 is the default, "
            "0.0.0.0 stands for all; kvseek listens at no IPv6 addresses"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ServerError(
                f"--host = {host!r}: must be an address of this machine, and no interface here has it; 127.0.0.1 is the default, "
                "0.0.0.0 stands for all"
            ) from None
        raise ServerError(
            f"{flag} = {port}: cannot listen on {host} ({error.strerror}); choose another port, or 0 for a free one"
        ) from None
    return int(own.getsockname()[1])


def _can_listen(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
