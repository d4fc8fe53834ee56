"""Kernels on a real GPU: loading, launching, streams, graphs, errors, and the pinned host memory that they read."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvseek.builder.compile.cuda import ARCHITECTURES, Specialisation, compile_cubin
from kvseek.core.cuda import CudaKernels, choose_architecture, cubin_path
from kvseek.core.errors import KernelError
from kvseek.engine.cache.host_memory import BY_DRIVER, REGISTERED, PinnedMemory, allocate, cuda_driver

pytestmark = pytest.mark.gpu

SOURCE = """
struct ScaleArguments {
    float* values;
    long long count;
    int rounds;
    float factor;
};

extern "C" __global__ void __launch_bounds__(128) kvseek_scale(const __grid_constant__ ScaleArguments a) {
    extern __shared__ float room[];
    __shared__ float own[256];
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += gridDim.x * blockDim.x) {
        own[threadIdx.x] = a.values[i];
        for (int round = 0; round < a.rounds; ++round) own[threadIdx.x] *= a.factor;
        a.values[i] = own[threadIdx.x];
    }
    if (a.rounds < 0) room[threadIdx.x] = 0.0f;  // the dynamic shared memory is used, as far as the compiler knows
}

__device__ void wait_microseconds(int count) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now < start + 1000ull * count);
}

// Lets the next kernel start, and ends sooner in every other block.
extern "C" __global__ void kvseek_busy(const __grid_constant__ ScaleArguments a) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    wait_microseconds(blockIdx.x % 2 ? a.rounds : 1);
}

// Writes down where each block runs.
extern "C" __global__ void kvseek_where(const __grid_constant__ ScaleArguments a) {
    unsigned multiprocessor;
    asm volatile("mov.u32 %0, %smid;" : "=r"(multiprocessor));
    if (threadIdx.x == 0) a.values[blockIdx.x] = multiprocessor;
    wait_microseconds(a.rounds);
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

extern "C" __global__ void kvseek_trap(const __grid_constant__ ScaleArguments a) { __trap(); }
"""


NAMES = ["kvseek_busy", "kvseek_scale", "kvseek_trap", "kvseek_where"]


class ScaleArguments(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("rounds", ctypes.c_int32),
        ("factor", ctypes.c_float),
    )


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def make_image(folder: Path) -> bytes:
    """The kernels above, compiled for this GPU."""
    (folder / "kernels").mkdir()
    (folder / "kernels/scale.cu").write_text(SOURCE)
    arch = choose_architecture(ARCHITECTURES, capability())
    return compile_cubin(Specialisation("float32", 64, 1, "none"), arch, [folder])


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_image(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def kernels(image: bytes) -> CudaKernels:
    return CudaKernels(image)


def arguments(values: torch.Tensor, rounds: int = 1, factor: float = 2.0) -> ScaleArguments:
    return ScaleArguments(values.data_ptr(), values.numel(), rounds, factor)


def test_launch(kernels: CudaKernels) -> None:
    assert kernels.names == NAMES
    assert kernels.multiprocessors == torch.cuda.get_device_properties(kernels.device).multi_processor_count
    values = torch.arange(1000.0, device=kernels.device)
    kernels.launch("kvseek_scale", (3, 1, 1), 128, arguments(values, rounds=3))
    assert torch.equal(values, 8 * torch.arange(1000.0, device=kernels.device))


def test_launches_follow_the_current_stream(kernels: CudaKernels) -> None:
    values = torch.ones(1 << 20, device=kernels.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what another stream launched now would overtake
        values.add_(1)
        kernels.launch("kvseek_scale", (64, 1, 1), 128, arguments(values))
    stream.synchronize()
    assert torch.equal(values, torch.full_like(values, 4.0))


def test_a_graph_replays_the_launch(image: bytes) -> None:
    kernels = CudaKernels(image)  # no kernel of it has run before the capture
    values = torch.ones(1000, device=kernels.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.launch("kvseek_scale", (4, 1, 1), 128, arguments(values, rounds=1), shared_bytes=100_000)
        kernels.launch("kvseek_scale", (4, 1, 1), 128, arguments(values, rounds=2))
    assert torch.equal(values, torch.ones_like(values)), "captured, not run"
    del kernels
    for _ in range(2):
        graph.replay()
    assert torch.equal(values, torch.full_like(values, 64.0))


@pytest.mark.parametrize("share", [1, 2, 3])
def test_an_even_launch_gives_no_multiprocessor_more_than_its_share(kernels: CudaKernels, share: int) -> None:
    """Blocks of 1,024 threads leave room for no others, and every second one of them ends at once."""
    count = kernels.multiprocessors * share - 5
    places = torch.empty(count, device=kernels.device)
    for _ in range(5):
        kernels.launch("kvseek_busy", (2 * kernels.multiprocessors, 1, 1), 1024, arguments(places, rounds=50))
        where = arguments(places, rounds=50)
        kernels.launch("kvseek_where", (count, 1, 1), 64, where, overlap=True, even=True)
        found = places.int().bincount()
        assert found.sum() == count
        if kernels.capability >= (9, 0):
            assert found.max() <= share


def test_shared_memory_beyond_the_default(kernels: CudaKernels) -> None:
    limit = torch.cuda.get_device_properties(kernels.device).shared_memory_per_block_optin
    values = torch.ones(100, device=kernels.device)
    for shared_bytes in (48 << 10, limit - 2048):  # the kernel has 1,024 bytes of its own
        kernels.launch("kvseek_scale", (1, 1, 1), 128, arguments(values), shared_bytes)
    assert torch.equal(values, torch.full_like(values, 4.0))
    with pytest.raises(KernelError, match=rf"kvseek_scale, grid .* {limit} bytes of dynamic shared memory.*CUDA_ERROR"):
        kernels.launch("kvseek_scale", (1, 1, 1), 128, arguments(values), limit)


def test_refused_launches_leave_the_gpu_usable(kernels: CudaKernels) -> None:
    values = torch.ones(100, device=kernels.device)
    for grid, threads in (((0, 1, 1), 128), ((1, 1, 1), 2048), ((1, 70_000, 1), 128)):
        with pytest.raises(KernelError, match=r"cuLaunchKernel failed .*kvseek_scale, grid .*CUDA_ERROR_INVALID_VALUE"):
            kernels.launch("kvseek_scale", grid, threads, arguments(values))
    kernels.launch("kvseek_scale", (1, 1, 1), 128, arguments(values))
    assert torch.equal(values, torch.full_like(values, 2.0))


class Longer(ctypes.Structure):
    _fields_ = (*ScaleArguments._fields_, ("more", ctypes.c_int64))


def test_what_does_not_match_a_kernel_is_refused(kernels: CudaKernels) -> None:
    with pytest.raises(KernelError, match=f"kernel 'kvseek_three' is not among {', '.join(NAMES)}; build"):
        kernels.launch("kvseek_three", (1, 1, 1), 128, ScaleArguments())
    with pytest.raises(
        KernelError, match="Longer has 32 bytes: kvseek_scale takes 24; give it the struct of its source"
    ):
        kernels.launch("kvseek_scale", (1, 1, 1), 128, Longer())


def test_a_new_thread_may_launch(kernels: CudaKernels) -> None:
    values = torch.ones(100, device=kernels.device)
    torch.cuda.synchronize()
    launch = ("kvseek_scale", (1, 1, 1), 128, arguments(values))
    thread = threading.Thread(target=lambda: kernels.launch(*launch))  # it has no current context
    thread.start()
    thread.join()
    assert torch.equal(values, torch.full_like(values, 2.0))


def test_load(image: bytes, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    cubin_path(tmp_path, choose_architecture(ARCHITECTURES, capability())).write_bytes(image)
    assert CudaKernels.load(tmp_path, torch.device("cuda")).names == NAMES


def test_an_image_that_is_no_cubin() -> None:
    with pytest.raises(KernelError, match=r"CUDA_ERROR|holds no kernels"):
        CudaKernels(b"no cubin\0")


def test_a_fault_of_a_kernel_shows(tmp_path: Path) -> None:
    """In a process of its own: no later call of a process succeeds after a fault."""
    (tmp_path / "image").write_bytes(make_image(tmp_path))
    code = f"""
import ctypes, pathlib, torch
from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import KernelError
kernels = CudaKernels(pathlib.Path({str(tmp_path / "image")!r}).read_bytes())
Arguments = type("Arguments", (ctypes.Structure,), {{"_fields_": [("bytes", ctypes.c_char * 24)]}})
kernels.launch("kvseek_trap", (1, 1, 1), 32, Arguments())
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    kernels.launch("kvseek_scale", (1, 1, 1), 32, Arguments())
except KernelError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "kvseek_scale, grid (1, 1, 1)" in result.stdout
    assert "CUDA_ERROR" in result.stdout


BYTES = 3 << 21  # whole huge pages and, as mappings need not begin at one, parts of them


def resident_bytes() -> int:
    """Memory of the process that is in use, in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def mapped(address: int) -> bool:
    """Whether the process has memory at an address."""
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)


def check_that_kernels_read_it(memory: PinnedMemory, device: torch.device) -> None:
    rows = torch.frombuffer(memory.buffer, dtype=torch.int64)
    assert rows.is_pinned()
    rows.copy_(torch.arange(len(rows)))
    described = {"shape": tuple(rows.shape), "typestr": "<i8", "data": (memory.device_pointer, False), "version": 3}
    on_device = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device=device)
    assert on_device.data_ptr() == memory.device_pointer
    assert torch.equal(on_device * 2, torch.arange(len(rows), device=device) * 2)  # a kernel reads host memory in place


def test_kernels_read_what_the_host_writes(device: torch.device) -> None:
    memory = allocate(BYTES, device)
    assert memory.way == REGISTERED
    check_that_kernels_read_it(memory, device)
    address = torch.frombuffer(memory.buffer, dtype=torch.uint8).data_ptr()
    assert mapped(address)
    del memory
    gc.collect()
    assert not mapped(address)


def test_where_registering_fails_the_driver_allocates_and_the_log_says_so(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = cuda_driver()
    refused = (driver.CUresult.CUDA_ERROR_NOT_PERMITTED,)
    monkeypatch.setattr(driver, "cuMemHostRegister", lambda address, size, flags: refused)
    with caplog.at_level(logging.WARNING):
        memory = allocate(BYTES, device)
    assert memory.way == BY_DRIVER
    assert "6291456 bytes of pinned memory are allocated by cuMemHostAlloc, which takes long" in caplog.text
    assert "cuMemHostRegister: CUDA_ERROR_NOT_PERMITTED" in caplog.text
    check_that_kernels_read_it(memory, device)


def test_memory_is_given_back(device: torch.device) -> None:
    before = resident_bytes()
    for _ in range(64):  # 4 GiB, were it kept
        allocate(64 << 20, device)
    gc.collect()
    assert resident_bytes() - before < 1 << 30
