"""Kernels of mixtures of experts without a GPU: threads are emulated (tests/support/emulated_kernels.py)."""

from __future__ import annotations

from typing import cast

import pytest
from tests.gpu.kernels.layer import test_experts as checks
from tests.support.emulated_kernels import emulated_experts

from kvseek.core.cuda import CudaKernels
from kvseek.core.model_config import ExpertsConfig
from kvseek.core.weight_only import NONE
from kvseek.kernels.cuda.layer.experts import ExpertKernels

pytestmark = pytest.mark.slow


def kernels_of(
    config: ExpertsConfig, dtype: str = "bfloat16", precision: str = NONE, asymmetric: bool = False
) -> ExpertKernels:
    kernels = cast("CudaKernels", emulated_experts(dtype, precision, asymmetric))
    return ExpertKernels(kernels, checks.DTYPES[dtype], config, precision, asymmetric=asymmetric)


@pytest.mark.parametrize("config", checks.CONFIGS)
def test_routes(config: ExpertsConfig) -> None:
    checks.check_routes(kernels_of(config), "cpu")


@pytest.mark.parametrize("prompt", [False, True], ids=["step", "prompt"])
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("config", [*checks.CONFIGS[:4], checks.CONFIGS[-1]])
def test_products(config: ExpertsConfig, dtype: str, prompt: bool) -> None:
    many = config.num_experts_per_tok > 16
    checks.check_products(
        kernels_of(config, dtype), "cpu", rows=(1, 64) if many else (1, 5, 20), hidden=88, prompt=prompt
    )


@pytest.mark.parametrize(
    ("precision", "dtype", "asymmetric"),
    [
        ("int8", "bfloat16", False),
        ("fp8", "float16", False),
        ("fp8_groups", "bfloat16", False),
        ("int4", "bfloat16", False),
        ("int8_asymmetric", "float16", False),
        ("int4", "bfloat16", True),
        ("int8_groups", "bfloat16", True),
    ],
)
def test_narrow_weights(precision: str, dtype: str, asymmetric: bool) -> None:
    """Of 8 bits, and in groups along the inputs; with `asymmetric` down has other numbers than gate_up."""
    kernels = kernels_of(ExpertsConfig(5, 2, 384, norm_topk_prob=True), dtype, precision, asymmetric)
    hidden = 240 if precision == "int8_asymmetric" else 256  # no whole blocks
    for prompt in (False, True):
        checks.check_products(kernels, "cpu", rows=(1, 11), hidden=hidden, prompt=prompt)


def test_a_row_does_not_depend_on_the_others() -> None:
    checks.check_rows_alone(kernels_of(checks.CONFIGS[0]), "cpu", rows=11, hidden=72)


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    checks.check_poison(kernels_of(checks.CONFIGS[1]), "cpu")
