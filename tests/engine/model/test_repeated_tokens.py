"""Earlier places of pairs of tokens, against a definition with dictionaries."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvseek.core.config import KEY_BLOCK
from kvseek.engine.model.repeated_tokens import MOST_PLACES, RepeatedTokens

CPU = torch.device("cpu")


def worth_of_blocks(ids: list[int], start: int, stop: int, past: int) -> list[float]:
    """What each of the first `past` blocks is worth for the tokens start .. stop - 1."""
    places, worth, alone = defaultdict[tuple[int, int], list[int]](list), [0.0] * past, Counter(ids)
    for place in range(stop):
        before = ids[place - 1] if place else -1
        earlier = places[before, ids[place]]
        if place >= start and 0 < len(earlier) <= MOST_PLACES:
            by_chance = alone[before] * alone[ids[place]] / len(ids)
            surprise = max(0.0, math.log((len(earlier) + 1) / by_chance))
            for one in earlier:
                for block in (one // KEY_BLOCK, (one + 1) // KEY_BLOCK):
                    if block < past:
                        worth[block] += surprise / len(earlier)
        earlier.append(place)
    return worth


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 60), st.integers(0, 2**32), st.integers(65, 1500), st.integers(1, 12))
def test_the_blocks_that_are_worth_most(vocabulary: int, seed: int, tokens: int, count: int) -> None:
    torch.manual_seed(seed)
    ids = torch.randint(vocabulary, (tokens,)).tolist()
    start = 64 + seed % (tokens - 64)
    past = start // KEY_BLOCK
    found = RepeatedTokens(ids, CPU).blocks(start, tokens, 200, past, count)
    assert found.shape == (-(-(tokens - start) // 200), min(count, past))
    for number, chosen in enumerate(found.tolist()):
        first = start + 200 * number
        worth = worth_of_blocks(ids, first, min(first + 200, tokens), past)
        best = sorted(worth, reverse=True)[: len(chosen)]
        # The first pair of a prompt has no token before it, and none like it.
        assert sum(worth[block] for block in set(chosen)) >= sum(best) - 1e-4 - (worth[0] if 0 in chosen else 0)
        named = [block for block in chosen if block]
        assert len(set(named)) == len(named)
        assert all(worth[block] > 0 for block in named)


def test_a_rare_pair_is_found_and_frequent_ones_are_not() -> None:
    ids = [1, 2] * 3000
    ids[700:702] = [7, 8]
    ids[5500:5502] = [7, 8]
    (found,) = RepeatedTokens(ids, CPU).blocks(5300, 5812, 512, 80, 20).tolist()
    assert set(found) == {0, 700 // KEY_BLOCK}


def test_a_pair_of_rare_tokens_goes_before_pairs_of_frequent_ones() -> None:
    torch.manual_seed(0)
    ids = torch.randint(100, (20_000,)).tolist()  # any pair stands there twice, by chance
    for place in (3210, 7410, 12_800, 19_500):
        ids[place : place + 2] = [200, 201]
    (found,) = RepeatedTokens(ids, CPU).blocks(19_456, 19_968, 512, 19_456 // KEY_BLOCK, 3).tolist()
    assert set(found) == {place // KEY_BLOCK for place in (3210, 7410, 12_800)}


@pytest.mark.parametrize("ids", [list(range(400)), [5] * 400])
def test_text_that_repeats_nothing_or_only_itself_chooses_nothing(ids: list[int]) -> None:
    assert RepeatedTokens(ids, CPU).blocks(300, 400, 50, 4, 3).eq(0).all()


def test_chunks_that_begin_together_may_end_apart() -> None:
    ids = [*range(200), *range(400)]
    repeated = RepeatedTokens(ids, CPU)
    short, long = (repeated.blocks(400, stop, 50, 6, 3) for stop in (450, 600))
    assert (len(short), len(long)) == (1, 4)
    assert torch.equal(long[:1], short)
