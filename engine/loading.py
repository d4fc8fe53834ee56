"""From an engine directory to a decoder: on the CPU, or on a GPU whose memory is divided first (docs/gpu.md)."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.cpu_library import LIBRARY_FILE, CpuLibrary
from kvseek.core.errors import CapacityError, ConfigError, KvseekError
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.core.manifest import CODEBOOKS_FILE
from kvseek.engine.cache.host_cache.host_cache import Cache
from kvseek.engine.cache.memory_layout import MemoryLayout, divide_memory
from kvseek.engine.model import bfloat16
from kvseek.engine.model.decoder import BaseDecoder
from kvseek.engine.model.torch_decoder import Decoder
from kvseek.engine.model.weights import load_weights
from kvseek.plugins.contract import DeviceIndex, Index, IndexContext
from kvseek.plugins.registry import METHODS, get_method

if TYPE_CHECKING:
    from kvseek.core.cuda import CudaKernels
    from kvseek.plugins.attention.device import DeviceAttention

    from .backends import Footprint

GIB = 1 << 30


def load_decoder(directory: Path, config: EngineConfig) -> BaseDecoder:
    """Load the decoder of an engine directory onto the device of its configuration; raises as `Engine.load`."""
    path = directory / CODEBOOKS_FILE
    codebooks = load_file(path) if path.exists() else {}
    return (_load_cuda if config.device == "cuda" else _load_cpu)(directory, config, codebooks)


def needs_cpu_library(config: EngineConfig) -> bool:
    """Whether an engine calls compiled code of the CPU: with native kernels on the CPU, or if the method's GPU index does."""
    if config.device == "cuda":
        method = get_method(config.method)
        return method.needs_cpu_library(method.configure(config.method_config))
    return config.kernels == "native"


def _load_cpu(directory: Path, config: EngineConfig, codebooks: dict[str, Tensor]) -> Decoder:
    device, dtype = torch.device("cpu"), getattr(torch, config.dtype)
    if not bfloat16.usable() and dtype is torch.bfloat16:
        raise KvseekError(
            "dtype = 'bfloat16': this processor cannot multiply it; build the engine with --dtype float32"
        )
    library = CpuLibrary(directory / LIBRARY_FILE) if needs_cpu_library(config) else None
    cache = Cache(config, dtype, device)
    indexes = create_indexes(config, cache, codebooks, library)
    weights = load_weights(directory, device)
    return Decoder(config, weights, cache, indexes, library)


def _load_cuda(directory: Path, config: EngineConfig, codebooks: dict[str, Tensor]) -> BaseDecoder:
    from kvseek.core.cuda import CudaKernels
    from kvseek.engine.cache.host_cache.device_cache import DeviceCache

    from .backends import load_backend

    kernels = CudaKernels.load(directory)
    device, dtype = kernels.device, getattr(torch, config.dtype)
    try:
        library = CpuLibrary(directory / LIBRARY_FILE) if needs_cpu_library(config) else None
        backend = load_backend(directory, config, device)
        plan = divide_device_memory(config, backend.footprint, codebooks, kernels, library)
        cache = DeviceCache(config, dtype, device, plan.device_row_bytes)
        indexes = device_indexes(create_indexes(config, cache, codebooks, library, kernels))
        decoder = backend.decoder(cache, indexes, kernels)
        decoder.prepare()
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise CapacityError(
            f"device memory: the engine does not fit on {device} ({free / GIB:.2f} of {total / GIB:.2f} GiB are free): "
            f"{str(error).splitlines()[0]} Stop what else runs there, or lower max_batch_size, max_seq_len, "
            "prefill_chunk_tokens or cache.kv_cache_device_memory_bytes"
        ) from None
    return decoder


def create_indexes(
    config: EngineConfig,
    cache: Cache,
    codebooks: dict[str, Tensor],
    library: CpuLibrary | None,
    cuda: CudaKernels | None = None,
) -> list[Index]:
    """One index per layer of the configured method over the cache's retrieval regions; for the GPU with `cuda` given."""
    window = cache.window
    contexts = _contexts(config, cache.extents, cache.lengths, window.dtype, window.device, codebooks, library, cuda)
    method = get_method(config.method)
    indexes = [method.create(context) for context in contexts]
    for layer, index in enumerate(indexes):
        index.bind(cache.rows_of(layer))
    return indexes


def _contexts(
    config: EngineConfig,
    extents: ExtentTable,
    lengths: list[int],
    dtype: torch.dtype,
    device: torch.device,
    codebooks: dict[str, Tensor],
    library: CpuLibrary | None,
    cuda: CudaKernels | None,
) -> list[IndexContext]:
    """What each layer's index is built for."""
    model, settings = config.model, get_method(config.method).configure(config.method_config)
    shared: dict[str, Any] = {}
    return [
        IndexContext(
            layer=layer,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            scaling=model.head_dim**-0.5,
            config=settings,
            codebooks=codebooks,
            extents=extents,
            lengths=lengths,
            dtype=dtype,
            device=device,
            library=library,
            cuda=cuda,
            shared=shared,
        )
        for layer in range(model.num_layers)
    ]


def device_indexes(indexes: Sequence[Index]) -> list[DeviceIndex]:
    """The indexes, once it is known that kernels of the GPU can use them.

    Raises
    ------
    ConfigError
        If the method has no index for the GPU, naming those that have.
    """
    found = [index for index in indexes if isinstance(index, DeviceIndex)]
    if len(found) < len(indexes):
        methods = ", ".join(methods_for_device(indexes[0].context)) or "none"
        name = type(indexes[0]).__name__
        raise ConfigError(
            f"method: {name} does not run with device = 'cuda'; choose one of {methods}, or build with --device cpu"
        )
    return found


def methods_for_device(context: IndexContext) -> list[str]:
    """Methods whose index, with default settings, is one for the GPU of `context`."""
    names = []
    for name in METHODS:
        method = get_method(name)
        settings = method.configure({})
        small = dataclasses.replace(
            context, config=settings, codebooks=method.codebooks(settings, context.head_dim), shared={}
        )
        try:
            if isinstance(method.create(small), DeviceIndex):
                names.append(name)
        except (KvseekError, torch.OutOfMemoryError):
            continue  # not for this shape, so no advice
    return names


def divide_device_memory(
    config: EngineConfig,
    footprint: Footprint,
    codebooks: dict[str, Tensor],
    kernels: CudaKernels,
    library: CpuLibrary | None = None,
) -> MemoryLayout:
    """Divide what the GPU has free, the loaded weights or plans included; raises CapacityError with the bytes of each part.

    What a method allocates is measured rather than asked for: its indexes and the attentions are made twice, for pools of
    one and of two extents, and thrown away.
    """
    device = kernels.device
    one, two = (measured_index_bytes(config, codebooks, kernels, library, capacity) for capacity in (1, 2))
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    device_bytes = free + torch.cuda.memory_allocated(device) + footprint.outside
    return divide_measured(config, IndexNeeds.of(one, two), device_bytes, footprint.weights, footprint.plan_work)


@dataclass(frozen=True)
class IndexNeeds:
    """Bytes that the indexes and attentions of all layers take on the device.

    Attributes
    ----------
    extent : int
        Of each extent of the pool.
    fixed : int
        Of the slots, and of what all layers share.
    """

    extent: int
    fixed: int

    @classmethod
    def of(cls, one: int, two: int) -> IndexNeeds:
        """From their bytes for pools of one and of two extents."""
        return cls(two - one, max(0, 2 * one - two))


def divide_measured(
    config: EngineConfig, needs: IndexNeeds, device_bytes: int, weight_bytes: int, plan_work_bytes: int = 0
) -> MemoryLayout:
    """Divide `device_bytes`, weights included.

    What indexes and attentions need whatever is cached counts as work space; so does `plan_work_bytes`, that of TensorRT's
    plans.
    """
    from kvseek.engine.cache.activation_memory import work_bytes

    dtype = getattr(torch, config.dtype)
    return divide_memory(
        config,
        dtype,
        device_bytes=device_bytes,
        weight_bytes=weight_bytes,
        work_bytes=work_bytes(config, dtype) + needs.fixed + plan_work_bytes,
        index_bytes_per_token=needs.extent / config.model.num_layers / EXTENT_TOKENS,
    )


def make_unbound(
    config: EngineConfig,
    codebooks: dict[str, Tensor],
    kernels: CudaKernels,
    library: CpuLibrary | None,
    capacity: int,
    slots: int,
) -> tuple[list[DeviceIndex], list[DeviceAttention]]:
    """Indexes and attentions of all layers for a pool of `capacity` extents that is not there; raises as `device_indexes`.

    Not bound: which layers' rows lie in host memory follows from their size. Until `bind` an index keeps what it would keep
    for rows in host memory (a store, hot rows): the most that a layer takes. A few KB a request that `bind` may add are part
    of the work space's reserve.
    """
    from kvseek.engine.model.graphed_decoder import make_attentions

    device, dtype, method = kernels.device, getattr(torch, config.dtype), get_method(config.method)
    extents = ExtentTable(slots, extents_for(config.max_seq_len), capacity, device)
    contexts = _contexts(config, extents, [0] * slots, dtype, device, codebooks, library, kernels)
    indexes = device_indexes([method.create(context) for context in contexts])
    return indexes, make_attentions(config, kernels, indexes, extents.device_table, dtype)


def measured_index_bytes(
    config: EngineConfig,
    codebooks: dict[str, Tensor],
    kernels: CudaKernels,
    library: CpuLibrary | None,
    capacity: int,
) -> int:
    """Bytes of the indexes and attentions of all layers for a pool of `capacity` extents."""
    gc.collect()  # indexes of one engine refer to each other
    before = torch.cuda.memory_allocated(kernels.device)
    made = make_unbound(config, codebooks, kernels, library, capacity, config.max_batch_size + 1)
    used = torch.cuda.memory_allocated(kernels.device) - before
    del made
    gc.collect()
    return used
