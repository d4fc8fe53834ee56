"""Counters that one thread adds to and another reads; adding takes a few hundred nanoseconds.

The counters of prometheus_client take a lock each time, which would cost the engine's thread some six microseconds a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric


class Histogram:
    """Number of values in each bucket. One thread observes; any thread may read, and misses at most the latest value.

    Parameters
    ----------
    bounds : sequence of float
        Upper bounds of the buckets, ascending, each inside its bucket; larger values fall into one more bucket.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def sum(self) -> float:
        """Sum of all values."""
        return self._sum

    def buckets(self) -> list[tuple[str, float]]:
        """Return, in Prometheus' form, the upper bound of each bucket and the number of values up to it."""
        found, buckets = 0, []
        for bound, count in zip((*self._bounds, None), list(self._counts), strict=True):
            found += count
            buckets.append(("+Inf" if bound is None else str(float(bound)), float(found)))
        return buckets


class Families:
    """Makes metric families whose names begin with `kvseek:` and which all have the same labels."""

    def __init__(self, **labels: str) -> None:
        self._names, self._values = tuple(labels), tuple(labels.values())

    def gauge(self, name: str, description: str, value: float) -> Metric:
        """Make a metric of a value that goes up and down."""
        family = GaugeMetricFamily(f"kvseek:{name}", description, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def counter(self, name: str, description: str, value: float) -> Metric:
        """Make a metric of a value that only grows; `_total` is added to its name."""
        family = CounterMetricFamily(f"kvseek:{name}", description, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def gauges(self, name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
        """Make a gauge for each value of one more label."""
        family = GaugeMetricFamily(f"kvseek:{name}", description, labels=(*self._names, label))
        for key, value in values.items():
            family.add_metric((*self._values, key), value)
        return family

    def counters(self, name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
        """Make a counter for each value of one more label."""
        family = CounterMetricFamily(f"kvseek:{name}", description, labels=(*self._names, label))
        for key, value in values.items():
            family.add_metric((*self._values, key), value)
        return family

    def histogram(self, name: str, description: str, histogram: Histogram) -> Metric:
        """Make a metric of a histogram's counts."""
        family = HistogramMetricFamily(f"kvseek:{name}", description, labels=self._names)
        family.add_metric(self._values, histogram.buckets(), histogram.sum)
        return family
