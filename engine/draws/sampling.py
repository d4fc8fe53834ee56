"""What the sampling of one request keeps and asks for, and what draws its tokens: Draws, by PyTorch or by a compiled kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvseek.core.errors import LogitsError, SamplingError
from kvseek.core.request import LogProbs, Request
from kvseek.core.selected_rows import SelectedRows

NO_TOKEN = -1  # stands for a greedy token if the largest logit is not finite
SEEN = -(1 << 31)  # bit of Sampler.occurrences: the repetition penalty counts the token


@dataclass(frozen=True)
class Drawn:
    """A token that was drawn, or why there is none.

    Attributes
    ----------
    logprobs : LogProbs or None
        Log probabilities of the token, if the request asks for them.
    logits : bytes
        Logits from which the token was drawn, float32 [vocabulary]; empty unless the request asks for them.
    error : Exception or None
        LogitsError as check_finite raises it, SamplingError if guide and bad words leave no token or the guide needs too much
        work; anything else that only this request has met.
    """

    token: int = NO_TOKEN
    logprobs: LogProbs | None = None
    logits: bytes = b""
    error: Exception | None = None


@dataclass(frozen=True)
class Launched:
    """Decode steps that have been launched: one, or several of which each takes in the tokens of the one before.

    Attributes
    ----------
    attended : list of float
        Cached tokens that one KV head attends to in the last step, per request, averaged over the layers; in each step before,
        one fewer.
    collect : callable
        Waits until the steps have ended, and returns for each step and request what was drawn; to be called once. An int is a
        token of which nothing else was asked for, or NO_TOKEN.
    selected_rows : callable
        Returns, by slot, what the requests that ask for it get of their selections; to be called after `collect`.
    """

    attended: list[float]
    collect: Callable[[], list[list[Drawn | int]]]
    selected_rows: Callable[[], Mapping[int, SelectedRows]] = dict


@dataclass(frozen=True)
class Verification:
    """A decode step of which a request may have several rows, one a token: its latest, and a draft of the next ones.

    Attributes
    ----------
    attended : list of float
        Cached tokens that one KV head attends to, per row, averaged over the layers.
    draw : callable
        Takes numbers of rows, and as many samplers or None; waits for the step, and draws the token behind each row, as
        Launched.collect gives it. To be called for the rows of a request in their order, when the tokens before have been taken.
    selected_rows : callable
        See Launched; to be called after `draw`.
    """

    attended: list[float]
    draw: Callable[[Sequence[int], Sequence[Sampler | None]], list[Drawn | int]]
    selected_rows: Callable[[], Mapping[int, SelectedRows]] = dict


class Guiding(Protocol):
    """State of a request's guide; GuideMatcher of engine/schedule/guides.py says more."""

    @property
    def complete(self) -> bool: ...

    @property
    def finished(self) -> bool: ...

    def allowed(self) -> npt.NDArray[np.uint32]: ...

    def accept(self, token: int) -> None: ...


class Sampler:
    """Sampling of one request: its parameters, its guide, and the tokens that it has drawn.

    Parameters
    ----------
    vocab_size : int
        Length of the logits.

    Attributes
    ----------
    generated : list of int
        Tokens drawn so far.
    pending : int
        Draws that have begun and whose tokens have not been taken, while the host runs ahead of the device.
    reads_tokens : bool
        Whether a draw depends on tokens that the host has to know, so that none may be pending when it begins.
    varies : bool
        Whether other tokens may be drawn from one draw to the next: `allowed` and `banned`.
    prepared : object or None
        What engine/draws/compiled.py keeps of this request on the device that draws.
    greedy : bool
        Whether the next token is the one with the largest logit, and nothing else is asked for (`greedy_token`).
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        self.params = request.sampling
        self.greedy = self.params.greedy and not self.params.needs_logits
        self.guide: Guiding | None = None
        self.vocab_size, self._prompt_ids, self._end_ids = vocab_size, request.prompt_ids, request.end_ids
        self.generated: list[int] = []
        self.pending = 0
        self.reads_tokens = self.params.guide is not None or bool(self.params.bad_words)
        self.varies = self.reads_tokens or bool(self.params.min_tokens or self.params.forced_tokens)
        self.prepared: object | None = None  # made at first use, by the engine's thread: see EngineService.load

    def follow(self, guide: Guiding) -> None:
        """Let the output follow the request's guide; `guide` is its state at the beginning, the sampler's own from now on."""
        self.guide = guide
        self.reads_tokens = self.varies = True

    @property
    def guided(self) -> bool:
        """Whether the output follows a guide."""
        return self.guide is not None

    @property
    def number(self) -> int:
        """Number of the next draw, from 0: it says which of the seed's random bits the draw takes."""
        return len(self.generated) + self.pending

    @property
    def forced(self) -> int | None:
        """The token that the next draw has to give; None: it is free."""
        tokens = self.params.forced_tokens
        return tokens[self.number] if self.number < len(tokens) else None

    def occurrences(self) -> Tensor | None:
        """Count how often tokens have occurred, int32 [vocabulary], as the penalties count; None without a penalty.

        The first `prompt_ignore_length` tokens of the prompt do not count, but every token of prompt and output has the bit SEEN.
        """
        params = self.params
        if params.repetition_penalty == 1 and not params.presence_penalty and not params.frequency_penalty:
            return None
        ids = torch.tensor((*self._prompt_ids, *self.generated), dtype=torch.long)
        counted = torch.cat((ids[params.prompt_ignore_length : len(self._prompt_ids)], ids[len(self._prompt_ids) :]))
        counts = torch.bincount(counted, minlength=self.vocab_size).int()
        counts[ids] |= SEEN
        return counts

    def allowed(self) -> npt.NDArray[np.uint32] | None:
        """Find the tokens that may come next, as bits [vocabulary / 32, rounded up]; None: all may.

        Raises SamplingError if the guide needs too much work.
        """
        if (forced := self.forced) is not None:
            bits = np.zeros(-(-self.vocab_size // 32), dtype=np.uint32)
            bits[forced // 32] = 1 << forced % 32
            return bits
        if self.guide is None:
            return None
        bits, complete = self.guide.allowed(), self.guide.complete
        for token in self._end_ids:
            bit = np.uint32(1 << token % 32)
            bits[token // 32] = bits[token // 32] | bit if complete else bits[token // 32] & ~bit
        return bits

    def banned(self) -> list[int]:
        """Return the tokens that must not come next: end tokens before min_tokens, and the last tokens of bad words."""
        if self.forced is not None or (not self.params.bad_words and not self.params.min_tokens):
            return []
        count = self.number
        only_ends = self.guide is not None and self.guide.finished
        early = self._end_ids if count < self.params.min_tokens and not only_ends else ()
        words = self.params.bad_words
        return [*early, *(word[-1] for word in words if tuple(self.generated[count - len(word) + 1 :]) == word[:-1])]

    def nothing_left(self) -> SamplingError:
        """Make the error for a draw that finds no token."""
        asked = {
            "bad_words": self.params.bad_words,
            "min_tokens": self.params.min_tokens,
            "guided_decoding_guide": self.guided,
            "forced_tokens": self.params.forced_tokens,
        }
        names = ", ".join(name for name, value in asked.items() if value)
        return SamplingError(f"{names}: leave no token to draw; ask for less of them")

    def take(self, drawn: Drawn | int) -> int:
        """Take the request's next token and return it; raises the error of a draw that has none, and the guide's.

        An int is a greedy token.
        """
        if isinstance(drawn, int):
            if drawn == NO_TOKEN:
                raise not_finite(None)
            token = drawn
        elif drawn.error is not None:
            raise drawn.error
        else:
            token = drawn.token
        if self.guide is not None and token not in self._end_ids:
            self.guide.accept(token)
        self.generated.append(token)
        return token


class Drawing(Protocol):
    """Draws of one step, or of several that follow each other, for the same requests."""

    def draw(self, logits: Tensor) -> None:
        """Begin the draws of the next step.

        Parameters
        ----------
        logits : Tensor [any, vocabulary]
            On the engine's device: float32 on the CPU, in the engine's dtype on a GPU. Not changed. -inf excludes a token.
        """

    def results(self) -> list[list[Drawn | int]]:
        """Wait for the draws of all steps, which have begun, and return them for each step and sampler.

        An int is a token that was drawn for a request that asks for nothing else.
        """


class Draws(Protocol):
    """Draws the next tokens of requests from their logits.

    In this order: bias, repetition penalty, presence and frequency penalty, guide, bad words and min_tokens, temperature,
    top-k, top-p, min-p, one draw. engine/draws/reference.py says exactly how. A draw depends on the request's own logits,
    parameters and tokens alone: the same seed gives the same tokens in any company. Nothing raises: what is wrong with one
    request is the `error` of its Drawn.
    """

    def begin(
        self, rows: Sequence[int], samplers: Sequence[Sampler], places: Sequence[int] = (), steps: int = 1
    ) -> Drawing:
        """Make what draws a token for each of `samplers` in each of `steps` steps.

        Parameters
        ----------
        rows : sequence of int
            The row of the logits for each sampler.
        places : sequence of int
            Addresses on a GPU to which the tokens go as well (Batch.latest).
        steps : int
            More than one only for samplers that do not vary (Sampler.varies).
        """


def draw_once(draws: Draws, logits: Tensor, rows: Sequence[int], samplers: Sequence[Sampler]) -> list[Drawn | int]:
    """Draw a token for each sampler from its row of the logits, and wait for it; see Draws and Drawing."""
    drawing = draws.begin(rows, samplers)
    drawing.draw(logits)
    return drawing.results()[0]


def sampled(samplers: Sequence[Sampler | None]) -> tuple[list[int], list[Sampler]]:
    """Return the numbers of the requests that have a sampler, and their samplers."""
    numbers = [number for number, sampler in enumerate(samplers) if sampler is not None]
    return numbers, [*filter(None, samplers)]


def log_probabilities(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[LogProbs, ...]:
    """Compute log probabilities: row i of float32 logits [n, vocabulary] gives those of tokens[i] and the `count` likeliest."""
    values = logits.log_softmax(dim=1)
    own = values.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    best, ids = values.topk(min(count, values.shape[1]), dim=1)
    likeliest = zip(ids.tolist(), best.tolist(), strict=True)
    return tuple(
        LogProbs(value, tuple(zip(*top, strict=True))) for value, top in zip(own.tolist(), likeliest, strict=True)
    )


def greedy_token(logits: Tensor) -> int:
    """Return the token of the largest of float32 logits [vocabulary] on the CPU; NO_TOKEN if that logit is not finite."""
    token = int(logits.argmax())  # the first of equal logits, or a NaN; half the time of max(dim=0)
    return token if math.isfinite(logits[token]) else NO_TOKEN


def check_finite(logits: Tensor) -> None:
    """Raise LogitsError if one of float32 logits [vocabulary] is NaN or +inf, or all are -inf."""
    best = float(logits.max())  # a NaN anywhere comes out as the maximum
    if not math.isfinite(best):
        raise not_finite(best)


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
