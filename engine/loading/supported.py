"""What an engine's method and kernels support. A build asks before it writes, and loading asks before it reads weights.

The limits themselves stand beside the kernels: `LIMITS` of kernels/cpu/attention/attend.py, `Traits.cuda_macros` of a
method, `check_sizes` of kernels/cuda/layer/layer.py.
"""

from __future__ import annotations

from kvseek.core.batch import buckets_for
from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.kernels.cpu.attention.attend import LIMITS
from kvseek.kernels.cuda.layer.layer import check_sizes
from kvseek.plugins.registry import METHODS, get_method, method_traits


def needs_cpu_library(config: EngineConfig) -> bool:
    """Whether an engine needs the compiled CPU library: for native kernels on the CPU, or for its method's index on a GPU."""
    return method_traits(config).cpu_library_on_gpu if config.device == "cuda" else config.kernels == "native"


def check_supported(config: EngineConfig) -> None:
    """Raise ConfigError if an engine could not serve a request: its method or its kernels do not support the model or device.

    Head sizes of the GPU's kernels are not checked here, but where macros are made of them (builder/compile/cuda.py).
    """
    check_device(config)
    _check_reuse(config)
    _check_rows(config)
    if config.device == "cuda":
        check_sizes(config.model)
        buckets_for(config.max_batch_size)
    elif config.kernels == "native":
        _check_cpu_kernels(config)


def check_device(config: EngineConfig) -> None:
    """Raise ConfigError if the method does not run on the engine's device; the message names the methods that do."""
    device = config.device
    if device in method_traits(config).devices:
        return
    others = [name for name in METHODS if device in get_method(name).traits().devices]
    other = "cpu" if device == "cuda" else "cuda"
    raise ConfigError(
        f"method = {config.method!r} does not run with device = {device!r}; choose one of "
        f"{', '.join(others) or 'none'}, or build with --device {other}"
    )


def _check_reuse(config: EngineConfig) -> None:
    if config.cache.cached_prefill == "sparse" and method_traits(config).prefix_reuse != "entries":
        sharing = [name for name in METHODS if get_method(name).traits().prefix_reuse == "entries"]
        raise ConfigError(
            f"cache.cached_prefill = 'sparse': must be 'dense' with method = {config.method!r}, whose requests share no index "
            f"entries; methods whose requests do: {', '.join(sharing)}"
        )


def _check_rows(config: EngineConfig) -> None:
    if config.cache.row_dtype != "auto" and not method_traits(config).rounded_rows:
        others = [name for name in METHODS if get_method(name).traits().rounded_rows]
        raise ConfigError(
            f"cache.row_dtype = {config.cache.row_dtype!r}: must be 'auto' with method = {config.method!r}, whose index reads "
            f"rows itself; methods that do not: {', '.join(others)}"
        )


def _check_cpu_kernels(config: EngineConfig) -> None:
    if fault := LIMITS.fault(config.model.head_dim, config.model.group_size):
        raise ConfigError(f"{fault} with kernels = 'native'; build with --kernels reference")
