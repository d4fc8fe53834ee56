"""Kernels of mixtures of experts without a GPU: threads are emulated (tests/support/emulated_kernels.py)."""

from __future__ import annotations

from typing import cast

import pytest
from tests.gpu.kernels.layer import test_experts as checks
from tests.support.emulated_kernels import emulated_experts

from kvseek.core.config import ExpertsConfig
from kvseek.core.cuda import CudaKernels
from kvseek.kernels.cuda.layer.experts import ExpertKernels

pytestmark = pytest.mark.slow


def kernels_of(config: ExpertsConfig, dtype: str = "bfloat16") -> ExpertKernels:
    return ExpertKernels(cast("CudaKernels", emulated_experts(dtype)), checks.DTYPES[dtype], config)


@pytest.mark.parametrize("config", checks.CONFIGS)
def test_routes(config: ExpertsConfig) -> None:
    checks.check_routes(kernels_of(config), "cpu")


@pytest.mark.parametrize("prompt", [False, True], ids=["step", "prompt"])
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("config", checks.CONFIGS[:4])
def test_products(config: ExpertsConfig, dtype: str, prompt: bool) -> None:
    checks.check_products(kernels_of(config, dtype), "cpu", rows=(1, 5, 20), hidden=88, prompt=prompt)


def test_a_row_does_not_depend_on_the_others() -> None:
    checks.check_rows_alone(kernels_of(checks.CONFIGS[0]), "cpu", rows=11, hidden=72)


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    checks.check_poison(kernels_of(checks.CONFIGS[1]), "cpu")
