"""Load testers as programs against a real server: Triton's perf_analyzer, with its usual flags, and NVIDIA's aiperf.

`make load-tools` installs both. aiperf is skipped where it is absent, as it takes 1.2 GB and minutes; make check installs
perf_analyzer, 14 MB.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT, BuildEngine, RandomModel
from tests.support.metrics import metric

from kvseek.bench.charts import load as chart
from kvseek.bench.load import aiperf, main, perf_analyzer
from kvseek.bench.load.cells import Answer, Cell, LoadTestError, figures, prompts
from kvseek.engine.tokenizer import TOKENIZER_FOLDER, Tokenizer
from kvseek.server.launch import RunningServer
from kvseek.server.settings import ServeSettings

PERF_ANALYZER = ROOT / main.INSTALLED / "perf_analyzer/bin/perf_analyzer"
AIPERF = ROOT / main.INSTALLED / "aiperf/bin/aiperf"
needs_perf_analyzer = pytest.mark.skipif(
    not PERF_ANALYZER.exists(), reason=f"{PERF_ANALYZER.relative_to(ROOT)} is absent: run make load-tools"
)
needs_aiperf = pytest.mark.skipif(
    not AIPERF.exists(), reason=f"{AIPERF.relative_to(ROOT)} is absent: run make load-tools (1.2 GB)"
)
pytestmark = [pytest.mark.server, pytest.mark.slow]

CELL = Cell(((40, 8),) * 4, concurrency=2)
# What a user types; QUICK makes each end after a few requests, whatever the machine's noise.
QUICK = ("--request-count", "4", "--stability-percentage", "999")
WINDOWS = (  # of four requests, however long these take
    *("--measurement-mode", "count_windows", "--measurement-request-count", "4", "--measurement-interval", "500"),
    *("--stability-percentage", "999", "--max-trials", "3"),
)
USUAL_FLAGS = [  # and how many loads they ask for
    (1, ("-m", "tensorrt_llm_bls", *QUICK)),
    (1, ("-m", "ensemble", "-x", "1", "-b", "1", "--service-kind", "triton", "--async", "-v", *QUICK)),
    (1, ("-m", "ensemble", "-b", "2", "--shape", "text_input:1", "--shape", "max_tokens:1", *QUICK)),
    (2, ("-m", "tensorrt_llm_bls", "--concurrency-range", "1:3:2", "--percentile", "95", *WINDOWS)),
    (2, ("-m", "tensorrt_llm_bls", "--request-rate-range", "4:8:4", "--request-distribution", "poisson", *WINDOWS)),
]
TOKENS = {
    "input_ids": {"content": [5, 6, 7, 8], "shape": [4]},
    "input_lengths": [4],
    "request_output_len": [8],
    "streaming": [True],
    "min_length": [8],
}

GENERATED = "kvseek:generation_tokens_total"


@pytest.fixture(scope="module")
def settings() -> ServeSettings:
    return ServeSettings(threads=1, served_model_name="kvseek")


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    limits = ("--max_batch_size", "4", "--max_seq_len", "1000")
    return build_engine(random_model("llama", max_position_embeddings=2048), "full", *limits)


@pytest.fixture(scope="module")
def texts(directory: Path, document: str) -> list[str]:
    return prompts(Tokenizer(directory), document, CELL)


def profile(server: RunningServer, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run perf_analyzer over gRPC as a user does."""
    command = [str(PERF_ANALYZER), "-u", server.grpc_url, "-i", "grpc", "--streaming", *flags]
    environment = perf_analyzer.environment(PERF_ANALYZER)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def plain_data(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """Inputs as genai-perf's template for TensorRT-LLM writes them, which has no shapes and names the model."""
    fields = {"max_tokens": [8], "stream": [True], "exclude_input_in_output": [True], "min_length": [8]}
    path = tmp_path_factory.mktemp("data") / "inputs.json"
    path.write_text(json.dumps({"data": [{"model": "ensemble", "text_input": [text], **fields} for text in texts]}))
    return path


@needs_perf_analyzer
@pytest.mark.parametrize(("loads", "flags"), USUAL_FLAGS)
def test_usual_flags_of_perf_analyzer(
    server: RunningServer, plain_data: Path, loads: int, flags: tuple[str, ...]
) -> None:
    done = profile(server, "--input-data", str(plain_data), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.partition("Inferences/Second vs. Client")[2].count("throughput: ") == loads
    assert "Avg request latency: 0 usec" in done.stdout, "Triton's own durations mislead"


@needs_perf_analyzer
def test_perf_analyzer_asks_the_token_model(server: RunningServer, tmp_path: Path) -> None:
    data = tmp_path / "tokens.json"
    data.write_text(json.dumps({"data": [TOKENS]}))
    done = profile(server, "-m", "tensorrt_llm", "--input-data", str(data), *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_perf_analyzer
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            (
                *("--input-data", "zero", "--shape", "bad_words:1", "--shape", "stop_words:1"),
                *("--shape", "embedding_bias_words:1", "--shape", "embedding_bias_weights:1"),
                *("--shape", "forced_tokens:1"),
            ),
            " = 0: must be ",
        ),
        (("--request-parameter", "max_token:8:int"), "max_token: tensorrt_llm_bls has no such parameter"),
        (("--shared-memory", "system"), "this part of Triton is closed to clients"),
    ],
)
def test_what_cannot_be_asked_ends_perf_analyzer_with_a_reason(
    server: RunningServer, plain_data: Path, flags: tuple[str, ...], message: str
) -> None:
    data = () if "--input-data" in flags else ("--input-data", str(plain_data))
    done = profile(server, "-m", "tensorrt_llm_bls", *data, *flags, *QUICK)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


@needs_perf_analyzer
def test_a_cell_with_perf_analyzer(server: RunningServer, texts: list[str]) -> None:
    tokens = 0.0  # before the run that counts: perf_analyzer may lose its result once

    def measure(cell: Cell, texts: list[str], folder: Path) -> list[Answer]:
        nonlocal tokens
        tokens = metric(server.metrics_url, GENERATED)
        return perf_analyzer.measure(PERF_ANALYZER, server.grpc_url, cell, texts, folder)

    check(figures(CELL, main.measure_cell(measure, CELL, texts)))
    assert metric(server.metrics_url, GENERATED) - tokens == len(CELL.lengths) * CELL.output_tokens


@needs_aiperf
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_cell_with_aiperf(
    server: RunningServer, directory: Path, texts: list[str], tmp_path: Path, endpoint: str
) -> None:
    tokens, url = metric(server.metrics_url, GENERATED), server.openai_url.removesuffix("/v1")
    tokenizer = directory / TOKENIZER_FOLDER
    answers = aiperf.measure(AIPERF, url, "kvseek", tokenizer, CELL, texts, tmp_path, endpoint)
    check(figures(CELL, answers))
    assert metric(server.metrics_url, GENERATED) - tokens == len(CELL.lengths) * CELL.output_tokens


@needs_aiperf
def test_usual_flags_of_aiperf(server: RunningServer, directory: Path, tmp_path: Path) -> None:
    """Synthetic prompts, a rate, sampling parameters, and metrics of the server."""
    command = [
        *(str(AIPERF), "profile", "-m", "kvseek", "--url", server.openai_url.removesuffix("/v1"), "--streaming"),
        *("--endpoint-type", "chat", "--tokenizer", str(directory / TOKENIZER_FOLDER), "--random-seed", "7"),
        *("--synthetic-input-tokens-mean", "30", "--synthetic-input-tokens-stddev", "5", "--output-tokens-mean", "8"),
        *("--extra-inputs", "temperature:0.8", "top_k:20", "top_p:0.9", "min_tokens:8", "--request-rate", "20"),
        *("--request-count", "4", "--warmup-request-count", "1"),
        *("--output-artifact-dir", str(tmp_path), "--ui", "none"),
    ]
    done = subprocess.run(command, env=aiperf.environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert summary["request_count"]["avg"] == 4
    assert summary["usage_completion_tokens"]["avg"] == 8
    assert not summary["error_summary"]


def check(found: dict[str, Any]) -> None:
    assert found["ttft_seconds"]["p50"] > 0
    for times in (found["ttft_seconds"], found["tpot_seconds"]):  # no time between tokens that came in one event
        assert 0 <= times["p50"] <= times["p99"] < found["seconds"]
    assert found["tokens_per_second"] == pytest.approx(len(CELL.lengths) * CELL.output_tokens / found["seconds"])


@needs_perf_analyzer
def test_a_tool_that_fails_is_an_error(server: RunningServer, texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        LoadTestError, match=r"ended with status 99; the end of what it printed:\n(.*\n)*.*max_seq_len = 1000"
    ):
        perf_analyzer.measure(PERF_ANALYZER, server.grpc_url, Cell(((40, 5000),) * 4), texts, tmp_path)


@needs_perf_analyzer
def test_the_whole_command(directory: Path, tmp_path: Path) -> None:
    result, picture = tmp_path / "load.json", tmp_path / "load.svg"
    flags = ["--engine_dir", str(directory), "--threads", "1", "--requests", "2", "--base_prompt_tokens", "20"]
    flags += ["--tools", "perf_analyzer", "--perf_analyzer", str(PERF_ANALYZER)]
    flags += ["--concurrency", "1", "2", "--prompt_tokens", "8"]
    flags += ["--output_tokens", "4", "--text", str(ROOT / "examples/harbour_log.txt"), "--output", str(result)]
    assert main.main(flags) == 0
    cells = [(found["concurrency"], found["prompt_tokens"]) for found in json.loads(result.read_text())["results"]]
    assert cells == [(1, 20), (2, 20), (1, 8)]
    assert chart.main([str(result), "--output", str(picture)]) == 0
    # A throughput and two percentiles of two times, for two cells by concurrency and two by the prompt.
    assert picture.read_text().count("<circle") == 5 * (2 + 2)
