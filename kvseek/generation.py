"""One request of the Python API: makes a request of the engine from prompt and parameters, and pieces from its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvseek.core.errors import KvseekError, UnavailableError, renamed
from kvseek.core.request import FinishReason, StepOutput
from kvseek.engine.accumulator import Accumulator
from kvseek.engine.schedule.sequence import RequestSequence
from kvseek.engine.tokenizer import Tokenizer

from .outputs import OutputPiece, RequestOutput

CLOSED = "the LLM was closed before the request had ended: no text follows; keep it open until its requests have ended"


class GenerationError(KvseekError):
    """Requests failed while they were running. Raised when all requests of the call have ended, so that no output is lost.

    Attributes
    ----------
    outputs : list of RequestOutput
        Outputs of all prompts, in their order. Outputs of failed requests have an `error`, and the text generated before it.
    """

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        failed = [output for output in outputs if output.error]
        first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(outputs)} requests failed, the first is prompts[{first.index}]: {first.error}; "
            "the outputs of the others are in this error's `outputs`"
        )
        self.outputs = list(outputs)


class Generation:
    """A request and its output so far.

    Parameters
    ----------
    names : mapping
        The caller's names of what the engine's errors name.

    Attributes
    ----------
    sequence : RequestSequence
        The request as the engine has prepared it.
    output : RequestOutput or None
        The complete output; None before the end.
    stops : bool
        Whether a stop text may end it, of which the engine does not know.
    """

    def __init__(
        self,
        index: int,
        prompt: str | None,
        sequence: RequestSequence,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        names: Mapping[str, str],
    ) -> None:
        self.index, self.sequence, self._names = index, sequence, names
        self.output: RequestOutput | None = None
        self.stops = bool(stop)
        self._prompt = prompt
        self._new = Accumulator(sequence.request, tokenizer, stop)
        self._text: list[str] = []  # of the pieces that have been given
        self._steps, self._cached = 0, 0  # decode steps, and tokens in the cache, summed over them
        self._attended = 0.0  # of those, attended to

    def push(self, output: StepOutput) -> OutputPiece | None:
        """Take an output of the engine and return its piece; None as where `take` returns False."""
        if not self.take(output):
            return None
        text, self._new.text = self._new.text, ""
        self._text.append(text)
        ids = () if output.token_id is None else (output.token_id,)
        return OutputPiece(self.index, text, ids, self._new.finish_reason, self.output, output.selected_rows)

    def take(self, output: StepOutput) -> bool:
        """Take an output of the engine; returns False for progress in reading the prompt, and after the end.

        The engine does not know stop texts, and goes on after one, so the caller has to cancel the request then.
        """
        if output.finish_reason in (FinishReason.CANCELLED, FinishReason.SHUTDOWN):  # not by this request's caller
            output = msgspec.structs.replace(
                output, finish_reason=FinishReason.ERROR, error=f"{UnavailableError.__name__}: {CLOSED}"
            )
        if not self._new.push(output):
            return False
        if output.earlier and (times := output.statistics) is not None:  # of all steps, not only of the last one
            self._steps, self._cached = times.generated_tokens - 1, times.cached_token_steps
            self._attended = times.attended_token_steps
        elif output.cached_tokens:
            self._steps += 1
            self._cached += output.cached_tokens
            self._attended += output.attended_tokens
        reason = self._new.finish_reason
        if reason is not None:
            error = renamed(output.error, self._names) if reason is FinishReason.ERROR else ""
            self.output = self._complete(reason, error)
        return True

    def _complete(self, reason: FinishReason, error: str) -> RequestOutput:
        steps, request = max(1, self._steps), self.sequence.request
        times = self._new.statistics
        return RequestOutput(
            index=self.index,
            prompt=self._prompt,
            prompt_token_ids=request.prompt_ids,
            text="".join((*self._text, self._new.text)),
            token_ids=tuple(self._new.token_ids),
            finish_reason=reason,
            attended_tokens=self._attended / steps,
            cached_tokens=self._cached / steps,
            reused_tokens=0 if times is None else times.reused_tokens,
            queue_seconds=0.0 if times is None else times.queue_seconds,
            ttft_seconds=0.0 if times is None else times.ttft_seconds,
            tpot_seconds=0.0 if times is None else times.tpot_seconds,
            logprobs=None if request.sampling.logprobs is None else tuple(self._new.logprobs),
            prompt_logprobs=None if request.sampling.prompt_logprobs is None else (None, *self._new.prompt_logprobs),
            selected_rows=None if request.sampling.return_selected_rows is None else tuple(self._new.selected_rows),
            error=error,
        )
