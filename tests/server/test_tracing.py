"""Spans of requests, as a collector of OpenTelemetry gets them over HTTP."""

from __future__ import annotations

import builtins
import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from tests.support.waiting import SECONDS

from kvseek.core.errors import ErrorCode
from kvseek.core.request import FinishReason, Request, RequestStatistics, SamplingConfig, StepOutput
from kvseek.server.engine.tracing import RequestTracer
from kvseek.server.errors import ServerError

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = (101, 102, 103)


class Collector(HTTPServer):
    """Takes OTLP over HTTP; `spans` gets every span, with its resource's attributes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.spans: queue.Queue[tuple[Any, dict[str, Any]]] = queue.Queue()
        self.paths: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.server.paths.append(self.path)
        message = ExportTraceServiceRequest()
        message.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource_spans in message.resource_spans:
            for scope in resource_spans.scope_spans:
                for span in scope.spans:
                    self.server.spans.put((span, values(resource_spans.resource.attributes)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def values(attributes: Any) -> dict[str, Any]:
    """Attributes of protocol buffers as a dictionary."""
    found: dict[str, Any] = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.proto")
    with Collector() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def ended(generated: int = 5) -> StepOutput:
    now = time.perf_counter()
    statistics = RequestStatistics(len(PROMPT), now - 4, now - 3, now - 2, now - 1, generated, 1000, 250.0)
    return StepOutput(1, 7, FinishReason.LENGTH, statistics=statistics)


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_a_request_is_a_span_of_its_clients_trace(collector: Collector, path: str) -> None:
    tracer = RequestTracer(collector.endpoint + path, "llama")
    request = Request(PROMPT, 5, SamplingConfig(temperature=0.5, top_p=0.9))
    span = tracer.start(request, f"00-{TRACE_ID}-{PARENT_ID}-01")
    time.sleep(0.01)
    span.end(ended())
    tracer.close()
    found, resource = collector.spans.get(timeout=SECONDS)
    assert collector.paths == ["/v1/traces"]
    assert resource["service.name"] == "kvseek"
    assert (found.name, found.trace_id.hex(), found.parent_span_id.hex()) == ("llm_request", TRACE_ID, PARENT_ID)
    assert found.end_time_unix_nano - found.start_time_unix_nano >= 10_000_000
    attributes = values(found.attributes)
    assert attributes["gen_ai.request.model"] == "llama"
    assert attributes["gen_ai.request.max_tokens"] == 5
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.usage.prompt_tokens"] == 3
    assert attributes["gen_ai.usage.completion_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.latency.time_in_queue"] == pytest.approx(1)
    assert attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(2)
    assert attributes["gen_ai.latency.time_in_model_prefill"] == pytest.approx(1)
    assert attributes["gen_ai.latency.time_in_model_decode"] == pytest.approx(1)
    assert attributes["gen_ai.latency.e2e"] >= 0.01
    assert attributes["kvseek.attended_share"] == 0.25


def test_the_environment_names_the_service(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracer = RequestTracer(collector.endpoint)
    tracer.start(Request(PROMPT, 5)).end(ended())
    tracer.close()
    assert collector.spans.get(timeout=SECONDS)[1]["service.name"] == "mine"


def test_a_refused_request_is_a_span_with_an_error_and_a_trace_of_its_own(collector: Collector) -> None:
    tracer = RequestTracer(collector.endpoint)
    output = StepOutput(1, finish_reason=FinishReason.ERROR, error="256 requests wait", code=ErrorCode.QUEUE_FULL)
    tracer.start(Request(PROMPT, 5), "no traceparent at all").end(output)
    tracer.close()
    found, _ = collector.spans.get(timeout=SECONDS)
    attributes = values(found.attributes)
    assert not found.parent_span_id
    assert found.status.message == "256 requests wait"
    assert attributes["error.type"] == "queue_full"
    assert not [name for name in attributes if name.startswith("gen_ai.latency")]


def test_a_client_that_does_not_sample_gets_no_span(collector: Collector) -> None:
    tracer = RequestTracer(collector.endpoint)
    tracer.start(Request(PROMPT, 5), f"00-{TRACE_ID}-{PARENT_ID}-00").end(ended())
    tracer.close()
    assert collector.spans.empty()


def test_a_collector_that_is_not_there_holds_nobody_up() -> None:
    pytest.importorskip("opentelemetry.sdk")
    tracer = RequestTracer("http://127.0.0.1:9")  # discard: nobody listens
    started = time.monotonic()
    for _ in range(100):
        tracer.start(Request(PROMPT, 5)).end(ended())
    tracer.close()
    assert time.monotonic() - started < SECONDS, "a second or more each, if a span waited for its collector"


def test_missing_packages_are_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    own_import = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError("no such module", name=name)
        return own_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ServerError, match=r"pip install 'kvseek\[otel\]'"):
        RequestTracer("http://collector:4318")
