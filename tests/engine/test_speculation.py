"""Speculation changes nothing but time: tokens, log probabilities and logits are those of steps of one token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import BuildEngine, RandomModel
from tests.engine.test_preemption import EXTENT_BYTES, LIMITS, REQUESTS, prompt
from tests.plugins.cases import CASES, method_flags
from tests.support.device_stand_ins import make_decoder
from tests.support.long_prompts import HEADS, SHAPE, WINDOW, load_changed
from tests.support.prefill import run_to_end
from tests.support.random_models import WINDOWS
from tests.support.steps_ahead import run_ahead

from kvseek.bench.speed.drafts import GivenDrafter
from kvseek.core.errors import ConfigError
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.core.selected_rows import RowReport
from kvseek.engine.engine import Engine
from kvseek.engine.speculation import NgramDrafter, Speculation, StepCosts, check_speculation, read_speculation
from kvseek.engine.tokenizer import Tokenizer
from kvseek.plugins.registry import METHODS, PEERS, get_method

SPECULATING = [method for method in METHODS if get_method(method).traits().verifies_drafts]
Answer = tuple[tuple[int, ...], tuple[object, ...], FinishReason | None]


class AnyDrafter(GivenDrafter):
    """Has any number of tokens drafted, whether they are worth it or not."""

    def __init__(self, answer: Sequence[int], acceptance: float, seed: int) -> None:
        super().__init__(answer, acceptance, seed)
        self._chance = random.Random(seed)

    def chances(self, most: int) -> list[float]:
        return [1e9] * self._chance.randint(0, most)


class Make:
    """Makes engines of which few rows are selected."""

    def __init__(self, model: Path, build_engine: BuildEngine) -> None:
        self._model, self._build = model, build_engine

    def directory(self, method: str, *flags: str) -> Path:
        few = method_flags(method, CASES[method].sparse)
        return self._build(self._model, method, *WINDOW, *LIMITS, *few, *flags)

    def __call__(self, method: str, extents: int = 40, speculation: Speculation | None = None, *flags: str) -> Engine:
        plain = load_changed(self.directory(method, *flags), {"kv_cache_host_memory_bytes": extents * EXTENT_BYTES})
        if speculation is None:
            return plain
        return Engine(plain.config, plain.decoder, plain.tokenizer, speculation=speculation)


@pytest.fixture(scope="module")
def make(random_model: RandomModel, build_engine: BuildEngine) -> Make:
    return Make(random_model("llama", **SHAPE, **HEADS), build_engine)


@pytest.fixture(scope="module")
def models(make: Make, hybrid: Make, windows: Make) -> dict[str, Make]:
    return {"llama": make, "hybrid": hybrid, "windows": windows}


@pytest.fixture(scope="module")
def hybrid(random_model: RandomModel, build_engine: BuildEngine) -> Make:
    """Two layers have rows, and the one between them a state."""
    kinds = {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]}
    return Make(random_model("qwen3_5", **SHAPE | kinds, **HEADS), build_engine)


@pytest.fixture(scope="module")
def windows(random_model: RandomModel, build_engine: BuildEngine) -> Make:
    """Two of three layers have a window, which is shorter than the prompts."""
    kinds = WINDOWS | {"num_hidden_layers": 3, "head_dim": 32}
    return Make(random_model("qwen3", **SHAPE | kinds, **HEADS), build_engine)


def answers(engine: Engine, requests: Sequence[Request], *, preempted: bool = False) -> list[Answer]:
    """Tokens, what came with them, and the reason of the end of each request; `preempted`: some steps take out one of them."""
    ids, outputs, steps = [engine.submit(request) for request in requests], list[StepOutput](), 0
    while engine.has_work:
        outputs += engine.step()
        steps += bool(engine._scheduler.decoding())
        if preempted and steps % 7 == 6:
            outputs += engine.settle()
            running = [one for one in engine._scheduler.decoding() if one.statistics.num_preemptions < 2]
            for one in running[:1]:
                engine._scheduler.preempt(one)
    assert not engine._cache.extents.used
    return [_answer([one for one in outputs if one.request_id == own]) for own in ids]


def _answer(outputs: Sequence[StepOutput]) -> Answer:
    drawn = [one for one in outputs if one.token_id is not None or one.finish_reason]
    assert not any(one.error for one in outputs)
    tokens = tuple(one.token_id if one.token_id is not None else one.end_id or -1 for one in drawn)
    with_each = tuple((one.logprobs, one.generation_logits, one.attended_tokens, one.cached_tokens) for one in drawn)
    return tokens, with_each, drawn[-1].finish_reason


def drafts_of(
    requests: Sequence[Request], expected: Sequence[Answer], acceptance: float
) -> Callable[[Request], AnyDrafter]:
    known = {request.prompt_ids: answer[0] for request, answer in zip(requests, expected, strict=True)}
    return lambda request: AnyDrafter(known[request.prompt_ids], acceptance, len(request.prompt_ids))


STOPPING = replace(REQUESTS[0], prompt_ids=prompt(7), stop_words=((1, 2),), max_tokens=60)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("method", SPECULATING)
def test_answers_are_those_without_drafts(method: str, kernels: str, make: Make) -> None:
    """Every kind of sampling, with evictions, drafts of every length, and a stop word in the middle of one."""
    plain, flags = make(method, 40, None, "--kernels", kernels), ("--kernels", kernels)
    (whole,) = answers(plain, [STOPPING])
    requests = [*REQUESTS, replace(STOPPING, stop_words=(whole[0][40:43],))]
    expected = answers(plain, requests)
    assert expected[-1][2] is FinishReason.STOP_WORD
    for acceptance in (0.0, 0.7, 1.0) if kernels == "native" else (0.7,):
        engine = make(method, 40, Speculation(), *flags)
        engine.make_drafter = drafts_of(requests, expected, acceptance)
        found = answers(engine, requests)
        if kernels == "native":
            assert found == expected
        else:  # last bits of PyTorch's products depend on the number of rows
            assert [one[0] for one in found] == [one[0] for one in expected]


@pytest.mark.parametrize("method", SPECULATING)
def test_rejected_tokens_leave_nothing_in_states(method: str, hybrid: Make) -> None:
    """Nor are accepted ones applied in another order, or by other operations, than without drafts: all bits are the same."""
    (whole,) = answers(hybrid(method), [STOPPING])
    requests = [*REQUESTS, replace(STOPPING, stop_words=(whole[0][40:43],))]
    expected = answers(hybrid(method), requests)
    for acceptance in (0.0, 0.7, 1.0):
        engine = hybrid(method, 40, Speculation())
        engine.make_drafter = drafts_of(requests, expected, acceptance)
        assert answers(engine, requests) == expected


def test_mixtures_with_states_verify(random_model: RandomModel, build_engine: BuildEngine) -> None:
    """In bfloat16, where what an expert computes for a row does not depend on how many rows choose it."""
    shape = SHAPE | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    make = Make(random_model("qwen3_next", **shape, **HEADS), build_engine)
    expected = answers(make("nested", 40, None, "--dtype", "bfloat16"), REQUESTS)
    engine = make("nested", 40, Speculation(), "--dtype", "bfloat16")
    engine.make_drafter = drafts_of(REQUESTS, expected, 0.8)
    assert answers(engine, REQUESTS) == expected


@pytest.mark.parametrize("method", SPECULATING)
def test_preempted_requests_and_reused_beginnings(method: str, make: Make) -> None:
    """Whoever goes on where he was, and whoever begins with another's rows, finds what tokens that were accepted have left."""
    check_reuse(method, make)


@pytest.mark.parametrize(("model", "method"), [("hybrid", "full"), ("hybrid", "nested"), ("windows", "nested")])
def test_states_that_are_reused_have_what_was_accepted(model: str, method: str, models: dict[str, Make]) -> None:
    """Requests go on from snapshots of where others ended, in the middle of drafts."""
    engine = check_reuse(method, models[model])
    assert engine._prefixes.counts.reused_tokens > 3000, "up to where the first requests ended"


def check_reuse(method: str, make: Make) -> Engine:
    """Returns the engine of the requests that go on from what others have left."""
    expected = answers(make(method), REQUESTS)
    engine = make(method, 40, Speculation())
    engine.make_drafter = drafts_of(REQUESTS, expected, 0.8)
    assert answers(engine, REQUESTS, preempted=True) == expected
    assert engine.preemptions > 3
    first = REQUESTS[:3]
    prompts = [(*one.prompt_ids, *answer[0]) for one, answer in zip(first, expected, strict=False)]
    longer = [Request(one, 20, SamplingConfig(logprobs=1)) for one in prompts]
    plain = make(method, 40)
    answers(plain, first)
    after = answers(plain, longer)
    engine = make(method, 40, Speculation())
    engine.make_drafter = drafts_of([*first, *longer], [*expected[:3], *after], 0.8)
    answers(engine, first)
    assert answers(engine, longer) == after
    return engine


@pytest.mark.parametrize(("model", "acceptance"), [("llama", 0.0), ("llama", 0.8), ("hybrid", 0.8), ("windows", 0.8)])
def test_engines_that_run_ahead_collect_before_they_draft(
    model: str, acceptance: float, models: dict[str, Make]
) -> None:
    """Drafts follow the tokens of the step before; requests that nobody watches get theirs at the end."""
    make = models[model]
    expected = answers(make("nested"), REQUESTS)
    engine = make("nested", 40, Speculation())
    engine.make_drafter = drafts_of(REQUESTS, expected, acceptance)
    decoder = run_ahead(engine)
    assert answers(engine, REQUESTS) == expected
    assert answers(engine, [replace(REQUESTS[1], speculate=False)]) == expected[1:2]
    assert decoder.launches, "where nothing was drafted"
    sequence = engine.prepare(REQUESTS[0])
    engine.enqueue(sequence, whole=True)
    (last,) = [one for one in run_to_end(engine) if one.finish_reason]
    assert (*last.earlier, last.token_id) == expected[0][0]
    assert sequence.statistics.drafted_tokens > 20
    assert (sequence.statistics.accepted_tokens > 10) == (acceptance > 0)


@pytest.mark.parametrize(("model", "method"), [("llama", "full"), ("llama", "flat"), ("hybrid", "flat")])
def test_the_decoder_of_a_gpu_verifies(model: str, method: str, models: dict[str, Make]) -> None:
    """PyTorch in place of kernels: rows of a slot in one batch, padding, greedy tokens and draws, evictions ahead of time."""
    directory = models[model].directory(method, "--kernels", "reference")
    expected, tokenizer = answers(Engine.load(directory), REQUESTS), Tokenizer(directory)
    decoder = make_decoder(directory)
    engine = Engine(decoder.config, decoder, tokenizer, speculation=Speculation())
    engine.make_drafter = drafts_of(REQUESTS, expected, 0.8)
    assert [one[0] for one in answers(engine, REQUESTS)] == [one[0] for one in expected]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_with_windows_verify(device: str, windows: Make) -> None:
    """Tokens that are taken back leave nothing in the rings."""
    directory = windows.directory("full", "--kernels", "native" if device == "cpu" else "reference")
    plain = Engine.load(directory)
    expected, decoder = answers(plain, REQUESTS), make_decoder(directory) if device == "cuda" else plain.decoder
    engine = Engine(decoder.config, decoder, plain.tokenizer, speculation=Speculation())
    engine.make_drafter = drafts_of(REQUESTS, expected, 0.8)
    assert [one[0] for one in answers(engine, REQUESTS)] == [one[0] for one in expected]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_two_ranks_verify(model: str, models: dict[str, Make]) -> None:
    directory = models[model].directory("nested", "--tp_size", "2")
    with closing(Engine.load(directory)) as plain:
        expected = answers(plain, REQUESTS)
    with closing(Engine.load(directory, speculation=Speculation())) as engine:
        engine.make_drafter = drafts_of(REQUESTS, expected, 0.8)
        assert answers(engine, REQUESTS) == expected


def test_who_asks_for_none_has_none_drafted(make: Make) -> None:
    """And whoever waits or has ended keeps no drafter."""
    plain, engine = make("full"), make("full", 40, Speculation())
    request = replace(REQUESTS[0], max_tokens=3)
    reported = replace(request, sampling=SamplingConfig(return_selected_rows=RowReport()))
    for asked, own, drafts in (
        (plain, request, False),
        (engine, replace(request, speculate=False), False),
        (engine, reported, False),
        (engine, request, True),
    ):
        sequence = asked.prepare(own)
        asked.enqueue(sequence)
        assert sequence.drafter is None
        asked.step()
        assert (sequence.drafter is not None) == drafts
        run_to_end(asked)
        assert sequence.drafter is None


def test_the_ngram_drafter_quotes() -> None:
    """Text that repeats its prompt: after two tokens that agree, the rest comes from there."""
    drafter = NgramDrafter([5, 6, 7, 8, 9, 10, 11, 12, 13, 50, 6, 7, 60, 6])
    assert drafter.draft(3) == []
    drafter.follow([7])
    assert drafter.draft(3) == [60, 6, 7], "the latest place"
    drafter.follow([7, 8])
    assert drafter.draft(4) == [9, 10, 11, 12], "and the longest match"
    drafter.follow([7, 8, 9, 10])
    first, *rest = drafter.chances(4)
    assert first > NgramDrafter([1, 2, 3, 1, 2]).chances(1)[0], "a match that has predicted well is believed"
    assert all(a >= b for a, b in pairwise([first, *rest]))
    assert NgramDrafter([3, 4, 3, 4]).draft(5) == [3, 4, 3, 4, 3], "a text that repeats itself goes on"
    for short in ([1], [1, 2], [1, 1, 1]):
        assert NgramDrafter(short).draft(3) in ([], [1, 1, 1])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(0, 3), max_size=60))
@settings(deadline=None)
def test_a_match_is_the_latest_of_the_longest(prompt: list[int], output: list[int]) -> None:
    """By search through the whole text, where no match of the step before goes on."""
    drafter, text = NgramDrafter(prompt), list(prompt)
    for token in [None, *output]:
        before = drafter.draft(1)
        if token is not None:
            text.append(token)
            drafter.follow(text[len(prompt) :])
        if before and before[0] == token:
            continue
        found = 0
        for size in (2, 3, 4):
            places = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
            found = places[-1] if places else found
        assert drafter.draft(1) == ([text[found]] if found else [])


def test_drafts_are_as_long_as_they_pay() -> None:
    costs = StepCosts()
    assert costs.choose([[0.9, 0.8]], 64) == [0], "nothing is known"
    costs.record(1, 0.010)
    assert costs.choose([[0.01, 0.001]], 64) == [0]
    for rows in range(2, 9):
        costs.record(rows, 0.010 + 0.001 * rows)
    assert costs.choose([[0.9**n for n in range(1, 8)]], 64) == [7]
    assert costs.choose([[0.9**n for n in range(1, 8)]], 4) == [3]
    assert costs.choose([[0.5, 0.25, 0.125, 0.06, 0.03]], 64) == [2], "0.3 ms a token: what comes behind does not pay"
    dear = StepCosts()
    for rows in (2, 3, 4):
        dear.record(rows, 0.010 * rows)
    assert dear.choose([[0.9], [0.2]], 64) == [0, 0], "a row that takes as long as a step"


def test_who_cannot_speculate_says_so(make: Make) -> None:
    for method in METHODS:
        config = make(method).config
        if method in SPECULATING:
            check_speculation(config, Speculation())
            check_speculation(config, None)
        else:
            with pytest.raises(ConfigError, match=f"speculation = 'ngram': must be left out with method = '{method}'"):
                check_speculation(config, Speculation())
    assert not any(get_method(peer).traits().verifies_drafts for peer in PEERS)
    config = replace(make("nested").config, device="cuda", max_batch_size=1)
    with pytest.raises(ConfigError, match="left out on a GPU with max_batch_size = 1"):
        check_speculation(config, Speculation())
    for values, message in (
        (("medusa",), "speculation = 'medusa': must be one of"),
        (("ngram", 8), r"num_speculative_tokens = 8: must be in \[1, 7\]"),
        ((None, 3), "num_speculative_tokens = 3: must be left out without speculation"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_speculation(*values)
