"""Sends a span of every request to an OpenTelemetry collector. Opt-in: without `--otlp_endpoint` nothing here is used.

Names of attributes are those of OpenTelemetry's conventions for generative AI, or vLLM's where the conventions have none.
Prompts and answers are never part of a span.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvseek.core.request import FinishReason, Request, RequestStatistics, StepOutput
from kvseek.server.errors import ServerError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

SPAN_NAME = "llm_request"
TRACES_PATH = "/v1/traces"
EXPORT_SECONDS = 3.0  # most time for sending spans, for which the engine process waits when it ends
SERVICE_NAME = "kvseek"


class RequestTracer:
    """Makes spans and sends them, from a thread of its own.

    Parameters
    ----------
    endpoint : str
        URL of an OTLP collector that listens for HTTP, as in OTEL_EXPORTER_OTLP_ENDPOINT: http://collector:4318.
    model_name : str
        Name of the model in spans.

    Raises
    ------
    ServerError
        If OpenTelemetry's packages are not installed.
    """

    def __init__(self, endpoint: str, model_name: str = "kvseek") -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ServerError(
                f"--otlp_endpoint = {endpoint!r}: OpenTelemetry is not installed ({error.name} is missing); "
                "run: pip install 'kvseek[otel]', or leave the flag out"
            ) from None
        base = endpoint.rstrip("/").removesuffix(TRACES_PATH)
        exporter = OTLPSpanExporter(base + TRACES_PATH, timeout=EXPORT_SECONDS)
        # Resource.create would let the name here win over OTEL_SERVICE_NAME.
        resource = Resource({"service.name": SERVICE_NAME}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvseek.server")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def start(self, request: Request, trace: str = "") -> RequestSpan:
        """Begin the span of a request that has just come.

        `trace` is the client's W3C traceparent; a span without a valid one begins a trace of its own.
        """
        parent = self._propagator.extract({"traceparent": trace} if trace else {})
        return RequestSpan(self._tracer, parent, _asked_for(request, self._model_name))

    def close(self) -> None:
        """Send the spans that have not been sent yet, for EXPORT_SECONDS at most; no span may be ended after this."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one request. It is made only at the request's end, so it costs a running request nothing."""

    def __init__(self, tracer: Tracer, parent: Context, attributes: dict[str, AttributeValue]) -> None:
        self._tracer, self._parent, self._attributes = tracer, parent, attributes
        self._started = time.time_ns()

    def end(self, output: StepOutput) -> None:
        """End the span with the request's last output; takes some 0.1 ms, and sends nothing itself."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        attributes = self._attributes | _outcome(output)
        ended = time.time_ns()
        if output.statistics is not None:
            attributes |= _measured(output.statistics, (ended - self._started) / 1e9)
        span = self._tracer.start_span(SPAN_NAME, self._parent, SpanKind.SERVER, attributes, start_time=self._started)
        if output.finish_reason is FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR, output.error))
        span.end(ended)


def _asked_for(request: Request, model_name: str) -> dict[str, AttributeValue]:
    sampling = request.sampling
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": model_name,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.usage.prompt_tokens": len(request.prompt_ids),
    }


def _outcome(output: StepOutput) -> dict[str, AttributeValue]:
    reason = output.finish_reason or FinishReason.ERROR
    attributes: dict[str, AttributeValue] = {"gen_ai.response.finish_reasons": (reason.value,)}
    if reason is FinishReason.ERROR:
        attributes["error.type"] = output.code.value
    return attributes


def _measured(statistics: RequestStatistics, seconds: float) -> dict[str, AttributeValue]:
    """Make the attributes of tokens and latencies; `seconds` is the whole time. A phase not reached has no attribute."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.completion_tokens": statistics.generated_tokens,
        "gen_ai.latency.e2e": seconds,
    }
    if statistics.started_at:
        attributes["gen_ai.latency.time_in_queue"] = statistics.queue_seconds
    if statistics.generated_tokens:
        first, last, started = statistics.first_token_at, statistics.last_token_at, statistics.started_at
        attributes["gen_ai.latency.time_to_first_token"] = statistics.ttft_seconds
        attributes["gen_ai.latency.time_in_model_prefill"] = first - started
        attributes["gen_ai.latency.time_in_model_decode"] = last - first
        attributes["gen_ai.latency.time_in_model_inference"] = last - started
    if statistics.cached_token_steps:
        attributes["kvseek.attended_share"] = statistics.attended_share
    return attributes
