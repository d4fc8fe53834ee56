"""A host whose ranks follow rank 0 on another: `kvseek serve --node_rank` (docs/parallelism.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvseek.core.config_file import read_config
from kvseek.core.liveness import ask
from kvseek.core.manifest import verify

from .launch import READY_SECONDS, STOP_SECONDS, check_log, supervisor_of
from .processes import Program
from .scratch import alive_socket, scratch_folder
from .settings import ServeSettings
from .supervisor import Supervisor


@dataclass(frozen=True)
class NodeRanks:
    """The running ranks of this host."""

    ranks: Sequence[int]
    supervisor: Supervisor

    def check(self) -> None:
        """Raise ServerError if a rank has ended for good."""
        self.supervisor.check()


@contextmanager
def running_ranks(
    engine_dir: Path,
    node_rank: int,
    settings: ServeSettings,
    log: Path | None = None,
    ready_seconds: float = READY_SECONDS,
) -> Iterator[NodeRanks]:
    """Start this host's ranks, wait until rank 0 has taken them and they are loaded, and end them with the context.

    When rank 0 ends, they end too, are started again, and wait until it is back, however long that takes.

    Parameters
    ----------
    node_rank : int
        Number of this host, which must not be 0.
    settings : ServeSettings
        `nnodes`, `rdzv_endpoint`, `ranks_key_file`, `threads`, of which each rank gets its share, and `restarts`.
    log, ready_seconds
        As of running_server.

    Raises
    ------
    EngineDirectoryError, ConfigError
        If the engine directory cannot be served on this host.
    ServerError
        If rank 0 does not come in time, or refuses these ranks.
    """
    check_log(log)
    verify(engine_dir)
    ranks = settings.nodes.ranks(read_config(engine_dir).tp_size, node_rank)
    threads = max(1, (settings.threads or len(os.sched_getaffinity(0))) // len(ranks))
    with scratch_folder() as scratch:
        programs = [_program(scratch, engine_dir, rank, threads, settings) for rank in ranks]
        supervisor = supervisor_of(programs, settings, log, scratch)
        try:
            supervisor.start()
            supervisor.wait_until(lambda: True, ready_seconds)
            yield NodeRanks(ranks, supervisor)
        finally:
            supervisor.stop()


def _program(scratch: Path, engine_dir: Path, rank: int, threads: int, settings: ServeSettings) -> Program:
    up, alive = scratch / f"rank{rank}.up", alive_socket(scratch, f"rank{rank}")
    key = () if settings.ranks_key_file is None else ("--ranks_key_file", settings.ranks_key_file)
    return Program(
        f"rank {rank}",
        (
            *(sys.executable, "-m", "kvseek.engine.leading.follower", "--engine_dir", str(engine_dir.resolve())),
            *("--rank", str(rank), "--nnodes", str(settings.nnodes), "--rdzv_endpoint", str(settings.rdzv_endpoint)),
            *("--threads", str(threads), "--up", str(up), "--alive", str(alive), *key),
        ),
        STOP_SECONDS,
        is_up=up.exists,  # however late: it waits for rank 0
        asks={f"rank {rank}": lambda seconds: ask(alive, seconds) is not None},
        clean_up=lambda: up.unlink(missing_ok=True),
        core_dumps=settings.core_dumps,
    )
