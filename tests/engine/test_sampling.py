"""Sampling against the processors of transformers, and the laws that it must keep."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from tests.support.draws import (
    KINDS,
    VOCABULARY,
    OneRequest,
    check_equal,
    draw_once,
    draw_together,
    every_kind_of_params,
    make_draws,
    random_logits,
)
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvseek.core.config import CHOICES
from kvseek.core.errors import LogitsError, RequestError, SamplingError
from kvseek.core.guide import Guide, GuideType
from kvseek.core.request import MAX_LOGPROBS, Request, SamplingConfig
from kvseek.engine.draws.compiled import CompiledDraws
from kvseek.engine.draws.reference import candidates, penalise, random_bits
from kvseek.engine.draws.sampling import SEEN, Draws, Sampler, overflow_remedy
from kvseek.kernels import draw_rows
from kvseek.kernels.cpu.draw.draw import NativeDraw

seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", params=KINDS)
def draws(request: pytest.FixtureRequest) -> Draws:
    return make_draws(request.param)


def draw(draws: Draws, params: SamplingConfig, rows: torch.Tensor, prompt: tuple[int, ...] = ()) -> list[int]:
    one = OneRequest(draws, params, rows.shape[1], prompt)
    return [one.sample(row) for row in rows]


@given(seeds, st.integers(0, VOCABULARY + 5), st.floats(0.01, 1.0), st.floats(0.0, 1.0), st.floats(0.1, 5.0))
@settings(max_examples=200, deadline=None)
def test_kept_tokens_and_probabilities_agree_with_transformers(seed, top_k, top_p, min_p, temperature):
    logits = random_logits(seed)
    expected = TemperatureLogitsWarper(temperature)(None, logits[None].double())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    near = expected.softmax(-1).sort(descending=True).values.cumsum(-1)
    assume(bool(((near - top_p).abs() > 1e-9).all()) or top_p == 1)  # either side may be right at the border
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    shares = expected.softmax(-1) / expected.softmax(-1).max()
    assume(bool(((shares - min_p).abs() > 1e-9)[shares < 1].all()))
    expected = MinPLogitsWarper(min_p)(None, expected)
    ids, weights = candidates(logits, temperature, top_k, top_p, min_p)
    likely = (expected[0].softmax(-1) >= 2**-44) | torch.zeros(VOCABULARY, dtype=torch.bool).scatter_(0, ids, True)
    assert set(ids.tolist()) == set((expected[0].isfinite() & likely).nonzero()[:, 0].tolist())
    shares = weights.double() / weights.sum()
    torch.testing.assert_close(shares, expected[0].softmax(-1)[ids], rtol=1e-9, atol=2**-44)


@given(seeds, st.lists(st.integers(0, VOCABULARY - 1), max_size=30), st.floats(0.2, 5.0))
@settings(max_examples=50, deadline=None)
def test_repetition_penalty_agrees_with_transformers(seed, previous, penalty):
    logits = random_logits(seed)
    occurrences = torch.zeros(VOCABULARY, dtype=torch.int32)
    occurrences[torch.tensor(previous, dtype=torch.long)] = SEEN
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([previous], dtype=torch.long), logits[None].clone()
    )
    torch.testing.assert_close(penalise(logits, occurrences, SamplingConfig(repetition_penalty=penalty)), expected[0])


def test_repetition_penalty_counts_prompt_and_drawn_tokens(draws):
    logits = torch.tensor([1.0, 0.9, 0.8, -5.0])
    sampler = OneRequest(draws, SamplingConfig(repetition_penalty=1.5), 4, (0,))
    assert [sampler.sample(logits) for _ in range(4)] == [1, 2, 0, 0]
    assert logits.tolist() == pytest.approx([1.0, 0.9, 0.8, -5.0])  # the engine's tensor is not changed


@given(seeds, st.lists(st.integers(0, 5), max_size=9), st.integers(0, 9), st.floats(-2, 2), st.floats(-2, 2))
@settings(max_examples=50, deadline=None)
def test_presence_and_frequency_penalties_count_prompt_and_output(draws, seed, prompt, ignored, presence, frequency):
    """OpenAI's formula, by hand: c occurrences cost c times the one, and once the other."""
    rows = torch.stack([random_logits(seed + step, 6) for step in range(8)])
    penalties = {"presence_penalty": presence, "frequency_penalty": frequency, "prompt_ignore_length": ignored}
    sampler, seen = OneRequest(draws, SamplingConfig(**penalties), 6, tuple(prompt)), prompt[ignored:]
    for row in rows:
        counts = [seen.count(token) for token in range(6)]
        values = [float(row[token]) - frequency * c - presence * (c > 0) for token, c in enumerate(counts)]
        second, best = sorted(values)[-2:]
        drawn = sampler.sample(row)
        assert drawn == values.index(best) or best - second < 1e-5
        seen = [*seen, drawn]


@given(seeds, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_bad_words_agree_with_transformers(draws, seed, words):
    assume(len({word[0] for word in words if len(word) == 1}) < 4)  # a token is left
    sampler, drawn = OneRequest(draws, SamplingConfig(bad_words=tuple(map(tuple, words))), 4, (0, 1, 2)), []
    processor = NoBadWordsLogitsProcessor(words)
    for step in range(12):
        row = random_logits(seed + step, 4)
        # An id that no word has stands for the prompt, of which bad words do not count.
        scores = processor(torch.tensor([[9, *drawn]]), torch.cat((row, torch.zeros(6)))[None])[0, :4]
        if not scores.isfinite().any():
            with pytest.raises(RequestError, match=r"^bad_words: leave no token"):
                sampler.sample(row)
            return
        drawn.append(sampler.sample(row))
        assert drawn[-1] == int(scores.argmax())


def test_end_tokens_come_late_and_biases_count_as_in_transformers(draws):
    rows = [random_logits(step) for step in range(6)]
    ends = [int(row.argmax()) for row in rows[:2]]
    bias = {int(rows[4].topk(9).indices[8]): 50.0, int(rows[5].argmax()): -50.0}
    params = SamplingConfig(min_tokens=3, logit_bias=tuple(bias.items()))
    sampler, drawn = OneRequest(draws, params, VOCABULARY, ends=tuple(ends)), []
    late = MinNewTokensLengthLogitsProcessor(1, 3, ends)
    biased = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    for row in rows:
        ids = torch.tensor([[1, *drawn]])
        drawn.append(sampler.sample(row))
        assert drawn[-1] == int(late(ids, biased(ids, row[None])).argmax())
    assert not set(drawn[:3]) & set(ends)


def test_log_probabilities_are_those_of_the_models_logits(draws):
    logits = random_logits(5)
    params = SamplingConfig(temperature=0.5, top_k=3, repetition_penalty=2.0, logit_bias=((7, 3.0),), logprobs=4)
    sampler = OneRequest(draws, params, VOCABULARY, (1, 2))
    drawn, expected = sampler.sample(logits), logits.log_softmax(0)
    found = sampler.last.logprobs
    assert found.token == pytest.approx(float(expected[drawn]))
    assert [token for token, _ in found.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(expected.topk(4).values.tolist())
    sampler = OneRequest(draws, SamplingConfig(logprobs=0), VOCABULARY)
    sampler.sample(logits)
    assert sampler.last.logprobs.top == ()


def test_only_plain_requests_are_greedy():
    plain = (
        SamplingConfig(),
        SamplingConfig(top_k=3, top_p=0.5, min_p=0.1, seed=9, prompt_ignore_length=4),
        SamplingConfig(temperature=1.5, top_p=0.0),
    )
    assert all(Sampler(Request((), 1, params), VOCABULARY).greedy for params in plain)
    changes = {"temperature": 0.1, "repetition_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 0.1}
    changes |= {"min_tokens": 1, "bad_words": ((1,),), "logit_bias": ((1, 1.0),), "logprobs": 0, "forced_tokens": (1,)}
    for name, value in changes.items():
        assert not Sampler(Request((), 1, SamplingConfig(**{name: value})), VOCABULARY).greedy


def test_forced_tokens_come_whatever_else_is_asked(draws):
    logits = torch.stack([random_logits(n) for n in range(4)])
    against = {"bad_words": ((7,), (17,)), "min_tokens": 9, "logit_bias": ((7, -50.0),), "repetition_penalty": 2.0}
    for params in ({}, {"temperature": 0.8, "top_k": 2, "logprobs": 1}):
        params = SamplingConfig(**params, **against, forced_tokens=(7, 17, 7))
        (drawn,) = draw_together(draws, logits[:, None], [params], ends=(17,))
        tokens = [one.token for one in drawn]
        assert tokens[:3] == [7, 17, 7]
        assert tokens[3] not in (7, 17)
    expected = logits.log_softmax(dim=1)
    assert [one.logprobs.token for one in drawn] == pytest.approx([float(expected[n, t]) for n, t in enumerate(tokens)])
    with pytest.raises(
        RequestError, match="forced_tokens = '1 tokens': must be absent with a guide; leave one of them"
    ):
        SamplingConfig(forced_tokens=(1,), guide=Guide(GuideType.JSON))


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_greedy_is_the_argmax(draws, seed):
    logits = random_logits(seed)
    assert draw(draws, SamplingConfig(), logits[None]) == [int(logits.argmax())]
    # one candidate is greedy too, whatever the temperature
    assert draw(draws, SamplingConfig(temperature=3.0, top_k=1), logits[None]) == [int(logits.argmax())]
    for one in ({"top_p": 1e-9}, {"top_p": 0.0}, {"top_p": 0.0, "logprobs": 0}, {"min_p": 1.0}):
        assert draw(draws, SamplingConfig(temperature=3.0, **one), logits[None]) == [int(logits.argmax())]


@given(st.integers(2, 2048), st.data())
@settings(max_examples=50, deadline=None)
def test_greedy_takes_the_lowest_of_equal_logits(draws, size, data):
    best = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=5)))
    logits = torch.zeros(size)
    logits[best] = 2.0
    assert draw(draws, SamplingConfig(), logits[None]) == [best[0]]


def test_top_k_keeps_all_that_equal_the_last():
    ids, weights = candidates(torch.tensor([1.0, 0.0, 1.0, 1.0]), 1.0, 2, 1.0)
    assert ids.tolist() == [0, 2, 3]
    assert weights.tolist() == [1 << 44] * 3


def test_top_p_includes_the_token_that_crosses_it():
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, kept in ((0.4, [0]), (0.51, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2]), (0.96, [0, 1, 2, 3])):
        assert candidates(scores, 1.0, 0, top_p)[0].tolist() == kept


def test_seed_decides_the_draws(draws):
    rows = torch.stack([random_logits(i) for i in range(40)])
    params = SamplingConfig(temperature=1.0, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=7)
    first = draw(draws, params, rows)
    assert first == draw(draws, params, rows)
    other = SamplingConfig(temperature=1.0, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=8)
    assert first != draw(draws, other, rows)


def test_draws_depend_neither_on_other_requests_nor_on_who_draws(draws):
    params = every_kind_of_params(5)
    logits = torch.stack([random_logits(n) for n in range(6 * len(params))]).reshape(6, len(params), VOCABULARY)
    options = {"prompt": (4, 4, 7, 400), "ends": (17,)}
    together = draw_together(draws, logits, params, **options)
    expected = [
        draw_together(make_draws("reference"), logits[:, [n]], [one], **options)[0] for n, one in enumerate(params)
    ]
    for found, wanted in zip(together, expected, strict=True):
        check_equal(found, wanted)


@given(
    seeds,
    st.sampled_from([2, 31, 500, 2048]),
    st.sampled_from(["distinct", "few", "masked"]),
    *(st.floats(0.05, 5.0), st.integers(0, 60), st.floats(0.0, 1.0, exclude_min=True), st.floats(0.0, 1.0)),
)
@settings(max_examples=60, deadline=None)
def test_every_combination_draws_the_same_token(draws, seed, size, kind, temperature, top_k, top_p, min_p):
    """With logits of few values, ties end at top-k's and top-p's borders."""
    logits = random_logits(seed, size)
    if kind == "few":
        logits = logits.round()
    if kind == "masked":
        logits = logits.masked_fill(torch.arange(size) % 3 == 1, -torch.inf)
    params = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    token = draw(draws, params, logits[None])
    assert token == draw(make_draws("reference"), params, logits[None])
    assert token[0] in candidates(logits, temperature, top_k, top_p, min_p)[0].tolist()


@pytest.mark.parametrize(
    "params",
    [
        *(
            {},
            {"temperature": 0.6, "top_p": 0.9},
            {"top_k": 5},
            {"min_p": 0.2},
            {"top_k": 12, "top_p": 0.7, "min_p": 0.1},
        ),
        *({"logit_bias": ((0, 1.0),), "temperature": 2.0}, {"repetition_penalty": 1.5, "presence_penalty": 0.3}),
    ],
)
def test_draws_follow_the_distribution(params):
    """Chi-square against a plain computation in float64. Tests above compare the reference's and the emulated kernel's draws."""
    draws, count, size = make_draws("native"), 4000, 30
    logits, prompt = random_logits(9, size) / 2, (1, 2, 5)
    params = SamplingConfig(**({"temperature": 1.0} | params))
    scores = logits.double()
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in prompt:
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
        scores[token] -= params.presence_penalty
    shares = (scores / params.temperature).softmax(0)
    order = shares.argsort(descending=True)
    order = order[: params.top_k or size]
    ordered = shares[order] / shares[order].sum()
    ordered[ordered.cumsum(0) - ordered >= params.top_p] = 0
    ordered[ordered < params.min_p * ordered[0]] = 0
    expected = torch.zeros(size, dtype=torch.float64).scatter_(0, order, ordered / ordered.sum()) * count
    samplers = [Sampler(Request(prompt, 1, dataclasses.replace(params, seed=seed)), size) for seed in range(count)]
    drawn = draw_once(draws, logits.expand(count, size).contiguous(), range(count), samplers)
    found = torch.tensor([one.token for one in drawn]).bincount(minlength=size)
    assert not found[expected == 0].any()
    likely = expected > 5
    rest = torch.tensor([float(expected[~likely].sum()), float(found[~likely].sum())])
    squares = float(((found - expected)[likely] ** 2 / expected[likely]).sum())
    squares += float((rest[1] - rest[0]) ** 2 / rest[0]) if rest[0] > 0 else 0.0
    assert squares < chi2.ppf(1 - 1e-6, max(1, int(likely.sum())))


class EveryThird:
    """A guide that allows every third token, and after `ends` tokens the end; it fails where it is told to."""

    def __init__(self, ends: int, fails: int = 1000, error: Exception | None = None) -> None:
        self._ends, self._fails, self._error, self._taken = ends, fails, error, 0

    @property
    def complete(self) -> bool:
        return self._taken >= self._ends

    @property
    def finished(self) -> bool:
        return self.complete

    def allowed(self) -> np.ndarray:
        if self._taken == self._fails:
            raise self._error or AssertionError("nobody told it to fail")
        bits = (np.arange(512) % 3 == 1) & (not self.complete)
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        assert token % 3 == 1
        self._taken += 1


@pytest.mark.parametrize("error", [SamplingError("guided_decoding_guide: too much work"), MemoryError("no room")])
def test_masks_of_guides_and_their_errors(draws, error):
    """Whatever a guide raises ends its own request alone."""
    logits = torch.stack([random_logits(n) for n in range(24)]).reshape(8, 3, VOCABULARY)
    found = []
    for kind in (draws, make_draws("reference")):
        params = [
            SamplingConfig(temperature=1.5, seed=4),
            SamplingConfig(min_tokens=3),
            SamplingConfig(temperature=1.0),
        ]
        samplers = [OneRequest(kind, one, VOCABULARY, ends=(5, 8)).sampler for one in params]
        samplers[0].follow(EveryThird(6))
        samplers[1].follow(EveryThird(9, fails=2, error=error))
        drawn = []
        for step in logits:
            drawn.append(draw_once(kind, step, range(3), samplers))
            for one, sampler in zip(drawn[-1], samplers, strict=True):
                if one.error is None:
                    sampler.take(one)
        found.append(drawn)
    tokens = [[one.token for one in step] for step in found[0]]
    assert tokens == [[one.token for one in step] for step in found[1]]
    assert all(token % 3 == 1 for token, _, _ in tokens[:6])
    assert {token for token, _, _ in tokens[6:]} <= {5, 8}
    assert [str(step[1].error) for step in found[0]] == ["None"] * 2 + [str(error)] * 6


def test_a_seeds_random_bits_are_philoxs():
    """Vectors of Random123's own tests, of which a seed and a number choose some; and neighbours do not resemble each other."""
    assert random_bits(0, 0) == 0x6627E8D5 | 0xE169C58D << 32
    bits = [random_bits(seed, number) for seed in range(40) for number in range(50)]
    ones = [bin(one ^ other).count("1") for one, other in pairwise(bits)]
    assert sum(ones) / len(ones) == pytest.approx(32, abs=0.5)


def test_a_request_goes_on_as_if_nothing_had_been(draws):
    """What a draw keeps on its device may be forgotten, as when a request gives its place up for a while."""
    rows = torch.stack([random_logits(n, 40) for n in range(20)])
    params = dataclasses.replace(every_kind_of_params(3)[-1], logit_bias=((3, 1.0),), bad_words=((1,),))
    one, other = (OneRequest(draws, params, 40, (4, 7, 7), (2,)) for _ in range(2))
    for row in rows:
        one.sampler.prepared = None
        assert one.sample(row) == other.sample(row)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e300])
def test_extreme_temperatures(draws, temperature):
    logits = random_logits(1)
    (token,) = draw(draws, SamplingConfig(temperature=temperature, seed=1), logits[None])
    assert temperature > 1 or token == int(logits.argmax())


@pytest.mark.parametrize(
    "params", [SamplingConfig(), SamplingConfig(temperature=1.0), SamplingConfig(repetition_penalty=2)]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail_the_request(draws, params, bad):
    for position in (0, 17, VOCABULARY - 1):
        logits = random_logits(2)
        logits[position] = bad
        with pytest.raises(LogitsError, match=r"logits: the largest is (nan|inf), must be finite"):
            OneRequest(draws, params, VOCABULARY, (17,)).sample(logits)
    with pytest.raises(LogitsError, match="-inf"):
        OneRequest(draws, params, VOCABULARY).sample(torch.full((VOCABULARY,), float("-inf")))


def test_draws_before_one_that_fails_are_kept():
    """Of a launch of five steps, whose third draw finds no memory, on any device."""
    draws, logits = make_draws("native"), random_logits(1)[None]
    sampler = OneRequest(draws, SamplingConfig(temperature=1.0, seed=5), VOCABULARY).sampler
    kernel, calls = draws._kernel, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no room")
        kernel(*arguments)

    failing.work_bytes = kernel.work_bytes
    expected = draws.begin([0], [sampler], steps=5)
    for drawing in (expected, CompiledDraws(failing).begin([0], [sampler], steps=5)):
        for _ in range(5):
            drawing.draw(logits)
    (*found, third, fourth, fifth), right = drawing.results(), expected.results()
    assert (len(right), found, len(calls)) == (5, right[:2], 3)
    assert [str(one.error) for (one,) in (third, fourth, fifth)] == ["no room"] * 3


def test_an_error_of_one_request_harms_no_other(draws):
    logits = torch.stack([random_logits(n) for n in range(3)])[None].repeat(2, 1, 1)
    logits[0, 1, 77] = torch.nan
    params = [SamplingConfig(temperature=1.0, logprobs=2, return_generation_logits=True, seed=n) for n in range(3)]
    drawn = draw_together(draws, logits, params)
    assert [type(one.error) for one in drawn[1]] == [LogitsError, type(None)]
    assert str(drawn[1][0].error) == "logits: the largest is nan, must be finite"
    for n in (0, 2):
        (alone,) = draw_together(draws, logits[:, [n]], params[n : n + 1])
        assert alone == drawn[n]
        assert drawn[n][1].logits == logits[1, n].numpy().tobytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("temperature", -1.0),
            ("temperature", float("nan")),
            ("top_k", -1),
            ("top_p", -0.1),
            ("top_p", 1.5),
            ("min_p", -0.1),
            ("min_p", 1.5),
            ("seed", -1),
        ),
        *(("presence_penalty", 101), ("frequency_penalty", float("nan")), ("min_tokens", -1), ("logprobs", 21)),
        ("prompt_ignore_length", -1),
    ],
)
def test_bad_parameters_are_named(field, value):
    with pytest.raises(RequestError, match=f"{field} = {value}"):
        SamplingConfig(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 0.0}, r"repetition_penalty = 0.0: must be in \[0.01, 100.0\]; 1 is no penalty"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty = 1e-38"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty = nan"),
        ({"bad_words": ((),)}, "bad_words = \\(\\): must be non-empty"),
        ({"bad_words": ((1,),) * 257}, "bad_words = '257 words': must be <= 256 words"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias of token 1 = 101.0: must be in"),
        ({"logit_bias": ((1, 1.0),) * 1025}, "logit_bias = '1025 tokens': must be <= 1024 tokens"),
    ],
)
def test_bad_lists_are_named(fields, message):
    with pytest.raises(RequestError, match=message):
        SamplingConfig(**fields)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingConfig)])
@pytest.mark.parametrize("value", [b"x", "x", 2.5, True, object()])
def test_values_of_another_type_are_named(name, value):
    default = getattr(SamplingConfig(), name)
    if type(value) is type(default):
        return
    with pytest.raises(RequestError, match=rf"^{name} = .*: Expected `.*, got `.*; correct it"):
        SamplingConfig(**{name: value})


@pytest.mark.parametrize("dtype", CHOICES["dtype"])
def test_numbers_that_overflow_are_not_mended_by_the_dtype_that_there_is(dtype):
    remedy = overflow_remedy(dtype)
    assert f"--dtype {dtype}" not in remedy
    assert ("--dtype" in remedy) == (dtype == "float16"), "bfloat16 reaches as far as float32"


def test_every_instruction_level_draws_the_same(library, level):
    params = every_kind_of_params(8)
    logits = torch.stack([random_logits(n) for n in range(2 * len(params))]).reshape(2, len(params), VOCABULARY)
    found = draw_together(CompiledDraws(NativeDraw(library)), logits, params)
    for one, other in zip(found, draw_together(make_draws("reference"), logits, params), strict=True):
        check_equal(one, other)


def test_kernels_have_room_for_the_likeliest_tokens_that_may_be_asked_for():
    assert dict(draw_rows.DrawnToken._fields_)["ids"]._length_ == MAX_LOGPROBS


@pytest.mark.parametrize("kind", ["native", "emulated"])
def test_tokens_go_where_the_next_step_finds_them(kind):
    """Of requests that get one: an address of 0, or logits that are not finite, write nothing."""
    draws, latest = make_draws(kind), torch.full((4,), -5, dtype=torch.int32)
    logits = torch.stack([random_logits(seed) for seed in range(4)])
    logits[2] = torch.nan
    params = [SamplingConfig(temperature=0.9, seed=n) for n in range(4)]
    samplers = [OneRequest(draws, one, VOCABULARY).sampler for one in params]
    places = [latest.data_ptr() + 4 * slot for slot in (3, 0, 1)]
    drawing = draws.begin(range(4), samplers, [*places, 0])
    drawing.draw(logits)
    (drawn,) = drawing.results()
    assert latest.tolist() == [drawn[1], -5, -5, drawn[0]]
    assert all(isinstance(drawn[number], int) for number in (0, 1, 3))
    assert isinstance(drawn[2].error, LogitsError)
