"""Lengths of the requests that people send: those of a published trace."""

from __future__ import annotations

import random

import numpy as np

# Percentiles of Mooncake's conversation trace, 12,031 requests of an hour of Kimi's service: the prompt's and the answer's
# tokens, which hardly depend on each other (rank correlation 0.07). Source: conversation_trace.jsonl in FAST25-release/traces of
# github.com/kvcache-ai/Mooncake at 3b5a594, of "Mooncake: Trading More Storage for Less Computation" (FAST 2025).
PERCENTS = (0, 10, 25, 50, 75, 90, 95, 99, 100)
PROMPTS = (891, 964, 2_306, 6_909, 15_367, 27_367, 39_550, 85_400, 126_195)  # mean 12,035
ANSWERS = (1, 24, 156, 350, 472, 597, 698, 1_118, 2_000)  # mean 343
LEAST_ANSWER = 50  # tokens: shorter answers, 15 % of the trace's, would have hardly a time per token


def mixture(requests: int, seed: int) -> tuple[tuple[int, int], ...]:
    """Prompt and answer lengths of so many requests, which together are distributed as the trace is, however few they are.

    Each takes its own share of the distribution, so that requests of two seeds differ in their order and in which prompt goes
    with which answer alone.
    """
    shares = (np.arange(requests) + 0.5) / requests * 100
    columns = []
    for number, quantiles in enumerate((PROMPTS, ANSWERS)):
        lengths = np.exp(np.interp(shares, PERCENTS, np.log(quantiles))).round().astype(int).tolist()
        random.Random(seed + number).shuffle(lengths)
        columns.append(lengths)
    return tuple((prompt, max(LEAST_ANSWER, answer)) for prompt, answer in zip(*columns, strict=True))
