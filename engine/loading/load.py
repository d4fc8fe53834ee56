"""Loads an engine directory, or the part of a rank: on the CPU, or on a GPU whose memory is divided first (docs/gpu.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from kvseek.core.config import EngineConfig
from kvseek.core.cpu_library import LIBRARY_FILE, CpuLibrary
from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import CapacityError, KvseekError
from kvseek.core.manifest import CODEBOOKS_FILE
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import host_rows
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.draws.compiled import CompiledDraws
from kvseek.engine.draws.reference import TorchDraws
from kvseek.engine.draws.sampling import Draws
from kvseek.engine.loading.supported import needs_cpu_library
from kvseek.engine.model.cpu import HostDecoder, HostProducts, TorchModel, bfloat16_works
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.model.layer import Products
from kvseek.engine.model.reference import TorchOperations, causal_attention
from kvseek.engine.parallel.cuda.ranks import DeviceRanks
from kvseek.engine.parallel.ranks import RankProducts, Ranks
from kvseek.kernels.cpu.attention.attend import causal_attention as native_attention
from kvseek.kernels.cpu.draw.draw import NativeDraw
from kvseek.kernels.cpu.layer.layer import NativeOperations
from kvseek.plugins.sources import check_sources

from .indexes import IndexMaker, device_retrieval, host_retrieval
from .memory import divide_device_memory
from .runtime import load_runtime, read_weights

logger = logging.getLogger(__name__)
GIB = 1 << 30
PINNED_BYTES_PER_SECOND = GIB  # at least, however memory is pinned
MakeCache = Callable[[EngineConfig, torch.dtype, torch.device, RowStorage], Cache]


def load_rank(
    directory: Path, config: EngineConfig, ranks: Ranks | None = None, make_cache: MakeCache = Cache
) -> Decoder:
    """Load the whole model of an engine directory, or the part of a rank, whose configuration this is (core/ranks.py)."""
    path = directory / CODEBOOKS_FILE
    codebooks = load_file(path) if path.exists() else {}
    library = CpuLibrary(directory / LIBRARY_FILE) if needs_cpu_library(config) else None
    kernels = CudaKernels.load(directory) if config.device == "cuda" else None
    if library is not None or kernels is not None:
        check_sources(directory)
    load = _load_cpu if config.device == "cpu" else _load_cuda
    return load(directory, IndexMaker(config, codebooks, library, kernels), ranks, make_cache)


def _load_cpu(directory: Path, maker: IndexMaker, ranks: Ranks | None, make_cache: MakeCache) -> Decoder:
    config, library = maker.config, maker.library
    device, dtype = torch.device("cpu"), getattr(torch, config.dtype)
    if not bfloat16_works() and dtype is torch.bfloat16:
        raise KvseekError(
            "dtype = 'bfloat16': this processor cannot multiply it; build the engine with --dtype float32"
        )
    cache = make_cache(config, dtype, device, RowStorage(config, dtype, device, host_rows(config, dtype)))
    retrieval = host_retrieval(config, cache, maker.over(cache), library)
    weights = read_weights(directory, config, device, ranks)
    products = Products(dtype)
    if library is not None:
        products = HostProducts(dtype, library)
        logger.info("prompts are multiplied by %s", products.prompts)
    if ranks is not None:
        products = RankProducts(products, ranks, config.model.vocab_size)
    if library is None:
        model = TorchModel(weights, retrieval, TorchOperations(config.model), causal_attention, products)
    else:
        ops = NativeOperations(library, config.model, dtype)
        attention = partial(native_attention, library=library)
        model = TorchModel(weights, retrieval, ops, attention, products)
    draws: Draws = TorchDraws() if library is None else CompiledDraws(NativeDraw(library))
    return HostDecoder(model, retrieval, draws)


def _load_cuda(directory: Path, maker: IndexMaker, ranks: Ranks | None, make_cache: MakeCache) -> Decoder:
    config, kernels = maker.config, maker.kernels
    assert kernels is not None, "an engine on a GPU has kernels"
    device, dtype = kernels.device, getattr(torch, config.dtype)
    assert ranks is None or isinstance(ranks, DeviceRanks), "ranks of an engine on GPUs compute there"
    try:
        footprint, make_decoder = load_runtime(directory, config, device, ranks)
        layout = divide_device_memory(maker, footprint, ranks)
        if ranks is not None:
            ranks.check_host_memory(layout.rows.host_bytes)
            ranks.reporter.doing("allocates rows", more=layout.rows.host_bytes / PINNED_BYTES_PER_SECOND)
        cache = make_cache(config, dtype, device, RowStorage(config, dtype, device, layout.rows))
        decoder = make_decoder(device_retrieval(config, cache, maker.over(cache), kernels), kernels)
        if ranks is not None:
            ranks.reporter.doing("captures decode steps")  # the sums of each count as steps
        _prepare(decoder)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise CapacityError(
            f"device memory: the engine does not fit on {device} ({free / GIB:.2f} of {total / GIB:.2f} GiB are free): "
            f"{str(error).splitlines()[0]} Stop what else runs there, or lower max_batch_size, max_seq_len, "
            "prefill_chunk_tokens or cache.kv_cache_device_memory_bytes"
        ) from None
    return decoder


def _prepare(decoder: Decoder) -> None:
    """Capture the steps. If one fails, drop the others: the error keeps the decoder, and NCCL ends only when no graph uses it."""
    try:
        decoder.prepare()
    except BaseException:
        decoder.close()
        raise
