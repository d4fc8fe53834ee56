"""Sampling parameters of the Python API: those of the engine's sampler, the output's length, and what ends the output."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from kvseek.core import request
from kvseek.core.errors import RequestError, typed
from kvseek.core.guide import Guide
from kvseek.core.selected_rows import RowReport

from .arguments import plain, texts, token_ids

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. Names and meanings are vLLM's; two defaults differ: `temperature` and `max_tokens`.

    Parameters
    ----------
    temperature : float
        0, the default, is greedy: the likeliest token.
    top_k : int
        Draw among the `top_k` likeliest tokens; 0 and -1 are all.
    top_p : float
        Draw among the likeliest tokens that together have this probability; 1 is all, 0 the likeliest one.
    repetition_penalty : float
        A penalty above 1 makes tokens rarer that are already in prompt or output.
    seed : int
        Seed of the request's own generator: the same seed, prompt and engine give the same tokens, on a GPU
        up to rounding (docs/conversations.md).
    max_tokens : int or None
        Most tokens to generate; None: as many as there is room for behind the prompt, in max_seq_len and in the row pool.
    stop : str or sequence of str
        Texts that end the output, and are not part of it; at most 64 of 1,024 bytes. Empty ones end nothing.
    stop_token_ids : sequence of int
        Tokens that end the output beside the model's own end tokens, and are not part of it.
    ignore_eos : bool
        Whether to treat the model's own end tokens like other tokens.
    presence_penalty, frequency_penalty : float
        Subtracted from the logits of tokens that are in the output: once, and once for each time. -100 to 100.
    min_tokens : int
        Tokens to generate before an end token may be drawn.
    bad_words : str or sequence of str
        Words that are not generated, as the tokenizer spells them inside of a text, behind a space and without one.
    logit_bias : mapping of int to float
        Numbers from -100 to 100 that are added to the logits of tokens.
    logprobs : int or None
        Return the log probability of every generated token, and of so many likeliest tokens, at most 20, as the model gives
        them before any of these parameters changes them.
    guide : Guide or None
        The output's text follows this JSON schema, regular expression or grammar, unless `max_tokens` or `stop` cuts it off.
    prompt_logprobs : int or None
        The same for every token of the prompt but the first. With it `max_tokens` may be 0.
    min_p : float
        Draw among the tokens that have at least this share of the likeliest token's probability; 0 is all.
    forced_tokens : sequence of int
        The output begins with these tokens, at most `max_tokens`; see LLM.score.
    return_selected_rows : bool or RowReport
        Return which rows of the context each decode step selected, of all layers and KV heads or as RowReport says.

    Raises
    ------
    RequestError
        On a parameter that is unknown, of another type or out of range. What depends on the engine, such as the longest request,
        is checked when a request is made.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    bad_words: str | Sequence[str] | None = ()
    logit_bias: Mapping[int, float] | None = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    guide: Guide | None = None
    prompt_logprobs: int | None = None
    min_p: float = 0.0
    forced_tokens: Sequence[int] | None = ()
    return_selected_rows: bool | RowReport | None = False

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Refuse unknown parameters by name; Python's own TypeError would not list the known ones."""
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in values if name not in names]:
            raise RequestError(
                f"{unknown[0]} = {values[unknown[0]]!r}: SamplingParams has no such parameter, leave it out; it has "
                f"{', '.join(names)}"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        values = {one.name: plain(getattr(self, one.name)) for one in dataclasses.fields(self)}
        # As tuples and a dict of its own: equal parameters are equal, whatever they were given as.
        for name in ("stop", "bad_words"):
            values[name] = request.check_words(name, texts(name, values[name]))
        for name in ("stop_token_ids", "forced_tokens"):
            ids = () if values[name] is None else values[name]
            values[name] = tuple(token_ids(name, ids, "a sequence of token ids"))
        biases = values["logit_bias"]
        if isinstance(biases, Mapping):
            biases = {plain(token): plain(bias) for token, bias in biases.items()}
        values["logit_bias"] = typed("logit_bias", {} if biases is None else biases, dict[int, float])
        values["max_tokens"] = typed("max_tokens", values["max_tokens"], int | None)
        rows = values["return_selected_rows"]
        if not isinstance(rows, RowReport):
            values["return_selected_rows"] = RowReport() if typed("return_selected_rows", rows, bool | None) else None
        values["ignore_eos"] = typed("ignore_eos", values["ignore_eos"], bool)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self.for_engine((), 0)  # raises on what else is of another type or out of range

    def for_engine(self, bad_words: tuple[tuple[int, ...], ...], prompt_tokens: int) -> request.SamplingConfig:
        """Make the engine's parameters of these, for a prompt of so many tokens and with the bad words as tokens."""
        names = [one.name for one in dataclasses.fields(request.SamplingConfig)]
        shared = {name: getattr(self, name) for name in names if hasattr(self, name)}
        shared |= {"bad_words": bad_words, "logit_bias": tuple((self.logit_bias or {}).items())}
        if self.top_k == -1:
            shared["top_k"] = 0
        return request.SamplingConfig(**shared, prompt_ignore_length=prompt_tokens)
