"""The metrics of all replicas at one port, each with the label `replica`: a process of `kvseek serve --replicas`.

So Prometheus scrapes one address that stays, whatever ports the replicas have. Health is there too: ready while a replica is.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvseek.core.errors import UnavailableError
from kvseek.core.liveness import answer_at

from .engine.metrics import written
from .http.metrics import (
    ENDPOINTS,
    MAX_METRICS_CONNECTIONS,
    UP,
    fetched,
    metrics_response,
    restarts_in,
    server_text,
)
from .http.server import HttpServer
from .processes import run_process

LABEL = "replica"
ANSWER_SECONDS = 5.0  # most time for a replica's metrics, for two of which it waits for its engine and for Triton
SILENT = UP + "".join(f'kvseek:up{{process="{process}"}} 0\n' for process in ("engine", "triton"))
# A counter whose name does not end in _total, as Triton's: prometheus_client would give it another name.
OTHER_COUNTER = re.compile(r"^(# TYPE (?!\S+_total )\S+) counter$", re.MULTILINE)


class ReplicaMetrics:
    """The handlers of the port.

    Parameters
    ----------
    replicas : sequence of str
        host:port of the replicas' metrics ports, in order of their numbers.
    router : str
        Base URL of the router.
    state : Path
        The supervisor's file of restarts of the router and of this process.
    """

    def __init__(self, replicas: Sequence[str], router: str, state: Path) -> None:
        self._replicas, self._router, self._state = replicas, router, state

    def routes(self) -> list[BaseRoute]:
        """Make the routes of the handlers."""
        return [
            Route("/metrics", self.metrics),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
        ]

    async def metrics(self, _: Request) -> Response:
        """Answer with the metrics of all replicas, and those of the router's process."""
        router, *found = await asyncio.gather(
            fetched(f"{self._router}/health", ANSWER_SECONDS),
            *(fetched(f"http://{place}/metrics", ANSWER_SECONDS) for place in self._replicas),
        )
        texts = {str(number): SILENT if text is None else text for number, text in enumerate(found)}
        up = f'{UP}kvseek:up{{process="router"}} {int(router is not None)}\n'
        own = server_text(None, restarts_in(self._state)) + up
        return metrics_response(merged(texts, own))

    async def live(self, _: Request) -> Response:
        """Answer 200 while this process runs."""
        return Response()

    async def ready(self, _: Request) -> Response:
        """Answer 200 if the router answers and a replica is ready, else 503."""
        router, *found = await asyncio.gather(
            fetched(f"{self._router}/health", ANSWER_SECONDS),
            *(fetched(f"http://{place}/v2/health/ready", ANSWER_SECONDS) for place in self._replicas),
        )
        if router is None:
            raise UnavailableError("not ready: the router does not answer")
        if set(found) == {None}:
            raise UnavailableError("not ready: no replica is")
        return Response()


def merged(texts: Mapping[str, str], own: str = "") -> bytes:
    """Merge texts in Prometheus' format: samples of `texts` get their key as the label `replica`, those of `own` stay."""
    families: dict[str, Metric] = {}
    for replica, text in [("", own), *texts.items()]:
        for family in text_string_to_metric_families(OTHER_COUNTER.sub(r"\1 untyped", text)):
            if family.name not in families:
                families[family.name] = Metric(family.name, family.documentation, family.type)
            label = {LABEL: replica} if replica else {}
            families[family.name].samples += [
                sample._replace(labels=sample.labels | label) for sample in family.samples
            ]
    return written(families.values())


async def run(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    metrics = ReplicaMetrics(arguments.replicas, arguments.router, arguments.state)
    server = HttpServer(metrics.routes(), ENDPOINTS, MAX_METRICS_CONNECTIONS)
    try:
        await server.start(arguments.host, arguments.port, "--metrics_port")
        answering = await answer_at(arguments.alive)
        await stop.wait()
        answering.close()
    finally:
        await server.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; its arguments come from `kvseek serve --replicas`."""
    parser = argparse.ArgumentParser(prog="python -m kvseek.server.replica_metrics", description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--replicas", nargs="+", required=True, help="host:port of their metrics, in order")
    parser.add_argument("--router", required=True, help="base URL of the router")
    parser.add_argument("--state", type=Path, required=True, help="the supervisor's file of restarts")
    parser.add_argument("--alive", type=Path, required=True, help="socket at which the supervisor asks")
    return run_process(run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
