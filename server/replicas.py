"""Several servers of one engine behind one OpenAI port: `kvseek serve --replicas N` (docs/parallelism.md).

The router is smg, the Shepherd Model Gateway that grew out of sglang-router. It sends a conversation to the replica that has
read its beginning. Each replica is a server as without a router, with a gRPC, an HTTP and a metrics port of its own, which are
other ones at each start. The metrics of all are at one port (replica_metrics.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import requests

from kvseek.core.config import read_config

from .errors import ServerError
from .launch import (
    LOOPBACK,
    READY_SECONDS,
    STANDARD_OUTPUT,
    STATE_FILE,
    RunningServer,
    answers,
    asked_at,
    get,
    reachable,
    running_server,
    supervisor_of,
)
from .ports import Ports, start_on_free_ports
from .processes import Program
from .scratch import alive_socket, scratch_folder
from .settings import ServeSettings
from .supervisor import Supervisor

ROUTER, METRICS = "router", "metrics"
SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")  # requests of one value go to one replica
HEALTH_SECONDS = 2  # between two looks at a replica; one that fails twice gets no further requests
STOP_SECONDS = 10.0
# smg takes its key as a flag alone, which every user of the machine would see in a list of processes.
START_ROUTER = "import json, sys; from smg.cli import main; main(json.load(open(sys.argv[1])))"
REMEDY = "pip install 'kvseek[replicas]'"


@dataclass(frozen=True)
class Replicas:
    """Running servers and their router.

    Attributes
    ----------
    openai_url : str
        The base URL of the router that OpenAI's clients take.
    metrics_url : str
        host:port of the metrics of all.
    """

    servers: Sequence[RunningServer]
    openai_url: str
    metrics_url: str
    supervisor: Supervisor

    def check(self) -> None:
        """Raise ServerError if the router or a replica has ended by itself."""
        self.supervisor.check()
        for server in self.servers:
            server.check()


@contextmanager
def running_replicas(
    engine_dir: Path,
    replicas: int,
    host: str = LOOPBACK,
    openai_port: int = 9000,
    metrics_port: int = 8002,
    settings: ServeSettings = ServeSettings(),  # noqa: B008  frozen
    log: Path | None = None,
    verbose: bool = False,
    device: str = "cpu",
    ready_seconds: float = READY_SECONDS,
) -> Iterator[Replicas]:
    """Start servers one after the other, then the router; keep them running, and end them with the context.

    Parameters
    ----------
    replicas : int
        Number of servers. Each has free ports of its own, and its share of the CPU threads or, with device "cuda", GPUs of
        its own among those of CUDA_VISIBLE_DEVICES: one for each rank of the engine, in order.
    openai_port, metrics_port : int
        Port of the router, and of the metrics of all replicas; 0 picks a free one.
    log : Path, optional
        As of running_server; replica i writes to a file with `.i` behind the name, the router to one with `.router`.

    Raises
    ------
    ServerError
        If the router is not installed, or as running_server.
    EngineDirectoryError, ConfigError
        If the engine directory cannot be served.
    """
    check_router()
    wanted = [(host, Ports(0, 0, metrics_port, openai_port)), (LOOPBACK, Ports(0, 0, 0, 0))]
    with wanted[0][1].hold(host):
        pass  # an error now, before replicas are started in vain
    ranks = read_config(engine_dir).tp_size
    threads = settings.threads or len(os.sched_getaffinity(0))
    origins = settings.cors_origins  # the router's alone, as browsers do not reach the replicas
    settings = dataclasses.replace(settings, threads=max(1, threads // replicas), cors_origins=())
    with ExitStack() as running, scratch_folder() as folder:
        servers = [
            running.enter_context(
                running_server(
                    engine_dir,
                    LOOPBACK,
                    settings=_settings_of(settings, number),
                    log=_log_of(log, str(number)),
                    verbose=verbose,
                    ready_seconds=ready_seconds,
                    environment=_devices(device, number, ranks),
                    open_models=True,  # as the router has no key to ask for them, and lists them itself without one
                )
            )
            for number in range(replicas)
        ]
        workers = [server.openai_url.removesuffix("/v1") for server in servers]
        key = secrets.token_hex(32)

        def start(stack: ExitStack, ports: Sequence[Ports]) -> Replicas:
            port, url = ports[0].openai, f"http://{reachable(host)}:{ports[0].openai}"
            arguments = folder / "arguments.json"
            arguments.touch(mode=0o600)
            arguments.write_text(
                json.dumps(flags(workers, host, port, ports[1].metrics, key, origins)), encoding="utf-8"
            )
            program = Program(
                ROUTER,
                (sys.executable, "-P", "-c", START_ROUTER, str(arguments)),
                STOP_SECONDS,
                asks={ROUTER: lambda seconds: answers(f"{url}/health", seconds)},
                start_seconds=ready_seconds,
                core_dumps=settings.core_dumps,
            )
            places = [server.metrics_url for server in servers]
            metrics = _metrics(places, url, host, ports[0].metrics, folder, ready_seconds, settings.core_dumps)
            supervisor = supervisor_of([program, metrics], settings, _log_of(log, ROUTER), folder)
            stack.callback(supervisor.stop)
            supervisor.start()
            supervisor.wait_until(_knows(url, key, replicas), ready_seconds)
            return Replicas(servers, f"{url}/v1", f"{reachable(host)}:{ports[0].metrics}", supervisor)

        yield start_on_free_ports(running, wanted, start)


def _metrics(
    replicas: Sequence[str],
    router: str,
    host: str,
    port: int,
    folder: Path,
    ready_seconds: float,
    core_dumps: bool,
) -> Program:
    """Describe the process that serves the metrics of all replicas."""
    alive = alive_socket(folder, METRICS)
    return Program(
        METRICS,
        (
            *(sys.executable, "-m", "kvseek.server.replica_metrics", "--host", host, "--port", str(port)),
            *("--replicas", *replicas, "--router", router, "--state", str(folder / STATE_FILE), "--alive", str(alive)),
        ),
        STOP_SECONDS,
        asks={METRICS: asked_at(alive)},
        start_seconds=ready_seconds,
        core_dumps=core_dumps,
    )


def check_router() -> None:
    """Raise ServerError unless the router is installed."""
    if find_spec("smg") is None:
        raise ServerError(f"--replicas: the router smg is not installed; {REMEDY}")


def flags(
    workers: Sequence[str], host: str, port: int, metrics: int, key: str, origins: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the router's flags, as of smg 1.13; docker/kubernetes/router.yaml has those from --policy on too."""
    return (
        *("launch", "--worker-urls", *workers, "--host", host, "--port", str(port)),
        *("--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics), "--log-level", "warn"),
        # The replica that has read most of a prompt's beginning gets it, unless a header names its session.
        *("--policy", "cache_aware", "--sticky-sessions", "--routing-key-headers", *SESSION_HEADERS),
        *("--health-check-interval-secs", str(HEALTH_SECONDS), "--health-failure-threshold", "2"),
        *("--health-success-threshold", "1", "--disable-load-monitoring"),
        # Without a key every client could add workers and remove them.
        *("--control-plane-api-keys", f"{ROUTER}:kvseek:admin:{key}"),
        *(("--cors-allowed-origins", *origins) if origins else ()),
    )


def _knows(url: str, key: str, replicas: int) -> Callable[[], bool]:
    """Make a function that says whether the router at `url` has so many healthy replicas."""

    def knows() -> bool:
        try:
            workers = get(f"{url}/workers", {"Authorization": f"Bearer {key}"}).json()["workers"]
        except (requests.RequestException, ValueError, KeyError):
            return False  # not listening yet
        return sum(bool(worker["is_healthy"]) for worker in workers) == replicas

    return knows


def _settings_of(settings: ServeSettings, number: int) -> ServeSettings:
    """Give a replica a folder of its own for prefixes on disk, as processes do not share one."""
    if settings.disk_dir is None:
        return settings
    return dataclasses.replace(settings, disk_dir=str(Path(settings.disk_dir) / f"replica{number}"))


def _devices(device: str, number: int, ranks: int) -> dict[str, str]:
    """Return the environment that shows a replica its own GPUs alone, one for each rank of its engine."""
    if device != "cuda":
        return {}
    listed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    first, stop = number * ranks, (number + 1) * ranks
    if listed and stop > len(listed):
        needed = "no GPU of its own" if ranks == 1 else f"no {ranks} GPUs of its own"
        raise ServerError(
            f"--replicas: replica {number} has {needed}, CUDA_VISIBLE_DEVICES names {len(listed)}; start fewer"
        )
    own = listed[first:stop] if listed else map(str, range(first, stop))
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _log_of(log: Path | None, name: str) -> Path | None:
    return log if log is None or log == STANDARD_OUTPUT else log.with_name(f"{log.name}.{name}")
