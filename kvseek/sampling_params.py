"""Sampling parameters of the Python API: those of the engine's sampler, the output's length, and what ends the output."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvseek.core import request
from kvseek.core.errors import RequestError

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True)
class SamplingParams(request.SamplingParams):
    """Sampling of one request. Names are vLLM's; the meaning of the first five is that of the engine (core/request.py).

    Parameters
    ----------
    temperature : float
        0, the default, is greedy: the likeliest token.
    top_k : int
        Draw among the `top_k` likeliest tokens; 0 is all.
    top_p : float
        Draw among the likeliest tokens that together have this probability; 1 is all.
    repetition_penalty : float
        A penalty above 1 makes tokens rarer that are already in prompt or output.
    seed : int
        Seed of the request's own generator: the same seed, prompt and engine give the same tokens.
    max_tokens : int
        Most tokens to generate.
    stop : str or sequence of str
        Texts that end the output, and are not part of it.
    stop_token_ids : sequence of int
        Tokens that end the output beside the model's own end tokens, and are not part of it.
    ignore_eos : bool
        Whether to treat the model's own end tokens like other tokens.

    Raises
    ------
    RequestError
        On a parameter that is unknown or out of range. What depends on the engine, such as the longest request, is checked
        when a request is made.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

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
        super().__post_init__()
        words = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", words)  # as tuples: equal parameters are equal, whatever they were given as
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
