"""stretch.py: a tiny model learns texts and tasks, and its checkpoint loads in transformers and builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.conftest import RandomModel

from kvseek import LLM, SamplingParams
from kvseek.bench.accuracy import stretch

LINE = "The harbour master wrote the log at dusk. One ship came in, two ships left for {}. "


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Texts to learn, and one that is held out."""
    learnt, held = tmp_path / "texts", tmp_path / "held"
    learnt.mkdir()
    held.mkdir()
    (learnt / "log.txt").write_text("".join(LINE.format(town) for town in ("Bergen", "Cadiz", "York")) * 40)
    (held / "novel.txt").write_text("A lamp burned in the tower; nobody had lit it since the war. " * 60)
    return learnt, held


@pytest.mark.slow
def test_learns_and_is_served(random_model: RandomModel, folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, data, output = random_model("llama"), tmp_path / "texts.xz", tmp_path / "stretched"
    lengths = ["--lengths", "512,1280"]
    packing = [
        "pack",
        "--model",
        str(model),
        "--texts",
        str(folders[0]),
        "--held_out",
        str(folders[1]),
        "--output",
        str(data),
    ]
    assert stretch.main([*packing, *lengths, "--tasks", "niah_single,qa_single", "--task_tokens", "5000"]) == 0
    found = stretch.Data.read(data)
    assert {length: len(ids) for length, (ids, _) in found.tasks.items()} == {512: 8, 1280: 2}
    training = ["train", "--model", str(model), "--data", str(data), "--output_dir", str(output), "--device", "cpu"]
    steps = ["--measured", "512,1280", "--steps", "12", "--learning_rate", "0.01", "--log_every", "1"]
    assert stretch.main([*training, *lengths, *steps]) == 0
    lines = [json.loads(line) for line in output.with_suffix(".jsonl").read_text().splitlines()]
    own, new, after = (line["of"]["novel"] for line in lines if "perplexity" in line)
    found_losses = [line["loss"] for line in lines if "loss" in line]
    assert len(found_losses) == 12
    assert found_losses[-1] < 0.8 * found_losses[0]
    assert own.keys() == {"512", "1280"}
    assert own != new
    assert after["1280"] < new["1280"]

    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(output)
    assert loaded.config.max_position_embeddings == 1280
    assert loaded.config.rope_parameters["rope_theta"] == 3e6
    assert loaded.dtype == torch.bfloat16
    with LLM(output, cache_dir=tmp_path / "cache", quiet=True, method="full", max_seq_len=1280) as llm:
        (output_of,) = llm.generate(["The harbour"], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(output_of.token_ids) == 4


def test_held_out_texts_are_not_learnt(
    random_model: RandomModel, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folders[0] / "copied.txt").write_text("x" + (folders[1] / "novel.txt").read_text())
    packing = ["pack", "--model", str(random_model("llama")), "--texts", str(folders[0]), "--held_out", str(folders[1])]
    assert stretch.main([*packing, "--output", str(tmp_path / "texts.xz")]) == 1
    assert "--held_out: novel = 1.0: must be <= 0.02" in capsys.readouterr().err
