"""Makes the last output of a request, for each way in which a request ends."""

from __future__ import annotations

from kvseek.core.errors import ErrorCode, KvseekError, TimeoutExpiredError, code_of
from kvseek.core.request import FinishReason, LogProbs, StepOutput

from .sequence import Sequence


def ended(
    sequence: Sequence,
    reason: FinishReason,
    token: int | None = None,
    cached: int = 0,
    attended: float = 0.0,
    logprobs: LogProbs | None = None,
    end_id: int | None = None,
    generation_logits: bytes = b"",
) -> StepOutput:
    """Make the last output of a request that ends without an error, with the token that ended it if there is one."""
    return StepOutput(
        sequence.request_id,
        token,
        reason,
        cached_tokens=cached,
        attended_tokens=attended,
        statistics=sequence.statistics,
        logprobs=logprobs,
        end_id=end_id,
        generation_logits=generation_logits,
    )


def failed(sequence: Sequence, error: Exception, code: ErrorCode | None = None) -> StepOutput:
    """Make the last output of a request that an error ends; its code is the error's own if none is given."""
    return StepOutput(
        sequence.request_id,
        finish_reason=FinishReason.ERROR,
        statistics=sequence.statistics,
        error=str(error) if isinstance(error, KvseekError) else f"{type(error).__name__}: {error}",
        code=code or code_of(error),
    )


def expired(sequence: Sequence, now: float) -> StepOutput:
    """Make the only output of a request whose time limit passed while it waited; `now` in seconds of time.perf_counter."""
    waited = sequence.request.waited_seconds + now - sequence.statistics.submitted_at
    error = TimeoutExpiredError(
        f"timeout = {sequence.request.timeout_seconds:g} s: passed while the request waited for its turn, for {waited:.1f} s; "
        "send it again later, or with a longer timeout"
    )
    return failed(sequence, error)
