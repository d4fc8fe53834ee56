"""Results of generation: pieces while it goes on, one output at its end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvseek.core.request import FinishReason, LogProbs
from kvseek.core.selected_rows import SelectedRows


@dataclass(frozen=True)
class RequestOutput:
    """Complete output of one request.

    Attributes
    ----------
    index : int
        Number of the prompt among the prompts of the call.
    prompt : str or None
        The prompt as the model read it, chat template included; None if token ids were given.
    prompt_token_ids : tuple of int
        Tokens of the prompt, special ones included.
    text : str
        Generated text, up to a stop text and without it.
    token_ids : tuple of int
        Generated tokens, including those that spell a stop text, but without an end token.
    finish_reason : FinishReason
        "end_id" (the model's own end token, or one of `stop_token_ids`), "stop_word", "length" (`max_tokens`), "timeout"
        or "error". It is a str.
    attended_tokens : float
        Tokens that attention read per decode step, mean over the steps, layers and KV heads. The first token comes from
        reading the prompt, which is dense and does not count: 0 if there was no other.
    cached_tokens : float
        Tokens in the KV cache at those steps, mean over the steps.
    reused_tokens : int
        First tokens of the prompt that were not read, because an earlier prompt began alike (docs/conversations.md).
    queue_seconds : float
        Time from submission until the engine began to read the prompt.
    ttft_seconds : float
        Time to first token: from submission, waiting included.
    tpot_seconds : float
        Time per output token after the first; 0 with fewer than two tokens.
    logprobs : tuple of LogProbs, or None
        Log probabilities of each token of `token_ids`, if `SamplingParams.logprobs` asked for them.
    prompt_logprobs : tuple of LogProbs and None, or None
        The same of the tokens of `prompt_token_ids`, if `SamplingParams.prompt_logprobs` asked for them; None for the first
        token, which nothing precedes. They end early if the request ended while its prompt was read.
    selected_rows : tuple of SelectedRows and None, or None
        What each decode step read, for each token of `token_ids`, if `SamplingParams.return_selected_rows` asked for it; None for
        the first token, which reading the prompt gives.
    error : str
        What failed, with finish_reason "error"; else empty.
    cumulative_logprob, perplexity : float or None
        Sum of the log probabilities of `token_ids`, and exp of minus their mean; None without `logprobs`.
    """

    index: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    attended_tokens: float = 0.0
    cached_tokens: float = 0.0
    reused_tokens: int = 0
    queue_seconds: float = 0.0
    ttft_seconds: float = 0.0
    tpot_seconds: float = 0.0
    logprobs: tuple[LogProbs, ...] | None = None
    prompt_logprobs: tuple[LogProbs | None, ...] | None = None
    selected_rows: tuple[SelectedRows | None, ...] | None = None
    error: str = ""

    @property
    def cumulative_logprob(self) -> float | None:
        """See RequestOutput."""
        return None if self.logprobs is None else math.fsum(one.token for one in self.logprobs)

    @property
    def perplexity(self) -> float | None:
        """See RequestOutput."""
        total = self.cumulative_logprob
        return None if total is None or not self.token_ids else math.exp(-total / len(self.token_ids))

    @property
    def attended_share(self) -> float:
        """Share of the cached tokens that attention read; 1 if there was no decode step."""
        return self.attended_tokens / self.cached_tokens if self.cached_tokens else 1.0


@dataclass(frozen=True)
class OutputPiece:
    """Output of one step for a request that streams.

    Attributes
    ----------
    index : int
        Number of the prompt among the prompts of the call.
    text : str
        New text. Empty while a character is incomplete, or while the text could be the beginning of a stop text. All pieces of
        a prompt together are `RequestOutput.text`.
    token_ids : tuple of int
        New tokens.
    finish_reason : FinishReason or None
        Why the output ended, in the last piece; None in earlier pieces.
    selected_rows : SelectedRows or None
        What the step read; see RequestOutput.
    output : RequestOutput or None
        The complete output, with the last piece.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    selected_rows: SelectedRows | None = None
