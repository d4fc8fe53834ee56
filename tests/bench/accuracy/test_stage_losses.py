"""Where rows are lost: stages agree with selections and change nothing, counts add up, questions are what engines see."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import RandomModel
from tests.plugins.cases import CASES, Settings
from torch import Tensor

from kvseek.bench.accuracy import stage_losses
from kvseek.bench.accuracy.capture import CapturedLayer, Replay, capture, capture_questions, load_model
from kvseek.bench.accuracy.needle_tasks.tasks import Dialogue
from kvseek.bench.accuracy.stage_losses import Losses, measure_layer, total
from kvseek.bench.methods import stages_of
from kvseek.bench.variants import Variant, parse_variants
from kvseek.core.errors import ConfigError, KernelError
from kvseek.kernels.reference.codes.store import CodeStore
from kvseek.plugins.ctkvr.build import largest
from kvseek.plugins.measurements import Stage, Stages, by_place
from kvseek.plugins.prkv.summaries import Summaries

STEPS = 4
TELLING = [method for method, cases in CASES.items() if cases.losses is not None]
OPTIONS = [(method, option) for method in TELLING for option in ({}, *CASES[method].options)]


def peaked_layer(tokens: int = 1300, queries: int = 60) -> CapturedLayer:
    """Queries that attend to few of many keys."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, tokens, 32, generator=generator)
    return CapturedLayer(keys, torch.randn(6, queries, 32, generator=generator) * 2.5, 32**-0.5)


def variant(method: str, option: Settings, **fields: Any) -> Variant:
    return Variant(method, method, {**option, **(CASES[method].losses or {}), **fields})


def steps_of(layer: CapturedLayer) -> list[Tensor]:
    return [layer.queries[:, place].contiguous() for place in range(-STEPS, 0)]


@pytest.mark.parametrize(("method", "option"), OPTIONS)
def test_stages_keep_what_is_selected_and_do_not_change_the_index(method: str, option: Settings) -> None:
    """But for ideal stages: those say what a perfect ranking would keep, and hold as many rows as are kept in their place."""
    layer = peaked_layer()
    asked, plain = (Replay(layer, 3, STEPS, variant(method, option)) for _ in range(2))
    tell_stages = stages_of(method)
    assert tell_stages is not None
    for query in steps_of(layer):
        before = copy.deepcopy(contents(asked.index))
        stages = tell_stages(asked.index, query, 0)
        assert same(before, contents(asked.index))
        selected = asked.places(query)
        expected = plain.places(query)
        assert torch.equal(selected, expected)
        kept_next = [*(stage.kept for stage in stages.stages[1:]), selected]
        for stage, following in zip(stages.stages, kept_next, strict=True):
            assert stage.kept.shape == selected.shape
            assert not stage.kept.all(), "a stage that keeps everything tests nothing"
            if stage.ideal:
                page = getattr(asked.index.context.config, "page", 1)  # one that does not fit is left out
                assert ((stage.kept.sum(dim=1) - following.sum(dim=1)).abs() < page).all()
            else:
                assert not (selected & ~stage.kept).any()
        for replay in (asked, plain):
            replay.index.refresh([0])


def contents(index: Any) -> dict[str, Any]:
    """All of an index, or of a part of one, that can change; the context and the pool are the engine's."""
    return {
        name: contents(value) if isinstance(value, CodeStore | Summaries) else value
        for name, value in vars(index).items()
        if name not in ("context", "rows", "observe")
    }


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):  # bits: memory that nothing was written to may hold NaN
        return torch.equal(one.flatten().view(torch.uint8), two.flatten().view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)


@pytest.mark.parametrize(("method", "option"), OPTIONS)
def test_lost_rows_add_up(method: str, option: Settings) -> None:
    losses = measure_layer(peaked_layer(), 3, STEPS, variant(method, option), 0.01)
    assert losses.by_stage is not None
    assert losses.choices == STEPS * 2
    assert 0 < losses.lost == sum(losses.by_stage.values()) < losses.needed
    assert 0 < losses.harmed <= losses.choices
    assert 0 < losses.mass < losses.choices
    assert not losses.dense


@pytest.mark.parametrize(("method", "option"), OPTIONS)
def test_nothing_is_lost_where_everything_is_kept(method: str, option: Settings) -> None:
    layer = peaked_layer(tokens=700)
    losses = measure_layer(layer, 3, STEPS, variant(method, option, top_k=1024, **CASES[method].losses_kept), 0.01)
    assert (losses.lost, losses.harmed, losses.mass, losses.dense) == (0, 0, 0.0, True)
    assert losses.needed > 0
    assert losses.by_stage is not None
    assert set(losses.by_stage.values()) == {0}
    replay = Replay(layer, 3, STEPS, variant(method, option, top_k=1024, **CASES[method].losses_kept))
    tell_stages = stages_of(method)
    assert tell_stages is not None
    stages = tell_stages(replay.index, steps_of(layer)[0], 0)
    assert all(stage.kept.all() for stage in stages.stages)


def test_stages_of_a_dense_layer_keep_everything() -> None:
    layer = peaked_layer()
    replay = Replay(layer, 0, STEPS, variant("clusterkv", {}))
    tell_stages = stages_of("clusterkv")
    assert tell_stages is not None
    stages = tell_stages(replay.index, steps_of(layer)[0], 0)
    assert all(stage.kept.all() for stage in stages.stages)
    assert measure_layer(layer, 0, STEPS, variant("clusterkv", {}), 0.01).dense


@pytest.mark.parametrize("method", [method for method in CASES if method not in TELLING])
def test_other_methods_tell_no_stages(method: str) -> None:
    losses = measure_layer(peaked_layer(), 0, STEPS, Variant(method, method, {**CASES[method].sparse}), 0.01)
    assert losses.by_stage is None
    assert losses.dense == CASES[method].dense
    assert losses.figures()["lost_share_by_stage"] is None


def test_stages_know_only_the_reference() -> None:
    replay, tell_stages = Replay(peaked_layer(), 0, STEPS, Variant("full", "full")), stages_of("prkv")
    assert tell_stages is not None
    with pytest.raises(KernelError, match=r"FullIndex: must be a ReferenceIndex; measure with the reference"):
        tell_stages(replay.index, torch.zeros(6, 32), 0)


def test_the_first_stage_that_does_not_keep_a_row_is_blamed() -> None:
    first, second = by_place(torch.tensor([[0, 1, 2, -1]]), 5), by_place(torch.tensor([[0, 3, -1, -1]]), 5)
    assert first.tolist() == [[True, True, True, False, False]]
    stages = Stages((Stage("a", first), Stage("b", second)), last="c")
    blamed = stages.blame(torch.tensor([[True, True, False, True, False]]))
    assert list(blamed) == list(stages.names) == ["a", "b", "c"]
    assert {name: rows.nonzero()[:, 1].tolist() for name, rows in blamed.items()} == {"a": [3], "b": [1], "c": [0]}


def test_losses_by_hand() -> None:
    """One row of the region holds nearly all attention of one head, and exact top 1 takes it or the other head's."""
    keys = torch.zeros(1, 400, 2)
    keys[0, 100, 0] = keys[0, 120, 1] = 20.0  # the region is 64 .. 142
    queries = torch.zeros(2, 3, 2)
    queries[0, :, 0], queries[1, :, 1] = 1.0, 0.9
    losses = measure_layer(CapturedLayer(keys, queries, 1.0), 0, 1, Variant("flat", "flat", {"top_k": 1}), 0.05)
    assert (losses.needed, losses.lost, losses.choices, losses.harmed) == (2, 1, 1, 1)
    assert losses.mass == pytest.approx(0.5, abs=1e-3)
    assert losses.figures()["lost_share"] == 0.5


def test_sums_of_losses() -> None:
    parts = [Losses(4, 1, 2, 1, {"a": 1, "b": 0}, 0.5, False), Losses(6, 3, 2, 2, {"a": 1, "b": 2}, 1.0, True)]
    assert total(parts) == Losses(10, 4, 4, 3, {"a": 2, "b": 2}, 1.5, False)
    assert total([Losses(by_stage=None)]).by_stage is None
    figures = total(parts).figures()
    assert (figures["lost_share"], figures["harmed_share"], figures["mass_lost"]) == (0.4, 0.75, 0.375)
    assert figures["lost_share_by_stage"] == {"a": 0.2, "b": 0.2}


@pytest.fixture(scope="module")
def random_model(random_model: RandomModel) -> Any:
    return load_model(random_model("qwen3"))[0]


def test_captured_questions_are_what_one_pass_sees(random_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared context read once, and rounds on a growing one: as if the whole text were read each time."""
    monkeypatch.setattr("kvseek.bench.accuracy.capture.CHUNK_TOKENS", 16)
    one, two = list(range(3, 43)), list(range(50, 73))
    rounds = [("one", [80, 81, 82], [90, 91, 92]), ("one", [83], [93, 94, 95, 96])]
    dialogues = [Dialogue(one, rounds[:1]), Dialogue(one, rounds[1:]), Dialogue(two, rounds)]
    texts = [[*one, 80, 81, 82, 90, 91], [*one, 83, 93, 94, 95], [*two, 80, 81, 82, 90, 91]]
    texts.append([*two, 80, 81, 82, 90, 91, 92, 83, 93, 94, 95])
    found = 0
    for text, question, steps in zip(texts, capture_questions(random_model, dialogues), (2, 3, 2, 3), strict=True):
        assert question.steps == steps
        for layer, expected in zip(question.layers, capture(random_model, text, 20), strict=True):
            torch.testing.assert_close(layer.keys, expected.keys, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(layer.queries[:, -20:], expected.queries, atol=1e-4, rtol=1e-4)
        found += 1
    assert found == len(texts)


def test_the_model_is_right_if_it_draws_the_answer(random_model: Any) -> None:
    context, question = list(range(3, 30)), [80, 81]
    before = random_model.config._attn_implementation
    with torch.inference_mode():
        ids = [*context, *question]
        for _ in range(3):
            ids.append(int(random_model(torch.tensor([ids])).logits[0, -1].argmax()))
    gold = ids[-3:]
    wrong = [*gold[:2], (gold[2] + 1) % 300]
    dialogues = [Dialogue(context, [("one", question, answer)]) for answer in (gold, wrong)]
    assert [captured.right for captured in capture_questions(random_model, dialogues)] == [True, False]
    assert random_model.config._attn_implementation == before


def test_questions_must_fit() -> None:
    dialogues = [Dialogue([5] * 300, [("one", [6] * 10, [7] * 40)])]
    (flat,) = parse_variants("flat")
    with pytest.raises(
        ConfigError, match=r"--lengths = 350: must be at least 361, so that the prompts exceed the window"
    ):
        stage_losses.check_questions(dialogues, [flat], 1000, 350)
    with pytest.raises(ConfigError, match="--lengths = 350: must be <= 300, the model's positions"):
        stage_losses.check_questions(dialogues, [flat], 300, 350)
    (narrow,) = parse_variants("flat:cache.update=38,cache.local=64")
    with pytest.raises(ConfigError, match=r"cache\.update = 38: must be at least 39, the decode steps of the longest"):
        stage_losses.check_questions(dialogues, [narrow], 1000, 350)


def test_command_line_prints_json_and_tables(
    needle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results" / "lost.json"
    arguments = f"--needle {needle_folder} --tasks niah_multiquery,niah_single --lengths 1024 --n 1".split()
    arguments += ["--methods", "flat:top_k=8,prkv:top_k=64", "--threads", "1", "--output", str(output)]
    assert stage_losses.main([*arguments, "--layers", "1,3", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report == json.loads(output.read_text(encoding="utf-8"))
    assert "niah_multiquery 1024: 1 questions, 1 right with full attention" in captured.err
    cells = report["results"]
    keys = [(cell["method"], cell["task"], cell["questions"]) for cell in cells]
    tasks = (("niah_multiquery", 1), ("niah_single", 1), ("all", 2))
    assert keys == [(m, task, asked) for task, asked in tasks for m in ("flat:top_k=8", "prkv:top_k=64")]
    for cell in cells:
        assert [layer["layer"] for layer in cell["layers"]] == [1, 3]
        assert cell["total"]["needed"] == sum(layer["needed"] for layer in cell["layers"]) > 0
    for number in (1, 3):
        assert cells[4 + number // 3]["total"]["lost"] == sum(
            cell["total"]["lost"] for cell in cells[number // 3 : 4 : 2]
        )
    stage_losses.print_report(report)
    printed = " ".join(capsys.readouterr().out.split())
    assert "tells no stages" in printed
    assert "length: 1" in printed
    assert "…" not in printed
    assert "niah_multiquery" in printed
    assert f"pages {cells[1]['layers'][0]['lost_share_by_stage']['pages']:.1%}, codes" in printed


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--tasks", "none", "--tasks: 'none' is unknown; choose from"),
        ("--lengths", "1024,x", "--lengths = '1024,x': must be a comma list of numbers >= 256"),
        ("--n", "0", "--n = 0: must be >= 1"),
        ("--questions", "65", "--questions = 65: must be <= 64"),
        ("--least", "0", "--least = 0.0: must be in (0, 1]"),
        ("--threads", "0", "--threads = 0: must be >= 1"),
        ("--layers", "7", "--layers = '7': must be a comma list of layers below 5"),
    ],
)
def test_errors_say_what_to_do(
    needle_folder: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, message: str
) -> None:
    assert stage_losses.main(["--needle", str(needle_folder), "--methods", "flat", flag, value]) == 1
    assert message in capsys.readouterr().err


def largest_of_all(values: Tensor, count: int) -> Tensor:
    """The definition: one integer of each value's bits and its complemented index, and the largest of them."""
    bits = values.contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    index = torch.arange(values.shape[-1])
    return ((ordered << 32) | (0xFFFFFFFF - index)).topk(count, dim=-1).indices


FEW = st.sampled_from((-torch.inf, -1.5, -0.0, 0.0, 1e-40, 2.0, torch.inf))
ANY = st.floats(width=32, allow_nan=False)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from((FEW, ANY)), st.integers(1, 12), st.integers(1, 4))
def test_the_largest_are_those_of_the_definition(data: st.DataObject, kind: Any, n: int, rows: int) -> None:
    listed = data.draw(st.lists(st.lists(kind, min_size=n, max_size=n), min_size=rows, max_size=rows))
    values = torch.tensor(listed, dtype=torch.float32)
    count = data.draw(st.integers(0, n))
    assert torch.equal(largest(values, count), largest_of_all(values, count))
    assert torch.equal(largest(values[0], count), largest_of_all(values[0], count))
