"""The needle tasks, what contexts state, what is asked and how it is scored; and the training of a model for them."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from tests.conftest import BuildEngine

from kvseek.bench import evaluate
from kvseek.bench.accuracy import train_needle
from kvseek.bench.accuracy.needle_tasks import facts, vocabulary
from kvseek.bench.accuracy.needle_tasks.facts import score, write_context
from kvseek.bench.accuracy.needle_tasks.tasks import TASKS, WIDE, Dialogue, make_dialogues
from kvseek.bench.accuracy.questions import Score
from kvseek.bench.accuracy.tasks import wilson
from kvseek.bench.accuracy.train_needle import make_sequence
from kvseek.core.errors import ConfigError

ORDINALS = ("first", "second", "third", "fourth")


def text_of(dialogue: Dialogue) -> str:
    return vocabulary.decode(dialogue.context)


def right_answer(question: list[int], context: str) -> str:
    """Read the context for the answer, as a person would."""
    asked, _, begun = vocabulary.decode(question).partition(" ? answer")
    if (wide := asked.split()[1]) in WIDE_READERS:
        return WIDE_READERS[wide](context, asked.split()[2:], begun)
    if variable := re.search("trace (.*)", asked):
        (said,) = re.findall(rf"var {variable[1]} = (.*?) [.]", context)
        answer = f"{said} ."
        while said.isupper():
            (said,) = re.findall(rf"var {said} = (.*?) [.]", context)
            answer = f"{answer.removesuffix(' .')} = {said} ."
        return answer
    keys = re.findall(r"the (\w+ish \w+er)", asked)
    found = [fact for key in keys for fact in re.findall(rf"(the {key} is .*?) [.]", context)]
    if begun:  # the question begins the answer with the key
        (fact,) = found
        return fact.removeprefix(begun.strip()).strip() + " ."
    return " ".join(f"{ordinal} {fact}" for ordinal, fact in zip(ORDINALS, found, strict=True)) + " ."


def extracted(context: str, asked: list[str], begun: str) -> str:
    return " ".join(re.findall(r"the \w+ish \w+er weighs \d \d \d", context)) + " ."


def copied(context: str, asked: list[str], begun: str) -> str:
    (found,) = re.findall(rf"passage {asked[0]} = (.*? [.])", context)
    return str(found)


def counted(context: str, asked: list[str], begun: str) -> str:
    (word,) = re.findall(rf"pick {asked[0]} = (\w+)", context)
    figures = f"{len(re.findall(f'met {word}', context)):02}"
    return f"{word} is {' '.join(figures)} ."


def compared(context: str, asked: list[str], begun: str) -> str:
    first, second = (re.findall(rf"list {name} = (.*?) [.]", context)[0].split() for name in asked)
    return " ".join(f"{word} {'both' if word in second else 'only'}" for word in first) + " ."


def grown(context: str, asked: list[str], begun: str) -> str:
    """Follow the table line by line; the words of the filler are the names of the lines."""
    (table,) = re.findall("table (.*?) [.]", context)
    leads = dict(re.findall(r"(\w+ \w+) (\w+)", table))
    names = vocabulary.WORDS[vocabulary.FILLER.start :]
    values, lines = {names[0]: begun.split()[2]}, []
    for number in range(1, names.index(asked[0]) + 1):
        name, before = names[number], names[number // 2]
        step = f"{values[before]} {ORDINALS[number % 2]}"
        values[name] = leads[step]
        lines.append(f"from {before} {step} {leads[step]} to {name} {leads[step]}")
    assert begun.strip() == lines[0]
    return " ".join(lines[1:]) + " ."


WIDE_READERS = {"extract": extracted, "copy": copied, "count": counted, "compare": compared, "grow": grown}


@pytest.mark.parametrize("tokens", [1024, 4096])
@pytest.mark.parametrize("task", TASKS)
def test_answers_stand_in_the_context(task: str, tokens: int) -> None:
    """A reader of the text finds the answer; lengths are those asked for; other seeds make other contexts."""
    dialogues = make_dialogues(task, tokens, 2)
    assert dialogues == [make_dialogues(task, tokens, 1, first=number)[0] for number in (0, 1)]
    assert len({text_of(dialogue) for dialogue in dialogues}) == 2
    for dialogue in dialogues:
        assert dialogue.context[0] == vocabulary.BOS
        assert tokens - 2 <= dialogue.tokens <= tokens
        assert len(dialogue.rounds) == (8 if task == "multi_turn" else 1)
        for kind, question, gold in dialogue.rounds:
            assert vocabulary.decode(gold) == right_answer(question, text_of(dialogue))
            assert score(kind, gold, gold) == Score(True, 1.0)


def test_long_dialogues_repeat_the_mixture() -> None:
    """Sixty-four rounds within the length asked for, and no fact of one value asked for twice."""
    (dialogue,) = make_dialogues("multi_turn", 4096, 1, rounds=64)
    kinds = [kind for kind, _, _ in dialogue.rounds]
    assert {kind: kinds.count(kind) for kind in kinds} == {"value": 40, "four": 8, "values": 8, "chain": 8}
    assert len({tuple(question) for kind, question, _ in dialogue.rounds if kind == "value"}) == 40
    assert dialogue.tokens == 4096
    assert len(make_dialogues("multi_turn", 1024, 1, rounds=3)[0].rounds) == 3
    with pytest.raises(ConfigError, match=r"--lengths 1024: multi_turn with 64 questions a context needs \d+ tokens"):
        make_dialogues("multi_turn", 1024, 1, rounds=64)


def test_scores() -> None:
    value = vocabulary.encode("1 2 3 4 5 .")
    assert score("value", value, vocabulary.encode("1 2 3 4 5 . the")) == Score(True, 1.0)
    assert score("value", value, vocabulary.encode("1 2 3 0 5 .")) == Score(False, 5 / 6)
    assert score("value", value, []) == Score(False, 0.0)
    (dialogue,) = make_dialogues("niah_multivalue", 1024, 1)
    kind, _, gold = dialogue.rounds[0]
    key = gold[1:5]
    ends = [place for place, number in enumerate(gold) if number in vocabulary.ORDINALS] + [len(gold) - 1]
    values = [gold[a + 5 : b] for a, b in pairwise(ends)]
    turned = [number for o, v in zip(vocabulary.ORDINALS, values[::-1], strict=True) for number in [o, *key, *v]]
    assert score(kind, gold, [*turned, vocabulary.FULL_STOP]) == Score(True, 1.0)
    assert score("four", gold, [*turned, vocabulary.FULL_STOP]) == Score(False, 1.0)
    assert score(kind, gold, [*gold[: ends[3]], vocabulary.FULL_STOP]) == Score(False, 0.75)


def test_parts_of_wide_answers() -> None:
    """A record that is left out costs its share alone; so does a word of a list with the wrong verdict."""
    for task, tokens in (("extract", 7), ("compare", 2)):
        (dialogue,) = make_dialogues(task, 1024, 1)
        kind, _, gold = dialogue.rounds[0]
        pieces = (len(gold) - 1) // tokens
        assert score(kind, gold, gold[tokens:]) == Score(False, pytest.approx(1 - 1 / pieces))
        assert score(kind, gold, [*gold[:-2], vocabulary.IDS["the"], vocabulary.FULL_STOP]).part < 1


def test_a_long_chain_fills_the_answer() -> None:
    (dialogue,) = make_dialogues("long_chain", 8300, 1)
    _, question, gold = dialogue.rounds[0]
    assert len(dialogue.context) + len(question) < 310
    assert len(gold) == 7993


def test_the_layout_is_the_needle_models(needle_folder: Path) -> None:
    """Words of the grammar have the ids of the model's own tokenizer, and so have the classes of made-up words."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(needle_folder / "model").get_vocab()
    given = 4 + 17 + 10
    assert len(own) == vocabulary.SIZE == len(vocabulary.IDS) == len(vocabulary.WORDS)
    assert [own[word] for word in vocabulary.WORDS[:given]] == list(range(given))
    assert all(word.isupper() == (number in vocabulary.VARIABLES) for word, number in own.items() if number >= given)


def test_the_saved_tokenizer_reads_the_text_back(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    vocabulary.save_tokenizer(tmp_path, 4096)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (dialogue,) = make_dialogues("variable_tracking", 512, 1)
    assert tokenizer(vocabulary.decode(dialogue.context[1:]))["input_ids"] == dialogue.context
    assert tokenizer.convert_tokens_to_ids("nonsense") == vocabulary.UNKNOWN


def test_filler_fills() -> None:
    """Sentences begin where the context says, and no facts or no filler are contexts too."""
    numbers = np.random.default_rng(0)
    for tokens in (0, 1, 7, 300):
        context = write_context([], tokens, numbers)
        assert context.ids.shape == (tokens,)
        assert all(context.ids[start - 1] == vocabulary.FULL_STOP for start in context.starts[1:])
    assert context.starts[0] == 0
    assert len(context.starts) > 20


@given(st.integers(1, 400), st.data())
def test_intervals_are_those_of_scipy(samples: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, samples))
    expected = binomtest(right, samples).proportion_ci(0.95, method="wilson")
    assert wilson(right / samples, samples) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_more_facts_than_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of a million tokens that consists of facts would need more: the search for a free key would not end."""
    assert len(facts.ADJECTIVES) * len(facts.NOUNS) == 65_536
    monkeypatch.setattr(facts, "NOUNS", facts.NOUNS[:2])
    with pytest.raises(ConfigError, match=r"more than 512 facts: must be <= 512; give shorter"):
        make_dialogues("niah_multikey_dense", 1 << 14, 1)


FLAGS = ["--shape", "tiny", "--positions", "2048", "--stage", "128:4:8:1.0", "--stage", "256:2:4", "--log_every", "1"]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One context a task is enough."""
    monkeypatch.setattr(train_needle, "CHECKED_CONTEXTS", 1)
    monkeypatch.setattr(train_needle, "EVALUATED_CONTEXTS", 1)


def train(folder: Path, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """Status and lines of the log."""
    status = train_needle.main(["--output_dir", str(folder), *FLAGS, *flags])
    return status, [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_training_writes_a_model_and_goes_on_where_it_was(
    tmp_path: Path, build_engine: BuildEngine, checks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls; ended and begun again, the weights are those of one run; the builder and the tasks take them."""
    status, log = train(tmp_path / "whole")
    losses = [line["loss"] for line in log if "loss" in line]
    assert (status, len(losses), log[-1]["step"]) == (0, 12, 12)
    assert losses[7] < losses[0] - 0.05
    assert set(log[-1]["exact_and_tokens"]) == set(TASKS)
    assert train(tmp_path / "parts", "--seconds", "0")[0] == 3
    status, log = train(tmp_path / "parts")
    assert (status, [line["loss"] for line in log if "loss" in line]) == (0, losses)
    states = [torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("whole", "parts")]
    for name, weights in states[0]["model"].items():
        torch.testing.assert_close(states[1]["model"][name], weights, rtol=0, atol=0)
    assert train(tmp_path / "parts", "--stage", "256:2:1")[0] == 0, "a stage may be longer, or follow"
    assert train(tmp_path / "parts", "--jumps", "0")[0] == 1
    assert train(tmp_path / "parts", "--init", str(tmp_path / "whole/model"), "--shape", "small")[0] == 1
    assert "was begun with other flags" in capsys.readouterr().err
    engine = build_engine(tmp_path / "whole/model", "full", "--max_seq_len", "512", "--check")
    assert (
        evaluate.main(
            [
                "tasks",
                "--suite",
                "needle",
                "--engine_dir",
                str(engine),
                "--lengths",
                "300",
                "--n",
                "1",
                "--tasks",
                "niah_single",
            ]
        )
        == 0
    )


def test_a_training_begins_with_a_checkpoint_and_fits_into_its_time(tmp_path: Path, checks: None) -> None:
    """Measuring how many steps fit changes no weight; a run that goes on keeps their number; the end measures all tasks."""

    def weights(name: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(tmp_path / name / "state.pt", weights_only=True)["model"]
        return found

    assert train(tmp_path / "first", "--seconds", "0")[0] == 3
    begun = ("--init", str(tmp_path / "first/model"), "--learning_rate", "0")
    status, log = train(tmp_path / "second", *begun, "--minutes", "9", "--seconds", "0")
    assert (status, [line["measured"] for line in log if "measured" in line]) == (3, [128, 256])
    for name, of_first in weights("first").items():
        torch.testing.assert_close(weights("second")[name], of_first.bfloat16().float(), rtol=0, atol=0)
    stages = torch.load(tmp_path / "second/state.pt", weights_only=True)["stages"]
    status, log = train(tmp_path / "second", *begun, "--minutes", "0.0001", "--evaluate", "1024")
    assert (status, len([line for line in log if "measured" in line])) == (0, 2), (
        "not measured again, and its time is over"
    )
    assert [(line["step"], line["of"]) for line in log if "loss" in line][-1] == (2, sum(stage[2] for stage in stages))
    assert (log[-1]["evaluated"], log[-1]["contexts"], set(log[-1]["exact_and_tokens"])) == (1024, 1, set(TASKS))


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


def test_wide_sequences() -> None:
    """Of every form, short and long; each answer is right by what the context states, and weighs more the longer it is."""
    kinds = set()
    for number in range(80):
        tokens = 256 << number % 5
        one = make_sequence([0, number, 0], tokens, bare=0, jumps=0.5, positions=8192, wide_share=1.0)
        assert one.ids.shape == one.weights.shape == (tokens,)
        assert np.array_equal(one.answers, one.weights > 0)
        context, *questions = vocabulary.decode(one.ids).split(" question ")
        edges = np.flatnonzero(np.diff(one.answers.astype(int), append=0))
        for question, begin, end in zip(questions, edges[::2] + 1, edges[1::2] + 1, strict=True):
            gold = vocabulary.decode(one.ids[begin:end])
            asked = vocabulary.encode(f"question {question}".removesuffix(gold))
            assert right_answer(asked, context) == gold
            assert one.weights[begin:end].sum() == pytest.approx((end - begin) ** 0.5, rel=1e-4)
            kinds.add(question.split()[0])
    assert kinds == set(WIDE_READERS)


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
    found = train_needle.check(needle_model, 1024, torch.device("cpu"))
    assert [task for task, shares in found.items() if shares != [1.0, 1.0]] == list(WIDE)
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
