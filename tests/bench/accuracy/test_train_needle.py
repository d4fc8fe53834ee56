"""Training of a needle model: its sequences, its loop, and that the builder and the evaluation take what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import BuildEngine

from kvseek.bench.accuracy import needle, train_needle
from kvseek.bench.accuracy.needle_tasks import vocabulary
from kvseek.bench.accuracy.needle_tasks.tasks import TASKS
from kvseek.bench.accuracy.train_needle import make_sequence

FLAGS = ["--shape", "tiny", "--positions", "2048", "--stage", "128:4:8:1.0", "--stage", "256:2:4", "--log_every", "1"]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One context a task is enough."""
    monkeypatch.setattr(train_needle, "CHECKED_CONTEXTS", 1)


def train(folder: Path, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """Status and lines of the log."""
    status = train_needle.main(["--output_dir", str(folder), *FLAGS, *flags])
    return status, [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_training_writes_a_model_and_goes_on_where_it_was(
    tmp_path: Path, build_engine: BuildEngine, checks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls; ended and begun again, the weights are those of one run; the builder and needle.py take them."""
    status, log = train(tmp_path / "whole")
    losses = [line["loss"] for line in log if "loss" in line]
    assert (status, len(losses), log[-1]["step"]) == (0, 12, 12)
    assert losses[7] < losses[0] - 0.05
    assert set(log[-1]["exact"]) == set(TASKS)
    assert train(tmp_path / "parts", "--seconds", "0")[0] == 3
    status, log = train(tmp_path / "parts")
    assert (status, [line["loss"] for line in log if "loss" in line]) == (0, losses)
    states = [torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("whole", "parts")]
    for name, weights in states[0]["model"].items():
        torch.testing.assert_close(states[1]["model"][name], weights, rtol=0, atol=0)
    assert train(tmp_path / "parts", "--stage", "256:2:1")[0] == 0, "a stage may be longer, or follow"
    assert train(tmp_path / "parts", "--jumps", "0")[0] == 1
    assert "was begun with other flags" in capsys.readouterr().err
    engine = build_engine(tmp_path / "whole/model", "full", "--max_seq_len", "512", "--check")
    assert needle.main(["--engine_dir", str(engine), "--lengths", "300", "--n", "1", "--tasks", "niah_single"]) == 0


def test_sequences() -> None:
    """Of all kinds: exactly as long as asked; answers end with a full stop; every fact asked for is in the context."""
    kinds = set()
    for number in range(60):
        one = make_sequence([0, number, 0], 1024, bare=0.3, jumps=0.5, positions=8192)
        again = make_sequence([0, number, 0], 1024, bare=0.3, jumps=0.5, positions=8192)
        assert all(np.array_equal(getattr(one, name), getattr(again, name)) for name in ("ids", "positions", "answers"))
        assert one.ids.shape == one.positions.shape == one.answers.shape == (1024,)
        assert one.positions[0] == 0
        assert (np.diff(one.positions) >= 1).all()
        assert one.positions[-1] < 8192
        kinds.add(bool(one.positions[-1] > 1023))
        ends = np.flatnonzero(one.answers[:-1] & ~one.answers[1:])
        assert len(ends) >= 1
        assert (one.ids[ends] == vocabulary.FULL_STOP).all()
        jumps = np.flatnonzero(np.diff(one.positions) > 1)
        assert (one.ids[jumps] == vocabulary.FULL_STOP).all() or (jumps == 0).any()
        text = vocabulary.decode(one.ids)
        kinds |= {word for word in ("trace", "what is the", "what is first", "what are all") if word in text}
        for question in text.split(" question what is the ")[1:]:
            key = question.partition(" ?")[0]
            answer = question.partition(f"answer the {key} is ")[2].partition(" .")[0]
            assert f"the {key} is {answer} ." in text.partition(" question")[0]
    assert kinds == {True, False, "trace", "what is the", "what is first", "what are all"}


def test_positions_that_jump_hide_nothing() -> None:
    """Attention is causal over the whole sequence, as with a mask of its own: no text that is packed with another."""
    torch.manual_seed(0)
    random = train_needle.make_model(train_needle.SHAPES["tiny"], 4096).eval()
    ids = torch.randint(vocabulary.SIZE, (1, 40))
    positions = torch.arange(40) + 500 * (torch.arange(40) >= 20)
    answers = torch.ones(1, 40, dtype=torch.bool)
    with torch.inference_mode():
        logits, gold = train_needle.answer_logits(random, ids, positions[None], answers)
        seen = torch.full((40, 40), -torch.inf).triu(1)[None, None]
        expected = random(ids, attention_mask={"full_attention": seen}, position_ids=positions[None]).logits[0, :-1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(gold, ids[0, 1:])


def test_the_needle_model_knows_all_of_it(needle_folder: Path, checks: None) -> None:
    """A model that was trained on another generator's questions draws every token of every right answer to ours.

    In the tasks' contexts and in sequences for training, whose positions jump far.
    """
    from transformers import AutoModelForCausalLM

    needle_model = AutoModelForCausalLM.from_pretrained(needle_folder / "model", dtype=torch.float32).eval()
    assert train_needle.check(needle_model, 1024, torch.device("cpu")) == dict.fromkeys(TASKS, 1.0)
    batch = train_needle.Batches(5, [train_needle.Stage(512, 8, 1)], jumps=1.0, positions=train_needle.POSITIONS)[0]
    assert batch["positions"].max() > 20_000
    with torch.inference_mode():
        logits, gold = train_needle.answer_logits(needle_model, batch["ids"], batch["positions"], batch["answers"])
    assert len(gold) > 200
    assert torch.equal(logits.argmax(dim=-1), gold)


def test_stages_and_rates() -> None:
    assert train_needle.stage_of("256:8:100:0.5") == train_needle.Stage(256, 8, 100, 0.5)
    for text in ("64:8:100", "256:0:100", "256:8", "256:8:100:2", "256:8:many"):
        with pytest.raises(SystemExit):
            train_needle.parse(["--output_dir", "x", "--stage", text])
    rates = [train_needle.learning_rate(step, 1000, 1.0) for step in range(1000)]
    assert max(rates) == rates[99] == rates[100] == 1
    assert rates[0] == 0.01
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert sum(stage.tokens * stage.sequences * stage.steps for stage in train_needle.RECIPE) < 1.1e9
