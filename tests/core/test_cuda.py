"""Choosing a cubin, and a GPU that is not there. Loading and launching: tests/gpu/engine/test_cuda.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvseek.core.cuda import (
    RESERVED_SHARED_BYTES,
    CudaKernels,
    bytes_of_even_share,
    check_alive,
    choose_architecture,
    cubin_architectures,
)
from kvseek.core.errors import KernelError


def test_a_device_that_has_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    check_alive(torch.device("cpu"))
    with pytest.raises(
        KernelError, match="cuda:1 has failed: CUDA error: an illegal memory access was encountered; no call"
    ):
        check_alive(torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(80, 80), (86, 80), (89, 89), (90, 90), (100, 100), (103, 100), (120, 120), (121, 120)],
)
def test_the_nearest_older_minor_version_is_chosen(capability: int, expected: int) -> None:
    assert choose_architecture([80, 89, 90, 100, 120], capability) == expected


@pytest.mark.parametrize(("available", "capability"), [([89], 80), ([90], 100), ([100], 90), ([], 90)])
def test_other_architectures_do_not_fit(available: list[int], capability: int) -> None:
    with pytest.raises(KernelError, match=f"this GPU is sm_{capability}: build the engine again with --cuda_archs"):
        choose_architecture(available, capability)


@pytest.mark.parametrize("shared_bytes", [228 << 10, 100 << 10], ids=["compute capability 9.0", "12.0"])
@pytest.mark.parametrize("share", [1, 2, 3, 7, 16, 24])
def test_an_even_share_fits_and_one_block_more_does_not(share: int, shared_bytes: int) -> None:
    for blocks in (132 * (share - 1) + 1, 132 * share):
        taken = bytes_of_even_share(blocks, 132, shared_bytes) + RESERVED_SHARED_BYTES
        assert share * taken <= shared_bytes < (share + 1) * taken
        assert taken < shared_bytes - RESERVED_SHARED_BYTES


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says that there is one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("h200")
def test_an_engine_without_a_cubin_for_the_gpu(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"compiled for none; this GPU is sm_90: build .* --cuda_archs 90"):
        CudaKernels.load(tmp_path)
    (tmp_path / "kernels").mkdir()
    for name in ("sm_80.cubin", "sm_100.cubin", "sm_new.cubin", "cpu.so"):
        (tmp_path / "kernels" / name).touch()
    assert cubin_architectures(tmp_path) == [80, 100]
    with pytest.raises(KernelError, match="compiled for sm_80, sm_100; this GPU is sm_90"):
        CudaKernels.load(tmp_path)


@pytest.mark.usefixtures("h200")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(KernelError, match="device = 'cuda:3': must be below cuda:1; PyTorch sees 1 GPUs"):
        CudaKernels(b"cubin", torch.device("cuda", 3))
    with pytest.raises(KernelError, match="device = 'cpu': must be a CUDA device"):
        CudaKernels(b"cubin", torch.device("cpu"))


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match=r"PyTorch sees no CUDA device.*or build the engine with --device cpu"):
        CudaKernels(b"cubin")
