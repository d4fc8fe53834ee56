"""Makes the text of one request while the engine's outputs arrive, for the server's doors and for the Python API."""

from __future__ import annotations

from collections.abc import Sequence

from kvseek.core.request import FinishReason, StepOutput

from .tokenizer import Tokenizer


class TextOutput:
    """Turns the outputs of one request into pieces of text, and ends the text before the first stop word.

    A stop word is found in the text, whatever tokens it is spelt with. The engine does not look for it: the caller has to
    cancel the request when `finish_reason` is set although the engine goes on.

    Parameters
    ----------
    prompt_ids : sequence of int
        The prompt, which the text continues: many tokenizers leave out the space at the beginning of a text.
    stop_words : sequence of str
        Texts that end the output and are not part of it; raises RequestError on an empty one.

    Attributes
    ----------
    token_ids : list of int
        Tokens so far, those that spell a stop word included.
    finish_reason : FinishReason or None
        Why the text has ended: STOP_WORD, or the engine's own reason. None: the text has not ended.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop_words: Sequence[str] = ()) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._words = tokenizer.stream(stop_words, prompt_ids)

    @property
    def stop_word(self) -> str:
        """The stop word that has ended the text; empty if none has."""
        return self._words.stop_word

    def push(self, output: StepOutput) -> str:
        """Take one output of the engine; returns the text that is certain now, nothing after the end."""
        if self.finish_reason is not None:
            return ""  # tokens drawn before the cancellation arrived
        text = ""
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
            text = self._words.push(output.token_id)
        if output.finish_reason is not None:
            text += self._words.finish()
        self.finish_reason = FinishReason.STOP_WORD if self._words.stopped else output.finish_reason
        return text
