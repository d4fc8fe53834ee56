"""Rank 0 of an engine of several ranks: it starts the others, and tells them what to do (commands.py)."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.errors import KvseekError
from kvseek.core.manifest import read_manifest
from kvseek.core.ranks import rank_config
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.prefix import Prefix, Reuse
from kvseek.engine.cache.prefix_rows import PrefixRows
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.decoder import Decoder
from kvseek.engine.loading.load import load_part
from kvseek.engine.model.prefill import NO_TAKERS, Prefill, Prompts, Takers

from .commands import (
    Advance,
    Begin,
    Close,
    Command,
    Complete,
    Decode,
    Drop,
    Finish,
    Forget,
    Keep,
    Load,
    Open,
    Refresh,
    Reserve,
    digest,
)
from .follower import READY
from .nodes import ONE_NODE, Nodes, accept_ranks
from .ranks import Ranks, create_store

TIMEOUT_SECONDS = 60.0  # that a rank waits for another in a layer, or while the engine is loaded
END_SECONDS = 10.0  # that a rank has to end before it is killed
FAILED_SECONDS = 1.0  # that a rank has to tell why rank 0 has failed


class RankError(KvseekError):
    """A rank has failed or does not answer: the engine cannot go on."""


@dataclass(frozen=True)
class Member:
    """A rank that is not rank 0: its connection, and its process if that runs on this host, or else the host's address."""

    rank: int
    connection: Connection
    process: subprocess.Popen[bytes] | None = None
    host: str = ""

    def ended(self) -> str:
        """Describe the end of a process that has closed its connection."""
        if self.process is None:
            return f"{self}: its connection is closed, so its process or its host has ended"
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        return f"{self}: its process {self.process.pid} has ended with status {self.process.returncode}"

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" ({self.host})" if self.host else "")


class Followers:
    """The processes of all ranks but rank 0: on this host, where they are started, and on others, which connect.

    Parameters
    ----------
    directory : Path
        Engine directory.
    config : EngineConfig
        Of all ranks.
    nodes : Nodes
        The hosts of the ranks.
    timeout_seconds : float
        See Ranks.join.

    Raises
    ------
    ConfigError
        If this process has another engine of several ranks, or cannot listen for ranks of other hosts.
    """

    def __init__(
        self, directory: Path, config: EngineConfig, nodes: Nodes, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self._failure = ""
        self._timeout_seconds = timeout_seconds
        here = nodes.ranks(config.tp_size, 0)
        threads = max(1, torch.get_num_threads() // len(here))
        torch.set_num_threads(threads)
        self._members = list[Member]()
        if nodes.count > 1:  # first, as the ranks of this host do not wait for long
            fingerprint = read_manifest(directory).fingerprint
            for rank, joined in accept_ranks(nodes, config.tp_size, fingerprint).items():
                host = f"node {rank // len(here)} at {joined.address}"
                self._members.append(Member(rank, joined.connection, host=host))
        self._store = create_store(timeout_seconds, nodes.host)
        self._members += [_start(rank) for rank in here[1:]]
        self._directory, self._config, self._threads = directory.resolve(), config, threads

    def join(self) -> Ranks:
        """Have all ranks load their parts, and join them; raises RankError."""
        for member in self._members:
            self._send(
                member,
                Load(
                    str(self._directory),
                    self._config,
                    self._threads,
                    self._store.host,
                    self._store.port,
                    member.rank,
                    self._timeout_seconds,
                ),
            )
        with self._together():
            return Ranks.join(self._store, 0, len(self._members) + 1, self._timeout_seconds)

    def wait_until_loaded(self) -> None:
        """Wait until all ranks have loaded their parts; raises RankError with the first error."""
        for member in self._members:
            try:
                answer = member.connection.recv_bytes()
            except (EOFError, OSError):
                self._fail(member.ended())
            if answer != READY:
                self._fail(f"{member}: {answer.decode()}")

    def tell(self, command: Command) -> None:
        """Tell all ranks what this rank does next; raises RankError if one of them has failed."""
        self._check()
        for member in self._members:
            self._send(member, command)

    @contextmanager
    def doing(self, command: Command) -> Iterator[None]:
        """Tell all ranks a command, and do it in the body: it must not fail.

        Whatever a rank raises, the others may wait for it in the middle of a layer, so any exception ends the engine: it is
        raised as RankError, now and by every later call.
        """
        self.tell(command)
        with self._together():
            yield

    def close(self) -> None:
        """Let the ranks end, and kill those that do not. May be called twice."""
        for member in self._members:
            member.connection.close()
        deadline = time.monotonic() + END_SECONDS
        for process in [member.process for member in self._members if member.process is not None]:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._failure = self._failure or "the engine is closed"

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            # A rank that has died may end this rank's communication a moment before its connection is seen closed.
            wait([member.connection for member in self._members], FAILED_SECONDS)
            self._check()
            raise self._failed(f"rank 0: {type(error).__name__}: {error}") from error

    def _check(self) -> None:
        """Raise RankError if a rank has told of an error, or has ended."""
        if self._failure:
            raise RankError(self._failure)
        told, ended = list[str](), list[str]()
        for member in self._members:
            if member.connection.poll():
                try:
                    told.append(f"{member}: {member.connection.recv_bytes().decode()}")
                except (EOFError, OSError):
                    ended.append(member.ended())
            elif member.process is not None and member.process.poll() is not None:
                ended.append(member.ended())
        if ended or told:  # what the others tell often follows from the end of one
            self._fail("; ".join(ended or told))

    def _send(self, member: Member, command: Command | Load) -> None:
        try:
            member.connection.send(command)
        except OSError:
            self._fail(member.ended())

    def _fail(self, reason: str) -> NoReturn:
        raise self._failed(reason)

    def _failed(self, reason: str) -> RankError:
        self._failure = f"{reason}; the engine's ranks cannot go on without each other: load it again"
        return RankError(self._failure)


def _start(rank: int) -> Member:
    """Start a rank on this host."""
    own, theirs = Pipe()
    with theirs:
        command = [sys.executable, "-m", "kvseek.engine.parallel.follower", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return Member(rank, own, process)


class LeadCache(Cache):
    """The cache of rank 0, which tells the other ranks whose slots are opened and closed."""

    def __init__(
        self, followers: Followers, config: EngineConfig, dtype: torch.dtype, device: torch.device, rows: RowStorage
    ) -> None:
        super().__init__(config, dtype, device, rows)
        self._followers = followers

    def open(self, slot: int, tokens: int, prefix: Prefix | None = None) -> None:
        """See Cache."""
        reuse = None if prefix is None else Reuse(prefix.tokens, prefix.extents, prefix.shared, prefix.sparse)
        with self._followers.doing(Open(slot, tokens, reuse)):
            super().open(slot, tokens, prefix)

    def close(self, slot: int) -> None:
        """See Cache."""
        with self._followers.doing(Close(slot)):
            super().close(slot)


class LeadPrefixRows(PrefixRows):
    """Keeps rows for later requests on all ranks; errors of its methods are RankErrors."""

    def __init__(self, rows: PrefixRows, followers: Followers) -> None:
        super().__init__(rows.cache, rows.indexes, rows.shares_entries)
        self._followers = followers

    def reserve(self, slot: int, tokens: int) -> None:
        """See PrefixRows."""
        with self._followers.doing(Reserve(slot, tokens)):
            super().reserve(slot, tokens)

    def complete(self, slot: int, kept: int, places: int, first: int | None) -> None:
        """See PrefixRows."""
        with self._followers.doing(Complete(slot, kept, places, first)):
            super().complete(slot, kept, places, first)

    def keep(self, slot: int, extents: Sequence[int], begins: bool) -> None:
        """See PrefixRows."""
        with self._followers.doing(Keep(slot, tuple(extents), begins)):
            super().keep(slot, extents, begins)

    def forget(self, extents: Sequence[int]) -> None:
        """See PrefixRows."""
        with self._followers.doing(Forget(tuple(extents))):
            super().forget(extents)


class LeadPrefill(Prefill):
    """A prefill that all ranks do."""

    def __init__(self, prefill: Prefill, followers: Followers, number: int, prompts: Prompts, takers: Takers) -> None:
        super().__init__(prefill.retrieval, prompts, takers)
        self._prefill, self._followers, self._number = prefill, followers, number
        self.dropped = prefill.dropped

    @property
    def progress(self) -> float:
        """See Prefill."""
        return self._prefill.progress

    def drop(self, slot: int) -> None:
        """See Prefill."""
        self._followers.tell(Drop(self._number, slot))
        self._prefill.drop(slot)

    def advance(self, max_tokens: int) -> int:
        """See Prefill; any exception is a RankError."""
        with self._followers.doing(Advance(self._number, max_tokens)):
            return self._prefill.advance(max_tokens)

    def finish(self) -> Tensor:
        """See Prefill; any exception is a RankError."""
        with self._followers.doing(Finish(self._number)):
            return self._prefill.finish()

    def _advance(self, max_tokens: int) -> int:
        raise AssertionError("advance does it")

    def _logits(self) -> Tensor:
        raise AssertionError("finish does it")


class LeadDecoder(Decoder):
    """The decoder of rank 0, with which all ranks decode; errors of its methods are RankErrors."""

    def __init__(self, decoder: Decoder, followers: Followers, ranks: Ranks) -> None:
        super().__init__(decoder.model, decoder.retrieval, decoder.steps)
        self._followers, self._ranks, self._numbers, self._closed = followers, ranks, itertools.count(), False

    def prefill(self, prompts: Prompts, takers: Takers = NO_TAKERS) -> Prefill:
        """See Decoder."""
        number = next(self._numbers)
        with self._followers.doing(Begin(number, prompts, tuple(takers))):
            return LeadPrefill(super().prefill(prompts, takers), self._followers, number, prompts, takers)

    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        """See Decoder."""
        with self._followers.doing(self._decode(tokens, slots)):
            return super().decode(tokens, slots)

    def decode_tokens(
        self, tokens: Sequence[int], slots: Sequence[int], greedy: Sequence[bool]
    ) -> tuple[list[Tensor | int], list[float]]:
        """See Decoder."""
        with self._followers.doing(self._decode(tokens, slots)):
            return super().decode_tokens(tokens, slots, greedy)

    def refresh(self, slots: Sequence[int]) -> None:
        """See Decoder."""
        with self._followers.doing(Refresh(tuple(slots))):
            super().refresh(slots)

    def prefix_rows(self) -> PrefixRows:
        """See Decoder."""
        return LeadPrefixRows(super().prefix_rows(), self._followers)

    def close(self) -> None:
        """See Decoder."""
        if not self._closed:
            self._closed = True
            self._followers.close()
            self._ranks.leave()

    def _decode(self, tokens: Sequence[int], slots: Sequence[int]) -> Decode:
        return Decode(tuple(tokens), tuple(slots), digest(self.cache))


def lead(
    directory: Path, config: EngineConfig, nodes: Nodes = ONE_NODE, timeout_seconds: float = TIMEOUT_SECONDS
) -> LeadDecoder:
    """Start the other ranks of an engine and load the part of rank 0; raises as Engine.load, and RankError.

    Waits for ranks of other nodes, however long they take.
    """
    followers = Followers(directory, config, nodes, timeout_seconds)
    try:
        ranks = followers.join()
        try:
            decoder = load_part(directory, rank_config(config), ranks, partial(LeadCache, followers))
            followers.wait_until_loaded()
        except BaseException:
            ranks.leave()
            raise
    except BaseException:
        followers.close()
        raise
    return LeadDecoder(decoder, followers, ranks)
