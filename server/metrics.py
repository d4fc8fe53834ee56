"""The engine's metrics in Prometheus' text format. docs/metrics.md has a table of them.

Names are vLLM's, with `kvseek:` in the place of `vllm:`, wherever the meaning is the same, so that a dashboard for one serves
the other. The engine's thread only adds to plain numbers; what costs more is done when somebody asks for the text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvseek.engine.errors import ErrorCode
from kvseek.engine.metrics import RequestStatistics
from kvseek.engine.request import FinishReason, StepOutput
from kvseek.engine.service import EngineService

from .tallies import Histogram

# Seconds: between tokens, from the few milliseconds of a small batch on a GPU; of requests, up to prompts read for ten minutes.
TOKEN_SECONDS = (
    0.002,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    10,
    30,
)
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 600, 1200, 3600)
PROMPT_TOKENS = tuple(1 << power for power in range(4, 21))  # 16 to 1M
OUTPUT_TOKENS = tuple(1 << power for power in range(16))  # 1 to 32K
SUCCESS = {  # vLLM's words for the ends of requests
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORD: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.TIMEOUT: "abort",
    FinishReason.SHUTDOWN: "abort",
    FinishReason.ERROR: "error",
}
ENDS = tuple(reason.value for reason in FinishReason if reason is not FinishReason.ERROR)
OUTCOMES = tuple(dict.fromkeys((*ENDS, *(code.value for code in ErrorCode))))
REQUEST_HISTOGRAMS = {  # name: buckets, what it is of
    "time_to_first_token_seconds": (REQUEST_SECONDS, "From submission to the first token"),
    "request_time_per_output_token_seconds": (
        TOKEN_SECONDS,
        "Mean time of an output token after the first, per request",
    ),
    "e2e_request_latency_seconds": (REQUEST_SECONDS, "From submission to the end"),
    "request_queue_time_seconds": (REQUEST_SECONDS, "From submission to the start of prefill"),
    "request_prefill_time_seconds": (REQUEST_SECONDS, "From the start of prefill to the first token"),
    "request_decode_time_seconds": (REQUEST_SECONDS, "From the first token to the last"),
    "request_inference_time_seconds": (REQUEST_SECONDS, "From the start of prefill to the last token"),
    "request_prompt_tokens": (PROMPT_TOKENS, "Tokens of a prompt"),
    "request_generation_tokens": (OUTPUT_TOKENS, "Tokens generated for a request"),
}
DOWN = (
    "# HELP kvseek:engine_up Whether the engine process answers\n# TYPE kvseek:engine_up gauge\nkvseek:engine_up 0.0\n"
)


class EngineMetrics(Collector):
    """Counts what an engine does.

    `record` is called by the engine's thread for every output, `refused` and `text` by the event loop's.

    Parameters
    ----------
    service : EngineService
        Its queue, requests and cache are looked at whenever the text is asked for.
    model_name : str
        What the label `model_name` says, as in vLLM; the label `method` is the engine's retrieval method.
    """

    def __init__(self, service: EngineService, model_name: str = "kvseek") -> None:
        self._service, self._started = service, time.time()
        self._labels = {"model_name": model_name, "method": service.config.method}
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._refusals = dict.fromkeys(OUTCOMES, 0)  # of the event loop: two threads never add to one number
        self._success = dict.fromkeys(SUCCESS.values(), 0)
        self._prompt_tokens = self._generated = self._cached = 0
        self._attended = 0.0
        self._token_times: dict[int, float] = {}  # of running requests: when the last token came
        self._between_tokens = Histogram(TOKEN_SECONDS)
        self._of_requests = {name: Histogram(bounds) for name, (bounds, _) in REQUEST_HISTOGRAMS.items()}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def record(self, output: StepOutput) -> None:
        """Count one output of the engine."""
        if output.token_id is not None:
            now = time.perf_counter()
            before = self._token_times.get(output.request_id)
            if before is not None:
                self._between_tokens.observe(now - before)
            self._token_times[output.request_id] = now
            self._generated += 1
        if output.cached_tokens:
            self._cached += output.cached_tokens
            self._attended += output.attended_tokens
        if output.finish_reason is not None:
            self._end(output, output.finish_reason)

    def refused(self, code: str) -> None:
        """Count a request that was refused, by an ErrorCode, before the engine had it."""
        self._refusals[code if code in self._refusals else ErrorCode.INTERNAL.value] += 1

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        """The metrics as prometheus_client wants them; see `text`."""
        up = not self._service.failure
        yield GaugeMetricFamily("kvseek:engine_up", "Whether the engine process answers", float(up))
        yield self._gauge("engine_start_time_seconds", "When the engine process was ready, Unix time", self._started)
        yield from self._state()
        yield self._counter("prompt_tokens", "Prompt tokens of requests that have got a token", self._prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", self._generated)
        yield self._counter("cached_tokens", "Cached tokens, summed over decode steps and requests", self._cached)
        description = "Of those, attended to: mean over layers and KV heads"
        yield self._counter("attended_tokens", description, self._attended)
        yield self._labelled("requests", "Requests by how they ended or why they were refused", "outcome", self._all())
        yield self._labelled("request_success", "Requests that ended", "finished_reason", self._success)
        yield self._histogram("inter_token_latency_seconds", "Between two tokens of a request", self._between_tokens)
        for name, (_, description) in REQUEST_HISTOGRAMS.items():
            yield self._histogram(name, description, self._of_requests[name])

    def _end(self, output: StepOutput, reason: FinishReason) -> None:
        self._token_times.pop(output.request_id, None)
        self._outcomes[(output.code if reason is FinishReason.ERROR else reason).value] += 1
        if output.statistics is None:
            return  # it was never started
        self._success[SUCCESS[reason]] += 1
        for name, value in _figures(output.statistics, time.perf_counter()).items():
            self._of_requests[name].observe(value)
        if output.statistics.generated_tokens:
            self._prompt_tokens += output.statistics.prompt_tokens

    def _all(self) -> dict[str, int]:
        return {outcome: count + self._refusals[outcome] for outcome, count in self._outcomes.items()}

    def _state(self) -> Iterator[Metric]:
        """What holds now: queue, running requests, extents."""
        service = self._service
        yield self._gauge("num_requests_running", "Requests with a slot", service.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue", service.waiting)

    def _gauge(self, name: str, description: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"kvseek:{name}", description, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, description: str, value: float) -> Metric:
        family = CounterMetricFamily(f"kvseek:{name}", description, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _labelled(self, name: str, description: str, label: str, values: dict[str, int]) -> Metric:
        """A counter for each value of a further label."""
        family = CounterMetricFamily(f"kvseek:{name}", description, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family

    def _histogram(self, name: str, description: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"kvseek:{name}", description, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
        return family


def _figures(statistics: RequestStatistics, now: float) -> dict[str, float]:
    """What the histograms of requests get when one ends, `now` in seconds of time.perf_counter."""
    figures: dict[str, float] = {
        "e2e_request_latency_seconds": now - statistics.submitted_at,
        "request_prompt_tokens": statistics.prompt_tokens,
        "request_generation_tokens": statistics.generated_tokens,
    }
    if statistics.started_at:
        figures["request_queue_time_seconds"] = statistics.queue_seconds
    if statistics.generated_tokens:
        figures["time_to_first_token_seconds"] = statistics.ttft_seconds
        figures["request_prefill_time_seconds"] = statistics.first_token_at - statistics.started_at
        figures["request_decode_time_seconds"] = statistics.last_token_at - statistics.first_token_at
        figures["request_inference_time_seconds"] = statistics.last_token_at - statistics.started_at
    if statistics.generated_tokens > 1:
        figures["request_time_per_output_token_seconds"] = statistics.tpot_seconds
    return figures
