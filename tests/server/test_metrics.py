"""The engine's metrics: what they count, that dashboard, rules and documentation name what there is, and the rules themselves."""

from __future__ import annotations

import json
import math
import queue
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import ROOT, BuildEngine, RandomModel
from tests.support.deployment import read

from kvseek.core.errors import ErrorCode
from kvseek.core.request import FinishReason, Request, RequestStatistics, StepOutput, StepReport
from kvseek.engine.cache.prefixes.cache import ReuseCounts
from kvseek.engine.cache.usage import CacheUsage
from kvseek.engine.engine import Engine
from kvseek.engine.service import EngineService
from kvseek.server.engine.metrics import OUTCOMES, EngineMetrics, Histogram
from kvseek.server.http.metrics import UP, server_text

PROMPT = tuple(i * 13 % 101 for i in range(300))
LONG_PROMPT = tuple(i * 7 % 101 for i in range(700))  # has tokens in the retrieval region
TIMEOUT = 60.0
PROMTOOL = shutil.which("promtool")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """Value of each sample by its name and labels, without `model_name` and `method`, which all of the engine's have."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = {key: value for key, value in sample.labels.items() if key not in ("model_name", "method")}
            found[sample.name, frozenset(own.items())] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[f"kvseek:{name}", frozenset(labels.items())]


class Server:
    """A tiny engine that has served requests, and its metrics."""

    def __init__(self, directory: Path) -> None:
        engine = Engine.load(directory, None, 3)
        self.service = EngineService(engine)
        self.metrics = EngineMetrics(self.service, "tiny", 3)
        engine.on_step = self.metrics.record_step

    def ask(self, request: Request) -> list[StepOutput]:
        outputs: queue.Queue[StepOutput] = queue.Queue()

        def on_output(output: StepOutput) -> None:
            self.metrics.record([output], time.perf_counter())
            outputs.put(output)

        self.service.submit(request, on_output)
        found = [outputs.get(timeout=TIMEOUT)]
        while found[-1].finish_reason is None:
            found.append(outputs.get(timeout=TIMEOUT))
        return found


FLAGS = ("--kernels", "reference", "--cache.full_threshold", "0")


@pytest.fixture(scope="module")
def server(random_model: RandomModel, build_engine: BuildEngine) -> Iterator[Server]:
    model = random_model("llama")
    server = Server(build_engine(model, "pariskv", "--pariskv.top_k", "100", *FLAGS))
    for prompt, tokens in ((PROMPT, 5), (PROMPT, 8), (LONG_PROMPT, 9)):
        assert server.ask(Request(prompt, tokens))[-1].finish_reason is FinishReason.LENGTH
    server.metrics.refused(ErrorCode.QUEUE_FULL)
    while server.service.call(lambda: None) is None and server.service.engine.running:
        time.sleep(0.01)
    yield server
    server.service.close()


def exported(server: Server) -> str:
    """What the metrics port shows, but for Triton's."""
    restarts = {"engine": 0, "doors": 0, "triton": 0}
    return server_text(server.metrics.text(), restarts) + UP + 'kvseek:up{process="engine"} 1\n'


def test_requests_are_counted(server: Server) -> None:
    found = samples(server.metrics.text())
    assert value(found, "prompt_tokens_total") == 2 * len(PROMPT) + len(LONG_PROMPT)
    assert value(found, "generation_tokens_total") == 5 + 8 + 9
    assert value(found, "requests_total", outcome="length") == 3
    assert value(found, "requests_total", outcome="queue_full") == 1
    assert value(found, "request_success_total", finished_reason="length") == 3
    assert value(found, "request_prompt_tokens_sum") == 2 * len(PROMPT) + len(LONG_PROMPT)
    assert value(found, "request_generation_tokens_sum") == 22
    assert value(found, "inter_token_latency_seconds_count") == 22 - 3
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_time_per_output_token"):
        assert value(found, f"{name}_seconds_count") == 3
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    total = sum(value(found, f"{name}_seconds_sum") for name in parts)
    assert 0 < total <= value(found, "e2e_request_latency_seconds_sum")


def test_steps_are_counted(server: Server) -> None:
    found = samples(server.metrics.text())
    assert value(found, "step_prefill_tokens_sum") == 2 * len(PROMPT) + len(LONG_PROMPT)
    assert value(found, "refresh_time_seconds_count") == 22 - 3, "one for each decode step"
    generated_by_decoding = 22 - 3
    read = 2 * len(PROMPT) + len(LONG_PROMPT)
    assert value(found, "iteration_tokens_total_sum") == read + generated_by_decoding
    assert value(found, "engine_step_time_seconds_count") == value(found, "iteration_tokens_total_count")
    assert 0 < value(found, "attended_tokens_total") < value(found, "cached_tokens_total")
    assert value(found, "host_rows_requested_total") > 0


def test_the_state_is_shown(server: Server) -> None:
    found = samples(server.metrics.text())
    assert value(found, "num_requests_running") == value(found, "num_requests_waiting") == 0
    assert value(found, "max_queue_size") == 3
    assert value(found, "max_batch_size") == server.service.engine.config.max_batch_size
    assert value(found, "extents_used") == value(found, "kv_cache_usage_perc") == 0
    assert value(found, "extents_free") > 0
    assert value(found, "row_pool_free_bytes", location="device") == 0
    model = server.service.engine.config.model
    row_bytes = model.num_layers * model.num_kv_heads * 2 * model.head_dim * 4
    assert value(found, "row_pool_free_bytes", location="host") == value(found, "extents_free") * 1024 * row_bytes
    assert math.isnan(value(found, "hot_row_hit_ratio")), "nobody counts hits on the CPU"
    assert time.time() - 600 < value(found, "engine_start_time_seconds") <= time.time()


def test_every_sample_has_the_labels(server: Server) -> None:
    for family in text_string_to_metric_families(server.metrics.text()):
        assert family.documentation
        for sample in family.samples:
            assert (sample.labels["model_name"], sample.labels["method"]) == ("tiny", "pariskv"), sample


def stand_in() -> Any:
    """A service of an engine on a GPU whose method counts hits."""
    usage = CacheUsage(3, 2, 1, 100, 200, 64, 0.75, ReuseCounts(100, 40, 7, 5), sessions=3, pinned_extents=2)
    config = SimpleNamespace(method="clusterkv", max_batch_size=4)
    engine = SimpleNamespace(running=2, waiting=1, unsound=6, preemptions=8, cache_usage=usage, config=config)
    return SimpleNamespace(engine=engine)


def test_extents_on_both_sides() -> None:
    found = samples(EngineMetrics(stand_in()).text())
    assert value(found, "kv_cache_usage_perc") == 0.5
    assert value(found, "extents_kept") == 2
    assert value(found, "num_preemptions_total") == 8
    assert value(found, "row_pool_kept_bytes", location="host") == 400
    assert value(found, "row_pool_used_bytes", location="device") == 300
    assert value(found, "row_pool_used_bytes", location="host") == 600
    assert value(found, "row_pool_free_bytes", location="host") == 200
    assert value(found, "host_rows_requested_total") == 64
    assert value(found, "hot_row_hit_ratio") == 0.75
    assert value(found, "prefix_cache_queries_total") == 100
    assert value(found, "prefix_cache_hits_total") == 40
    assert value(found, "prefix_cache_evictions_total") == 7
    assert value(found, "prefix_cache_discards_total") == 5
    assert value(found, "unsound_requests_total") == 6


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_end_has_an_outcome(reason: FinishReason) -> None:
    metrics = EngineMetrics(stand_in())
    now = time.perf_counter()
    waiting = RequestStatistics(10, now - 1)
    metrics.record(
        [StepOutput(1, finish_reason=reason, statistics=waiting, code=ErrorCode.TIMEOUT)], time.perf_counter()
    )
    found = samples(metrics.text())
    assert sum(value(found, "requests_total", outcome=outcome) for outcome in OUTCOMES) == 1
    assert value(found, "e2e_request_latency_seconds_count") == 1
    assert value(found, "request_queue_time_seconds_count") == 0, "it never started"


def test_a_running_request_shows_at_once() -> None:
    metrics = EngineMetrics(stand_in())
    now = time.perf_counter()
    first = StepOutput(1, 7, statistics=RequestStatistics(10, now - 3, now - 2, now - 1, now - 1, 1))
    metrics.record([first], now)
    metrics.record([StepOutput(1, 8, cached_tokens=100, attended_tokens=25.0)], now)
    metrics.record_step(StepReport(1, 0.02, 1, 512, refresh_seconds=0.001, drafted_tokens=7, accepted_tokens=4))
    found = samples(metrics.text())
    assert value(found, "generation_tokens_total") == 2
    assert value(found, "time_to_first_token_seconds_count") == 1
    assert value(found, "time_to_first_token_seconds_sum") == pytest.approx(2)
    assert value(found, "inter_token_latency_seconds_count") == 1
    assert value(found, "attended_tokens_total") == 25
    assert value(found, "prompt_tokens_total") == 512
    assert value(found, "spec_decode_num_draft_tokens_total") == 7
    assert value(found, "spec_decode_num_accepted_tokens_total") == 4


def test_a_first_token_is_timed_once_however_the_request_ends() -> None:
    metrics = EngineMetrics(stand_in())
    now = time.perf_counter()
    statistics = RequestStatistics(10, now - 3, now - 2, now - 1, now - 1, 1)
    outputs = [
        StepOutput(1, 7, FinishReason.LENGTH, statistics=statistics),
        StepOutput(2, None, FinishReason.END_ID, statistics=statistics),  # the first token was the end
        StepOutput(3, 7, statistics=statistics),
        StepOutput(3, None, FinishReason.CANCELLED, statistics=statistics),
    ]
    metrics.record(outputs, now)
    assert value(samples(metrics.text()), "time_to_first_token_seconds_count") == 3


def test_an_end_token_counts_as_generated_in_all_metrics() -> None:
    """Though no client gets it: time per token would otherwise be of other tokens than there are."""
    metrics = EngineMetrics(stand_in())
    now = time.perf_counter()
    first = StepOutput(1, 7, statistics=RequestStatistics(10, now - 3, now - 2, now - 1, now - 1, 1))
    statistics = RequestStatistics(10, now - 3, now - 2, now - 1, now, 3)
    metrics.record([first, StepOutput(1, 8)], now)
    metrics.record([StepOutput(1, None, FinishReason.END_ID, statistics=statistics)], now)
    found = samples(metrics.text())
    assert value(found, "generation_tokens_total") == 3
    assert value(found, "request_generation_tokens_sum") == 3
    assert value(found, "inter_token_latency_seconds_count") == 2
    assert value(found, "request_time_per_output_token_seconds_sum") == pytest.approx(0.5)
    assert value(found, "time_to_first_token_seconds_count") == 1


def test_a_request_that_ends_by_a_token_is_counted(server: Server) -> None:
    tokens = [output.token_id for output in server.ask(Request(PROMPT, 8)) if output.token_id is not None]
    end = next(token for token in tokens[2:] if token is not None)
    names = "generation_tokens_total", "request_generation_tokens_sum", "inter_token_latency_seconds_count"
    before = samples(server.metrics.text())
    outputs = server.ask(Request(PROMPT, 8, end_ids=(end,)))
    assert outputs[-1].finish_reason is FinishReason.END_ID
    given = len([output for output in outputs if output.token_id is not None])
    after = samples(server.metrics.text())
    assert [value(after, name) - value(before, name) for name in names] == [given + 1, given + 1, given]


def test_histogram() -> None:
    histogram = Histogram((1, 2.5))
    for number in (0.5, 1, 2, 9):
        histogram.observe(number)
    assert histogram.buckets() == [("1.0", 2), ("2.5", 3), ("+Inf", 4)]
    assert histogram.sum == 12.5


# Dashboard, rules, documentation


def dashboard_expressions() -> list[str]:
    dashboard = json.loads((ROOT / "docker/grafana/dashboard.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def rules() -> list[dict[str, Any]]:
    return [rule for group in read("rules.yaml")["groups"] for rule in group["rules"]]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bkvseek:[\w:]+", expression))


def test_dashboard_and_rules_name_what_is_exported(server: Server) -> None:
    exist = {name for name, _ in samples(exported(server))}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert not recorded & exist
    for expression in dashboard_expressions():
        assert names_in(expression), expression
        assert names_in(expression) <= exist, expression
    for rule in rules():
        assert names_in(rule["expr"]) <= exist | recorded | {"up"}, rule["expr"]


def test_the_error_share_is_of_errors_that_no_client_can_have_caused() -> None:
    (rule,) = [rule for rule in rules() if rule.get("record") == "kvseek:error_share:ratio5m"]
    (outcomes,) = re.findall(r'outcome=~"([^"]+)"', rule["expr"])
    assert set(outcomes.split("|")) == {ErrorCode.INTERNAL, ErrorCode.UNAVAILABLE}


def test_every_metric_is_documented(server: Server) -> None:
    families = {family.name: family for family in text_string_to_metric_families(exported(server))}
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    table = {match[1]: match[2] for match in re.finditer(r"^\| `(kvseek:\w+)[^|]*\| (\w+) \|", text, re.MULTILINE)}
    kinds = {name + ("_total" if family.type == "counter" else ""): family.type for name, family in families.items()}
    assert table == kinds
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert names_in(text) <= set(kinds) | recorded


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)")
def test_promtool_accepts_the_rules_and_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    subprocess.run([PROMTOOL, "check", "rules", str(ROOT / "docker/rules.yaml")], check=True)
    shown = [
        {"record": "dashboard", "expr": expression.replace("$__rate_interval", "1m").replace("$model_name", ".*")}
        for expression in dashboard_expressions()
    ]
    path = tmp_path / "dashboard.yaml"  # YAML holds JSON; equal records that differ in nothing else are no error here
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": shown}]}))
    subprocess.run([PROMTOOL, "check", "rules", "--lint=none", str(path)], check=True)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)")
def test_alerts_fire_when_they_should_and_only_then() -> None:
    subprocess.run([PROMTOOL, "test", "rules", str(ROOT / "tests/deploy/rules_test.yaml")], check=True)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)")
def test_prometheus_can_read_the_text(server: Server) -> None:
    check = subprocess.run([PROMTOOL, "check", "metrics"], input=exported(server), text=True, capture_output=True)
    assert check.returncode in (0, 3), check.stderr  # 3: it would have other names than vLLM's
    assert "error while linting" not in check.stderr
