"""What the metrics port shows of kvseek: the engine's metrics, and what only those around the engine process know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvseek.server.engine.tallies import Families


def server_text(engine: str | None, restarts: Mapping[str, int]) -> str:
    """kvseek's metrics in Prometheus' text format.

    Parameters
    ----------
    engine : str or None
        What `EngineMetrics.text` gave; None: the engine process does not answer.
    restarts : mapping
        How often each process of the server was started again, by its name: the supervisor's state file.
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
