"""The tasks in English: exact lengths, right answers that score 1 and wrong ones that do not, and a run from end to end."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel

from kvseek.bench.accuracy import text_tasks
from kvseek.bench.accuracy.haystack import Haystack, python_reference, sentences
from kvseek.bench.accuracy.questions import Score
from kvseek.bench.accuracy.text_tasks import TASKS, Asked, TextSuite
from kvseek.cli.main import main
from kvseek.core.errors import ConfigError
from kvseek.engine.tokenizer import Tokenizer

SETTINGS = {"chat": False, "depths": 3}
LENGTH = 8192  # tiny vocabularies have many tokens a word


@pytest.fixture(scope="module")
def engine_dir(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    return build_engine(random_model("llama"), "full", "--max_seq_len", "400", "--max_batch_size", "2")


@pytest.fixture(scope="module")
def suite(engine_dir: Path) -> TextSuite:
    return TextSuite(Tokenizer(engine_dir), python_reference()[:40_000], SETTINGS)


@pytest.mark.parametrize("task", TASKS)
def test_prompts_have_the_length_and_the_answer(task: str, suite: TextSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Asked] = []
    maker = (text_tasks.IN_HAYSTACK | text_tasks.OF_ITEMS)[task]  # type: ignore[operator]
    kind = text_tasks.IN_HAYSTACK if task in text_tasks.IN_HAYSTACK else text_tasks.OF_ITEMS
    monkeypatch.setitem(kind, task, lambda source: made.append(maker(source)) or made[-1])  # type: ignore[index]
    first, second = suite.conversations(task, LENGTH, 2, 0)
    assert suite.conversations(task, LENGTH, 1, 1)[0].context == second.context, "whatever was made before"
    assert first.context != second.context
    (question,) = second.questions
    assert len(second.context) + len(question.ids) + question.max_tokens == LENGTH
    asked = made[-1]
    assert asked.score(asked.answer) == question.score(asked.answer, ()) == Score(True, 1)
    assert asked.score("No answer.").part == 0
    text = suite._tokenizer.decode(second.context)
    for _, sentence in asked.inserted:
        assert sentence in text
    assert all(item in text for item in asked.items[-5:])


def test_the_needle_wanders_from_the_beginning_to_the_end(suite: TextSuite) -> None:
    places = []
    for one in suite.conversations("niah_single", 2048, 4, 0):
        text = suite._tokenizer.decode(one.context)
        (found,) = re.finditer(r"The secret number of the \w+ \w+ is \d{7}\.", text)
        places.append(round(found.start() / len(text), 1))
    assert places == [pytest.approx(0, abs=0.1), pytest.approx(0.5, abs=0.1), pytest.approx(1, abs=0.1), places[0]]


def test_scores_by_hand() -> None:
    assert text_tasks.found(["12", "Ghent"], "It is GHENT.") == Score(False, 0.5)
    assert text_tasks.same_number(7, "about 17") == Score(False, 0)
    assert text_tasks.same_words("a b c d", "a b d x").part == 0.75
    records = {"red cup": "120", "old hat": "300"}
    assert text_tasks.same_records(records, '"red cup": 120, "old hat": 300}') == Score(True, 1)
    assert text_tasks.same_records(records, '"red cup": 120, "old hat": 30') == Score(False, 0.5)
    assert text_tasks.same_set(["cup", "hat"], ["cup", "hat", "pin"], "cup, hat, pin").part == pytest.approx(2 / 3)


def test_haystacks_are_prose_of_exact_length(engine_dir: Path) -> None:
    text = "A ship came in at dusk today. x = 1; y = {2: 3}\n\nNobody saw it leave the harbour again.\n\n--- 1 2 3 4 5 6 7 ---."
    assert sentences(text) == ["A ship came in at dusk today.", "Nobody saw it leave the harbour again."]
    haystack = Haystack(text, Tokenizer(engine_dir))
    for tokens in (0, 1, 17, 500):
        assert sum(map(len, haystack.take(tokens, random.Random(3)))) == tokens
    with pytest.raises(ConfigError, match="must have sentences of prose"):
        sentences("1 2 3")


def test_too_short_contexts_are_named(suite: TextSuite) -> None:
    with pytest.raises(ConfigError, match=r"--lengths 256: extract needs \d+ tokens; ask in a longer context"):
        suite.conversations("extract", 256, 1, 0)
    with pytest.raises(ConfigError, match=r"--lengths 256: common_words has room for \d+ items: must be >= 100"):
        suite.conversations("common_words", 256, 1, 0)


def test_a_run_is_gone_on_with(random_model: RandomModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two methods, one of them with two budgets; the second run builds and asks only what is missing."""
    (tmp_path / "hay.txt").write_text("The harbour master wrote the log at dusk. " * 40, encoding="utf-8")
    output = tmp_path / "result.json"
    flags = ["evaluate", "tasks", "--model", str(random_model("llama")), "--lengths", "400", "--batch", "2"]
    flags += ["--methods", "full,nested:cache.full_threshold=32,cache.local=16,cache.update=8,cache.sink=4"]
    flags += ["--haystack", str(tmp_path / "hay.txt"), "--tasks", "niah_single", "--output", str(output)]
    assert main([*flags, "--n", "1", "--top_k", "8"]) == 0
    assert main([*flags, "--n", "2", "--top_k", "8,200", "--json"]) == 0
    capsys.readouterr()
    document = json.loads(output.read_text(encoding="utf-8"))
    assert [cell["contexts"] for cell in document["cells"]] == [2, 2, 2]
    full, few, many = document["cells"]
    assert few["attended_share"] < many["attended_share"] < full["attended_share"] == 1
    assert set(document["fingerprints"]) == set(document["engines"]) == {cell["engine"] for cell in document["cells"]}
    assert document["settings"]["haystack"] == ["hay.txt"]
    assert main([*flags, "--n", "2", "--top_k", "8,200"]) == 0
    assert capsys.readouterr().err == "", "nothing is built or asked"
