"""Gathers the outputs of one request while they arrive, for every port of the server and for the Python API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvseek.core.request import FinishReason, LogProbs, Request, RequestStatistics, StepOutput
from kvseek.core.selected_rows import SelectedRows

from .tokenizer import Tokenizer

MOST_UNDECODED = 64  # tokens that wait for somebody to ask for their text: together they are decoded in less time


class Accumulator:
    """What the outputs of a request have made so far; who passes it on takes out of it what its client has got.

    A stop word is found in the text, whatever tokens it is spelt with, and ends the text before it. The engine does not look for
    it: the caller has to cancel the request when `finish_reason` is set although the engine goes on.

    Parameters
    ----------
    tokenizer : Tokenizer or None
        Makes text of the tokens; None: there is no text, and only the engine ends the request.
    stop_words : sequence of str
        Texts that end the output and are not part of it; raises RequestError on an empty one.
    marks : mapping, optional
        Characters that stand in the text for tokens; see TextStream.

    Attributes
    ----------
    token_ids, logprobs : list
        Tokens, those that spell a stop word included, and their log probabilities.
    prompt_logprobs : list of LogProbs
        Those of the prompt's tokens but the first.
    selected_rows : list of SelectedRows or None
        One for each of `token_ids`, if the request asks for them.
    context_logits, generation_logits : list of bytes
        See StepOutput.
    count : int
        Tokens generated, whatever has been taken out.
    finish_reason : FinishReason or None
        Why the output has ended: STOP_WORD, or the engine's own reason. None: it has not ended.
    statistics : RequestStatistics or None
        The latest, which come with the first token and with the end.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None = None,
        stop_words: Sequence[str] = (),
        marks: Mapping[int, str] | None = None,
    ) -> None:
        # The text continues the prompt: many tokenizers leave out the space at the beginning of a text.
        self._words = None if tokenizer is None else tokenizer.stream(stop_words, request.prompt_ids, marks)
        self._stops = bool(stop_words)
        self._pieces, self._undecoded = list[str](), list[int]()
        self.token_ids, self.logprobs, self.prompt_logprobs = list[int](), list[LogProbs](), list[LogProbs]()
        self.context_logits, self.generation_logits = list[bytes](), list[bytes]()
        self.selected_rows = list[SelectedRows | None]()
        self._reports = request.sampling.return_selected_rows is not None
        self.count = 0
        self.finish_reason: FinishReason | None = None
        self.statistics: RequestStatistics | None = None

    @property
    def text(self) -> str:
        """Text that is certain by now."""
        self._decode()
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @text.setter
    def text(self, text: str) -> None:
        self._decode()
        self._pieces = [text] if text else []

    @property
    def stop_word(self) -> str:
        """The stop word that has ended the text; empty if none has."""
        return "" if self._words is None else self._words.stop_word

    def push(self, output: StepOutput) -> bool:
        """Take one output of the engine.

        Returns whether it is a part of the answer: neither progress in reading the prompt nor a token that was drawn after the
        end, before the cancellation arrived.
        """
        if output.prompt_logprobs:
            self.prompt_logprobs += output.prompt_logprobs
        if output.context_logits:
            self.context_logits.append(output.context_logits)
        token, reason, earlier = output.token_id, output.finish_reason, output.earlier
        if self.finish_reason is not None or (token is None and reason is None):
            return False
        if output.generation_logits:
            self.generation_logits.append(output.generation_logits)
        if output.statistics is not None:
            self.statistics = output.statistics
        if earlier:
            self.count += len(earlier)
            self.token_ids += earlier
            if self._words is not None:
                self._undecoded += earlier
        if token is not None:
            self.count += 1
            self.token_ids.append(token)
            if output.logprobs is not None:
                self.logprobs.append(output.logprobs)
            if self._reports:
                self.selected_rows.append(output.selected_rows)
            if self._words is not None:
                self._undecoded.append(token)
        self.finish_reason = reason
        if self._stops or reason is not None or len(self._undecoded) >= MOST_UNDECODED:
            self._finish(reason)
        return True

    def _finish(self, reason: FinishReason | None) -> None:
        """Decode, where it has to be known now whether a stop word has come, or there will be no more tokens."""
        self._decode()
        if self._words is not None:
            if reason is not None and (text := self._words.finish()):
                self._pieces.append(text)
            if self._words.stopped:
                self.finish_reason = FinishReason.STOP_WORD

    def _decode(self) -> None:
        """Make text of the tokens that have come since the last time."""
        if self._words is not None and self._undecoded:
            if text := self._words.push(*self._undecoded):
                self._pieces.append(text)
            self._undecoded.clear()
