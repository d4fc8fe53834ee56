"""Draws of tokens on a GPU, where several blocks draw for a request, against the reference."""

from __future__ import annotations

from random import Random

import pytest
import torch
from tests.gpu.conftest import MakeKernels
from tests.support.draws import check_equal, draw_together, every_kind_of_params, random_logits
from torch import Tensor

from kvseek.core.errors import LogitsError, SamplingError
from kvseek.core.request import SamplingConfig
from kvseek.engine.draws.compiled import CompiledDraws
from kvseek.engine.draws.reference import TorchDraws
from kvseek.engine.draws.sampling import Drawn
from kvseek.kernels.cuda.draw.draw import DeviceDraw

pytestmark = pytest.mark.gpu

VOCABULARY = 128_256
OPTIONS = {"prompt": (4, 4, 7, 400), "ends": (17,)}
DTYPES = ("float32", "bfloat16", "float16")


def both(
    kernels: MakeKernels, device: torch.device, logits: Tensor, params: list[SamplingConfig]
) -> tuple[list[list[Drawn]], list[list[Drawn]]]:
    """What the GPU and the reference draw from logits [steps, requests, vocabulary]."""
    draws = CompiledDraws(DeviceDraw(kernels(str(logits.dtype).removeprefix("torch."), 64, 3)))
    with torch.inference_mode():
        return draw_together(draws, logits.to(device), params, **OPTIONS), draw_together(
            TorchDraws(), logits.float(), params, **OPTIONS
        )


@pytest.mark.parametrize("vocabulary", [499, 5000, VOCABULARY])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_draws_as_the_reference(
    dtype: str, vocabulary: int, kernels: MakeKernels, device: torch.device
) -> None:
    params = every_kind_of_params(5)
    logits = torch.stack([random_logits(n, vocabulary) for n in range(3 * len(params))]).to(getattr(torch, dtype))
    found, expected = both(kernels, device, logits.reshape(3, len(params), vocabulary), params)
    for one, other in zip(found, expected, strict=True):
        if dtype == "float32":
            check_equal(one, other)
        assert [drawn.token for drawn in one] == [drawn.token for drawn in other]


@pytest.mark.parametrize("spread", [0.02, 0.5, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_combinations_draw_as_the_reference(
    dtype: str, spread: float, kernels: MakeKernels, device: torch.device
) -> None:
    """64 requests at once, of random parameters; logits that are flat, or have few values, so that ties end at borders."""
    random, generator = Random(3), torch.Generator().manual_seed(3)
    params = [
        SamplingConfig(
            temperature=random.choice([0.3, 0.7, 1.0, 3.0]),
            top_k=random.choice([0, 1, 20, 1000, 200_000]),
            top_p=random.choice([0.1, 0.8, 0.95, 0.999, 1.0]),
            min_p=random.choice([0.0, 0.01, 0.3]),
            logprobs=random.choice([None, None, 0, 20]),
            seed=n,
        )
        for n in range(64)
    ]
    for rounding in (None, 8.0):
        logits = torch.randn(1, 64, 32_064, generator=generator) * spread * 3
        logits = (logits if rounding is None else (logits * rounding).round() / rounding).to(getattr(torch, dtype))
        found, expected = both(kernels, device, logits, params)
        assert [one[0].token for one in found] == [one[0].token for one in expected]
        for (one,), (other,) in zip(found, expected, strict=True):
            if one.logprobs is not None and other.logprobs is not None:
                assert one.logprobs.token == pytest.approx(other.logprobs.token, abs=1e-5)
                values = [[value for _, value in own.top] for own in (one.logprobs, other.logprobs)]
                assert values[0] == pytest.approx(values[1], abs=1e-5)


def test_a_request_draws_the_same_alone_and_in_any_company(kernels: MakeKernels, device: torch.device) -> None:
    """The number of blocks that draw for a request depends on the batch."""
    draws = CompiledDraws(DeviceDraw(kernels("bfloat16", 64, 3)))
    logits = (torch.randn(3, 64, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 0.3).bfloat16().to(device)
    params = [SamplingConfig(temperature=0.8, top_p=0.95, seed=n, logprobs=20) for n in range(64)]
    together = draw_together(draws, logits, params)
    for size in (1, 3, 16, 33):
        assert draw_together(draws, logits[:, :size], params[:size]) == together[:size]


def test_errors_are_their_requests_alone(kernels: MakeKernels, device: torch.device) -> None:
    logits = torch.stack([random_logits(n, 9000) for n in range(5)])[None]
    logits[0, 1, 8999], logits[0, 2, 3] = torch.nan, torch.inf
    logits[0, 3] = -torch.inf
    params = [SamplingConfig(temperature=1.0, seed=n) for n in range(4)]
    params.append(SamplingConfig(temperature=1.0, return_generation_logits=True))
    found, expected = both(kernels, device, logits, params)
    assert [type(one.error) for (one,) in found] == [type(None), *[LogitsError] * 3, type(None)]
    assert [str(one.error) for (one,) in found] == [str(one.error) for (one,) in expected]
    assert [one.token for (one,) in found] == [one.token for (one,) in expected]
    assert found[4][0].logits == logits[0, 4].numpy().tobytes()
    words = tuple((token,) for token in range(200))
    params = [SamplingConfig(temperature=1.0, bad_words=words), SamplingConfig()]
    found, _ = both(kernels, device, logits[:, :2, :200].contiguous().nan_to_num(), params)
    assert isinstance(found[0][0].error, SamplingError)
    assert found[1][0].token == int(logits[0, 1, :200].argmax())
