"""Runs a server over an engine directory (engine process, frontend, Triton), or the ranks of a host that serves nothing itself.

For `kvseek serve`, the demo and the tests.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import requests

from kvseek.core.config import read_config
from kvseek.core.liveness import ask
from kvseek.core.manifest import verify
from kvseek.core.private_files import PrivateFileError, open_own_file, open_private_folder
from kvseek.engine.cache.prefixes.file import RowShape
from kvseek.engine.cache.prefixes.folder import DEFAULT_DISK_BYTES, check_directory
from kvseek.server.requests.keys import read_keys
from kvseek.server.requests.models import LAYOUTS
from kvseek.server.triton.find import TritonServer, find_server
from kvseek.server.triton.repository import write_models

from .errors import ServerError
from .ports import CLOSED, Ports, start_on_free_ports, written
from .processes import APPEND, Ask, Program, listens
from .scratch import alive_socket, close_shared_memory, free_shared_memory, memory_prefix, scratch_folder
from .settings import ServeSettings
from .supervisor import Supervisor

READY_SECONDS = 180.0
STOP_SECONDS = 5.0  # time for a process to end once nothing runs in it any more
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOPBACK = "127.0.0.1"
TRITON_NUMBER = 1  # Triton puts a colon and its port behind any address: of a socket in a folder they end the name
ENGINE, FRONTEND, TRITON = "engine", "doors", "triton"  # as metrics and logs name them
STATE_FILE = "restarts.json"
STANDARD_OUTPUT = Path("-")  # log to standard output, where a container's log belongs


class RunningServer:
    """A server that is ready, with its host and ports."""

    def __init__(self, host: str, ports: Ports, supervisor: Supervisor) -> None:
        self.host, self.ports, self._supervisor = reachable(host), ports, supervisor
        self.grpc_url = f"{self.host}:{ports.grpc}"
        """host:port for tritonclient.grpc."""
        self.http_url = f"{self.host}:{ports.http}"
        """host:port for HTTP."""
        self.metrics_url = f"{self.host}:{ports.metrics}"
        """host:port of the Prometheus metrics."""
        self.openai_url = f"http://{self.host}:{ports.openai}/v1"
        """The base URL that OpenAI's clients take."""

    def check(self) -> None:
        """Raise ServerError if the server has ended by itself."""
        self._supervisor.check()

    def process_ids(self) -> dict[str, int]:
        """Process ids: "engine", "doors", "triton", and "/models/NAME/" of Triton's models."""
        return self._supervisor.process_ids()

    @property
    def statuses(self) -> dict[str, int]:
        """Exit status of each process, once the server has ended."""
        return self._supervisor.statuses


@contextmanager
def running_server(
    engine_dir: Path,
    host: str = LOOPBACK,
    ports: Ports = Ports(0, 0, 0, 0),  # noqa: B008  frozen
    settings: ServeSettings = ServeSettings(),  # noqa: B008  frozen
    log: Path | None = None,
    verbose: bool = False,
    ready_seconds: float = READY_SECONDS,
    environment: Mapping[str, str] | None = None,
    open_models: bool = False,
) -> Iterator[RunningServer]:
    """Start a server, wait until it is ready, keep it running, and end it with the context.

    Parameters
    ----------
    log : Path, optional
        File for the server's output, "-" for standard output; None keeps it for the error message of a failed start only.
    ready_seconds : float
        How long loading the engine may take.
    environment : mapping, optional
        Variables of the engine process beside those of this one.
    open_models : bool
        Whether the OpenAI port lists its models without asking for an API key.

    Raises
    ------
    EngineDirectoryError, ConfigError
        If the engine directory cannot be served.
    ServerError
        If there is no server, a port is busy, or the server ends or does not become ready in time.
    """
    if not ready_seconds > 0:
        raise ServerError(f"--ready_seconds = {ready_seconds}: must be > 0; {READY_SECONDS:.0f} is the default")
    check_log(log)
    if settings.ui:
        settings.check_page(read_config(engine_dir))
    if settings.disk_dir is not None:
        most, shape = settings.disk_bytes or DEFAULT_DISK_BYTES, RowShape.of(read_config(engine_dir))
        check_directory(Path(settings.disk_dir), most, shape)
    if settings.api_key_file is not None:
        read_keys(Path(settings.api_key_file))  # here too, so that a wrong file is an error before anything is started

    def start(stack: ExitStack, triton: Sequence[Ports]) -> RunningServer:
        scratch = stack.enter_context(scratch_folder())
        programs = _programs(
            scratch,
            engine_dir,
            host,
            held,
            ports.free,
            triton[0],
            settings,
            verbose,
            environment or {},
            open_models,
            ready_seconds,
        )
        supervisor = supervisor_of(programs, settings, log, scratch)
        server = RunningServer(host, held, supervisor)
        stack.callback(_stop, supervisor)
        supervisor.start()
        # Triton answers at its gRPC port before it has tried to listen at its metrics port.
        metrics = triton[0].metrics
        supervisor.wait_until(
            lambda: listens(supervisor.process_ids().get(TRITON, 0), metrics) and _is_ready(held.health(server.host)),
            ready_seconds,
        )
        return server

    ports.health(host)  # here too
    with ports.hold(host) as held, ExitStack() as running:
        verify(engine_dir)  # the last check, as it reads all of the engine
        yield start_on_free_ports(running, [(LOOPBACK, Ports(CLOSED, CLOSED, 0, CLOSED))], start)


def check_log(log: Path | None) -> None:
    """Raise ServerError if a log cannot be written, or others could have it written elsewhere."""
    if log is None or log == STANDARD_OUTPUT:
        return
    try:
        os.close(open_private_folder(log.parent, make=False, own=False))
        os.close(open_own_file(log, APPEND))
    except PrivateFileError as error:
        raise ServerError(f"--log = {log}: {error}") from None
    except OSError as error:
        raise ServerError(
            f"--log = {log}: cannot be written ({error.strerror}); name a file in a folder that is there, or - for standard "
            "output"
        ) from None


def supervisor_of(programs: Sequence[Program], settings: ServeSettings, log: Path | None, scratch: Path) -> Supervisor:
    """Make the supervisor of a server's programs; without a log, what each writes is kept in `scratch`, for error messages."""
    output = scratch if log is None else None if log == STANDARD_OUTPUT else log
    return Supervisor(programs, settings.restarts, settings.hang_seconds, output, scratch / STATE_FILE)


def _stop(supervisor: Supervisor) -> None:
    with signals():  # a second signal must not leave processes behind
        supervisor.stop()


def _programs(
    scratch: Path,
    engine_dir: Path,
    host: str,
    ports: Ports,
    held: Sequence[str],
    inner: Ports,
    settings: ServeSettings,
    verbose: bool,
    environment: Mapping[str, str],
    open_models: bool,
    ready_seconds: float,
) -> list[Program]:
    """Describe the engine process, the frontend and Triton, in the order in which they start and end.

    `held`: names of those of `ports` that are held for the frontend; `inner`: Triton's metrics port, on loopback.
    """
    server, socket = find_server(scratch), scratch / "engine.sock"
    repository, triton, models = scratch / "models", scratch / "triton", LAYOUTS[settings.layout].models
    engine_alive, frontend_alive = alive_socket(scratch, ENGINE), alive_socket(scratch, FRONTEND)
    triton_metrics = f"http://{LOOPBACK}:{inner.metrics}/metrics"
    write_models(repository, engine_dir, settings, socket)
    own = ("--engine_dir", str(engine_dir.resolve()), "--socket", str(socket), "--settings", settings.to_json())
    http = (
        *("--host", host, "--http_port", written(ports.http), "--grpc_port", written(ports.grpc)),
        *("--metrics_port", written(ports.metrics), "--openai_port", written(ports.openai)),
        *("--held_ports", *held, "--state", str(scratch / STATE_FILE), *(("--open_models",) if open_models else ())),
        *("--triton_grpc", f"unix:{triton}:{TRITON_NUMBER}", "--triton_metrics", f"{LOOPBACK}:{inner.metrics}"),
    )
    python = (sys.executable, "-m")
    return [
        Program(
            ENGINE,
            (*python, "kvseek.server.engine.process", *own, "--alive", str(engine_alive)),
            settings.drain_seconds + STOP_SECONDS,
            {**os.environ, **environment},
            asks={ENGINE: asked_at(engine_alive)},
            # With ranks on other hosts it waits for them, however late they come back.
            start_seconds=ready_seconds if settings.nnodes == 1 else math.inf,
            clean_up=lambda: socket.unlink(missing_ok=True),
            core_dumps=settings.core_dumps,
        ),
        Program(
            FRONTEND,
            (*python, "kvseek.server.frontend", *own, *http, "--alive", str(frontend_alive)),
            STOP_SECONDS,
            asks={FRONTEND: asked_at(frontend_alive)},
            start_seconds=ready_seconds,
            core_dumps=settings.core_dumps,
        ),
        Program(
            TRITON,
            _triton_command(server, repository, triton, inner.metrics, verbose),
            2 * STOP_SECONDS,
            server.environment,
            is_up=lambda: close_shared_memory(scratch, len(models)),
            ends_with=FRONTEND,  # a dead frontend's calls are cancelled, which may crash Triton 2.51, and nobody waits
            workers=tuple(f"/models/{model}/" for model in models),
            # Its gRPC endpoint is asked by the frontend, which uses it; one that does not answer says nothing of Triton.
            asks={TRITON: lambda seconds: answers(triton_metrics, seconds) and ask(frontend_alive, seconds) != TRITON}
            | {f"/models/{model}/": asked_at(alive_socket(scratch, model)) for model in models},
            start_seconds=ready_seconds,
            clean_up=lambda: free_shared_memory(scratch),
            core_dumps=settings.core_dumps,
        ),
    ]


def _triton_command(
    server: TritonServer, repository: Path, socket: Path, metrics_port: int, verbose: bool
) -> tuple[str, ...]:
    """Make Triton's command line: gRPC is for the frontend alone, at a socket in a folder of this user's (docs/security.md)."""
    return (
        str(server.binary),
        f"--model-repository={repository}",
        f"--backend-directory={server.backends}",
        "--allow-http=false",
        "--disable-auto-complete-config",  # otherwise an extra process of each model is started and ended first
        f"--grpc-address=unix:{socket}",
        f"--grpc-port={TRITON_NUMBER}",
        f"--metrics-address={LOOPBACK}",
        f"--metrics-port={metrics_port}",
        f"--exit-timeout-secs={STOP_SECONDS:.0f}",
        f"--log-verbose={int(verbose)}",
        f"--backend-config=python,shm-region-prefix-name={memory_prefix(repository.parent)}",
    )


def reachable(host: str) -> str:
    """Return an address of this machine for clients that run on it."""
    return LOOPBACK if host in ("0.0.0.0", "") else host


def _is_ready(url: str) -> bool:
    """Whether the frontend calls the server ready."""
    try:
        return get(url).status_code == 200
    except requests.RequestException:
        return False  # not listening yet


def get(url: str, headers: Mapping[str, str] | None = None, seconds: float = 5.0) -> requests.Response:
    """Ask a server of this machine, to which no proxy leads; raises requests.RequestException."""
    with requests.Session() as session:
        session.trust_env = False
        return session.get(url, headers=headers, timeout=seconds)


def answers(url: str, seconds: float) -> bool:
    """Whether a server of this machine answers, whatever it says."""
    try:
        get(url, seconds=seconds)
    except requests.RequestException:
        return False
    return True


def asked_at(alive: Path) -> Ask:
    """Make the question to a process of ours."""
    return lambda seconds: ask(alive, seconds) is not None


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collect the signals SIGINT and SIGTERM that arrive from now on.

    A handler that raises could be too late for a wait that has just begun, and could leave Popen's lock taken.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread handle signals
        yield received
        return
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def running_ranks(
    engine_dir: Path,
    node_rank: int,
    settings: ServeSettings,
    log: Path | None = None,
    ready_seconds: float = READY_SECONDS,
) -> Iterator[tuple[Sequence[int], Supervisor]]:
    """Run the ranks of a host that follow rank 0 on another (docs/parallelism.md): start them, wait until rank 0 has taken them
    and they are loaded, give their numbers and who looks after them, and end them with the context.

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
        programs = [_follower(scratch, engine_dir, rank, threads, settings) for rank in ranks]
        supervisor = supervisor_of(programs, settings, log, scratch)
        try:
            supervisor.start()
            supervisor.wait_until(lambda: True, ready_seconds)
            yield ranks, supervisor
        finally:
            supervisor.stop()


def _follower(scratch: Path, engine_dir: Path, rank: int, threads: int, settings: ServeSettings) -> Program:
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
        asks={f"rank {rank}": asked_at(alive)},
        clean_up=lambda: up.unlink(missing_ok=True),
        core_dumps=settings.core_dumps,
    )
