"""Sampling against the processors of transformers, and the laws that it must keep."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvseek.core.errors import LogitsError, RequestError
from kvseek.core.request import Request, SamplingParams
from kvseek.engine.schedule.sampling import Sampler, candidates, penalise

VOCABULARY = 500
seeds = st.integers(0, 2**32 - 1)


def random_logits(seed: int, size: int = VOCABULARY) -> torch.Tensor:
    """Distinct logits with the spread of a language model's, float32 [size]."""
    generator = torch.Generator().manual_seed(seed)
    # One from each part of equal probability, not near its borders: numbers drawn freely coincide now and then.
    parts = torch.randperm(size, generator=generator) + torch.rand(size, generator=generator) * 0.9 + 0.05
    return torch.special.ndtri(parts / size) * 4


def make(
    params: SamplingParams, size: int = VOCABULARY, prompt: tuple[int, ...] = (), ends: tuple[int, ...] = ()
) -> Sampler:
    return Sampler(Request(prompt, 1, params, end_ids=ends), size)


def draw(params: SamplingParams, rows: torch.Tensor, prompt: tuple[int, ...] = ()) -> list[int]:
    sampler = make(params, rows.shape[1], prompt)
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
    sampler = make(SamplingParams(repetition_penalty=1.5), 4, (0,))
    assert [sampler.sample(logits) for _ in range(4)] == [1, 2, 0, 0]
    assert logits.tolist() == pytest.approx([1.0, 0.9, 0.8, -5.0])  # the engine's tensor is not changed


@given(seeds, st.lists(st.integers(0, 5), max_size=9), st.integers(0, 9), st.floats(-2, 2), st.floats(-2, 2))
@settings(max_examples=50, deadline=None)
def test_presence_and_frequency_penalties_count_prompt_and_output(seed, prompt, ignored, presence, frequency):
    """OpenAI's formula, by hand: c occurrences cost c times the one, and once the other."""
    rows = torch.stack([random_logits(seed + step, 6) for step in range(8)])
    penalties = {"presence_penalty": presence, "frequency_penalty": frequency, "prompt_ignore_length": ignored}
    sampler, seen = make(SamplingParams(**penalties), 6, tuple(prompt)), prompt[ignored:]
    for row in rows:
        counts = [seen.count(token) for token in range(6)]
        values = [float(row[token]) - frequency * c - presence * (c > 0) for token, c in enumerate(counts)]
        second, best = sorted(values)[-2:]
        drawn = sampler.sample(row)
        assert drawn == values.index(best) or best - second < 1e-5
        seen = [*seen, drawn]


@given(seeds, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_bad_words_agree_with_transformers(seed, words):
    assume(len({word[0] for word in words if len(word) == 1}) < 4)  # a token is left
    sampler, drawn = make(SamplingParams(bad_words=tuple(map(tuple, words))), 4, prompt=(0, 1, 2)), []
    processor = NoBadWordsLogitsProcessor(words)
    for step in range(12):
        row = random_logits(seed + step, 4)
        # An id that no word has stands for the prompt, of which bad words do not count.
        scores = processor(torch.tensor([[9, *drawn]]), torch.cat((row, torch.zeros(6)))[None])[0, :4]
        if not scores.isfinite().any():
            with pytest.raises(RequestError, match="bad_words, min_tokens: together they leave no token"):
                sampler.sample(row)
            return
        drawn.append(sampler.sample(row))
        assert drawn[-1] == int(scores.argmax())


def test_end_tokens_come_late_and_biases_count_as_in_transformers():
    rows = [random_logits(step) for step in range(6)]
    ends = [int(row.argmax()) for row in rows[:2]]
    bias = {int(rows[4].topk(9).indices[8]): 50.0, int(rows[5].argmax()): -50.0}
    params = SamplingParams(min_tokens=3, logit_bias=tuple(bias.items()))
    sampler, drawn = make(params, ends=tuple(ends)), []
    late = MinNewTokensLengthLogitsProcessor(1, 3, ends)
    biased = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    for row in rows:
        ids = torch.tensor([[1, *drawn]])
        drawn.append(sampler.sample(row))
        assert drawn[-1] == int(late(ids, biased(ids, row[None])).argmax())
    assert not set(drawn[:3]) & set(ends)


def test_log_probabilities_are_those_of_the_models_logits():
    logits = random_logits(5)
    params = SamplingParams(temperature=0.5, top_k=3, repetition_penalty=2.0, logit_bias=((7, 3.0),), logprobs=4)
    sampler = make(params, prompt=(1, 2))
    assert sampler.logprobs is None
    drawn, expected = sampler.sample(logits), logits.log_softmax(0)
    found = sampler.logprobs
    assert found.token == pytest.approx(float(expected[drawn]))
    assert [token for token, _ in found.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(expected.topk(4).values.tolist())
    sampler = make(SamplingParams(logprobs=0))
    sampler.sample(logits)
    assert sampler.logprobs.top == ()


def test_only_plain_requests_are_greedy():
    plain = (SamplingParams(), SamplingParams(top_k=3, top_p=0.5, seed=9, prompt_ignore_length=4))
    assert all(make(params).greedy for params in plain)
    changes = {"temperature": 0.1, "repetition_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 0.1}
    changes |= {"min_tokens": 1, "bad_words": ((1,),), "logit_bias": ((1, 1.0),), "logprobs": 0}
    assert not any(make(SamplingParams(**{name: value})).greedy for name, value in changes.items())


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
    samplers = [make(p) for p in params]
    torch.manual_seed(0)
    together = [[] for _ in params]
    for row in rows:
        for number in torch.randperm(len(params)).tolist():  # uses the global generator between draws
            together[number].append(samplers[number].sample(row))
    assert together == alone


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    sampler = make(SamplingParams(temperature=1.0, seed=3), 5)
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
        with pytest.raises(LogitsError, match=r"logits: the largest is (nan|inf), must be finite"):
            make(params, prompt=(17,)).sample(logits)
    with pytest.raises(LogitsError, match="-inf"):
        make(params).sample(torch.full((VOCABULARY,), float("-inf")))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("temperature", -1.0),
            ("temperature", float("nan")),
            ("top_k", -1),
            ("top_p", 0.0),
            ("top_p", 1.5),
            ("seed", -1),
        ),
        *(("presence_penalty", 101), ("frequency_penalty", float("nan")), ("min_tokens", -1), ("logprobs", 21)),
        ("prompt_ignore_length", -1),
    ],
)
def test_bad_parameters_are_named(field, value):
    with pytest.raises(RequestError, match=f"{field} = {value}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": ((),)}, "bad_words = \\(\\): must be non-empty"),
        ({"bad_words": ((1,),) * 257}, "bad_words = '257 words': must be <= 256 words"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias of token 1 = 101.0: must be in"),
        ({"logit_bias": ((1, 1.0),) * 1025}, "logit_bias = '1025 tokens': must be <= 1024 tokens"),
    ],
)
def test_bad_lists_are_named(fields, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)
