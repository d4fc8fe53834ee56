"""The load test's own parts: which cells, what the tools' exports mean, table and picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.support.waiting import is_running, wait_for

from kvseek.bench.charts import load as chart
from kvseek.bench.charts import steps
from kvseek.bench.load import aiperf, perf_analyzer
from kvseek.bench.load.cells import Answer, Cell, LoadTestError, cells, figures, prompts
from kvseek.bench.load.main import main, print_table
from kvseek.bench.load.tool import run_tool
from kvseek.bench.output import ResultError

SVG = "{http://www.w3.org/2000/svg}"


class Words:
    """A tokenizer whose tokens are words."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_cells_lie_on_two_lines_and_none_is_there_twice() -> None:
    found = cells([1, 8], [4, 100], (1, 100), requests=10, output_tokens=16)
    assert found == [Cell(((100, 16),) * 10, 1), Cell(((100, 16),) * 16, 8), Cell(((4, 16),) * 10, 1)]


def test_prompts_are_different_pieces_of_the_text() -> None:
    words = " ".join(map(str, range(50)))
    found = prompts(Words(), words, Cell(((40, 2),) * 9 + ((120, 2),)))  # type: ignore[arg-type]
    assert len(set(found)) == 10
    assert [len(prompt.split()) for prompt in found] == [40] * 9 + [120]
    assert all(prompt in " ".join([words] * 4) for prompt in found)
    with pytest.raises(LoadTestError, match=r"--text has 50 tokens: must be >= 51, for as many different prompts"):
        prompts(Words(), words, Cell(((40, 2),) * 51))  # type: ignore[arg-type]


def test_figures_of_answers() -> None:
    answers = [Answer(10, (10.5, 11.5), 11), Answer(10, (11, 12, 13), 11), Answer(11, (14, 15), 21)]
    found = figures(Cell(((40, 11), (40, 21), (41, 11)), 2), answers)
    assert found["seconds"] == 5
    assert (found["prompt_tokens"], found["output_tokens"]) == (40, 14)
    assert (found["requests_per_second"], found["tokens_per_second"]) == (3 / 5, 43 / 5)
    assert found["ttft_seconds"] == {"p50": 1, "p99": pytest.approx(2.96)}
    assert found["tpot_seconds"] == {"p50": pytest.approx(0.1), "p99": pytest.approx(0.198)}
    assert found["itl_seconds"] == {"p50": 1, "p99": 1}


@pytest.mark.parametrize("answers", [[], [Answer(0, (1, 2), 4)], [Answer(0, (1, 2), 4), Answer(0, (1, 2), 3)]])
def test_answers_that_are_missing_or_short_give_no_figures(answers: list[Answer]) -> None:
    with pytest.raises(LoadTestError, match=r"answers of .* tokens: must be 2 of \[4\]"):
        figures(Cell(((40, 4),) * 2), answers)


def test_an_export_of_perf_analyzer() -> None:
    """As version 2.51 writes it, in nanoseconds."""
    sent = 1_795_371_589_572_069_733
    requests = [
        {"timestamp": sent, "response_timestamps": [sent + 250_000_000, sent + 300_000_000, sent + 450_000_000]},
        {"timestamp": sent, "response_timestamps": []},
    ]
    (found,) = perf_analyzer.answers({"experiments": [{"requests": requests}]})
    assert (found.ttft, found.tpot) == (pytest.approx(0.25, abs=1e-6), pytest.approx(0.1, abs=1e-6))
    assert found.tokens == 3


def test_records_of_aiperf() -> None:
    """As version 0.13 writes them: starts in nanoseconds, durations in milliseconds."""
    values = {"time_to_first_token": 148.4, "inter_chunk_latency": [100.0, 54.6], "usage_completion_tokens": 16}
    metrics = {name: {"value": value, "unit": "ms"} for name, value in values.items()}
    metadata = {"request_start_ns": 1_795_372_045_468_441_957}
    (found,) = aiperf.answers([{"metadata": metadata, "metrics": metrics}, {"metadata": metadata, "error": {}}])
    assert found.ttft == pytest.approx(0.1484, abs=1e-6)
    assert found.tpot == pytest.approx((0.303 - 0.1484) / 15, abs=1e-6)
    assert found.tokens == 16


def test_inputs_have_shapes() -> None:
    (step,) = perf_analyzer.input_data(["the sea"], Cell(((2, 16),)))["data"]
    assert all(set(field) == {"content", "shape"} and field["shape"] == [1] for field in step.values())
    assert {name: field["content"][0] for name, field in step.items()} == {
        "text_input": "the sea",
        "max_tokens": 16,
        "stream": True,
        "end_id": -1,
    }


def test_a_tool_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"nowhere: no such program; run make load-tools"):
        run_tool([str(tmp_path / "nowhere")], {}, tmp_path / "export")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo too many; exit 3", "sh ended with status 3; the end of what it printed:\ntoo many"),
        ("echo done; : > $EXPORT", "sh ended with status 0 and has written nothing to export; .*:\ndone"),
    ],
)
def test_a_tool_without_a_result(tmp_path: Path, script: str, message: str) -> None:
    export = tmp_path / "export"
    with pytest.raises(LoadTestError, match=message):
        run_tool(["/bin/sh", "-c", script], {"EXPORT": str(export)}, export)


def test_a_tools_children_end_with_it(tmp_path: Path) -> None:
    pid, export = tmp_path / "pid", tmp_path / "export"
    script = "sleep 1000 >/dev/null 2>&1 & echo $! > $PID; echo result > $EXPORT"
    assert run_tool(["/bin/sh", "-c", script], {"PID": str(pid), "EXPORT": str(export)}, export) == "result\n"
    wait_for(lambda: not is_running(int(pid.read_text())))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--concurrency", "4", "0"), "--concurrency = 0: must be >= 1"),
        (("--output_tokens", "1"), "--output_tokens = 1: must be >= 2"),
    ],
)
def test_flags_that_make_no_load(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--engine_dir", "nowhere", *flags]) == 1
    assert message in capsys.readouterr().err


def result(tool: str, concurrency: int, length: int, rate: float, ttft: float, tpot: float) -> dict[str, Any]:
    return {
        "tool": tool,
        "door": "gRPC",
        "concurrency": concurrency,
        "prompt_tokens": length,
        "requests": 8,
        "output_tokens": 16,
        "tokens_per_second": rate,
        "ttft_seconds": {"p50": ttft, "p99": 2 * ttft},
        "tpot_seconds": {"p50": tpot, "p99": 2 * tpot},
    }


def made_up() -> dict[str, Any]:
    return {
        "benchmark": "load",
        "machine": {"cpu": "a processor", "cores": 2, "commit": "0123456789abcdef"},
        "engine": {"name": "tiny", "method": "full", "max_batch_size": 8, "max_seq_len": 4096},
        "server": {"threads": 2, "max_queue_size": 256},
        "base": {"concurrency": 1, "prompt_tokens": 128},
        "results": [
            result(tool, *numbers)
            for tool in ("perf_analyzer", "aiperf")
            for numbers in ((1, 128, 10.0, 0.2, 0.05), (4, 128, 30.0, 0.9, 0.1), (1, 2048, 1.0, 5.0, 0.05))
        ]
        + [result("aiperf", 16, 128, 55.0, 20.0, 0.2)],
    }


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(made_up())
    first, *_, last = capsys.readouterr().out.splitlines()[4:]
    assert first == "| perf_analyzer | gRPC | 1 | 128 | 8 | 10 | 0.2 | 0.4 | 50 | 100 |"
    assert last == "| aiperf | gRPC | 16 | 128 | 8 | 55 | 20 | 40 | 200 | 400 |"


def test_the_picture_shows_every_result_where_it_belongs() -> None:
    root = ElementTree.fromstring(chart.draw(made_up(), "made_up.json"))
    assert root.findtext(f"{SVG}metadata") == "made_up.json"
    shown = {
        str(circle.findtext(f"{SVG}title")): (float(circle.attrib["cx"]), float(circle.attrib["cy"]))
        for circle in root.iter(f"{SVG}circle")
    }
    assert {"aiperf 16: 55", "aiperf p99 16: 40", "perf_analyzer p50 2,048: 5", "perf_analyzer p99 4: 200"} <= set(
        shown
    )
    (x1, y1), (x4, y4), (x16, y16) = (shown[f"aiperf {key}"] for key in ("1: 10", "4: 30", "16: 55"))
    assert x4 - x1 == pytest.approx(x16 - x4, abs=0.21)  # concurrency is logarithmic, throughput linear
    assert (y1 - y4) / 20 == pytest.approx((y4 - y16) / 25, abs=0.02)
    for x, y in shown.values():
        assert any(left <= x <= left + chart.PANEL_WIDTH for left in chart.LEFTS)
        assert any(0 <= y - chart.HEAD - chart.ROW * row <= chart.PANEL_HEIGHT for row in range(2))


def test_the_picture_of_a_served_load() -> None:
    """A row for each load, a line for each method; what was asked of the bare engine has none."""
    common = {"requests": 8, "prompt_tokens": 100, "output_tokens": 16, "asked": "server"}
    times = {"tokens_per_second": 5.0, "ttft_seconds": {"p50": 1, "p99": 2}, "tpot_seconds": {"p50": 0.1, "p99": 0.2}}
    loads = [("mixture", 4, None), ("mixture", 8, None), ("arrivals", 1, 0.5)]
    results = [
        {"method": method, "load": load, "concurrency": number, "rate": rate, **common, **times}
        for method in ("full", "nested")
        for load, number, rate in loads
    ]
    own = {"shape": "tiny", "dtype": "bfloat16", "max_batch_size": 8, "sampling": {"top_k": 20}}
    document = {**made_up(), **own, "benchmark": "served", "gpu": {"name": "a GPU"}}
    document["results"] = [*results, results[0] | {"asked": "bare engine", "concurrency": 64}]
    root = ElementTree.fromstring(chart.draw(document, "served.json"))
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words.count("concurrency (mixture)") == words.count("requests a second (arrivals)") == 3
    assert "tiny, random weights, bfloat16, max_batch_size 8, on a GPU, kvseek commit 0123456789." in words
    assert len(list(root.iter(f"{SVG}circle"))) == len(results) * 5
    document["results"] = []
    with pytest.raises(ResultError, match="no result of a server by concurrency or rate"):
        chart.draw(document, "served.json")


@pytest.mark.parametrize(
    ("draw", "found", "wanted"),
    [
        (chart.main, '{"benchmark": "serving"}', "serving: must be of benchmark load or served"),
        (
            steps.main,
            '{"benchmark": "device", "mode": "prefill"}',
            "device, mode prefill: must be of benchmark device, mode decode",
        ),
    ],
)
def test_files_that_are_no_results(
    draw: Callable[[list[str]], int], found: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, other, picture = tmp_path / "missing.json", tmp_path / "other.json", tmp_path / "none.svg"
    other.write_text(found)
    for path, message in ((missing, "no such file"), (other, f"is of benchmark {wanted}")):
        assert draw([str(path), "--output", str(picture)]) == 1
        assert f"error: {path}: {message}" in capsys.readouterr().err
    assert not picture.exists()
