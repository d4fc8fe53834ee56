"""Draws the next token of one request: bias, penalties, guide, bad words, temperature, top-k, top-p, min-p, one draw."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.core.errors import LogitsError, SamplingError
from kvseek.core.request import LogProbs, Request
from kvseek.engine.model.reference.operations import NO_TOKEN

from .guides import GuideMatcher


class Sampler:
    """Sampling state of one request: its generator and the tokens that it has seen.

    Nothing here depends on the batch that the request runs in, so the same seed gives the same tokens in any company.

    Parameters
    ----------
    vocab_size : int
        Length of the logits.
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        self.params = request.sampling
        self._guide: GuideMatcher | None = None
        self._generator = torch.Generator().manual_seed(self.params.seed)
        self._vocab_size, self._prompt_ids, self._end_ids = vocab_size, request.prompt_ids, request.end_ids
        self._generated: list[int] = []
        self._seen: Tensor | None = None  # made at first use, by the engine's thread: see EngineService.load
        self._counts: Tensor | None = None
        self._biases: tuple[Tensor, Tensor] | None = None  # token ids, and what is added to the logit of each
        self._logprobs: LogProbs | None = None
        self._logits = b""

    def follow(self, guide: GuideMatcher) -> None:
        """Let the output follow the request's guide; `guide` is its state at the beginning, the sampler's own from now on."""
        self._guide = guide

    @property
    def guided(self) -> bool:
        """Whether the output follows a guide."""
        return self._guide is not None

    @property
    def greedy(self) -> bool:
        """Whether the next token is the one with the largest logit, and nothing else is asked for (`greedy_token`)."""
        return self.params.greedy and not self.params.needs_logits

    @property
    def logprobs(self) -> LogProbs | None:
        """Log probabilities of the last token, if the request asks for them."""
        return self._logprobs

    @property
    def generation_logits(self) -> bytes:
        """Logits from which the last token was drawn, float32 [vocabulary]; empty unless the request asks for them."""
        return self._logits

    @torch.inference_mode()
    def sample(self, logits: Tensor) -> int:
        """Draw a token and remember it as seen.

        Parameters
        ----------
        logits : Tensor, float32 [vocabulary], CPU
            Not changed. -inf excludes a token.

        Raises
        ------
        LogitsError
            As check_finite.
        SamplingError
            If guide and bad words leave no token, or the guide needs too much work.
        """
        check_finite(logits)
        scores = self._adjusted(logits)
        best, token = scores.max(dim=0)  # of equal scores the lowest id
        if not torch.isfinite(best):
            asked = {
                "bad_words": self.params.bad_words,
                "min_tokens": self.params.min_tokens,
                "guided_decoding_guide": self.guided,
            }
            names = ", ".join(name for name, value in asked.items() if value)
            raise SamplingError(f"{names}: leave no token to draw; ask for less of them")
        if not self.params.greedy:
            token = self._draw(scores)
        drawn = int(token)
        if self.params.logprobs is not None:
            (self._logprobs,) = log_probabilities(logits[None], [drawn], self.params.logprobs)
        if self.params.return_generation_logits:
            self._logits = logits.numpy().tobytes()
        self._note(drawn)
        return drawn

    def _adjusted(self, logits: Tensor) -> Tensor:
        """Apply all that changes logits before the temperature; the result may be `logits` itself."""
        params, scores = self.params, logits
        if params.logit_bias:
            if self._biases is None:
                ids, biases = zip(*params.logit_bias, strict=True)
                self._biases = torch.tensor(ids), torch.tensor(biases, dtype=scores.dtype)
            scores = scores.index_add(0, *self._biases)
        if params.repetition_penalty != 1:
            if self._seen is None:
                self._seen = torch.zeros(self._vocab_size, dtype=torch.bool)
                self._seen[torch.tensor(self._prompt_ids, dtype=torch.long)] = True
            scores = penalise(scores, self._seen, params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            if self._counts is None:
                counted = torch.tensor(self._prompt_ids[params.prompt_ignore_length :], dtype=torch.long)
                self._counts = torch.bincount(counted, minlength=self._vocab_size).float()
            scores = scores - params.presence_penalty * (self._counts > 0) - params.frequency_penalty * self._counts
        if self._guide is not None:
            allowed = self._guide.allowed()
            allowed[list(self._end_ids)] = self._guide.complete
            scores = scores.masked_fill(~allowed, -torch.inf)
        banned = self._banned()
        if banned:
            scores = scores.index_fill(0, torch.tensor(banned), -torch.inf)
        return scores

    def _banned(self) -> list[int]:
        """Return the tokens that must not come next: end tokens before min_tokens, and the last tokens of bad words."""
        count = len(self._generated)
        only_ends = self._guide is not None and self._guide.finished
        early = self._end_ids if count < self.params.min_tokens and not only_ends else ()
        words = self.params.bad_words
        return [*early, *(word[-1] for word in words if tuple(self._generated[count - len(word) + 1 :]) == word[:-1])]

    def _note(self, drawn: int) -> None:
        if self._seen is not None:
            self._seen[drawn] = True
        if self._counts is not None:
            self._counts[drawn] += 1
        if self.params.bad_words or self.params.min_tokens:
            self._generated.append(drawn)
        if self._guide is not None and drawn not in self._end_ids:
            self._guide.accept(drawn)

    def _draw(self, scores: Tensor) -> Tensor:
        params = self.params
        ids, probabilities = candidates(scores, params.temperature, params.top_k, params.top_p, params.min_p)
        cumulative = probabilities.cumsum(dim=0)
        target = torch.rand((), generator=self._generator, dtype=torch.float64) * cumulative[-1]
        # right=True passes over tokens of probability 0; target < cumulative[-1], so the index is in range
        return ids[torch.searchsorted(cumulative, target, right=True)]


def log_probabilities(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[LogProbs, ...]:
    """Compute log probabilities: row i of float32 logits [n, vocabulary] gives those of tokens[i] and the `count` likeliest."""
    values = logits.log_softmax(dim=1)
    own = values.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    best, ids = values.topk(min(count, values.shape[1]), dim=1)
    likeliest = zip(ids.tolist(), best.tolist(), strict=True)
    return tuple(
        LogProbs(value, tuple(zip(*top, strict=True))) for value, top in zip(own.tolist(), likeliest, strict=True)
    )


def check_finite(logits: Tensor) -> None:
    """Raise LogitsError if one of float32 logits [vocabulary] is NaN or +inf, or all are -inf."""
    best = float(logits.max())  # a NaN anywhere comes out as the maximum
    if not math.isfinite(best):
        raise not_finite(best)


def accept(token: int) -> int:
    """Return a greedy token that a decoder chose; raises LogitsError if it is NO_TOKEN."""
    if token == NO_TOKEN:
        raise not_finite(None)
    return token


def not_finite(largest: float | None) -> LogitsError:
    """Make the error for a largest logit that is NaN or infinite; None if its value is not known."""
    found = "not finite" if largest is None else largest
    return LogitsError(f"logits: the largest is {found}, must be finite")


def overflow_remedy(dtype: str) -> str:
    """Say what helps where the numbers of a model in `dtype` are not finite."""
    if dtype == "float16":
        return "float16 ends at 65504: build with --dtype bfloat16, whose range is float32's"
    return (
        f"no dtype reaches further than {dtype}: the checkpoint's own weights or sums are not finite, use another one"
    )


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of seen tokens by `penalty` (CTRL paper, section 4.1).

    Logits float [vocabulary], seen bool [vocabulary].
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def candidates(
    scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Find the tokens that top-k, then top-p (nucleus sampling) and then min-p leave, and their probabilities.

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
        top_p.
    min_p : float
        Keep the tokens with at least this share of the most probable token's probability; 0 keeps every token.

    Returns
    -------
    ids : Tensor, int64 [kept]
    probabilities : Tensor, float64 [kept]
        Relative to the tokens that top-k left; they sum to less than 1 if top-p or min-p left tokens out.
    """
    ids = torch.arange(scores.shape[0])
    if 0 < top_k < scores.shape[0]:
        ids = (scores >= scores.topk(top_k).values[-1]).nonzero()[:, 0]
        scores = scores[ids]
    # float64, with the largest score at 0, so that no temperature above 0 overflows
    probabilities = ((scores.double() - scores.max().double()) / temperature).softmax(dim=0)
    if top_p < 1:
        # Tokens below this bound add up to less than 1 - top_p, so none is in the nucleus; leaving them out saves the sort.
        likely = (probabilities >= (1 - top_p) / probabilities.shape[0]).nonzero()[:, 0]
        ordered, order = probabilities[likely].sort(descending=True, stable=True)
        kept = ordered.cumsum(dim=0) - ordered < top_p
        ids, probabilities = ids[likely[order[kept]]], ordered[kept]
    if min_p > 0:
        kept = probabilities >= min_p * probabilities.max()
        ids, probabilities = ids[kept], probabilities[kept]
    return ids, probabilities
