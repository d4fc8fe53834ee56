"""`kvseek build --calibrate` as a build: what is printed and kept, when an engine is built again, what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.builder.test_calibrate import DEVICE, calibrated, run

from kvseek.builder import build, weight_storage
from kvseek.builder.calibration import calibrate
from kvseek.builder.calibration.calibrate import CALIBRATION_FILE, Calibration
from kvseek.builder.calibration.perplexity import WindowedText
from kvseek.core.errors import EngineDirectoryError

SENTENCE = "the harbour master wrote the log, and the light was lit at dusk in 1931; "


def test_what_is_printed_and_kept(model: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = text.rename(tmp_path / "[red] text.txt")
    assert run(model, tmp_path / "engine", text, "--weight_only_precision", "int8", "--calibrate_tokens", "100") == 0
    output = capsys.readouterr().err
    found = Calibration.load(tmp_path / "engine")
    cost = found.quantised
    assert cost is not None
    lines = [line.split() for line in output.splitlines()]
    table = [
        ["weights", "float32", "int8"],
        ["perplexity", f"{found.perplexity:,.4f}", f"{cost.perplexity:,.4f}"],
        ["ratio", f"{cost.perplexity_ratio:.5f}"],
        ["mean", "KL", "divergence,", "nats", f"{cost.mean_kl_divergence:.6f}"],
        ["most", "probable", "token", "the", "same", f"{cost.same_token_share:.2%}"],
        f"99 predictions in windows of 100 tokens of [red] text.txt, on {DEVICE}".split(),
    ]
    assert all(row in lines for row in table)
    assert f"calibrate on {DEVICE}" in output, "the progress bar says where"
    assert build.main(["--inspect", str(tmp_path / "engine")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert all(row in lines for row in table)
    assert build.main(["--inspect", str(tmp_path / "engine"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["calibration"]
    assert document == json.loads((tmp_path / "engine" / CALIBRATION_FILE).read_text())
    assert document["quantised"]["perplexity"] == cost.perplexity


def test_one_column_without_quantisation(
    model: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, tmp_path / "engine", text) == 0
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    found = Calibration.load(tmp_path / "engine")
    assert ["weights", "float32"] in lines
    assert ["perplexity", f"{found.perplexity:,.4f}"] in lines
    assert not any(line[:1] == ["ratio"] for line in lines)
    assert f"text.txt has {found.tokens:,} tokens, fewer than calibrate_tokens = 2,048: all are used".split() in lines
    assert (found.tokens, found.window) == (found.text_tokens, 1024), "no longer than max_seq_len"


def test_an_engine_without_calibration_shows_none(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(model), "--method", "full", "--kernels", "reference", "--output_dir", str(tmp_path / "e")]
    assert build.main([*flags, "--quiet"]) == 0
    assert not (tmp_path / "e" / CALIBRATION_FILE).exists()
    assert build.main(["--inspect", str(tmp_path / "e"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"] is None


def test_what_decides_whether_an_engine_is_up_to_date(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def built(*flags: str) -> bool:
        assert run(model, tmp_path / "engine", text, "--calibrate_tokens", "60", *flags) == 0
        return "isuptodate" not in "".join(capsys.readouterr().err.split())  # lines are folded anywhere

    assert built()
    assert not built()
    assert built("--calibrate_window", "50")
    assert Calibration.load(tmp_path / "engine").predictions == 58
    assert built("--calibrate_window", "50", "--calibrate_tokens", "61")
    text.write_text(SENTENCE * 20, encoding="utf-8")
    assert built("--calibrate_window", "50", "--calibrate_tokens", "61")
    assert Calibration.load(tmp_path / "engine").text_sha256 == hashlib.sha256(text.read_bytes()).hexdigest()


REFUSED = [
    (None, (), "does not exist; name a text file"),
    (b"", (), "tokens of text.txt = 0: must be >= 2; name a longer text with --calibrate"),
    (b"a", (), "tokens of text.txt = 1: must be >= 2; name a longer text with --calibrate"),
    (b"caf\xe9 au lait", (), "byte 3 is not UTF-8 (invalid continuation byte); convert the text to UTF-8"),
    (b"a text", ("--calibrate_tokens", "1"), "calibrate_tokens = 1: must be >= 2; the first token of a text"),
    (b"a text", ("--calibrate_window", "1"), "calibrate_window = 1: must be between 2 and max_seq_len = 1024; set"),
    (
        b"a text",
        ("--calibrate_window", "300", "--max_seq_len", "200"),
        "calibrate_window = 300: must be between 2 and max_seq_len = 200; set --calibrate_window, or leave it out",
    ),
]


@pytest.mark.parametrize(("content", "flags", "message"), REFUSED)
def test_refused_before_weights_are_written(
    content: bytes | None,
    flags: tuple[str, ...],
    message: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "texts" / "text.txt"
    text.parent.mkdir()
    if content is not None:
        text.write_bytes(content)
    monkeypatch.setattr(weight_storage, "write_weights", lambda *values, **options: pytest.fail("weights were written"))
    assert run(model, tmp_path / "engine", text, "--quiet", *flags) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_directory_is_no_text(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, tmp_path / "engine", model) == 1
    assert f"calibrate = {str(model)!r}: is a directory; name a text file" in capsys.readouterr().err


def test_a_processor_without_bfloat16(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(calibrate.bfloat16, "usable", lambda: False)
    assert run(model, tmp_path / "engine", text, "--quiet", "--dtype", "bfloat16") == 1
    assert "calibrate: this processor cannot multiply dtype = 'bfloat16'; build where" in capsys.readouterr().err
    assert not (tmp_path / "engine").exists()
    assert run(model, tmp_path / "engine", text, "--quiet") == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--output_dir", "x", "--calibrate_tokens", "5"), "--calibrate_tokens goes only with --calibrate TEXT"),
        (("--output_dir", "x", "--calibrate_window", "5"), "--calibrate_window goes only with --calibrate TEXT"),
        (("--output_dir", "x", "--calibrate", "t", "--calibrate_tokens", "all"), "invalid int value: 'all'"),
        (("--plan", "--calibrate", "t"), "--calibrate does not go with --plan; leave it out"),
    ],
)
def test_bad_usage(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build.main(["--model", "m", "--method", "full", *flags])
    assert message in capsys.readouterr().err


def test_a_failure_on_the_way_leaves_the_old_engine(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = calibrated(model, tmp_path / "engine", text)
    monkeypatch.setattr(WindowedText, "losses", raising(torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")))
    assert run(model, tmp_path / "engine", text, "--quiet", "--calibrate_tokens", "77") == 1
    error = capsys.readouterr().err
    assert "does not hold one layer and 77 tokens (CUDA out of memory. Tried); lower --calibrate_tokens" in error
    assert Calibration.load(tmp_path / "engine") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", "text.txt"]


def raising(error: Exception) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("damage", ["", "[]", '{"text": 1}', "\xff"])
def test_a_damaged_record_is_named(damage: str, tmp_path: Path) -> None:
    with pytest.raises(EngineDirectoryError, match=r"calibration\.json is missing; build the engine again"):
        Calibration.load(tmp_path)
    (tmp_path / CALIBRATION_FILE).write_text(damage, encoding="latin-1")
    with pytest.raises(EngineDirectoryError, match=r"calibration\.json is corrupt \(.*build the engine again"):
        Calibration.load(tmp_path)
