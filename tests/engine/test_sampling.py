"""Sampling against the processors of transformers, and the laws that it must keep."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvseek.core.errors import RequestError
from kvseek.core.request import SamplingParams
from kvseek.engine.schedule.sampling import Sampler, candidates, penalise

VOCABULARY = 500
seeds = st.integers(0, 2**32 - 1)


def random_logits(seed: int) -> torch.Tensor:
    """Distinct logits with the spread of a language model's, float32 [VOCABULARY]."""
    generator = torch.Generator().manual_seed(seed)
    # One from each part of equal probability, not near its borders: numbers drawn freely coincide now and then.
    parts = torch.randperm(VOCABULARY, generator=generator) + torch.rand(VOCABULARY, generator=generator) * 0.9 + 0.05
    return torch.special.ndtri(parts / VOCABULARY) * 4


def draw(params: SamplingParams, rows: torch.Tensor, prompt: tuple[int, ...] = ()) -> list[int]:
    sampler = Sampler(params, rows.shape[1], prompt)
    return [sampler.sample(row) for row in rows]


@given(seeds, st.integers(0, VOCABULARY + 5), st.floats(0.01, 1.0), st.floats(0.1, 5.0))
@settings(max_examples=200, deadline=None)
def test_kept_tokens_and_probabilities_agree_with_transformers(seed, top_k, top_p, temperature):
    logits = random_logits(seed)
    expected = TemperatureLogitsWarper(temperature)(None, logits[None].double())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    near = expected.softmax(-1).sort(descending=True).values.cumsum(-1)
    assume(bool(((near - top_p).abs() > 1e-9).all()) or top_p == 1)  # either side may be right at the border
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    ids, probabilities = candidates(logits, temperature, top_k, top_p)
    assert set(ids.tolist()) == set(expected[0].isfinite().nonzero()[:, 0].tolist())
    torch.testing.assert_close(probabilities / probabilities.sum(), expected[0].softmax(-1)[ids], rtol=1e-9, atol=0)


@given(seeds, st.lists(st.integers(0, VOCABULARY - 1), max_size=30), st.floats(0.2, 5.0))
@settings(max_examples=50, deadline=None)
def test_repetition_penalty_agrees_with_transformers(seed, previous, penalty):
    logits = random_logits(seed)
    seen = torch.zeros(VOCABULARY, dtype=torch.bool)
    seen[torch.tensor(previous, dtype=torch.long)] = True
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([previous], dtype=torch.long), logits[None].clone()
    )
    torch.testing.assert_close(penalise(logits, seen, penalty), expected[0])


def test_repetition_penalty_counts_prompt_and_drawn_tokens():
    logits = torch.tensor([1.0, 0.9, 0.8, -5.0])
    sampler = Sampler(SamplingParams(repetition_penalty=1.5), 4, (0,))
    assert [sampler.sample(logits) for _ in range(4)] == [1, 2, 0, 0]
    assert logits.tolist() == pytest.approx([1.0, 0.9, 0.8, -5.0])  # the engine's tensor is not changed


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_greedy_is_the_argmax(seed):
    logits = random_logits(seed)
    assert draw(SamplingParams(), logits[None]) == [int(logits.argmax())]
    # one candidate is greedy too, whatever the temperature
    assert draw(SamplingParams(temperature=3.0, top_k=1), logits[None]) == [int(logits.argmax())]
    assert draw(SamplingParams(temperature=3.0, top_p=1e-9), logits[None]) == [int(logits.argmax())]


@given(st.integers(2, 49152), st.data())
@settings(max_examples=50, deadline=None)
def test_greedy_takes_the_lowest_of_equal_logits(size, data):
    best = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=5)))
    logits = torch.zeros(size)
    logits[best] = 2.0
    assert draw(SamplingParams(), logits[None]) == [best[0]]


def test_top_k_keeps_all_that_equal_the_last():
    ids, probabilities = candidates(torch.tensor([1.0, 0.0, 1.0, 1.0]), 1.0, 2, 1.0)
    assert ids.tolist() == [0, 2, 3]
    torch.testing.assert_close(probabilities, torch.full((3,), 1 / 3, dtype=torch.float64))


def test_top_p_includes_the_token_that_crosses_it():
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, kept in ((0.4, [0]), (0.51, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2]), (0.96, [0, 1, 2, 3])):
        assert candidates(scores, 1.0, 0, top_p)[0].tolist() == kept


def test_seed_decides_the_draws():
    rows = torch.stack([random_logits(i) for i in range(40)])
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=7)
    first = draw(params, rows)
    assert first == draw(params, rows)
    other = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=8)
    assert first != draw(other, rows)


def test_draws_do_not_depend_on_other_requests():
    rows = torch.stack([random_logits(i) for i in range(20)])
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=seed) for seed in range(4)]
    alone = [draw(p, rows) for p in params]
    samplers = [Sampler(p, VOCABULARY, ()) for p in params]
    torch.manual_seed(0)
    together = [[] for _ in params]
    for row in rows:
        for number in torch.randperm(len(params)).tolist():  # uses the global generator between draws
            together[number].append(samplers[number].sample(row))
    assert together == alone


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), 5, ())
    drawn = torch.tensor([sampler.sample(probabilities.log()) for _ in range(4000)])
    share = drawn.bincount(minlength=5) / drawn.numel()
    assert share[4] == 0  # -inf is never drawn
    torch.testing.assert_close(share, probabilities, atol=0.03, rtol=0)  # more than three standard deviations


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e300])
def test_extreme_temperatures(temperature):
    logits = random_logits(1)
    (token,) = draw(SamplingParams(temperature=temperature, seed=1), logits[None])
    assert temperature > 1 or token == int(logits.argmax())


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(repetition_penalty=2)]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail_the_request(params, bad):
    for position in (0, 17, VOCABULARY - 1):
        logits = random_logits(2)
        logits[position] = bad
        with pytest.raises(RequestError, match=r"logits: the largest is (nan|inf), must be finite"):
            Sampler(params, VOCABULARY, (17,)).sample(logits)
    with pytest.raises(RequestError, match="-inf"):
        Sampler(params, VOCABULARY, ()).sample(torch.full((VOCABULARY,), float("-inf")))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("seed", -1)],
)
def test_bad_parameters_are_named(field, value):
    with pytest.raises(RequestError, match=f"{field} = {value}"):
        SamplingParams(**{field: value})
