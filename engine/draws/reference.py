"""Draws tokens by PyTorch, request by request: what the kernels compute, in the fewest lines.

A token's weight is 2^44 exp((score - largest score) / temperature), rounded to a whole number. Sums of weights are then exact,
so that top-p's border and the draw do not depend on the order in which a processor adds, nor on its number of threads. Tokens
with less than 2^-45 of the likeliest token's probability have the weight 0.

The draw takes 64 random bits of the request's seed, those of the token's number: Philox 4x32 with 10 rounds (Salmon and others,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011). It chooses the first token, by id, at which the sum of the kept weights
exceeds the bits' share of their sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvseek.core.request import SamplingConfig

from .sampling import SEEN, Drawn, Sampler, check_finite, log_probabilities

LARGEST_WEIGHT = 1 << 44
MOST_INVERSE = 1e300  # of the inverse temperature, so that it can be multiplied by 0
WORD = (1 << 32) - 1


class TorchDraws:
    """Draws on the CPU by PyTorch; Draws of sampling.py."""

    def begin(
        self, rows: Sequence[int], samplers: Sequence[Sampler], places: Sequence[int] = (), steps: int = 1
    ) -> TorchDrawing:
        """See Draws. It knows the tokens that have been taken, so none may be pending of a request with penalties."""
        assert not places, "the CPU's host knows the tokens"
        return TorchDrawing(rows, samplers)


class TorchDrawing:
    """See Drawing."""

    def __init__(self, rows: Sequence[int], samplers: Sequence[Sampler]) -> None:
        self._rows, self._samplers, self._drawn = rows, samplers, list[list[Drawn | int]]()

    @torch.inference_mode()
    def draw(self, logits: Tensor) -> None:
        each, done = zip(self._rows, self._samplers, strict=True), len(self._drawn)
        self._drawn.append([_draw(logits[row].float(), sampler, sampler.number + done) for row, sampler in each])

    def results(self) -> list[list[Drawn | int]]:
        return self._drawn


def _draw(logits: Tensor, sampler: Sampler, number: int) -> Drawn:
    params = sampler.params
    try:
        check_finite(logits)
        scores = adjusted(logits, sampler)
        best, token = scores.max(dim=0)  # of equal scores the lowest id
        if not torch.isfinite(best):
            raise sampler.nothing_left()
    except Exception as error:  # whatever it is, it is one request's
        return Drawn(error=error)
    if not params.greedy:
        ids, weights = candidates(scores, params.temperature, params.top_k, params.top_p, params.min_p)
        sums = weights.cumsum(dim=0)
        target = random_bits(params.seed, number) * int(sums[-1]) >> 64
        token = ids[torch.searchsorted(sums, target, right=True)]
    drawn, logprobs = int(token), None
    if params.logprobs is not None:
        (logprobs,) = log_probabilities(logits[None], [drawn], params.logprobs)
    return Drawn(drawn, logprobs, logits.numpy().tobytes() if params.return_generation_logits else b"")


def adjusted(logits: Tensor, sampler: Sampler) -> Tensor:
    """Apply all that changes logits [vocabulary] before the temperature; raises SamplingError as Sampler.allowed."""
    params, scores = sampler.params, logits.clone()
    for token, bias in merged_biases(params).items():
        scores[token] += bias
    occurrences = sampler.occurrences()
    if occurrences is not None:
        scores = penalise(scores, occurrences, params)
    allowed = sampler.allowed()
    if allowed is not None:
        bits = np.unpackbits(allowed.view(np.uint8), count=logits.shape[0], bitorder="little")
        scores.masked_fill_(~torch.from_numpy(bits.view(np.bool_)), -torch.inf)
    scores[sampler.banned()] = -torch.inf
    return scores


def merged_biases(params: SamplingConfig) -> dict[int, float]:
    """Return the bias of each token that has one; several of one token add up."""
    biases = dict[int, float]()
    for token, bias in params.logit_bias:
        biases[token] = biases.get(token, 0.0) + bias
    return biases


def penalise(scores: Tensor, occurrences: Tensor, params: SamplingConfig) -> Tensor:
    """Divide positive and multiply negative scores of seen tokens (CTRL paper, section 4.1), then subtract OpenAI's penalties.

    Scores float32 [vocabulary], occurrences as Sampler.occurrences.
    """
    repetition = torch.tensor(params.repetition_penalty, dtype=torch.float32)
    changed = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(occurrences & SEEN != 0, changed, scores)
    presence, frequency = (
        torch.tensor(p).float().double() for p in (params.presence_penalty, params.frequency_penalty)
    )
    counts = occurrences & ~SEEN
    return torch.where(counts > 0, (scores.double() - presence - frequency * counts).float(), scores)


def candidates(
    scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Find the tokens that top-k, then top-p (nucleus sampling) and then min-p leave, and their weights.

    Parameters
    ----------
    scores : Tensor, float32 [vocabulary]
        Logits; the largest is finite.
    temperature : float
        Greater than 0.
    top_k : int
        Number of tokens to keep; tokens whose logit equals the last kept one's are kept too. 0 keeps every token.
    top_p : float
        Greater than 0. Keep the most probable tokens, up to and including the token at which their sum of probabilities reaches
        top_p; of equal logits the lower ids first.
    min_p : float
        Keep the tokens with at least this share of the most probable token's probability; 0 keeps every token.

    Returns
    -------
    ids, weights : Tensor, int64 [kept]
        Ids ascend.
    """
    inverse = min(1 / temperature, MOST_INVERSE)
    weights = (((scores.double() - scores.max().double()) * inverse).exp() * LARGEST_WEIGHT).round().long()
    kept = torch.ones_like(weights, dtype=torch.bool)
    if 0 < top_k < scores.shape[0]:
        kept = scores >= scores.topk(top_k).values[-1]
    if top_p < 1:
        order = scores.masked_fill(~kept, -torch.inf).sort(descending=True, stable=True).indices
        ordered = (weights * kept)[order]
        before = ordered.cumsum(dim=0) - ordered
        kept = kept & torch.zeros_like(kept).scatter_(0, order, before < math.ceil(top_p * float(ordered.sum())))
    ids = (kept & (weights >= least_weight(min_p))).nonzero()[:, 0]
    return ids, weights[ids]


def least_weight(min_p: float) -> int:
    """Return the smallest weight that min_p keeps."""
    return math.ceil(min_p * LARGEST_WEIGHT)


def random_bits(seed: int, number: int) -> int:
    """Return the number-th 64 random bits of a 64-bit seed."""
    words, keys = [number, 0, 0, 0], [seed & WORD, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [b >> 32 ^ words[1] ^ keys[0], b & WORD, a >> 32 ^ words[3] ^ keys[1], a & WORD]
        keys = [keys[0] + 0x9E3779B9 & WORD, keys[1] + 0xBB67AE85 & WORD]
    return words[0] | words[1] << 32
