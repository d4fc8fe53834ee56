"""Reads the metrics of a server."""

from __future__ import annotations

import requests

SECONDS = 20.0


def metrics(url: str) -> dict[str, float]:
    """All metrics at host:port: name, with labels as they stand there, to value."""
    text = requests.get(f"http://{url}/metrics", timeout=SECONDS).text
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def metric(url: str, name: str, *labels: str) -> float:
    """Sum of the series of a metric whose labels contain all of `labels`; 0 if there is none."""
    found = metrics(url).items()
    return sum(
        value for series, value in found if series.partition("{")[0] == name and all(x in series for x in labels)
    )


def running(url: str) -> float:
    """Requests of the engine that have a slot."""
    return metric(url, "kvseek:num_requests_running")
