"""A request on its way through the engine, and what it asks of its prompt: log probabilities and logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvseek.core.errors import ErrorCode, KvseekError, TimeoutExpiredError, code_of
from kvseek.core.request import FinishReason, LogProbs, Request, RequestStatistics, StepOutput
from kvseek.core.selected_rows import RowReport, SelectedRows
from kvseek.engine.cache.prefix import Prefix
from kvseek.engine.cache.prefixes.cache import LeftRows
from kvseek.engine.cache.prefixes.tree import pack_tokens
from kvseek.engine.draws.sampling import Drawn, Sampler, log_probabilities, not_finite
from kvseek.engine.speculation import Drafter


class PromptScores:
    """Takes the logits of a prompt while they are computed, and makes outputs of them, piece by piece."""

    def __init__(self, request_id: int, request: Request) -> None:
        self._request_id, self._ids, self._params = request_id, request.prompt_ids, request.sampling
        self._taken = 0  # tokens whose logits have been taken
        self._pieces: list[tuple[tuple[LogProbs, ...], bytes]] = []  # log probabilities and logits, not yet passed on

    @property
    def holds_logits(self) -> bool:
        """Whether there are logits to pass on, which should not wait for more of them: they take much memory."""
        return bool(self._pieces) and self._params.return_context_logits

    def take(self, start: int, logits: Tensor) -> None:
        """Take the logits of consecutive tokens, the next ones or some of them again: a pack that has failed is read again.

        Parameters
        ----------
        start : int
            Position of the first token.
        logits : Tensor, float32 [tokens, vocabulary]
            On any device. Row i says which token may follow the token at position start + i.

        Raises
        ------
        LogitsError
            If a largest logit is NaN or infinite.
        """
        logits, start = logits[max(0, self._taken - start) :], max(start, self._taken)
        rows = logits.shape[0]
        if not rows:
            return
        largest = logits.amax(dim=1)  # a NaN in a row comes out as its maximum
        if not torch.isfinite(largest).all():
            raise not_finite(None)
        self._taken = start + rows
        following, top = self._ids[start + 1 : start + 1 + rows], self._params.prompt_logprobs
        logprobs = () if top is None or not following else log_probabilities(logits[: len(following)], following, top)
        data = logits.cpu().numpy().tobytes() if self._params.return_context_logits else b""
        self._pieces.append((logprobs, data))

    def pop(self, progress: float) -> list[StepOutput]:
        """Return the outputs to pass on; `progress` is the share of the prompt's reading that is done."""
        pieces, self._pieces = self._pieces, []
        return [
            StepOutput(self._request_id, prefill_progress=progress, prompt_logprobs=logprobs, context_logits=logits)
            for logprobs, logits in pieces
        ]


@dataclass(eq=False)
class RequestSequence:
    """A request on its way through the engine.

    Attributes
    ----------
    reading : bool
        Whether its prompt must be read, at first or again after a preemption, before it takes part in decode steps.
    replay : int
        Generated tokens that decode steps must take in again, besides the latest, as a preemption has lost their rows. What
        these steps draw is known.
    stalled : bool
        Whether it takes no part in the next step, for want of memory.
    whole : bool
        Whether nobody wants its tokens before its end: the last output has them all. Not if something comes with each token.
    left : LeftRows or None
        What it has left when it was preempted last.
    progress : float
        The largest share of its prompt's reading that the client has been told.
    finished : bool
        Whether it has ended. A step that was launched before may still compute a row for it.
    """

    request_id: int
    request: Request
    sampler: Sampler
    statistics: RequestStatistics
    slot: int = -1
    whole: bool = False
    scores: PromptScores | None = None  # of a request that asks for log probabilities or logits of its prompt
    ends_session: bool = False  # the client has ended its session, so that what the request leaves goes with it
    row_report: RowReport | None = None  # fitted to the request
    drafter: Drafter | None = None  # of a request that has begun, and whose steps may verify drafts
    prefix: Prefix | None = None  # found at admission, until the slot is open
    resumes: bool = False  # of `prefix`: it has all rows of the prompt, so that nothing is read
    reserved_tokens: int = 0  # to which its extents let it grow, since its last admission
    reading: bool = True
    replay: int = 0
    stalled: bool = False
    left: LeftRows | None = None
    progress: float = 0.0
    finished: bool = False

    @cached_property
    def quiet(self) -> bool:
        """Whether a token that does not end it only has to be counted: no output has it, and nothing follows the text."""
        return self.whole and not self.request.stop_words and self.request.sampling.guide is None

    def ended(self, reason: FinishReason) -> StepOutput:
        """Make the last output, without a token, of a request that ends without an error."""
        return StepOutput(self.request_id, finish_reason=reason, statistics=self.statistics, earlier=self.unsent())

    def failed(self, error: Exception, code: ErrorCode | None = None) -> StepOutput:
        """Make the last output of a request that an error ends; its code is the error's own if none is given."""
        return StepOutput(
            self.request_id,
            finish_reason=FinishReason.ERROR,
            statistics=self.statistics,
            error=str(error) if isinstance(error, KvseekError) else f"{type(error).__name__}: {error}",
            code=code or code_of(error),
            earlier=self.unsent(),
        )

    def taken(
        self, token: int, drawn: Drawn | int, cached: int, attended: float, now: float, selected: SelectedRows | None
    ) -> StepOutput | None:
        """Count the token that has been drawn, and make its output; None: nobody wants one before the end.

        Parameters
        ----------
        token : int
            What the sampler took of `drawn`.
        cached, attended, now
            As RequestStatistics.record_tokens.
        selected : SelectedRows or None
            The rows that the token's step selected, where the request asks for them.
        """
        statistics, ends = self.statistics, token in self.request.end_ids
        statistics.record_tokens(cached, attended, now)
        reason = FinishReason.END_ID if ends else self._finish_reason()
        if self.whole and reason is None:
            return None
        logprobs, logits = (None, b"") if isinstance(drawn, int) else (drawn.logprobs, drawn.logits)
        return StepOutput(
            self.request_id,
            None if ends else token,
            reason,
            cached_tokens=cached,
            attended_tokens=attended,
            statistics=statistics if reason or statistics.generated_tokens == 1 else None,
            logprobs=logprobs,
            end_id=token if ends else None,
            generation_logits=b"" if ends else logits,
            selected_rows=None if ends else selected,
            earlier=self.unsent(1),
        )

    def _finish_reason(self) -> FinishReason | None:
        generated, request = self.generated, self.request
        if request.stop_words and any(tuple(generated[-len(word) :]) == word for word in request.stop_words):
            return FinishReason.STOP_WORD
        return FinishReason.LENGTH if len(generated) == request.max_tokens else None

    def unsent(self, last: int = 0) -> tuple[int, ...]:
        """Return the tokens that no output has given, but for the `last` ones."""
        return tuple(self.generated[: len(self.generated) - last]) if self.whole else ()

    def expired(self, now: float) -> StepOutput:
        """Make the last output of a request whose time limit passed while it waited; `now` in seconds of time.perf_counter.

        One that has been preempted ends like a running one, with the tokens that it has.
        """
        if self.statistics.num_preemptions:
            return self.ended(FinishReason.TIMEOUT)
        waited = self.request.waited_seconds + now - self.statistics.submitted_at
        return self.failed(
            TimeoutExpiredError(
                f"timeout = {self.request.timeout_seconds:g} s: passed while the request waited for its turn, for {waited:.1f} "
                "s; send it again later, or with a longer timeout"
            )
        )

    @property
    def ready(self) -> bool:
        """Whether the request may start: its guide has been compiled, if it has one."""
        return self.sampler.guided or self.request.sampling.guide is None

    @property
    def generated(self) -> list[int]:
        """The tokens drawn so far, with the end token when that has come."""
        return self.sampler.generated

    @property
    def next_input(self) -> int:
        """The token that its next decode step takes in."""
        return self.generated[-1 - self.replay]

    @property
    def reused_before(self) -> int | None:
        """Tokens of its prompt that were reused when it was read first; None: it has not been read before."""
        return self.statistics.reused_tokens if self.generated else None

    @property
    def unscored(self) -> PromptScores | None:
        """What takes the logits of its prompt when that is read, if they are asked for and have not all been taken."""
        return None if self.generated else self.scores

    @property
    def total_tokens(self) -> int:
        """Tokens that the request can grow to, prompt included."""
        return len(self.request.prompt_ids) + self.request.max_tokens

    @cached_property
    def packed_prompt(self) -> bytes:
        """The prompt's tokens as prefixes are looked up."""
        return pack_tokens(self.request.prompt_ids)

    def cached_tokens(self) -> bytes:
        """Return the tokens of which the slot of a request whose prompt has been read has rows, packed as `packed_prompt`.

        The row of the token drawn last is not among them, although steps that are launched ahead compute it and more.
        """
        count = len(self.generated) - 1 - self.replay
        return self.packed_prompt + pack_tokens(self.generated[: max(0, count)])

    def packed_rows(self) -> bytes:
        """Return the tokens that have rows once it decodes, all but the latest, packed as `packed_prompt`."""
        return self.packed_prompt + pack_tokens(self.generated[:-1])

    @property
    def deadline(self) -> float | None:
        """Time at which the request's own time limit passes, in seconds of time.perf_counter; None: it has no limit."""
        limit, waited = self.request.timeout_seconds, self.request.waited_seconds
        return None if limit is None else self.statistics.submitted_at + limit - waited
