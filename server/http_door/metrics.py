"""The metrics port: serves the engine's metrics, whether each process answered, then Triton's but for durations."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from kvseek.core.errors import KvseekError
from kvseek.server.process_metrics import server_text
from kvseek.server.requests.engine_client import EngineClient
from kvseek.server.triton.durations import metrics_without_durations

TRITON_SECONDS = 2.0
MAX_METRICS_CONNECTIONS = 64
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UP = "# HELP kvseek:up Whether a process of the server answers.\n# TYPE kvseek:up gauge\n"
logger = logging.getLogger(__name__)


class MetricsRoutes:
    """The handler of /metrics.

    Parameters
    ----------
    answers : callable
        Returns whether the engine's loop answers.
    triton : str
        host:port of Triton's own metrics.
    state : Path or None
        The supervisor's file of restarts, see Supervisor.
    """

    def __init__(self, client: EngineClient, triton: str, state: Path | None, answers: Callable[[], bool]) -> None:
        self._client, self._url, self._state, self._answers = client, f"http://{triton}/metrics", state, answers
        timeout = aiohttp.ClientTimeout(total=TRITON_SECONDS)
        self._session = aiohttp.ClientSession(timeout=timeout)

    async def close(self) -> None:
        """Disconnect."""
        await self._session.close()

    def routes(self) -> list[web.RouteDef]:
        """Make the route of the handler."""
        return [web.get("/metrics", self.metrics)]

    async def metrics(self, _: web.Request) -> web.Response:
        """Answer with all metrics that are available now."""
        return web.Response(body=await self.text(), headers={"Content-Type": CONTENT_TYPE})

    async def text(self) -> bytes:
        """Write all metrics that are available now."""
        engine, triton = await asyncio.gather(self._engine_text(), self._triton_text())
        up = {"engine": engine is not None and self._answers(), "triton": triton is not None}
        text = (
            server_text(engine, {} if self._state is None else restarts_in(self._state))
            + UP
            + "".join(f'kvseek:up{{process="{process}"}} {int(answers)}\n' for process, answers in up.items())
        )
        return (text + (triton or "")).encode("utf-8")

    async def _engine_text(self) -> str | None:
        try:
            return await self._client.read_metrics()
        except KvseekError:
            return None

    async def _triton_text(self) -> str | None:
        try:
            async with self._session.get(self._url) as response:
                text = await response.text("utf-8", "replace")
                return metrics_without_durations(text) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None


def restarts_in(state: Path) -> dict[str, int]:
    """Read the supervisor's file of restarts: their number by process."""
    try:
        counts: dict[str, int] = json.loads(state.read_text(encoding="utf-8"))
        return counts
    except (OSError, ValueError) as error:
        logger.error("the file of restarts cannot be read: %s", error)
        return {}
