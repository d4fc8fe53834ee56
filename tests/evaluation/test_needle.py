"""The needle evaluation: how dialogues run and are scored, and, slow, accuracy of real engines at 4K tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.plugins.cases import CASES
from tests.support.random_models import VOCABULARY

from kvseek import LLM, SamplingParams
from kvseek.core.config_file import read_config
from kvseek.core.errors import ConfigError
from kvseek.evaluation import needle

LENGTH = 4096
QUESTIONS = 1
NEEDLE = [method for method, cases in CASES.items() if cases.needle is not None]


class Tasks(ModuleType):
    """Tasks without a model that knows them: an answer is right if it is what `gold` says."""

    DOT = 3
    TASKS = ("multi_turn", "niah_multikey")


def score(kind: str, gold: list[int], got: list[int]) -> dict[str, float]:
    return {"exact": float(gold == got), "part": sum(a == b for a, b in zip(gold, got, strict=False)) / len(gold)}


@pytest.fixture(scope="module")
def llm(random_model: RandomModel, build_engine: BuildEngine) -> Iterator[LLM]:
    with LLM(build_engine(random_model("qwen3"), "full", "--max_seq_len", "300", "--max_batch_size", "2")) as llm:
        yield llm


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    module = Tasks("tasks")
    module.score = score
    return module


def test_later_rounds_see_the_generated_answers(llm: LLM, tasks: ModuleType) -> None:
    """Two dialogues of three rounds: the right answers are generated step by step as one growing prompt."""
    dialogues, expected = [], []
    for number in range(2):
        context = [5 + number, *range(10, 60)]
        history, rounds = list(context), []
        for question in ([70, 71], [80], [90, 91, 92]):
            history += question
            ids = greedy(llm, history, 4 + needle.EXTRA_TOKENS, tasks.DOT)
            rounds.append(("one", question, [0, 0, 0, 0]))
            expected.append(ids)
            history += ids
        dialogues.append(needle.Dialogue(context, rounds))
    given = []
    tasks.score = lambda kind, gold, got: given.append(got) or score(kind, gold, got)
    results = needle.converse(llm, tasks, dialogues)
    tasks.score = score
    assert [len(scored) for scored in results] == [2, 2, 2]
    assert given == [expected[dialogue * 3 + number] for number in range(3) for dialogue in range(2)]


def greedy(llm: LLM, prompt: list[int], limit: int, dot: int) -> list[int]:
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=limit, ignore_eos=True))
    ids = list(output.token_ids)
    return ids[: ids.index(dot) + 1] if dot in ids else ids


def test_an_answer_ends_with_its_full_stop(llm: LLM, tasks: ModuleType) -> None:
    """The token that ends an answer belongs to it, as in the right answers."""
    prompt = [5, *range(10, 60)]
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    ids = list(output.token_ids)
    ending = Tasks("tasks")
    ending.DOT, ending.score = ids[2], score
    gold = ids[: ids.index(ids[2]) + 1]
    ((right, share),), ((wrong, _),) = (
        needle.converse(llm, ending, [needle.Dialogue(prompt, [("one", [], answer)])])[0]
        for answer in (gold, [*gold[:-1], 0])
    )
    assert (right, share) == ({"exact": 1.0, "part": 1.0}, 1.0)
    assert wrong == {"exact": 0.0, "part": (len(gold) - 1) / len(gold)}


def test_too_long_questions_are_refused_before_any_is_asked(llm: LLM) -> None:
    dialogue = needle.Dialogue([1] * 280, [("one", [2] * 10, [3] * 5)])
    assert dialogue.longest == 280 + 10 + 5 + needle.EXTRA_TOKENS
    with pytest.raises(ConfigError, match=r"max_input_len = 300: must be >= 303 .* build with --max_input_len 303"):
        needle.check_lengths(llm.config, "full", [dialogue])


def test_the_folder_is_named_if_it_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert needle.main(["--needle", str(tmp_path), "--engine_dir", str(tmp_path)]) == 1
    assert "must be the needle folder, with tasks.py and model/" in capsys.readouterr().err


def test_settings_are_checked(needle_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {"--tasks": "nothing", "--n": "0", "--rounds": "0", "--lengths": "4096,long"}
    for flag, value in cases.items():
        assert needle.main(["--needle", str(needle_folder), "--engine_dir", "none", flag, value]) == 1
        assert flag in capsys.readouterr().err


def test_dialogues_are_the_folders_own_examples(needle_folder: Path) -> None:
    tasks = needle.load_tasks(needle_folder)
    for task in tasks.TASKS:
        dialogues = needle.make_dialogues(tasks, task, 1024, 10)
        assert len(dialogues) == (2 if task == "multi_turn" else 10)
        first = tasks.make_example(task, 1024, needle.FIRST_SEED)
        assert dialogues[0].context[0] == first.context[0] == tasks.BOS
        assert len(dialogues[0].rounds) == (8 if task == "multi_turn" else 1)
        for dialogue in dialogues:
            tokens = len(dialogue.context) + sum(len(question) + len(gold) for _, question, gold in dialogue.rounds)
            assert 900 < tokens <= 1024
            kind, _, gold = dialogue.rounds[0]
            assert tasks.score(kind, gold, gold)["exact"] == 1.0
    assert max(dialogues[0].context) > VOCABULARY  # no other model's vocabulary


def test_long_dialogues_repeat_the_mixture(needle_folder: Path) -> None:
    """Sixty-four rounds whose answers stand in the context, within the length asked for, and no fact of one value twice."""
    tasks = needle.load_tasks(needle_folder)
    first, second = needle.make_dialogues(tasks, "multi_turn", 4096, 8, rounds=64)
    assert first.context != second.context
    assert first == needle.make_dialogues(tasks, "multi_turn", 4096, 8, rounds=64)[0]
    kinds = [kind for kind, _, _ in first.rounds]
    assert len(kinds) == 64
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"one": 40, "four": 8, "all": 8, "trace": 8}
    assert len(first.context) + sum(len(question) + len(gold) for _, question, gold in first.rounds) == 4096
    text = tasks.text(first.context)
    singles = [(tasks.text(question), tasks.text(gold)) for kind, question, gold in first.rounds if kind == "one"]
    assert all(f"{question.split(' answer ')[1]} {gold}" in text for question, gold in singles)
    assert len({question for question, _ in singles}) == 40
    for kind, _, gold in first.rounds:
        assert tasks.score(kind, gold, gold)["exact"] == 1.0


def test_rounds_of_the_folders_own_number_are_its_own(needle_folder: Path) -> None:
    tasks = needle.load_tasks(needle_folder)
    asked, default = (needle.make_dialogues(tasks, "multi_turn", 1024, 8, *rounds) for rounds in ((8,), ()))
    assert asked == default
    (short, _) = needle.make_dialogues(tasks, "multi_turn", 1024, 8, 3)
    assert len(short.rounds) == 3


def test_too_many_rounds_are_named(needle_folder: Path) -> None:
    tasks = needle.load_tasks(needle_folder)
    with pytest.raises(ConfigError, match=r"--rounds = 64: questions, answers and facts need \d+ tokens, more than"):
        needle.make_dialogues(tasks, "multi_turn", 1024, 8, 64)


def test_a_model_without_the_positions_is_named(llm: LLM) -> None:
    """Building longer would not help: the length has to come down."""
    dialogue = needle.Dialogue([1] * 1010, [("one", [2] * 10, [3] * 5)])
    with pytest.raises(ConfigError, match=r"the model has 1024 positions: lower --lengths by 9$"):
        needle.check_lengths(llm.config, "full", [dialogue])


def test_long_dialogues_are_shown_by_eight_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    cell = needle.Cell("multi_turn", 4096, "full", 16, 50.0, by_round=[100.0] * 8 + [0.0] * 4 + [100.0] * 4)
    needle.print_table([cell], ["full"])
    assert "multi_turn 4,096 full: exact by 8 rounds: 100.0, 50.0" in capsys.readouterr().out


def test_engines_of_one_method_are_told_apart(
    needle_folder: Path, build_engine: BuildEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pages alone beside static rows and pages, in columns of their own; the file grows with every task."""
    flags = ("--max_seq_len", "700", "--max_batch_size", "2", "--cache.full_threshold", "256", "--prkv.top_k", "128")
    pages = ("--prkv.static_share", "0")
    model = needle_folder / "model"
    directories = [build_engine(model, "prkv", *flags), build_engine(model, "prkv", *flags, *pages)]
    configs = [read_config(directory) for directory in directories]
    names = ["prkv top_k=128", "prkv top_k=128 static_share=0.0"]
    assert needle.engine_names(directories, configs) == names
    assert needle.engine_names(directories[:1], configs[:1]) == ["prkv"]
    assert needle.engine_names([tmp_path, tmp_path / "b"], [configs[0]] * 2) == [str(tmp_path), str(tmp_path / "b")]
    output = tmp_path / "results" / "needle.json"
    given = [word for directory in directories for word in ("--engine_dir", str(directory))]
    given += ["--needle", str(needle_folder), "--lengths", "600", "--n", "1", "--output", str(output)]
    written: list[int] = []
    for tasks in ("niah_single", "niah_single,niah_multikey"):
        assert needle.main([*given, "--tasks", tasks]) == 0
        written.append(len(json.loads(output.read_text(encoding="utf-8"))["cells"]))
    assert written == [2, 4]
    assert all(name in capsys.readouterr().out for name in names[:1])


@pytest.mark.slow
@pytest.mark.parametrize("method", NEEDLE)
def test_methods_find_the_needles(
    method: str, needle_folder: Path, build_engine: BuildEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[method].needle
    assert case is not None
    limits = ("--max_seq_len", str(LENGTH + 128), "--max_batch_size", "4")
    flags = ["--engine_dir", str(build_engine(needle_folder / "model", method, *limits))]
    flags += ["--lengths", str(LENGTH), "--n", str(QUESTIONS), "--tasks", case.tasks, "--json"]
    assert needle.main(["--needle", str(needle_folder), *flags]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert len(cells) == (7 if case.tasks == "all" else 1 + case.tasks.count(","))
    assert mean_exact(cells) >= 100 - case.margin
    for cell in cells:
        if CASES[method].dense:
            assert cell["attended_share"] == pytest.approx(1)
        else:
            assert cell["attended_share"] < case.most_attended, "it must attend sparsely at 4K"


def mean_exact(cells: list[dict[str, float]]) -> float:
    return sum(cell["exact"] for cell in cells) / len(cells)
