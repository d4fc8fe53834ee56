"""The engine's metrics in Prometheus' text format. docs/metrics.md has a table of them.

Names are vLLM's, with `kvseek:` in place of `vllm:`, wherever the meaning is the same, so that a dashboard for vLLM also works
for kvseek. The engine's thread only adds to plain numbers; all costlier work is done when the text is asked for.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvseek.core.errors import ErrorCode
from kvseek.core.request import FinishReason, RequestStatistics, StepOutput, StepReport

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from kvseek.engine.cache.prefixes.store import DiskUsage
    from kvseek.engine.cache.usage import CacheUsage
    from kvseek.engine.service import EngineService

# Buckets. Seconds between tokens begin with the step time of a small batch on a GPU; seconds of requests reach beyond the ten
# minutes that a long prompt on a CPU takes.
TOKEN_MILLISECONDS = (2, 5, 7.5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000, 2500, 10000, 30000)
TOKEN_SECONDS = tuple(milliseconds / 1000 for milliseconds in TOKEN_MILLISECONDS)
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 600, 1200, 3600)
PROMPT_TOKENS = tuple(1 << power for power in range(4, 21))  # 16 to 1M
OUTPUT_TOKENS = tuple(1 << power for power in range(16))  # 1 to 32K
STEP_TOKENS = tuple(1 << power for power in range(15))  # 1 to 16K
REFRESH_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5)
TTFT = "time_to_first_token_seconds"
REQUEST_HISTOGRAMS = {  # name: buckets, description
    TTFT: (REQUEST_SECONDS, "From submission to the first token"),
    "request_time_per_output_token_seconds": (TOKEN_SECONDS, "Mean time per output token after a request's first"),
    "e2e_request_latency_seconds": (REQUEST_SECONDS, "From submission to the end"),
    "request_queue_time_seconds": (REQUEST_SECONDS, "From submission to the start of prefill"),
    "request_prefill_time_seconds": (REQUEST_SECONDS, "From the start of prefill to the first token"),
    "request_decode_time_seconds": (REQUEST_SECONDS, "From the first token to the last"),
    "request_inference_time_seconds": (REQUEST_SECONDS, "From the start of prefill to the last token"),
    "request_prompt_tokens": (PROMPT_TOKENS, "Tokens of a prompt"),
    "request_generation_tokens": (OUTPUT_TOKENS, "Tokens generated for a request"),
}
STEP_HISTOGRAMS = {
    "engine_step_time_seconds": (TOKEN_SECONDS, "Of a step: parts of prompts and one decode step"),
    "iteration_tokens_total": (STEP_TOKENS, "Tokens that a step read and generated"),
    "step_prefill_tokens": (STEP_TOKENS, "Prompt tokens of a step that read any"),
    "refresh_time_seconds": (REFRESH_SECONDS, "Upkeep of all indexes after a decode step, on the host"),
}
FINISHED_REASONS = {  # vLLM's words
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORD: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.TIMEOUT: "abort",
    FinishReason.SHUTDOWN: "abort",
    FinishReason.ERROR: "error",
}
_ENDS = (reason.value for reason in FinishReason if reason is not FinishReason.ERROR)
Values = float | Mapping[str, float]  # of a metric: one, or one for each value of a label
OUTCOMES = tuple(dict.fromkeys((*_ENDS, *(code.value for code in ErrorCode))))


class Histogram:
    """Number of values in each bucket. One thread observes; any thread may read, and misses at most the latest value.

    A value takes a few hundred nanoseconds. prometheus_client's own counters take a lock each time, which would cost the
    engine's thread some six microseconds a token.

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

    def gauge(self, name: str, description: str, value: Values, label: str = "") -> Metric:
        """Make a metric of a value that goes up and down, or of one for each value of one more label."""
        return self._made(GaugeMetricFamily, name, description, value, label)

    def counter(self, name: str, description: str, value: Values, label: str = "") -> Metric:
        """Make a metric as `gauge`, of what only grows; `_total` is added to its name."""
        return self._made(CounterMetricFamily, name, description, value, label)

    def histogram(self, name: str, description: str, histogram: Histogram) -> Metric:
        """Make a metric of a histogram's counts."""
        family = HistogramMetricFamily(f"kvseek:{name}", description, labels=self._names)
        family.add_metric(self._values, histogram.buckets(), histogram.sum)
        return family

    def _made(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        description: str,
        value: Values,
        label: str,
    ) -> Metric:
        family = kind(f"kvseek:{name}", description, labels=(*self._names, *filter(None, (label,))))
        for key, number in value.items() if isinstance(value, Mapping) else (("", value),):
            family.add_metric((*self._values, *filter(None, (key,))), number)
        return family


def written(metrics: Iterable[Metric]) -> bytes:
    """Write metrics in Prometheus' text format."""
    return generate_latest(cast("Collector", SimpleNamespace(collect=lambda: metrics)))


class EngineMetrics:
    """Counts what an engine does.

    Tokens and steps come from the engine's thread alone and are counted without a lock; requests may end in any thread.

    Parameters
    ----------
    service : EngineService
        The service whose queue, requests and cache are read whenever the text is asked for.
    model_name : str
        Value of the label `model_name`, as in vLLM; the label `method` is the engine's retrieval method.
    max_queue_size : int
        Most requests that may wait.
    """

    def __init__(self, service: EngineService, model_name: str = "kvseek", max_queue_size: int = 256) -> None:
        self._service, self._max_queue_size, self._started = service, max_queue_size, time.time()
        self._lock = threading.Lock()  # guards the counts of requests that have ended
        self._families = Families(model_name=model_name, method=service.engine.config.method)
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._finished = dict.fromkeys(FINISHED_REASONS.values(), 0)
        self._prompt_tokens = self._generated = self._cached = self._drafted = self._accepted = 0
        self._attended = 0.0
        self._token_times: dict[int, float] = {}  # by running request: the time of its last token
        self._between_tokens = Histogram(TOKEN_SECONDS)
        self._of_requests = {name: Histogram(bounds) for name, (bounds, _) in REQUEST_HISTOGRAMS.items()}
        self._of_steps = {name: Histogram(bounds) for name, (bounds, _) in STEP_HISTOGRAMS.items()}

    def record(self, outputs: Sequence[StepOutput], now: float) -> None:
        """Count the outputs that the engine has put out at a time, in seconds of time.perf_counter; a microsecond for each.

        The token that ends a request was generated like the others, though no client gets it.
        """
        for output in outputs:
            if output.token_id is not None or output.finish_reason is FinishReason.END_ID:
                before = self._token_times.get(output.request_id)
                if before is not None:
                    self._between_tokens.observe(now - before)
                elif output.statistics is not None:  # the first token
                    self._of_requests[TTFT].observe(output.statistics.ttft_seconds)
                self._token_times[output.request_id] = now
                self._generated += 1
            if output.cached_tokens:
                self._cached += output.cached_tokens
                self._attended += output.attended_tokens
            if output.finish_reason is not None:
                with self._lock:
                    self._end(output, output.finish_reason, now)

    def record_step(self, report: StepReport) -> None:
        """Count the work of a step; made to be Engine.on_step."""
        self._prompt_tokens += report.prefill_tokens
        self._drafted, self._accepted = self._drafted + report.drafted_tokens, self._accepted + report.accepted_tokens
        steps = self._of_steps
        steps["engine_step_time_seconds"].observe(report.seconds)
        steps["iteration_tokens_total"].observe(report.prefill_tokens + report.decode_batch)
        if report.prefill_tokens:
            steps["step_prefill_tokens"].observe(report.prefill_tokens)
        if report.decode_batch:
            steps["refresh_time_seconds"].observe(report.refresh_seconds)

    def refused(self, code: str, count: int = 1) -> None:
        """Count requests that a frontend refused with an ErrorCode, before the engine got them."""
        with self._lock:
            self._outcomes[code if code in self._outcomes else ErrorCode.INTERNAL.value] += count

    def text(self) -> str:
        """Return all metrics in Prometheus' text format; takes some 4 ms."""
        return written(itertools.chain(self._state(), self._tokens(), self._requests())).decode()

    def _state(self) -> Iterator[Metric]:
        """Yield the metrics of the present state."""
        engine, make = self._service.engine, self._families
        description = "When the engine process was ready, in seconds since 1970"
        yield make.gauge("engine_start_time_seconds", description, self._started)
        yield make.gauge("num_requests_running", "Requests with a slot", engine.running)
        yield make.gauge("num_requests_waiting", "Requests in the queue", engine.waiting)
        description = "Running requests that made room for others, and went on later"
        yield make.counter("num_preemptions", description, engine.preemptions)
        yield make.gauge("max_queue_size", "Requests that may wait; further ones are refused", self._max_queue_size)
        yield make.gauge("max_batch_size", "Slots: requests that may run", engine.config.max_batch_size)
        yield from self._extents(engine.cache_usage)

    def _extents(self, usage: CacheUsage) -> Iterator[Metric]:
        make, used, kept, free = self._families, usage.extents_used, usage.extents_kept, usage.extents_free
        share = used / (used + kept + free)
        yield make.gauge("kv_cache_usage_perc", "Share of the extents that requests hold, 0 to 1", share)
        yield make.gauge("extents_used", "Extents (1,024 tokens in all layers) that requests hold", used)
        yield make.gauge("extents_kept", "Extents that are only kept for later requests that begin alike", kept)
        description = "Of extents used and kept, those that sessions pin whose time to live has not passed"
        yield make.gauge("extents_pinned", description, usage.pinned_extents)
        yield make.gauge("sessions", "Conversations with a session_id that the engine knows", usage.sessions)
        yield make.gauge("extents_free", "Extents that no request holds and that are not kept", free)
        for state, extents in (("used", used), ("kept", kept), ("free", free)):
            by_location = {
                "device": extents * usage.device_extent_bytes,
                "host": extents * usage.host_extent_bytes,
            }
            description = f"Bytes of rows in {state} extents"
            yield make.gauge(f"row_pool_{state}_bytes", description, by_location, "location")
        yield make.counter("prefix_cache_queries", "Prompt tokens looked up for reuse", usage.reuse.queried_tokens)
        yield make.counter("prefix_cache_hits", "Of those, not read again", usage.reuse.reused_tokens)
        description = "Kept extents that made room for others"
        yield make.counter("prefix_cache_evictions", description, usage.reuse.evicted_extents)
        description = "Kept extents given up because a request that had used them failed"
        yield make.counter("prefix_cache_discards", description, usage.reuse.discarded_extents)
        yield from self._disk(usage.disk)
        description = "Retrieval rows in host memory that decode steps attended to"
        yield make.counter("host_rows_requested", description, usage.host_rows)
        share = math.nan if usage.hot_row_hit_ratio is None else usage.hot_row_hit_ratio
        yield make.gauge("hot_row_hit_ratio", "Share of the selected rows that the device had kept so far", share)

    def _disk(self, disk: DiskUsage) -> Iterator[Metric]:
        """Yield the metrics of prefixes on disk; all are 0 without --disk_dir."""
        make, counts = self._families, disk.counts
        yield make.gauge("prefix_disk_files", "Files of kept prefixes on disk, one an extent", disk.files)
        yield make.gauge("prefix_disk_bytes", "Bytes of these files", disk.bytes)
        yield make.gauge("prefix_disk_waiting", "Extents that wait to be written to disk", disk.waiting)
        yield make.counter("prefix_disk_written", "Files written", counts.written)
        yield make.counter("prefix_disk_loaded", "Files loaded", counts.loaded)
        description = "Prompt tokens not read because their rows were loaded"
        yield make.counter("prefix_disk_loaded_tokens", description, counts.loaded_tokens)
        yield make.counter("prefix_disk_dropped", "Extents not written, by the reason", counts.dropped, "reason")
        yield make.counter("prefix_disk_removed", "Files that made room for others", disk.removed)
        yield make.counter("prefix_disk_damaged", "Files removed because they were damaged", disk.damaged)
        yield make.counter("prefix_disk_write_seconds", "Time spent on writing files", counts.write_seconds)
        yield make.counter("prefix_disk_load_seconds", "Time spent on loading files", counts.load_seconds)

    def _tokens(self) -> Iterator[Metric]:
        make = self._families
        yield make.counter("prompt_tokens", "Prompt tokens read by all layers", self._prompt_tokens)
        yield make.counter("generation_tokens", "Tokens generated", self._generated)
        yield make.counter("spec_decode_num_draft_tokens", "Tokens of drafts that steps verified", self._drafted)
        yield make.counter("spec_decode_num_accepted_tokens", "Of those, accepted", self._accepted)
        yield make.counter("cached_tokens", "Cached tokens, summed over decode steps and requests", self._cached)
        description = "Of those, attended to: mean over layers and KV heads"
        yield make.counter("attended_tokens", description, self._attended)
        for name, (_, text) in STEP_HISTOGRAMS.items():
            yield make.histogram(name, text, self._of_steps[name])
        description = "Between two tokens of a request"
        yield make.histogram("inter_token_latency_seconds", description, self._between_tokens)

    def _requests(self) -> Iterator[Metric]:
        make = self._families
        description = "Requests by how they ended or why they were refused"
        yield make.counter("requests", description, self._outcomes, "outcome")
        description = "Requests that ended because their logits were not finite"
        yield make.counter("unsound_requests", description, self._service.engine.unsound)
        yield make.counter("request_success", "Requests that have ended", self._finished, "finished_reason")
        for name, (_, description) in REQUEST_HISTOGRAMS.items():
            yield make.histogram(name, description, self._of_requests[name])

    def _end(self, output: StepOutput, reason: FinishReason, now: float) -> None:
        self._token_times.pop(output.request_id, None)
        self._outcomes[(output.code if reason is FinishReason.ERROR else reason).value] += 1
        if output.statistics is None:
            return  # the engine never got the request
        self._finished[FINISHED_REASONS[reason]] += 1
        for name, value in _figures(output.statistics, now).items():
            self._of_requests[name].observe(value)


def _figures(statistics: RequestStatistics, now: float) -> dict[str, float]:
    """Compute the figures of a request that has ended, for the histograms; `now` in seconds of time.perf_counter.

    A phase that the request did not reach gives no figure.
    """
    figures: dict[str, float] = {
        "e2e_request_latency_seconds": now - statistics.submitted_at,
        "request_prompt_tokens": statistics.prompt_tokens,
        "request_generation_tokens": statistics.generated_tokens,
    }
    if statistics.started_at:
        figures["request_queue_time_seconds"] = statistics.queue_seconds
    if statistics.generated_tokens:
        figures["request_prefill_time_seconds"] = statistics.first_token_at - statistics.started_at
        figures["request_decode_time_seconds"] = statistics.last_token_at - statistics.first_token_at
        figures["request_inference_time_seconds"] = statistics.last_token_at - statistics.started_at
    if statistics.generated_tokens > 1:
        figures["request_time_per_output_token_seconds"] = statistics.tpot_seconds
    return figures
