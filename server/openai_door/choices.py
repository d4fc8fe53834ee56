"""One choice of an answer: a request of the engine, and the pieces of text that its outputs make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvseek.core.config import EngineConfig
from kvseek.core.errors import ErrorCode
from kvseek.core.request import MAX_SEED, FinishReason, LogProbs, Request, SamplingParams, StepOutput
from kvseek.engine.text_output import TextOutput
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.requests.generations import CodedError

from .errors import FieldError
from .parameters import MAX_CHOICES, Parameters, require
from .prompts import TOO_LONG
from .response_format import read_guide

# OpenAI knows two reasons for which a complete text ends. A time limit cuts a text off, as max_tokens does.
REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORD: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "length",
}
BROKEN_OFF = "the server is shutting down and has ended the request before its end; send it again in some seconds"


class Body(Protocol):
    """What the bodies of both endpoints have besides their Parameters."""

    def prompts(self, tokenizer: Tokenizer, config: EngineConfig) -> list[list[int]]:
        """Return the token ids of every prompt."""

    def limit(self, prompt_tokens: int, config: EngineConfig) -> int:
        """Return the most tokens to generate."""

    def top(self) -> int | None:
        """Return the number of likeliest tokens to tell; None: no log probabilities."""


class Choice:
    """See ServedRequest. Its chunks are pieces of the answer, as dicts:

    - `text`: new text;
    - `tokens`: (token id, its LogProbs, length of the text before it) of new tokens, if log probabilities are asked for;
    - `count`: tokens generated so far;
    - `finish_reason`: "stop" or "length" with the last piece, else None.

    If the client does not want a stream, there is one piece, at the end.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, stop: Sequence[str], streaming: bool) -> None:
        self.request, self.streaming, self.ended = request, streaming, False
        self._output = TextOutput(tokenizer, stop)
        self._offsets = tokenizer.stream() if request.sampling.logprobs is not None else None
        self._length = 0  # characters of the text so far, those held back included
        self._text: list[str] = []
        self._tokens: list[tuple[int, LogProbs, int]] = []

    def push(self, output: StepOutput) -> Iterator[dict[str, Any]]:
        """Take one output of the engine; raises CodedError if the server ended the request."""
        if self.ended or (output.token_id is None and output.finish_reason is None):
            return  # progress in reading the prompt, or tokens drawn before the cancellation arrived
        if output.finish_reason is not None and output.finish_reason not in REASONS:
            raise CodedError(ErrorCode.UNAVAILABLE, BROKEN_OFF)
        self._text.append(self._output.push(output))
        if output.token_id is not None and output.logprobs is not None and self._offsets is not None:
            self._tokens.append((output.token_id, output.logprobs, self._length))
            self._length += len(self._offsets.push(output.token_id))
        reason = self._output.finish_reason
        self.ended = reason is not None
        if reason is None and not self.streaming:
            return
        text = "".join(self._text)
        if text or self._tokens or reason is not None:
            count = len(self._output.token_ids)
            name = None if reason is None else REASONS[reason]
            yield {"text": text, "tokens": self._tokens, "count": count, "finish_reason": name}
            self._text, self._tokens = [], []


def make_choices(
    body: Body, parameters: Parameters, tokenizer: Tokenizer, config: EngineConfig
) -> tuple[list[Choice], int]:
    """Make the choices that a body asks for, those of the first prompt first, and count the tokens of all prompts.

    Tokenises, which may take long. Raises RequestError on any body that cannot be served.
    """
    parameters.check()
    stop, guide = parameters.stop_words(), read_guide(parameters.response_format)
    sampling = replace(parameters.sampling(tokenizer, body.top()), guide=guide)
    ends, streaming = parameters.end_ids(config), bool(parameters.stream)
    _check_tokens("stop_token_ids", ends, config)
    _check_tokens("logit_bias", [token for token, _ in sampling.logit_bias], config)
    prompts = body.prompts(tokenizer, config)
    count, limit = len(prompts) * parameters.choices, f"<= {MAX_CHOICES} for all prompts together"
    require(count <= MAX_CHOICES, "n", f"{count} choices", limit, "send fewer prompts in a request")
    choices = []
    for prompt in prompts:
        request = Request(
            prompt_ids=tuple(prompt),
            max_tokens=_limit(body, len(prompt), config),
            sampling=replace(sampling, prompt_ignore_length=len(prompt)),
            end_ids=ends,
            priority=parameters.queue_priority,
            timeout_seconds=parameters.timeout,
        )
        request.validate(config)
        for number in range(parameters.choices):
            own = replace(request, sampling=_seeded(request.sampling, number))
            choices.append(Choice(own, tokenizer, stop, streaming))
    return choices, sum(map(len, prompts))


def _limit(body: Body, prompt_tokens: int, config: EngineConfig) -> int:
    """Return the most tokens to generate; raises FieldError if prompt and answer do not fit together."""
    limit, left = body.limit(prompt_tokens, config), config.max_seq_len - prompt_tokens
    if left < 1 or limit > left:
        whole = f"max_tokens = {limit}: must be <= {left}, as the prompt has {prompt_tokens} tokens of max_seq_len"
        raise FieldError(
            "max_tokens", f"{whole} = {config.max_seq_len}; ask for fewer, or shorten the prompt", TOO_LONG
        )
    require(limit >= 1, "max_tokens", limit, ">= 1", "ask for a token")
    return limit


def _seeded(sampling: SamplingParams, number: int) -> SamplingParams:
    """Give choice `number` a seed of its own; with one seed all choices would be equal."""
    return replace(sampling, seed=(sampling.seed + number) & MAX_SEED)


def _check_tokens(name: str, ids: Sequence[int], config: EngineConfig) -> None:
    vocabulary = config.model.vocab_size
    bad = next((token for token in ids if not 0 <= token < vocabulary), None)
    require(bad is None, name, bad, f"token ids in [0, {vocabulary})", "the vocabulary of the model has no such id")
