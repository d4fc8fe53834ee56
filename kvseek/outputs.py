"""What generation gives: pieces while it goes on, one output at its end."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.request import FinishReason


@dataclass(frozen=True)
class RequestOutput:
    """One request from its prompt to its end.

    Attributes
    ----------
    index : int
        Of the prompt among those that were given together.
    prompt : str or None
        As the model read it, a chat template included; None if token ids were given.
    prompt_token_ids : tuple of int
        Tokens of the prompt, special ones included.
    text : str
        What was generated, up to a stop text and without it.
    token_ids : tuple of int
        What was generated; those that spell a stop text are among them, a token that ended the output is not.
    finish_reason : FinishReason
        "end_id" (the model's own end token, or one of `stop_token_ids`), "stop_word", "length" (`max_tokens`), "timeout"
        or "error". It is a str.
    attended_tokens : float
        Tokens that attention read per decode step, mean over the steps, layers and KV heads. The first token comes from
        reading the prompt, which is dense and does not count: 0 if there was no other.
    cached_tokens : float
        Tokens in the KV cache at those steps, mean over the steps.
    queue_seconds : float
        From submission until the engine began to read the prompt.
    ttft_seconds : float
        Time to first token: from submission, waiting included.
    tpot_seconds : float
        Time per output token after the first; 0 with fewer than two tokens.
    error : str
        What failed, with finish_reason "error"; else empty.
    """

    index: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    attended_tokens: float = 0.0
    cached_tokens: float = 0.0
    queue_seconds: float = 0.0
    ttft_seconds: float = 0.0
    tpot_seconds: float = 0.0
    error: str = ""

    @property
    def attended_share(self) -> float:
        """Share of the cached tokens that attention read; 1 if there was no decode step."""
        return self.attended_tokens / self.cached_tokens if self.cached_tokens else 1.0


@dataclass(frozen=True)
class OutputPiece:
    """What one step gave to one request, while it streams.

    Attributes
    ----------
    index : int
        Of the prompt among those that were given together.
    text : str
        New text. Empty while a token is half of a character, or what came could be the beginning of a stop text. All
        pieces of a prompt together are `RequestOutput.text`.
    token_ids : tuple of int
        New tokens.
    finish_reason : FinishReason or None
        Of the last piece; None before.
    output : RequestOutput or None
        The complete output, with the last piece.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
