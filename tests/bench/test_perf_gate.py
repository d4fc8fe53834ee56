"""The gate: which steps it compares, in which order, when it closes; and, slow, real processes of two trees on the CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from tests.conftest import ROOT, BuildEngine, RandomModel

from kvseek.bench import perf_gate
from kvseek.bench.machine import tree_of
from kvseek.bench.output import read_result
from kvseek.bench.perf_gate import BEFORE, NOW, Steps, compared, main, run_bench, steps_of, take_turns
from kvseek.core.errors import ConfigError, KvseekError

TREES = {BEFORE: Path("before"), NOW: Path("now")}


def test_trees_take_turns_and_medians_are_compared() -> None:
    """One round of three is disturbed: it changes nothing."""
    order, times = list[str](), {"before": iter((1.0, 9.0, 1.0)), "now": iter((1.5, 1.5, 9.0))}

    def bench(tree: Path) -> Steps:
        order.append(tree.name)
        return {"nested": next(times[tree.name])}

    found = take_turns(TREES, 3, bench)
    assert order == ["before", "now", "now", "before", "before", "now"]
    assert compared(found) == [{"contestant": "nested", BEFORE: 1.0, NOW: 1.5, "ratio": 1.5}]
    with pytest.raises(KvseekError, match=r"the trees timed different steps, .*: name methods and contexts"):
        compared({BEFORE: [{"full": 1.0}], NOW: [{"nested": 1.0}]})


@pytest.mark.parametrize(("seconds", "status"), [(1.019, 0), (0.5, 0), (1.021, 1)])
def test_the_gate_closes_beyond_its_limit(
    seconds: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bench(tree: Path, flags: list[str]) -> Steps:
        return {"full": 1.0, "nested": seconds if tree == ROOT else 1.0}

    monkeypatch.setattr(perf_gate, "run_bench", bench)
    assert main(["--commit", "HEAD", "--", "--engine_dirs", "x"]) == status
    printed = capsys.readouterr()
    assert f"{seconds:.3f}" in printed.out
    assert ("slower by more than 2 %: nested, 1.021 ×" in printed.err) == (status == 1)


def test_what_cannot_be_compared_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--commit", "no-such-commit", "--", "--engine_dirs", "x"]) == 2
    assert "--commit = 'no-such-commit': must be one of this repository" in capsys.readouterr().err
    assert main(["--commit", "HEAD", "--rounds", "0", "--", "--engine_dirs", "x"]) == 2
    assert "--rounds = 0: must be >= 1" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["--commit", "HEAD"]) == 2
        assert "PyTorch sees no CUDA device: must have one for these flags" in capsys.readouterr().err


def test_steps_of_results() -> None:
    """Of the files in bench/results: both kinds, every method in every place, the baseline once."""
    on_cpu = steps_of(read_result(ROOT / "bench/results/decode-cpu-8k-int8-two-cores.json"))
    assert "nested, 8,000 tokens" in on_cpu
    on_gpu = steps_of(read_result(ROOT / "bench/results/methods-h200.json"))
    assert {"full never, 131,072 tokens × 1", "nested always hot, 131,072 tokens × 1"} <= set(on_gpu)
    assert all(seconds > 0 for seconds in (*on_cpu.values(), *on_gpu.values()))
    failed = {"offload": "never", "cells": [], "skipped": [], "errors": [{"method": "nested", "error": "no room"}]}
    with pytest.raises(KvseekError, match=r"not all was timed: .*no room"):
        steps_of({"benchmark": "device", "mode": "decode", "phases": [failed]})
    with pytest.raises(KvseekError, match="a result of device, prefill: must be of decode steps"):
        steps_of({"benchmark": "device", "mode": "prefill"})


def test_a_tree_of_another_commit_runs_by_itself(tmp_path: Path) -> None:
    """Its own package is imported, not this checkout's."""
    files = {"kvseek/__init__.py": "", "core/__init__.py": "", "kvseek/cli/__init__.py": ""}
    files["kvseek/cli/main.py"] = "import kvseek.core, sys; sys.exit(f'{kvseek.core.__file__} {sys.argv[1:3]}')"
    files["Makefile"] = "links:\n\t@ln -s ../core kvseek/core\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "core.hooksPath=/dev/null"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    with tree_of("HEAD", tmp_path) as tree, pytest.raises(KvseekError) as failed:
        run_bench(tree, ["--tokens", "2"])
    assert f"{tree}/kvseek/core/__init__.py ['bench', '--tokens']" in str(failed.value)
    assert not tree.exists()
    with pytest.raises(ConfigError, match="must be one of this repository"), tree_of("HEAD~1", tmp_path):
        pass


@pytest.mark.slow
def test_real_processes_of_two_trees(
    random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever their times are: every method is compared."""
    limits = ("--max_batch_size", "1", "--max_seq_len", "400", "--max_input_len", "400")
    engines = [str(build_engine(random_model("llama"), method, *limits)) for method in ("full", "pariskv")]
    text = tmp_path / "text.txt"
    text.write_text("the harbour master wrote the log at dusk. " * 20, encoding="utf-8")
    flags = ["--engine_dirs", *engines, "--text", str(text), "--contexts", "100", "--tokens", "2", "--threads", "1"]
    assert main(["--commit", "HEAD", "--rounds", "1", "--limit", "1e9", "--", *flags]) == 0
    printed = capsys.readouterr().out
    assert "pariskv" in printed
    assert "100 tokens" in printed
