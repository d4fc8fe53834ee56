"""kvseek's text on the metrics port: the engine's metrics, and those known only outside of the engine process (restarts)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvseek.server.engine.tallies import Families


def server_text(engine: str | None, restarts: Mapping[str, int]) -> str:
    """Write kvseek's metrics in Prometheus' text format.

    Parameters
    ----------
    engine : str or None
        Result of `EngineMetrics.text`; None: the engine process does not answer.
    restarts : mapping
        Number of restarts of each process of the server, by its name, from the supervisor's state file.
    """
    registry = CollectorRegistry()
    registry.register(_Restarts(restarts))
    return generate_latest(registry).decode() + (engine or "")


class _Restarts(Collector):
    def __init__(self, restarts: Mapping[str, int]) -> None:
        self._restarts = restarts

    def collect(self) -> Iterator[Metric]:
        description = "Processes of the server that were started again"
        yield Families().counters("process_restarts", description, "process", self._restarts)
