"""Choosing a cubin and launching its kernels, with a driver that writes down what it is asked."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvseek.core import cuda
from kvseek.core.cuda import CudaKernels, choose_architecture, cubin_architectures, cubin_path
from kvseek.core.errors import KernelError

SUCCESS, INVALID, NO_BINARY, ILLEGAL = 0, 1, 209, 700
GRID = (5, 2, 1)


class Arguments(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("count", ctypes.c_int64))


class Longer(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("count", ctypes.c_int64), ("more", ctypes.c_int64))


class Driver:
    """The functions of cuda.bindings.driver that core/cuda.py calls, for one cubin of two kernels."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SUCCESS, CUDA_ERROR_NO_BINARY_FOR_GPU=NO_BINARY)
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8
    )

    def __init__(self, parameters: tuple[int, ...] = (16,), static_bytes: int = 1024) -> None:
        self.parameters, self.static_bytes = parameters, static_bytes
        self.fails: dict[str, int] = {}
        self.launches: list[tuple[Any, ...]] = []
        self.shared: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        results = {
            "cuDeviceGet": ("gpu",),
            "cuDevicePrimaryCtxRetain": ("context",),
            "cuCtxSetCurrent": (),
            "cuLibraryLoadData": ("library",),
            "cuLibraryGetKernelCount": (2,),
            "cuLibraryEnumerateKernels": (["kvseek_one", "kvseek_two"],),
        }[name]
        return lambda *_: (self.fails.get(name, SUCCESS), *results)

    def cuKernelGetName(self, kernel: str) -> tuple[int, bytes]:
        return SUCCESS, kernel.encode()

    def cuKernelGetFunction(self, kernel: str) -> tuple[int, str]:
        return SUCCESS, kernel.upper()

    def cuFuncGetAttribute(self, attribute: int, _: str) -> tuple[int, int]:
        assert attribute == 1
        return SUCCESS, self.static_bytes

    def cuFuncGetParamInfo(self, _: str, number: int) -> tuple[int, int | None, int | None]:
        known = number < len(self.parameters)
        return (SUCCESS, 0, self.parameters[number]) if known else (INVALID, None, None)

    def cuFuncSetAttribute(self, function: str, attribute: int, value: int) -> tuple[int]:
        assert attribute == 8
        self.shared.append((function, value))
        return (self.fails.get("cuFuncSetAttribute", SUCCESS),)

    def cuLaunchKernel(self, *launch: Any) -> tuple[int]:
        *others, parameters, extra = launch
        assert extra == 0
        address = ctypes.c_void_p.from_address(parameters).value
        assert address is not None
        arguments = Arguments.from_address(address)
        self.launches.append((*others, arguments.values, arguments.count))
        return (self.fails.get("cuLaunchKernel", SUCCESS),)

    def cuGetErrorName(self, status: int) -> tuple[int, bytes | None]:
        return SUCCESS, {ILLEGAL: b"CUDA_ERROR_ILLEGAL_ADDRESS", NO_BINARY: b"CUDA_ERROR_NO_BINARY"}.get(status)

    def cuGetErrorString(self, status: int) -> tuple[int, bytes | None]:
        return SUCCESS, b"what went wrong" if status != INVALID else None


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A pretended H200 with a pretended driver."""
    fake = Driver()
    monkeypatch.setattr(cuda, "_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    return fake


def test_launch(driver: Driver) -> None:
    kernels = CudaKernels(b"cubin")
    assert (kernels.names, kernels.multiprocessors) == (["kvseek_one", "kvseek_two"], 132)
    assert (kernels.capability, kernels.shared_memory_per_block) == ((9, 0), 232_448)
    assert kernels.device == torch.device("cuda", 0)
    kernels.launch("kvseek_two", GRID, 128, Arguments(11, 22))
    assert driver.launches == [("KVSEEK_TWO", *GRID, 128, 1, 1, 0, 77, 11, 22)]
    assert driver.shared == []


def test_shared_memory_is_asked_for_when_static_and_dynamic_exceed_48_kib(driver: Driver) -> None:
    kernels = CudaKernels(b"cubin")
    for shared_bytes in (47 << 10, (47 << 10) + 1, 100_000, 90_000):
        kernels.launch("kvseek_one", GRID, 128, Arguments(), shared_bytes)
    assert driver.shared == [("KVSEEK_ONE", (47 << 10) + 1), ("KVSEEK_ONE", 100_000)]
    assert [launch[7] for launch in driver.launches] == [47 << 10, (47 << 10) + 1, 100_000, 90_000]
    driver.fails["cuFuncSetAttribute"] = INVALID
    for _ in range(2):  # a refused size is asked for again, not remembered
        with pytest.raises(KernelError, match=r"cuFuncSetAttribute failed on cuda:0 \(kvseek_one, .* 300000 bytes"):
            kernels.launch("kvseek_one", GRID, 128, Arguments(), 300_000)
    assert len(driver.launches) == 4


def test_bad_launches_are_refused(driver: Driver) -> None:
    kernels = CudaKernels(b"cubin")
    with pytest.raises(KernelError, match="kernel 'kvseek_three' is not among kvseek_one, kvseek_two; build"):
        kernels.launch("kvseek_three", GRID, 128, Arguments())
    with pytest.raises(KernelError, match="Longer has 24 bytes: kvseek_one takes 16; make both list the same fields"):
        kernels.launch("kvseek_one", GRID, 128, Longer())
    assert driver.launches == []
    driver.fails["cuLaunchKernel"] = ILLEGAL
    message = (
        r"cuLaunchKernel failed on cuda:0 \(kvseek_one, grid \(5, 2, 1\), 128 threads, 0 bytes of dynamic shared "
        r"memory\): CUDA_ERROR_ILLEGAL_ADDRESS: what went wrong"
    )
    with pytest.raises(KernelError, match=message):
        kernels.launch("kvseek_one", GRID, 128, Arguments())


@pytest.mark.parametrize("parameters", [(), (16, 8)])
def test_a_kernel_takes_one_struct(driver: Driver, parameters: tuple[int, ...]) -> None:
    driver.parameters = parameters
    with pytest.raises(KernelError, match="kernel kvseek_one takes not exactly one parameter"):
        CudaKernels(b"cubin")


def test_load(driver: Driver, tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"compiled for none; this GPU is sm_90: build .* --cuda_archs 90"):
        CudaKernels.load(tmp_path)
    (tmp_path / "kernels").mkdir()
    for name in ("sm_80.cubin", "sm_90.cubin", "sm_100.cubin", "sm_new.cubin", "cpu.so"):
        (tmp_path / "kernels" / name).write_bytes(name.encode())
    assert cubin_architectures(tmp_path) == [80, 90, 100]
    assert CudaKernels.load(tmp_path, torch.device("cuda")).device == torch.device("cuda", 0)
    driver.fails["cuLibraryLoadData"] = NO_BINARY
    with pytest.raises(KernelError, match="cubin is of another architecture: build with --cuda_archs 90"):
        CudaKernels.load(tmp_path)
    cubin_path(tmp_path, 90).unlink()
    with pytest.raises(KernelError, match="compiled for sm_80, sm_100; this GPU is sm_90"):
        CudaKernels.load(tmp_path)


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


@pytest.mark.usefixtures("driver")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(KernelError, match="device = 'cuda:3': must be below cuda:1; PyTorch sees 1 GPUs"):
        CudaKernels(b"cubin", torch.device("cuda", 3))
    with pytest.raises(KernelError, match="device = 'cpu': must be a CUDA device"):
        CudaKernels(b"cubin", torch.device("cpu"))


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match=r"PyTorch sees no CUDA device.*or build the engine with --device cpu"):
        CudaKernels(b"cubin")
