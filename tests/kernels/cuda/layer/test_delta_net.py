"""The kernel of Gated DeltaNet layers without a GPU: threads are emulated (tests/support/emulated_kernels.py)."""

from __future__ import annotations

from typing import cast

import pytest
from tests.gpu.kernels.layer import test_delta_net as checks
from tests.support.emulated_kernels import emulated_delta_net

from kvseek.core.cuda import CudaKernels
from kvseek.core.model_config import DeltaNetConfig

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("config", checks.CONFIGS, ids=str)
def test_step(config: DeltaNetConfig, dtype: str) -> None:
    checks.check_steps(cast("CudaKernels", emulated_delta_net(dtype)), config, checks.DTYPES[dtype], "cpu")
