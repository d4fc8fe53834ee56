"""Draws of tokens for tests: one request at a time, by PyTorch, by the compiled library, by an emulated GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tests.support.emulated_kernels import emulated_draw
from torch import Tensor

from kvseek.builder.compile.cpu import cached_cpu_library
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.draws import sampling
from kvseek.engine.draws.compiled import CompiledDraws
from kvseek.engine.draws.reference import TorchDraws
from kvseek.engine.draws.sampling import Drawn, Draws, Sampler
from kvseek.engine.schedule.guides import GuideMatcher
from kvseek.kernels.cpu.draw.draw import NativeDraw
from kvseek.kernels.cuda.draw.draw import DeviceDraw

KINDS = ("reference", "native", "emulated")
VOCABULARY = 500


def make_draws(kind: str, dtype: str = "float32") -> Draws:
    """One of KINDS; an emulated GPU takes vocabularies of one block, 2,048 tokens, and logits of the dtype."""
    if kind == "reference":
        return TorchDraws()
    if kind == "native":
        return CompiledDraws(NativeDraw(CpuLibrary(cached_cpu_library())))
    return CompiledDraws(DeviceDraw(emulated_draw(dtype)))


class OneRequest:
    """Draws the tokens of one request; `last` is the last draw."""

    last: Drawn

    def __init__(
        self, draws: Draws, params: SamplingConfig, size: int, prompt: tuple[int, ...] = (), ends: tuple[int, ...] = ()
    ) -> None:
        self.draws, self.sampler = draws, Sampler(Request(prompt, 1, params, end_ids=ends), size)

    def sample(self, logits: Tensor) -> int:
        """Draw the next token from logits [vocabulary]; raises as Sampler.take."""
        (self.last,) = draw_once(self.draws, logits[None], [0], [self.sampler])
        return self.sampler.take(self.last)


def draw_once(draws: Draws, logits: Tensor, rows: Sequence[int], samplers: Sequence[Sampler]) -> list[Drawn]:
    """Draw for requests of one step."""
    return [Drawn(one) if isinstance(one, int) else one for one in sampling.draw_once(draws, logits, rows, samplers)]


def draw_together(draws: Draws, logits: Tensor, params: list[SamplingConfig], **options: Any) -> list[list[Drawn]]:
    """Draw for several requests at once: logits [steps, requests, vocabulary]; the draws of each request."""
    samplers = [OneRequest(draws, one, logits.shape[2], **options).sampler for one in params]
    drawn: list[list[Drawn]] = [[] for _ in params]
    for step in logits:
        for mine, sampler, one in zip(
            drawn, samplers, draw_once(draws, step, range(len(params)), samplers), strict=True
        ):
            mine.append(one)
            if one.error is None:
                sampler.take(one)
    return drawn


def check_equal(drawn: list[Drawn], expected: list[Drawn]) -> None:
    """The same tokens, and log probabilities that differ by rounding: the reference adds up in float32."""
    assert [one.token for one in drawn] == [one.token for one in expected]
    for one, other in zip(drawn, expected, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert [token for token, _ in one.logprobs.top] == [token for token, _ in other.logprobs.top]
            values = [[own.token, *(value for _, value in own.top)] for own in (one.logprobs, other.logprobs)]
            torch.testing.assert_close(torch.tensor(values[0]), torch.tensor(values[1]), rtol=0, atol=2e-5)


def random_logits(seed: int, size: int = VOCABULARY) -> torch.Tensor:
    """Distinct logits with the spread of a language model's, float32 [size]."""
    generator = torch.Generator().manual_seed(seed)
    # One from each part of equal probability, not near its borders: numbers drawn freely coincide now and then.
    parts = torch.randperm(size, generator=generator) + torch.rand(size, generator=generator) * 0.9 + 0.05
    return torch.special.ndtri(parts / size) * 4


def every_kind_of_params(seed: int) -> list[SamplingConfig]:
    """Requests that have nothing, one thing or everything to do for a draw."""
    kinds = [{}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.05}, {"repetition_penalty": 1.3}, {"logprobs": 20}]
    kinds += [{"presence_penalty": 0.5, "frequency_penalty": -0.2}, {"logit_bias": ((3, 4.0), (9, -2.0), (3, 1.0))}]
    kinds += [{"bad_words": ((1,), (2, 3)), "min_tokens": 4}, {"temperature": 0.0, "logprobs": 3}]
    kinds += [{"forced_tokens": (5, 1)}, {"forced_tokens": (17, 17, 3), "min_tokens": 4, "logprobs": 1}]
    kinds.append({name: value for kind in kinds for name, value in kind.items()} | {"temperature": 1.1})
    return [SamplingConfig(**({"temperature": 0.8, "seed": seed + n} | kind)) for n, kind in enumerate(kinds)]


def allowed_tokens(matcher: GuideMatcher) -> Tensor:
    """Which tokens a guide lets come next, bool [vocabulary, rounded up to words]."""
    return torch.from_numpy(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little").view(np.bool_))
