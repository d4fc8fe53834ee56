"""The metrics port: serves the engine's metrics, whether each process answered, then Triton's but for durations."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import requests
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvseek.core.errors import KvseekError
from kvseek.server.engine.metrics import Families, written
from kvseek.server.requests.engine_client import EngineClient
from kvseek.server.triton.relay import metrics_without_durations

TRITON_SECONDS = 2.0
MAX_METRICS_CONNECTIONS = 64
ENDPOINTS = "/metrics, /v2/health/live and /v2/health/ready"  # of a metrics port
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UP = "# HELP kvseek:up Whether a process of the server answers.\n# TYPE kvseek:up gauge\n"
logger = logging.getLogger(__name__)


class MetricsRoutes:
    """The handler of /metrics.

    Parameters
    ----------
    answers : callable
        Returns whether the engine's loop answers.
    triton : str or None
        host:port of Triton's own metrics; None: there is no Triton, and nothing but the engine to tell of.
    state : Path or None
        The supervisor's file of restarts, see Supervisor.
    """

    def __init__(
        self,
        client: EngineClient,
        triton: str | None = None,
        state: Path | None = None,
        answers: Callable[[], bool] = lambda: True,
    ) -> None:
        self._client, self._triton, self._state, self._answers = client, triton, state, answers

    def routes(self) -> list[BaseRoute]:
        """Make the route of the handler."""
        return [Route("/metrics", self.metrics)]

    async def metrics(self, _: Request) -> Response:
        """Answer with all metrics that are available now."""
        return metrics_response((await self._text()).encode())

    async def _text(self) -> str:
        if self._triton is None:
            return server_text(await self._engine_text(), {})
        engine, triton = await asyncio.gather(
            self._engine_text(), fetched(f"http://{self._triton}/metrics", TRITON_SECONDS)
        )
        up = {"engine": engine is not None and self._answers(), "triton": triton is not None}
        return (
            server_text(engine, {} if self._state is None else restarts_in(self._state))
            + UP
            + "".join(f'kvseek:up{{process="{process}"}} {int(answers)}\n' for process, answers in up.items())
            + metrics_without_durations(triton or "")
        )

    async def _engine_text(self) -> str | None:
        try:
            return await self._client.read_metrics()
        except KvseekError:
            return None


def metrics_response(text: bytes) -> Response:
    """Make the response of a metrics port."""
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


async def fetched(url: str, seconds: float) -> str | None:
    """Return what a process of this machine answers with status 200, or None."""

    def fetch() -> str | None:
        with requests.Session() as session:
            session.trust_env = False  # no proxy leads to this machine
            response = session.get(url, timeout=seconds)
        return response.content.decode("utf-8", "replace") if response.status_code == 200 else None

    try:
        return await asyncio.wait_for(asyncio.to_thread(fetch), seconds)
    except (requests.RequestException, TimeoutError):
        return None


def restarts_in(state: Path) -> dict[str, int]:
    """Read the supervisor's file of restarts: their number by process."""
    try:
        counts: dict[str, int] = json.loads(state.read_text(encoding="utf-8"))
        return counts
    except (OSError, ValueError) as error:
        logger.error("the file of restarts cannot be read: %s", error)
        return {}


def server_text(engine: str | None, restarts: Mapping[str, int]) -> str:
    """Write kvseek's metrics in Prometheus' text format.

    Parameters
    ----------
    engine : str or None
        Result of `EngineMetrics.text`; None: the engine process does not answer.
    restarts : mapping
        Number of restarts of each process of the server, by its name, from the supervisor's state file.
    """
    description = "Processes of the server that were started again"
    return written([Families().counter("process_restarts", description, restarts, "process")]).decode() + (engine or "")
