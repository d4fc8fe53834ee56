"""Kernels of the GPU: load a cubin, launch its kernels through the CUDA driver. Each caller gives a struct of arguments.

The contract with the kernels: `extern "C"`, one struct passed by value as the only parameter, blocks of one dimension.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from .errors import KernelError

KERNELS_FOLDER = "kernels"  # inside an engine directory
REBUILD = "build the engine again"
DEFAULT_SHARED_BYTES = 48 << 10  # static and dynamic shared memory of a block that has not asked for more (CUDA guide)
RESERVED_SHARED_BYTES = 1 << 10  # that a block takes beside its own, from compute capability 8.0 on
SHARED_STEP = 128  # bytes, in which shared memory is given out


@dataclass
class _Kernel:
    """A loaded kernel: its handle, bytes of its parameter, static shared memory of a block, and dynamic that launches may use.

    `shared_bytes` is raised by the first launch that needs more.
    """

    function: Any
    argument_bytes: int
    static_bytes: int
    shared_bytes: int


class CudaKernels:
    """The kernels of one cubin on one GPU.

    The image stays loaded until the process ends: captured graphs hold its kernels and may outlive this object.

    Parameters
    ----------
    image : bytes
        A cubin for the GPU's architecture (builder/compile/cuda.py).
    device : torch.device, optional
        A CUDA device; None or a device without an index: the current one.

    Attributes
    ----------
    device : torch.device
        The GPU, with its index.
    capability : tuple of int
        Compute capability of the GPU: major and minor version.
    multiprocessors : int
        Streaming multiprocessors of the GPU; persistent grids are sized by them.
    shared_memory_per_block : int
        Most bytes of shared memory that a block may ask for.

    Raises
    ------
    KernelError
        If PyTorch sees no such GPU, the driver refuses the image, or a kernel takes anything but one struct.
    """

    def __init__(self, image: bytes, device: torch.device | None = None) -> None:
        self.device = cuda_device(device)
        self.capability: tuple[int, int] = torch.cuda.get_device_capability(self.device)
        self._driver = _driver()
        # Asking PyTorch first initialises the driver.
        properties: Any = torch.cuda.get_device_properties(self.device)  # the stubs lag behind
        self.multiprocessors: int = properties.multi_processor_count
        self.shared_memory_per_block: int = properties.shared_memory_per_block_optin
        self._multiprocessor_bytes: int = properties.shared_memory_per_multiprocessor
        gpu = self._call("cuDeviceGet", self.device.index)
        # Streams and memory of PyTorch belong to the primary context.
        self._context = self._call("cuDevicePrimaryCtxRetain", gpu)
        self._call("cuCtxSetCurrent", self._context)
        self._kernels = self._load(image)

    @classmethod
    def load(cls, directory: Path, device: torch.device | None = None) -> CudaKernels:
        """Load the cubin of an engine directory that fits `device`.

        Raises
        ------
        KernelError
            If the directory has no cubin for this GPU; the message names the architectures that it has.
        """
        device = cuda_device(device)
        major, minor = torch.cuda.get_device_capability(device)
        available = cubin_architectures(directory)
        arch = choose_architecture(available, 10 * major + minor)
        return cls(cubin_path(directory, arch).read_bytes(), device)

    @property
    def names(self) -> list[str]:
        """Names of the kernels."""
        return sorted(self._kernels)

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: ctypes.Structure,
        shared_bytes: int = 0,
        overlap: bool = False,
        even: bool = False,
        together: bool = False,
    ) -> None:
        """Launch a kernel on PyTorch's current stream of the device, and make the device current in the calling thread.

        The stream may be capturing a graph.

        Parameters
        ----------
        grid : tuple of int
            Blocks in x, y and z.
        threads : int
            Threads of a block.
        arguments : ctypes.Structure
            The kernel's parameter, copied during the call. The memory that its pointers name must outlive the launch, and
            every replay of a graph that holds the launch.
        shared_bytes : int
            Dynamic shared memory of a block.
        overlap : bool
            Let the kernel start while the preceding kernel on the stream ends: only for kernels that follow
            kernels/cuda/overlap.cuh. Without effect below compute capability 9.0.
        even : bool
            With overlap, blocks start where the preceding kernel's end first. Let no multiprocessor take more of them than an
            even share, so that a grid whose blocks all run at once, with equal work, ends everywhere at the same time. They are
            given shared memory for that, and wait until the preceding kernel leaves it: ask where it was measured to gain.
            Without effect without overlap.
        together : bool
            All blocks run at once, so that they can wait for each other; not with overlap. The driver refuses more blocks than
            the GPU has room for.

        Raises
        ------
        KernelError
            If there is no such kernel, `arguments` has another size than the kernel's struct, or the driver refuses the
            launch or reports the failure of an earlier launch.
        """
        kernel = self._find(name, arguments)
        overlap = overlap and self.capability >= (9, 0)
        if overlap and even:
            even_bytes = bytes_of_even_share(math.prod(grid), self.multiprocessors, self._multiprocessor_bytes)
            shared_bytes = max(shared_bytes, even_bytes - kernel.static_bytes)
        what = f"{name}, grid {grid}, {threads} threads, {shared_bytes} bytes of dynamic shared memory"
        self._call("cuCtxSetCurrent", self._context, what=what)
        if shared_bytes > kernel.shared_bytes:
            limit = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", kernel.function, limit, shared_bytes, what=what)
            kernel.shared_bytes = shared_bytes
        stream = torch.cuda.current_stream(self.device).cuda_stream
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        if overlap:
            config = self._overlapping(grid, threads, shared_bytes, stream)
            self._call("cuLaunchKernelEx", config, kernel.function, ctypes.addressof(parameters), 0, what=what)
        elif together:
            given = (*grid, threads, 1, 1, shared_bytes, stream, ctypes.addressof(parameters))
            self._call("cuLaunchCooperativeKernel", kernel.function, *given, what=what)
        else:
            launch = (*grid, threads, 1, 1, shared_bytes, stream, ctypes.addressof(parameters), 0)
            self._call("cuLaunchKernel", kernel.function, *launch, what=what)

    def _overlapping(self, grid: tuple[int, int, int], threads: int, shared_bytes: int, stream: int) -> Any:
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = stream
        config.attrs, config.numAttrs = [attribute], 1
        return config

    def _find(self, name: str, arguments: ctypes.Structure) -> _Kernel:
        kernel = self._kernels.get(name)
        if kernel is None:
            raise KernelError(f"kernel {name!r} is not among {', '.join(self.names) or 'none'}; {REBUILD}")
        if ctypes.sizeof(arguments) != kernel.argument_bytes:
            raise KernelError(
                f"{type(arguments).__name__} has {ctypes.sizeof(arguments)} bytes: {name} takes {kernel.argument_bytes}; "
                f"give it the struct of its source, or {REBUILD} if it is of another version"
            )
        return kernel

    def _load(self, image: bytes) -> dict[str, _Kernel]:
        """Load all kernels now, because a kernel that its first launch loads would disturb the capture of a graph."""
        code = ctypes.create_string_buffer(image, len(image))
        library = self._call("cuLibraryLoadData", ctypes.addressof(code), [], [], 0, [], [], 0)
        count = self._call("cuLibraryGetKernelCount", library)
        kernels = {}
        for handle in self._call("cuLibraryEnumerateKernels", count, library) if count else []:
            name = self._call("cuKernelGetName", handle).decode()
            kernels[name] = self._describe(name, self._call("cuKernelGetFunction", handle, what=name))
        if not kernels:  # the driver reads an image when it needs it, and reports no error for one that holds nothing
            raise KernelError(f"the image of {len(image)} bytes holds no kernels; {REBUILD}")
        return kernels

    def _describe(self, name: str, function: Any) -> _Kernel:
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        static_bytes = self._call("cuFuncGetAttribute", attribute, function, what=name)
        found = [self._driver.cuFuncGetParamInfo(function, number) for number in range(2)]
        success = self._driver.CUresult.CUDA_SUCCESS
        if [status == success for status, *_ in found] != [True, False]:
            raise KernelError(f"kernel {name} takes not exactly one parameter; pass one struct, by value")
        _, _offset, argument_bytes = found[0]
        return _Kernel(function, argument_bytes, static_bytes, DEFAULT_SHARED_BYTES - static_bytes)

    def _call(self, function: str, *arguments: Any, what: str = "") -> Any:
        """Call a function of the driver; returns its result, or raises KernelError with the driver's own words."""
        status, *results = getattr(self._driver, function)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            self._fail(function, status, what)
        return results[0] if results else None

    def _fail(self, function: str, status: Any, what: str) -> NoReturn:
        _, name = self._driver.cuGetErrorName(status)
        _, text = self._driver.cuGetErrorString(status)
        words = ": ".join(part.decode() for part in (name, text) if part) or str(status)
        about = f" ({what})" if what else ""
        remedy = ""
        if status == self._driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU:
            major, minor = torch.cuda.get_device_capability(self.device)
            remedy = f"; the cubin is of another architecture: build with --cuda_archs {major}{minor}"
        raise KernelError(f"{function} failed on {self.device}{about}: {words}{remedy}")


def bytes_of_even_share(blocks: int, multiprocessors: int, shared_bytes: int) -> int:
    """Return shared memory of a block with which no multiprocessor takes more than its share of the blocks.

    A multiprocessor has `shared_bytes`: just too few for one block more than its share. At most half of them, and a little, are
    returned, which is less than a block may ask for.
    """
    share = -(-blocks // multiprocessors)
    return shared_bytes // (share + 1) + SHARED_STEP - RESERVED_SHARED_BYTES


def cuda_device(device: torch.device | None = None) -> torch.device:
    """Return a CUDA device with its index: the current device if `device` is None or has no index.

    Raises KernelError if PyTorch sees no such GPU.
    """
    if device is not None and device.type != "cuda":
        raise KernelError(f"device = {str(device)!r}: must be a CUDA device; kernels of the GPU run nowhere else")
    if not torch.cuda.is_available():
        raise KernelError(
            "PyTorch sees no CUDA device: install NVIDIA's driver and a CUDA build of torch, or build the engine with "
            "--device cpu"
        )
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    count = torch.cuda.device_count()
    if index >= count:
        raise KernelError(f"device = 'cuda:{index}': must be below cuda:{count}; PyTorch sees {count} GPUs")
    return torch.device("cuda", index)


def check_alive(device: torch.device) -> None:
    """Wait for a device's work; nothing has to be done for the CPU.

    Raises KernelError if the device has failed so that no call succeeds any more, as after an illegal address.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise KernelError(f"{device} has failed: {reason}; no call to it succeeds in this process any more") from error


def cubin_path(directory: Path, arch: int) -> Path:
    """Return the path of an architecture's cubin in an engine directory."""
    return directory / KERNELS_FOLDER / f"sm_{arch}.cubin"


def cubin_architectures(directory: Path) -> list[int]:
    """Return the architectures that an engine directory holds cubins of, ascending."""
    names = [path.stem.removeprefix("sm_") for path in (directory / KERNELS_FOLDER).glob("sm_*.cubin")]
    return sorted(int(name) for name in names if name.isdecimal())


def choose_architecture(available: Sequence[int], capability: int) -> int:
    """Choose the cubin for a GPU: same major version, and the highest minor version that is not above the GPU's.

    Parameters
    ----------
    available : sequence of int
        Architectures that cubins exist for; 90 stands for compute capability 9.0.
    capability : int
        The GPU's compute capability, 10 × major + minor.

    Raises
    ------
    KernelError
        If none of the cubins runs on the GPU.
    """
    fitting = [arch for arch in available if arch // 10 == capability // 10 and arch <= capability]
    if not fitting:
        held = ", ".join(f"sm_{arch}" for arch in available) or "none"
        raise KernelError(
            f"the engine's kernels are compiled for {held}; this GPU is sm_{capability}: build the engine again with "
            f"--cuda_archs {capability}"
        )
    return max(fitting)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise KernelError(f"cuda-python is missing ({error}): pip install 'kvseek[cuda]'") from None
    return driver
