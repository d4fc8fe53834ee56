"""The other ranks as rank 0 sees them: processes on its host, which it starts, and on other hosts, which connect (nodes.py)."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

import torch

from kvseek.core.config import EngineConfig
from kvseek.core.errors import KvseekError
from kvseek.core.manifest import read_manifest
from kvseek.engine.parallel.channel import Channel, TamperedError
from kvseek.engine.parallel.cuda.ranks import DeviceRanks
from kvseek.engine.parallel.cuda.sums import Sums
from kvseek.engine.parallel.nodes import Nodes, accept_ranks
from kvseek.engine.parallel.ranks import Ranks, create_store, find_store, leave
from kvseek.engine.parallel.reports import LOOK_SECONDS, STALL_SECONDS, Reporter, Reports, named
from kvseek.engine.parallel.watch import Watch, unanswered

from .commands import Command, Load, encode
from .follower import READY

TIMEOUT_SECONDS = 60.0  # that a rank waits for another in a layer, or until all have joined
END_SECONDS = 10.0  # that a rank has to end before it is killed
LEFT_SECONDS = 5.0  # that a thread of rank 0 has to end which waits for ranks that have ended
FOLLOWER = "kvseek.engine.leading.follower"  # the program of a rank
FAILED_SECONDS = 1.0  # that a rank has to tell why rank 0 has failed
logger = logging.getLogger(__name__)


class RankError(KvseekError):
    """A rank has failed or does not answer: the engine cannot go on."""


@dataclass(frozen=True)
class Member:
    """A rank that is not rank 0: its channel, and its process if that runs on this host, or else the host's address."""

    rank: int
    channel: Channel
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
    stall_seconds : float
        That a rank may take for a piece of loading; see reports.py.

    Raises
    ------
    ConfigError
        If this process has another engine of several ranks, or cannot listen for ranks of other hosts.
    """

    def __init__(
        self,
        directory: Path,
        config: EngineConfig,
        nodes: Nodes,
        timeout_seconds: float = TIMEOUT_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._failure = ""
        self._watch: Watch | None = None
        self._ways = list[Sums]()  # whose kernels the watch releases
        self._ready = set[int]()  # ranks that are loaded
        self._reporter = Reporter(stall_seconds, self._check_watch)
        self._timeout_seconds, self._stall_seconds = timeout_seconds, stall_seconds
        here = nodes.ranks(config.tp_size, 0)
        threads = max(1, torch.get_num_threads() // len(here))
        torch.set_num_threads(threads)
        self._members = list[Member]()
        if nodes.count > 1:  # first, as the ranks of this host do not wait for long
            fingerprint = read_manifest(directory).fingerprint
            for rank, joined in accept_ranks(nodes, config.tp_size, fingerprint).items():
                host = f"node {rank // len(here)} at {joined.address}"
                self._members.append(Member(rank, joined.channel, host=host))
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
                    self._stall_seconds,
                ),
            )
        numbers = [member.rank for member in self._members]
        own_connection = find_store(self._store.host, self._store.port, self._timeout_seconds)
        self._reports = Reports(own_connection, self._reporter, numbers)
        channels = {member.rank: member.channel for member in self._members}
        self._watch = Watch(channels, self._release, self._timeout_seconds, self._reports)
        try:
            with self._named():
                self._wait_for_all()
                ranks = self._reporter.apart(self._join)
                if self._config.device == "cpu":
                    return ranks
                return DeviceRanks.over(ranks, self._config, self._ways)
        except BaseException:
            logger.exception("the ranks cannot join")
            self.close()  # what waits for this rank ends with its process, and then nothing waits in a group
            if not self._reporter.has_ended_apart(LEFT_SECONDS):
                # In NCCL it stays, which is no default group. A wait for a rank in gloo fails after `timeout_seconds`. Should
                # the thread join a group yet, create_store refuses the next engine of several ranks in this process.
                logger.warning("a thread still waits for ranks that have ended, and is left behind")
            leave()  # so that this process may load another engine of several ranks
            raise

    def _join(self) -> Ranks:
        size = len(self._members) + 1
        return Ranks.join(self._store, 0, size, self._timeout_seconds, self._reporter)

    def _wait_for_all(self) -> None:
        """Wait until the processes of all ranks are about to join: only then do they wait for each other."""
        self._reporter.waiting("waits for the processes of the other ranks")
        deadline = time.monotonic() + self._timeout_seconds
        while absent := self._reports.absent:
            self._check_watch()
            if time.monotonic() > deadline:
                self._fail(f"{named(absent)}: not started within {self._timeout_seconds:.0f} s")
            time.sleep(LOOK_SECONDS)

    def _release(self) -> None:
        for sums in list(self._ways):
            sums.release()

    def wait_until_loaded(self) -> None:
        """Wait until all ranks have loaded their parts; raises RankError with the first error."""
        self._reporter.waiting("waits until the other ranks are loaded")
        while len(self._ready) < len(self._members):
            wait(
                [member.channel.connection for member in self._members if member.rank not in self._ready],
                FAILED_SECONDS,
            )
            self._check()
            self._check_watch()
        if self._watch is not None and self._config.device == "cpu":
            self._watch.close()  # nothing waits but in gloo, which notices what happens
        elif self._watch is not None:
            self._watch.loaded()

    def tell(self, command: Command) -> None:
        """Tell all ranks what this rank does next; raises RankError if one of them has failed."""
        self._check()
        self._reporter.step()
        for member in self._members:
            self._send(member, command)

    @contextmanager
    def doing(self, command: Command) -> Iterator[None]:
        """Tell all ranks a command, and do it in the body: it must not fail.

        Whatever a rank raises, the others may wait for it in the middle of a layer, so any exception ends the engine: it is
        raised as RankError, now and by every later call.
        """
        self.tell(command)
        with self.waiting():
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Do in the body what may wait for other ranks, of which a command has told them; see `doing`."""
        with self._named():
            if self._watch is not None:
                self._watch.begin()
            try:
                yield
            finally:
                if self._watch is not None:
                    self._watch.end()
            if self._watch is not None and self._watch.failure:
                raise RuntimeError("what this rank has computed is wrong")

    def close(self) -> None:
        """Let the ranks end, and kill those that do not; what waits for them on this rank's GPU ends. May be called twice."""
        self.free()
        for member in self._members:
            member.channel.close()
        deadline = time.monotonic() + END_SECONDS
        for process in [member.process for member in self._members if member.process is not None]:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watch is not None and self._config.device == "cuda":
            self._watch.begin()  # what waited for them on this GPU ends from here to `stop_watching`
        self._failure = self._failure or "the engine is closed"

    def free(self) -> None:
        """Let what waits for other ranks on this rank's GPU end, until `stop_watching`."""
        if self._watch is not None:
            self._watch.free()

    def stop_watching(self) -> None:
        """End the thread that frees this rank's GPU: nothing waits for other ranks there any more. May be called twice."""
        if self._watch is not None:
            self._watch.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Raise whatever the body raises as RankError that names the rank at fault."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            # A rank that has died may end this rank's communication a moment before its connection is seen closed.
            wait([member.channel.connection for member in self._members], FAILED_SECONDS)
            errors, ended = self._news()
            found = "" if self._watch is None else self._watch.failure
            reason = "; ".join(ended.values())
            if not reason and not found and self._reporter.waited >= self._timeout_seconds:
                # Ranks that have told of an error, of their own time limit, have waited like this one.
                others = [member.rank for member in self._members if member.rank not in errors]
                reason = unanswered(self._reports, others, self._timeout_seconds) if others else ""
            reason = reason or "; ".join(errors.values()) or found
            raise self._failed(reason or f"rank 0: {type(error).__name__}: {error}") from error

    def _check(self) -> None:
        """Raise RankError if a rank has told of an error, or has ended."""
        if self._failure:
            raise RankError(self._failure)
        errors, ended = self._news()
        if ended or errors:  # what the others tell often follows from the end of one
            self._fail("; ".join((ended or errors).values()))

    def _check_watch(self) -> None:
        """Raise RankError if the watch has found one that has failed, with what it tells itself if it does."""
        if self._watch is not None and self._watch.failure:
            wait([member.channel.connection for member in self._members], FAILED_SECONDS)
            self._check()
            self._fail(self._watch.failure)

    def _news(self) -> tuple[dict[int, str], dict[int, str]]:
        """Return what ranks have told of errors, and how others have ended, by rank; notes those that are loaded."""
        errors, ended = dict[int, str](), dict[int, str]()
        for member in self._members:
            if member.channel.poll():
                try:
                    message = member.channel.receive()
                except TamperedError as error:
                    ended[member.rank] = f"{member}: {error}"
                    continue
                except (EOFError, OSError):
                    ended[member.rank] = member.ended()
                    continue
                if message == READY:
                    self._ready.add(member.rank)
                else:
                    errors[member.rank] = f"{member}: {message.decode()}"
            elif member.process is not None and member.process.poll() is not None:
                ended[member.rank] = member.ended()
        return errors, ended

    def _send(self, member: Member, command: Command | Load) -> None:
        try:
            member.channel.send(encode(command))
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
        command = [sys.executable, "-m", FOLLOWER, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return Member(rank, Channel(own), process)
