"""What the processes around an engine cost: real doors over an engine process that computes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel

from kvseek.bench.machine import ROOT
from kvseek.bench.speed.ports import GENERATE, OPENAI, measure_ports, print_ports


def test_every_stream_of_both_ports_gets_its_tokens(
    random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = build_engine(
        random_model("llama", max_position_embeddings=2048), "full", "--max_seq_len", "2000", "--max_input_len", "1500"
    )
    text, streams, tokens = ROOT / "examples/harbour_log.txt", 3, 20
    profile = tmp_path / "profile"
    results = measure_ports(directory, text, {"here": ROOT}, (streams, tokens), [0.001], 1, profile)
    assert [result["port"] for result in results] == [GENERATE, OPENAI]
    for result in results:
        assert result["tokens_per_second"] >= result["events_per_second"] * streams * tokens / (streams * (tokens + 2))
        assert result["ttft_p50_seconds"] > 0
        assert result["door_seconds_per_token"] > 0
    assert profile.stat().st_size, "cProfile writes it when the door ends"
    print_ports({"machine": {"cpu": "a CPU"}, "streams": streams, "tokens": tokens, "results": results})
    assert capsys.readouterr().out.count("| here |") == 2
