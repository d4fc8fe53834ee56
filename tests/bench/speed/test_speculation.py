"""bench/speed/speculation.py on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.bench.speed.test_engine_steps import TINY

from kvseek.bench.speed import decode, shapes
from kvseek.bench.speed.drafts import GivenDrafter

SIZES = ["--tokens", "24", "--rounds", "1", "--row_memory", "64MiB", "--slots", "3", "--device", "cpu"]


def test_each_kind_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    output = tmp_path / "result.json"
    flags = ["--shape", "tiny", "--layers", "1", "--dtype", "float32", "--contexts", "60", "--batches", "1,2"]
    kinds = ["--speculation", "none,0,1,ngram"]
    assert decode.main([*kinds, *flags, *SIZES, "--output", str(output)]) == 0
    document = json.loads(output.read_text(encoding="utf-8"))
    found = [(one["batch"], one["speculation"], one["generated"]) for one in document["results"]]
    each = [(f"{batch} x 60", kind, 24 * batch) for batch in (1, 2) for kind in ("none", "0.0", "1.0", "ngram")]
    assert found == each
    assert all(one["tpot_seconds"] > 0 for one in document["results"])
    assert document["results"][0]["drafted"] == 0
    assert document["step_seconds_by_rows"]


def test_given_drafts_are_right_as_often_as_asked() -> None:
    answer = list(range(4000))
    drafter, right = GivenDrafter(answer, 0.6, 3), 0
    for place, token in enumerate(answer):
        right += drafter.draft(1) == [token]
        drafter.follow(answer[: place + 1])
    assert 2300 < right < 2500
    assert drafter.draft(3) == drafter.chances(3) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculation", "0.5"], "must have none, the base"),
        (["--speculation", "none,2"], "'2': must be none, ngram or a probability"),
        (["--questions", "Who?"], "--questions: has 1: must come with --engine_dir"),
    ],
)
def test_flags_that_cannot_be(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [] if "--speculation" in flags else ["--speculation", "none"]
    assert decode.main([*kinds, "--shape", "smollm2-135m", *flags]) == 1
    assert message in capsys.readouterr().err
