"""The benchmark of the server in its short form on the CPU: a real server, random weights. No test asserts how long it takes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT

from kvseek.bench.engines import make_vocabulary
from kvseek.bench.load import served
from kvseek.bench.load.cells import Answer, Cell, LoadTestError
from kvseek.bench.load.client import send
from kvseek.bench.load.report import BARE, SERVER, comparisons
from kvseek.bench.speed import shapes
from kvseek.core.errors import ConfigError
from kvseek.core.model_config import ModelConfig

TEXT = (ROOT / "examples/harbour_log.txt").read_text(encoding="utf-8")
TINY = ModelConfig("llama", 3000, 64, 96, 2, 4, 2, 16, 1e-6, 1e4, 512)
FLAGS = ["--shape", "tiny", "--text", str(ROOT / "examples/harbour_log.txt"), "--device", "cpu", "--dtype", "float32"]
SHORT = [
    *("--scale", "0.02", "--row_memory", "64MiB", "--threads", "1", "--max_batch_size", "4", "--requests", "3"),
    *("--concurrency", "2", "--bare", "2", "--rates", "8", "--arrival_seconds", "0.5", "--streams", "2"),
    *("--window", "1"),
]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)


@pytest.mark.slow
@pytest.mark.server
def test_every_load_and_a_method_that_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "served.json"
    methods = "nested,full:cache.kv_cache_host_memory_bytes=1"
    assert served.main([*FLAGS, *SHORT, "--methods", methods, "--output", str(output)]) == 0
    document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    found = {(one["load"], one["asked"]): one for one in document["results"]}
    closed = [(load, asked) for load in ("mixture", "reasoning") for asked in (SERVER, BARE)]
    assert sorted(found) == sorted([*closed, ("arrivals", SERVER)])
    assert {one["method"] for one in (*document["results"], *document["beside"])} == {"nested"}
    for name in closed:
        assert found[name]["requests"] == (4 if name[0] == "mixture" else 2)
    assert (found["arrivals", SERVER]["rate"], found["arrivals", SERVER]["requests"]) == (8, 4)
    assert found["reasoning", BARE]["output_tokens"] == found["reasoning", SERVER]["output_tokens"] == 160
    for one in found.values():
        assert ("door_seconds_per_token" in one) == (one["asked"] == SERVER)
        assert 0 < one["ttft_seconds"]["p50"] <= one["ttft_seconds"]["p99"] <= one["seconds"]
        assert 0 < one["tpot_seconds"]["p50"] <= one["tpot_seconds"]["p99"]
        tokens = one["tokens_per_second"] * one["seconds"]
        assert tokens == pytest.approx(one["output_tokens"] * one["requests"], abs=one["requests"])  # means are rounded
    # The kernel counts in hundredths of a second, of which one load may take none.
    assert max(one.get("door_seconds_per_token", 0) for one in found.values()) > 0
    parts = [(one["part"], one["streams"]) for one in document["beside"]]
    alone, beside = [("long prompts", 0), ("short prompts", 0)], ["nothing", "short prompts", "long prompts", "both"]
    assert parts == [*alone, *((part, 2) for part in beside)]
    for one in document["beside"]:
        assert bool(one["tpot_seconds"]) == bool(one["itl_seconds"]) == (one["streams"] > 0)
        assert bool(one["short_ttft_seconds"]) == (one["part"] in ("short prompts", "both"))
        assert bool(one["long_ttft_seconds"]) == (one["part"] in ("long prompts", "both"))
    _, idle, undisturbed, _, _, both = document["beside"]
    ratios = {what: ratio for _, what, ratio in comparisons(document)}
    assert len(ratios) == 2 * 3 + 2
    for load in ("mixture", "reasoning"):
        served_rate, bare_rate = (found[load, asked]["tokens_per_second"] for asked in (SERVER, BARE))
        assert ratios[f"{load}: tokens/s over the bare engine's"] == served_rate / bare_rate
    for quantity, other in (("tpot_seconds", undisturbed), ("short_ttft_seconds", idle)):
        assert both[quantity]["p99"] / other[quantity]["p99"] in ratios.values()
    (failed,) = document["left_out"]
    assert failed["method"].startswith("full")
    assert "kv_cache_host_memory_bytes = 1" in failed["why"]
    printed = capsys.readouterr().out
    assert printed.count("tokens/s over the bare engine's: ") == 2
    assert all(text in printed for text in ("| `nested` | 2 | both |", "left out: full:cache", "temperature 0.6"))


@pytest.mark.slow
@pytest.mark.server
def test_turns_of_a_conversation_read_what_is_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "served.json"
    flags = ["--loads", "conversation", "--turns", "20", "--scale", "0.1", "--row_memory", "64MiB", "--threads", "1"]
    assert served.main([*FLAGS, *flags, "--methods", "nested", "--max_batch_size", "2", "--output", str(output)]) == 0
    ((result,), ()) = (json.loads(output.read_text(encoding="utf-8"))[name] for name in ("conversations", "results"))
    prompts = [turn["prompt_tokens"] for turn in result["each"]]
    assert prompts == pytest.approx([45 + 50 * turn for turn in range(20)], abs=3)  # tokens at seams may join
    assert all(turn["read_tokens"] < 60 for turn in result["each"][13:]), "beyond the window, which is read anew"
    assert result["edited"]["read_tokens"] == pytest.approx(540, abs=15)
    assert result["forked"]["prompt_tokens"] == pytest.approx(545, abs=3)
    assert result["beyond_seconds"]["max"] >= result["beyond_seconds"]["p99"]
    assert "| `nested` | 20 | 1,0" in capsys.readouterr().out


def test_a_run_without_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert served.main([*FLAGS, *SHORT, "--methods", "full", "--seconds", "0.001"]) == 1
    assert "nothing could be measured: full: the engine: not begun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scale", "0"], "--scale = 0: must be > 0"),
        (["--rates", "1", "-1"], "--rates = -1: must be > 0"),
        (["--bare", "5"], "--bare = 5: must be one of --concurrency"),
        (["--streams", "0"], "--streams = 0: must be >= 1"),
        (["--loads", "conversation", "beside"], "--loads = conversation beside: conversation must be alone"),
    ],
)
def test_flags_that_make_no_load(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.main([*FLAGS, *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "offload", "device_bytes", "host_bytes"),
    [
        ("nested", "never", 1 << 30, None),
        ("nested:cache.offload=always", "always", None, 1 << 30),
        ("nested:cache.offload=auto,cache.kv_cache_host_memory_bytes=2GiB", "auto", None, 2 << 30),
    ],
)
def test_where_rows_lie(method: str, offload: str, device_bytes: int | None, host_bytes: int | None) -> None:
    arguments = served.parse(["--shape", "llama-3.1-8b", "--methods", method, "--row_memory", "1GiB"])
    cache = served.engine_config(arguments, arguments.methods[0]).cache
    assert (cache.offload, cache.reuse) == (offload, False)
    assert (cache.kv_cache_device_memory_bytes, cache.kv_cache_host_memory_bytes) == (device_bytes, host_bytes)


def test_every_load_fits_the_engine() -> None:
    arguments = served.parse(["--shape", "llama-3.1-8b"])
    config, beside = served.engine_config(arguments, arguments.methods[0]), served.beside_load(arguments)
    pairs = [pair for _, cell in served.loads(arguments) for pair in cell.lengths]
    pairs += [(beside.prompt_tokens, beside.output_tokens), (beside.long_prompt, 2)]
    assert all(prompt + answer + served.ROOM <= config.max_seq_len for prompt, answer in pairs)


def test_a_mixture_is_the_traces_however_few_requests_there_are() -> None:
    for requests in (64, 1000):
        prompts, answers = zip(*served.mixture(requests, 0), strict=True)
        assert sum(prompts) / requests == pytest.approx(12_035, rel=0.02)
        assert sum(answers) / requests == pytest.approx(343, rel=0.02)
        assert min(served.PROMPTS) <= min(prompts) < max(prompts) <= max(served.PROMPTS)
        assert served.LEAST_ANSWER == min(answers) < max(answers) <= max(served.ANSWERS)
    few = served.mixture(8, 1)
    assert few == served.mixture(8, 1) != served.mixture(8, 2)
    assert Counter(prompt for prompt, _ in few) == Counter(prompt for prompt, _ in served.mixture(8, 2))


def test_a_vocabulary_has_text_for_every_token() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(make_vocabulary(TEXT, 30_000))
    assert tokenizer.get_vocab_size() == 30_000
    ids = tokenizer.encode(TEXT).ids
    assert tokenizer.decode(ids) == TEXT
    assert len(TEXT.split()) <= len(ids) < 2 * len(TEXT.split())  # as with the vocabulary of a real model
    assert all(tokenizer.decode([token]).strip() for token in (20_000, 29_999))
    with pytest.raises(ConfigError, match=r"--text: its words make .* tokens: must be 1000; give a longer text"):
        make_vocabulary("a few words", 1000)


def run(cell: Cell, seconds: float, fails: int = -1) -> tuple[list[Answer], list[int]]:
    """Send a cell to nobody: the answers, and how many requests there were when each was sent."""
    running, seen = 0, list[int]()

    async def ask(number: int) -> Answer:
        nonlocal running
        running += 1
        seen.append(running)
        if number == fails:
            raise LoadTestError("refused")
        await asyncio.sleep(0.001 if cell.rate is None else 10)
        running -= 1
        return Answer(float(number), (1.0, 2.0), 2)

    return asyncio.run(send(cell, ask, seconds)), seen


def test_requests_at_a_time() -> None:
    answers, seen = run(Cell(((1, 2),) * 20, 3), 60)
    assert sorted(answer.sent for answer in answers) == list(range(20))
    assert max(seen) == 3


def test_requests_that_arrive_wait_for_nobody_and_a_run_ends_on_time() -> None:
    with pytest.raises(LoadTestError, match=r"20 requests, 1000 a second, .*: not done in 1 s; raise --seconds"):
        run(Cell(((1, 2),) * 20, rate=1000), 1)


def test_a_request_that_fails_ends_the_cell() -> None:
    with pytest.raises(LoadTestError, match="refused"):
        run(Cell(((1, 2),) * 20, 3), 60, fails=5)
