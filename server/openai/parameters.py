"""The fields that chat and text completions share, and the engine's parameters that they stand for."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from kvseek.core.config import EngineConfig
from kvseek.core.request import (
    DEFAULT_PRIORITY,
    MAX_LOGPROBS,
    MAX_SALT,
    MAX_SEED,
    SamplingParams,
    check_words,
)
from kvseek.core.session import Session, check_text, read_session
from kvseek.engine.tokenizer import Tokenizer

from .errors import FieldError
from .fields import ABSENT

MAX_N = 8
MAX_CHOICES = (
    128  # of all prompts of a request together: each is a request of the engine, and takes a place in its queue
)
MAX_ALTERED = 2.0  # of presence and frequency penalty, as OpenAI
MAX_STOP_IDS = 1024
# Fields that never change an answer here: who asks, how OpenAI bills, stores and caches.
WITHOUT_EFFECT = ("user", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
# Fields that kvseek does not support, with the values at which they have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream has besides its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers on encrypted lines


class Parameters(msgspec.Struct, kw_only=True):
    """Fields of both endpoints; None stands for the default of the field."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: msgspec.Raw = ABSENT
    # vLLM's names for what OpenAI does not have, and kvseek's own.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    retention_priority: int | None = None
    retention_seconds: float | None = None

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Raise FieldError on what only this door limits; the engine checks the rest."""
        require(1 <= self.choices <= MAX_N, "n", self.n, f"in [1, {MAX_N}]", "send further requests for more")
        for name in ("presence_penalty", "frequency_penalty"):
            value, limit = getattr(self, name) or 0.0, f"in [-{MAX_ALTERED:g}, {MAX_ALTERED:g}]"
            require(abs(value) <= MAX_ALTERED, name, value, limit, "0 is no penalty")
        if self.stream_options is not None:
            require(bool(self.stream), "stream_options", "an object", "absent unless stream is true", "leave it out")
            padded = bool(self.stream_options.include_obfuscation)
            require(not padded, "stream_options.include_obfuscation", padded, "false", "kvseek does not pad streams")
        seed = self.seed or 0
        require(-(2**63) <= seed <= MAX_SEED, "seed", seed, f"in [-2^63, {MAX_SEED}]", "any such number will do")
        ids = len(self.stop_token_ids or ())
        require(ids <= MAX_STOP_IDS, "stop_token_ids", f"{ids} ids", f"<= {MAX_STOP_IDS} ids", "send fewer")
        if self.cache_salt is not None:
            check_text("cache_salt", self.cache_salt, MAX_SALT)

    def stop_words(self) -> tuple[str, ...]:
        """Return the texts that end an answer; empty ones end none. Raises RequestError."""
        return check_words("stop", (self.stop,) if isinstance(self.stop, str) else self.stop or ())

    def end_ids(self, config: EngineConfig) -> tuple[int, ...]:
        """Return the tokens that end an answer: the model's own unless `ignore_eos`, and `stop_token_ids`."""
        own = () if self.ignore_eos else config.model.eos_token_ids
        return tuple(dict.fromkeys((*own, *(self.stop_token_ids or ()))))

    def sampling(self, tokenizer: Tokenizer, logprobs: int | None) -> SamplingParams:
        """Make the engine's parameters of the first choice. Without `seed` every request draws anew, as with OpenAI."""
        given: dict[str, Any] = {
            name: value
            for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
            if (value := getattr(self, name)) is not None
        }
        seed = secrets.randbits(63) if self.seed is None else self.seed & MAX_SEED  # OpenAI's seeds have a sign
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=0 if self.top_k in (None, -1) else self.top_k,  # vLLM's -1 keeps all tokens, as 0 does
            seed=seed,
            bad_words=self._bad_words(tokenizer),
            logit_bias=self._biases(),
            logprobs=logprobs,
            **given,
        )

    @property
    def session(self) -> Session | None:
        """The conversation that the request continues; raises RequestError."""
        return read_session(self.session_id, self.retention_priority, self.retention_seconds)

    @property
    def queue_priority(self) -> int:
        """Priority in the queue."""
        return DEFAULT_PRIORITY if self.priority is None else self.priority

    def _bad_words(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
        words = check_words("bad_words", self.bad_words or ())
        return tuple(spelling for word in words for spelling in tokenizer.spellings(word))

    def _biases(self) -> tuple[tuple[int, float], ...]:
        biases = self.logit_bias or {}
        for token in biases:
            number = token.isascii() and token.isdigit() and len(token) <= 10
            require(number, "logit_bias", token, "token ids, written as strings", "the model's tokenizer tells them")
        return tuple((int(token), bias) for token, bias in biases.items())


def check_logprobs(name: str, count: int) -> int:
    """Return a number of likeliest tokens; raises FieldError that names the field."""
    require(0 <= count <= MAX_LOGPROBS, name, count, f"in [0, {MAX_LOGPROBS}]", "ask for fewer")
    return count


def require(condition: bool, name: str, value: object, limit: str, remedy: str) -> None:
    """Raise FieldError unless a condition holds; a value's text is shortened."""
    if not condition:
        text = repr(value)
        shown = text if len(text) <= 60 else f"{text[:60]}…"
        raise FieldError(name, f"{name} = {shown}: must be {limit}; {remedy}")
