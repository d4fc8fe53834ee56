"""What computes a GPU engine's products, loaded: weights for PyTorch and kvseek's kernels, or TensorRT's plans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.cuda import CudaKernels
from kvseek.engine.decoder import Decoder
from kvseek.engine.model.graph_steps import GraphSteps
from kvseek.engine.model.graphs import buckets_for
from kvseek.engine.model.kernel_model import KernelModel
from kvseek.engine.model.layer_kernels import LayerKernels
from kvseek.engine.model.weight_only_kernels import weight_only_kernels
from kvseek.engine.model.weights import load_weights
from kvseek.engine.retrieval import Retrieval


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


class Runtime(Protocol):
    """Weights or plans on a device."""

    @property
    def footprint(self) -> Footprint:
        """Device memory that they hold."""

    def decoder(self, retrieval: Retrieval, kernels: CudaKernels) -> Decoder:
        """The decoder that runs them.

        Raises
        ------
        ConfigError
            If max_batch_size exceeds the largest bucket of decode steps.
        KernelError
            If the kernels do not support a shape of the model.
        """


@dataclass(frozen=True)
class TorchRuntime:
    """Weights by name (engine/model/weights.py)."""

    config: EngineConfig
    weights: dict[str, Tensor]

    @property
    def footprint(self) -> Footprint:
        """See Runtime."""
        return Footprint(sum(tensor.nbytes for tensor in self.weights.values()))

    def decoder(self, retrieval: Retrieval, kernels: CudaKernels) -> Decoder:
        """See Runtime."""
        model = KernelModel(
            self.weights, retrieval, layer_kernels(retrieval, kernels), weight_only_kernels(self.config, kernels)
        )
        return Decoder(model, retrieval, GraphSteps(model, retrieval))


def layer_kernels(retrieval: Retrieval, kernels: CudaKernels) -> LayerKernels:
    """Launches what a layer computes around its products and its attention."""
    window, most = retrieval.cache.window, buckets_for(retrieval.config.max_batch_size)[-1]
    return LayerKernels(kernels, retrieval.config.model, window.dtype, window.device, most)


def load_runtime(directory: Path, config: EngineConfig, device: torch.device) -> Runtime:
    """Load what `config.runtime` computes with from an engine directory.

    Raises
    ------
    EngineDirectoryError
        If files are missing or malformed, or plans are of another version of TensorRT than is installed.
    KernelError
        If TensorRT cannot be imported, or cannot load a plan.
    """
    if config.runtime == "tensorrt":
        from kvseek.engine.tensorrt.runtime import (
            load_plans,  # the one door to TensorRT: who does not use it never imports it
        )

        return load_plans(directory, config, device)
    return TorchRuntime(config, load_weights(directory, device))
