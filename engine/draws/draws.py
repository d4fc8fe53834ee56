"""How a decoder draws the tokens of requests that are not plainly greedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from .sampling import Drawn, Sampler


class Draws(Protocol):
    """Draws the next tokens of requests from their logits.

    In this order: bias, repetition penalty, presence and frequency penalty, guide, bad words and min_tokens, temperature,
    top-k, top-p, min-p, one draw. engine/draws/reference.py says exactly how. A draw depends on the request's own logits,
    parameters and tokens alone: the same seed gives the same tokens in any company. Nothing raises: what is wrong with one
    request is the `error` of its Drawn.
    """

    def begin(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[Sampler]) -> Callable[[], list[Drawn]]:
        """Begin to draw a token for each of `samplers`; the result waits for the draws and returns them.

        Parameters
        ----------
        logits : Tensor [any, vocabulary]
            On the engine's device: float32 on the CPU, in the engine's dtype on a GPU. Not changed. -inf excludes a token.
        rows : sequence of int
            The row of the logits for each sampler.
        """


def sampled(samplers: Sequence[Sampler | None]) -> tuple[list[int], list[Sampler]]:
    """Return the numbers of the requests that have a sampler, and their samplers."""
    chosen = [(number, sampler) for number, sampler in enumerate(samplers) if sampler is not None]
    return [number for number, _ in chosen], [sampler for _, sampler in chosen]
