"""kvseek evaluate tasks: how dialogues run, how answers are counted, and, slow, accuracy of real engines at 4K tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.plugins.cases import CASES

from kvseek import LLM, SamplingParams
from kvseek.bench import evaluate
from kvseek.bench.accuracy import tasks
from kvseek.bench.accuracy.needle_tasks import suite, vocabulary
from kvseek.bench.accuracy.needle_tasks.tasks import TASKS, WIDE
from kvseek.bench.accuracy.questions import Conversation, Score
from kvseek.bench.accuracy.tasks import Cell, by_depth, compared, print_report
from kvseek.core.config import BlockSparseConfig, read_config
from kvseek.core.errors import ConfigError
from kvseek.plugins.registry import get_method

LIMITS = ("--max_seq_len", "300", "--max_batch_size", "2")
LENGTH = 4096
CONTEXTS = 1
NEEDLE = [method for method, cases in CASES.items() if cases.needle is not None]


RIGHT, WRONG = (Score(True, 1.0), 0.5), (Score(False, 0.5), 0.5)


@pytest.fixture(scope="module")
def llm(random_model: RandomModel, build_engine: BuildEngine) -> Iterator[LLM]:
    with LLM(build_engine(random_model("qwen3"), "full", *LIMITS)) as llm:
        yield llm


def greedy(llm: LLM, prompt: list[int], limit: int) -> list[int]:
    """The tokens of one request, up to the full stop and with it."""
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=limit, ignore_eos=True))
    ids, stop = list(output.token_ids), vocabulary.FULL_STOP
    return ids[: ids.index(stop) + 1] if stop in ids else ids


def test_later_rounds_see_the_generated_answers(llm: LLM) -> None:
    """Two dialogues of three rounds: the tokens are those that one growing prompt generates step by step."""
    right, wrong = [], []
    for number in range(2):
        context = [5 + number, *range(10, 60)]
        history, rounds = list(context), []
        for question in ([70, 71], [80], [90, 91, 92]):
            history += question
            generated = greedy(llm, history, 4 + suite.EXTRA_TOKENS)
            rounds.append((question, generated[:4]))
            history += generated
        right.append(conversation(context, rounds))
        wrong.append(conversation(context, [(question, [0, *gold[1:]]) for question, gold in rounds]))
    for conversations, part in ((right, 1), (wrong, 0.75)):
        answers = tasks.converse(llm, conversations)
        assert [[score.part for score, _ in answer] for answer in answers] == [[part] * 3] * 2


def conversation(context: list[int], rounds: list[tuple[list[int], list[int]]]) -> Conversation:
    questions = [suite.question("value", ids, gold) for ids, gold in rounds]
    return Conversation(context, questions, vocabulary.FULL_STOP)


def test_an_answer_ends_with_its_full_stop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that ends an answer belongs to it, as in the right answers."""
    prompt = [5, *range(10, 60)]
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    ids = list(output.token_ids)
    monkeypatch.setattr(vocabulary, "FULL_STOP", ids[2])
    gold = ids[: ids.index(ids[2]) + 1]
    (((score, share),),) = tasks.converse(llm, [conversation(prompt, [([], gold)])])
    assert (score, share) == (Score(True, 1.0), 1.0)


def test_engines_that_cannot_hold_the_questions_are_named(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"max_input_len = 300: must be >= 303 .* build with --max_input_len 303"):
        tasks.check_lengths(llm.config, "full", 303)
    with pytest.raises(ConfigError, match=r"the model has 1024 positions: lower --lengths by 40$"):
        tasks.check_lengths(llm.config, "full", 1064)
    with pytest.raises(ConfigError, match=r"full: vocab_size = \d+: must be 2624, the words of the tasks"):
        suite.NeedleSuite(8).check(llm.config, "full")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--tasks", "nothing"),
        ("--n", "0"),
        ("--rounds", "0"),
        ("--lengths", "4096,long"),
        ("--methods", "full"),
    ],
)
def test_settings_are_checked(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["tasks", "--suite", "needle", "--engine_dir", "none", flag, value]) == 1
    assert flag in capsys.readouterr().err


def test_answers_are_counted_by_context() -> None:
    """An interval has the contexts as samples, however many questions each was asked."""
    cell = Cell("multi_turn", 4096, "full")
    cell.add([[RIGHT, WRONG], [RIGHT, RIGHT]], 2.0)
    cell.add([[RIGHT, WRONG]], 1.0)
    assert (cell.right, cell.contexts, cell.questions, cell.seconds) == (["10", "11", "10"], 3, 6, 3.0)
    assert (cell.exact, cell.part, cell.attended_share) == pytest.approx((4 / 6, 5 / 6, 0.5))
    assert cell.by_round == pytest.approx([1, 1 / 3])
    assert cell.interval == pytest.approx(wilson_interval(4 / 6, 3))
    read = Cell.from_report(json.loads(json.dumps(cell.report())))
    assert read == cell


def wilson_interval(share: float, samples: int) -> tuple[float, float]:
    """Wilson's bounds p are where the observed share lies 1.96 standard deviations sqrt(p (1 - p) / n) from p."""
    from scipy.optimize import brentq

    def off(p: float) -> float:
        return (share - p) ** 2 - 1.959964**2 * p * (1 - p) / samples

    return brentq(off, 1e-9, share), brentq(off, share, 1 - 1e-9)


def test_methods_are_compared_on_the_same_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    full = Cell("niah_single", 4096, "full", ["1", "1", "0", "1"], [1, 1, 0, 1])
    other = Cell("niah_single", 4096, "prkv", ["1", "0", "1"], [1, 0, 1])
    assert compared(other, full) == "+0.0 (1 lost, 1 gained), +0.0 [-100.0, +100.0]"
    assert compared(other, Cell("niah_single", 4096, "full")) == ""
    dialogue = Cell("multi_turn", 4096, "full", ["1" * 8 + "0" * 4 + "1" * 4], [0.75])
    print_report(
        {
            "settings": {"depths": 2},
            "engines": {"full": {}, "prkv": {}},
            "cells": [c.report() for c in (full, other, dialogue)],
        }
    )
    printed = capsys.readouterr().out
    assert "75.0 [30.1, 95.4]" in printed
    assert "3 to 4" in printed
    assert by_depth(full.parts, 2) == [0.5, 1]
    assert "niah_single 4,096 full: part by depth, first to last: |=@|" in printed
    assert "multi_turn 4,096 full: exact by 8 rounds: 100.0, 50.0" in printed


def engine(build_engine: BuildEngine, folder: Path, *flags: str) -> Path:
    sizes = ("--max_seq_len", "700", "--max_batch_size", "2", "--cache.full_threshold", "256")
    return build_engine(folder / "model", "prkv", *sizes, "--prkv.top_k", "128", *flags)


def test_engines_of_one_method_are_told_apart(needle_folder: Path, build_engine: BuildEngine, tmp_path: Path) -> None:
    directories = [engine(build_engine, needle_folder), engine(build_engine, needle_folder, "--prkv.static_share", "0")]
    configs = [read_config(directory) for directory in directories]
    names = ["prkv:top_k=128", "prkv:top_k=128,static_share=0.0"]
    assert tasks.engine_names(directories, configs) == names
    assert tasks.engine_names(directories[:1], configs[:1]) == names[:1]
    eight_bits = replace(configs[0], weight_only_precision="int8", method_config={})
    assert tasks.engine_names(directories[:1], [eight_bits]) == ["prkv:weight_only_precision=int8"]
    head = replace(eight_bits, quantize_lm_head=True)
    assert tasks.engine_names(directories[:1], [head]) == ["prkv:weight_only_precision=int8,quantize_lm_head=true"]
    sparse = replace(
        configs[0], prefill_attention="block_sparse", block_sparse=BlockSparseConfig(2048), method_config={}
    )
    named = "prkv:prefill_attention=block_sparse,block_sparse.budget=2048"
    assert tasks.engine_names(directories[:1], [sparse]) == [named]
    chunks = replace(sparse, prefill_chunk_tokens=4096)
    assert tasks.engine_names(directories[:1], [chunks]) == [f"{named},prefill_chunk_tokens=4096"]
    assert tasks.engine_names([tmp_path, tmp_path / "b"], [configs[0]] * 2) == [str(tmp_path), str(tmp_path / "b")]
    method = get_method("prkv")
    paper = replace(configs[0], method_config=method.preset("paper")[0])
    assert tasks.engine_names(directories[:1], [paper]) == ["prkv:paper"]
    more = replace(paper, weight_only_precision="int8")
    assert tasks.engine_names(directories[:1], [more]) == ["prkv:paper,weight_only_precision=int8"]
    cached = replace(configs[0], cache=replace(configs[0].cache, local=128))
    names = ["prkv:top_k=128,cache.full_threshold=256", "prkv:top_k=128,cache.local=128,cache.full_threshold=256"]
    assert tasks.engine_names(directories, [configs[0], cached]) == names


def test_a_result_file_is_gone_on_with(
    needle_folder: Path, build_engine: BuildEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No question is asked twice: of one file, of several that are merged, and after a run that its time ended."""
    whole, first, rest, merged = (tmp_path / f"{name}.json" for name in ("whole", "first", "rest", "merged"))
    asked = ["--engine_dir", str(engine(build_engine, needle_folder)), "--lengths", "300"]

    def run(*flags: str) -> str:
        assert evaluate.main(["tasks", "--suite", "needle", *asked, *flags]) == 0
        return capsys.readouterr().err

    def cells(path: Path) -> dict[str, Any]:
        return {cell["task"]: cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}

    run("--tasks", "niah_single,niah_multikey", "--n", "2", "--output", str(whole))
    run("--tasks", "niah_single", "--n", "1", "--output", str(first))
    flags = ("--tasks", "niah_single", "--n", "2", "--output", str(first))
    assert "niah_single 300 prkv:top_k=128: 1 contexts left; run again to go on" in run(*flags, "--seconds", "0")
    assert run(*flags).count("niah_single 300") == 1, "one context is left"
    document = json.loads(whole.read_text(encoding="utf-8"))
    rest.write_text(json.dumps({**document, "cells": document["cells"][1:]}), encoding="utf-8")
    asked = ["--results", str(first), "--results", str(rest)]
    run("--output", str(merged))
    assert set(cells(merged)) == {"niah_single", "niah_multikey"}
    for task, cell in cells(merged).items():
        assert (cell["contexts"], cell["questions"], cell["right"]) == (2, 2, cells(whole)[task]["right"])


def test_foreign_result_files_are_named(
    needle_folder: Path, build_engine: BuildEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of older versions and of other settings; an engine of the same name that is another."""
    path, directory = tmp_path / "results.json", engine(build_engine, needle_folder)
    ask = ["--engine_dir", str(directory), "--lengths", "300", "--n", "1", "--tasks", "niah_single"]

    def refused(document: Any, message: str) -> None:
        path.write_text(json.dumps(document), encoding="utf-8")
        assert evaluate.main(["tasks", "--suite", "needle", *ask, "--results", str(path)]) == 1
        assert message in capsys.readouterr().err

    assert evaluate.main(["tasks", "--suite", "needle", *ask, "--output", str(path)]) == 0
    good = json.loads(path.read_text(encoding="utf-8"))
    (name,) = good["engines"]
    other = {**good["engines"][name], "dtype": "bfloat16", "max_batch_size": 64}
    refused({**good, "engines": {name: other}}, "dtype = 'float32': must be 'bfloat16', as in the results so far")
    refused({**good, "settings": {"rounds": 64}}, "has {'rounds': 64}: must have {'rounds': 8}, as this run")
    refused(
        {"cells": [{"task": "niah_single", "questions": 24}]}, "must be a result file of this command that has `parts`"
    )
    refused([], "must be a result file")
    assert evaluate.main(["tasks", "--suite", "needle"]) == 1
    assert "--engine_dir: must name an engine" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("method", NEEDLE)
def test_methods_find_the_needles(
    method: str, needle_folder: Path, build_engine: BuildEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[method].needle
    assert case is not None
    limits = ("--max_seq_len", str(LENGTH + 128), "--max_batch_size", "4")
    flags = ["--engine_dir", str(build_engine(needle_folder / "model", method, *limits))]
    learnt = [task for task in TASKS if task not in WIDE]  # by this model
    asked = learnt if case.tasks == "all" else case.tasks.split(",")
    flags += ["--lengths", str(LENGTH), "--n", str(CONTEXTS), "--tasks", ",".join(asked), "--json"]
    assert evaluate.main(["tasks", "--suite", "needle", *flags]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["task"] for cell in cells] == asked
    assert mean_exact(cells) >= 100 - case.margin
    for cell in cells:
        if CASES[method].dense:
            assert cell["attended_share"] == pytest.approx(1)
        else:
            assert cell["attended_share"] < case.most_attended, "it must attend sparsely at 4K"


def mean_exact(cells: list[dict[str, float]]) -> float:
    return sum(cell["exact"] for cell in cells) / len(cells)
