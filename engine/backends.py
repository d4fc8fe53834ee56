"""What computes a GPU engine's products, loaded: weights for PyTorch and kvseek's kernels, or TensorRT's plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.cuda import CudaKernels
from kvseek.core.tensorrt_api import TensorRtRuntime, load_runtime
from kvseek.engine.cache.host_cache.device_cache import DeviceCache
from kvseek.engine.model.device_decoder import DeviceDecoder
from kvseek.engine.model.graphed_decoder import GraphedDecoder
from kvseek.engine.model.graphs import buckets_for
from kvseek.engine.model.weights import load_weights
from kvseek.engine.tensorrt.decoder import SegmentsDecoder, WholeDecoder
from kvseek.engine.tensorrt.plan_index import check_version, read_plan_index
from kvseek.engine.tensorrt.session import OUTSIDE_OF_GRAPHS, Session
from kvseek.plugins.contract import DeviceIndex


@dataclass(frozen=True)
class Footprint:
    """Device memory that is taken before anything else is divided, in bytes.

    Attributes
    ----------
    weights : int
    outside : int
        Of the weights, what PyTorch did not allocate, and so does not know of.
    plan_work : int
        Work space of TensorRT's plans, which PyTorch allocated.
    """

    weights: int
    outside: int = 0
    plan_work: int = 0


class Backend(Protocol):
    """Weights or plans on a device."""

    @property
    def footprint(self) -> Footprint:
        """Device memory that they hold."""

    def decoder(self, cache: DeviceCache, indexes: Sequence[DeviceIndex], kernels: CudaKernels) -> GraphedDecoder:
        """The decoder that runs them; raises ConfigError or KernelError as DeviceDecoder."""


@dataclass(frozen=True)
class TorchBackend:
    """Weights by name (engine/model/weights.py)."""

    config: EngineConfig
    weights: dict[str, Tensor]

    @property
    def footprint(self) -> Footprint:
        """See Backend."""
        return Footprint(sum(tensor.nbytes for tensor in self.weights.values()))

    def decoder(self, cache: DeviceCache, indexes: Sequence[DeviceIndex], kernels: CudaKernels) -> GraphedDecoder:
        """See Backend."""
        return DeviceDecoder(self.config, self.weights, cache, indexes, kernels)


@dataclass(frozen=True)
class TensorRtBackend:
    """TensorRT plans and the bytes of their files, which are weights above all."""

    config: EngineConfig
    session: Session
    file_bytes: int

    @property
    def footprint(self) -> Footprint:
        """See Backend."""
        return Footprint(self.file_bytes, outside=self.file_bytes, plan_work=self.session.memory.nbytes)

    def decoder(self, cache: DeviceCache, indexes: Sequence[DeviceIndex], kernels: CudaKernels) -> GraphedDecoder:
        """See Backend."""
        plans = self.session.plans
        if self.config.tensorrt.form == "segments":
            return SegmentsDecoder(self.config, plans, cache, indexes, kernels)
        from kvseek.plugins.tensorrt.plugin import serving

        return WholeDecoder(self.config, plans[0], serving, cache, indexes, kernels)


def load_backend(directory: Path, config: EngineConfig, device: torch.device) -> Backend:
    """Load what `config.runtime` computes with from an engine directory.

    Raises
    ------
    EngineDirectoryError
        If files are missing or malformed, or plans are of another version of TensorRT than is installed.
    KernelError
        If TensorRT cannot be imported, or cannot load a plan.
    """
    if config.runtime == "tensorrt":
        return load_plans(directory, config, device, load_runtime(config.tensorrt.module))
    return TorchBackend(config, load_weights(directory, device))


def load_plans(directory: Path, config: EngineConfig, device: torch.device, api: TensorRtRuntime) -> TensorRtBackend:
    """Load the plans of an engine directory; raises as `load_backend`."""
    index = read_plan_index(directory, config)
    check_version(index, api)
    if index.form == "engine":
        from kvseek.plugins.tensorrt.plugin import register

        register(api)  # a plan with plugin layers loads only where they are known
    files = [directory / entry.file for entry in index.segments]
    contexts = (OUTSIDE_OF_GRAPHS, *buckets_for(config.max_batch_size))
    return TensorRtBackend(config, Session(api, files, device, contexts), sum(file.stat().st_size for file in files))
