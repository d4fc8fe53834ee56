"""Loads the part of a GPU engine that computes its products: weights for PyTorch and kvseek's kernels, or TensorRT's plans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.cuda import CudaKernels
from kvseek.engine.decoder import Decoder
from kvseek.engine.draws.device import DeviceDraws
from kvseek.engine.model.graph_steps import GraphSteps
from kvseek.engine.model.graphs import buckets_for
from kvseek.engine.model.kernel_model import KernelModel
from kvseek.engine.model.layer_kernels import LayerKernels
from kvseek.engine.model.linear import KernelProducts, Products
from kvseek.engine.model.prefill import logits_at_once
from kvseek.engine.model.product_kernels import product_kernels
from kvseek.engine.model.prompt_attention import SHORTEST_BLOCK, PromptAttention
from kvseek.engine.parallel.device_ranks import DeviceRanks
from kvseek.engine.parallel.rank_kernels import RankLayerKernels
from kvseek.engine.parallel.ranks import RankPartProducts
from kvseek.engine.retrieval import Retrieval

from .indexes import without_hot_rows
from .part_weights import read_weights


@dataclass(frozen=True)
class Footprint:
    """Device memory, in bytes, that loading a runtime has taken.

    Attributes
    ----------
    weights : int
        Weights, or the plans that contain them.
    outside : int
        Part of `weights` that PyTorch did not allocate and does not count.
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
        """Device memory that the runtime holds."""

    def decoder(self, retrieval: Retrieval, kernels: CudaKernels) -> Decoder:
        """Make the decoder that runs these weights or plans.

        Raises
        ------
        ConfigError
            If max_batch_size exceeds the largest bucket of decode steps, or the kernels do not support a size of the model.
        """


@dataclass(frozen=True)
class TorchRuntime:
    """The runtime "torch": weights by name (engine/model/weights.py)."""

    config: EngineConfig
    weights: dict[str, Tensor]
    ranks: DeviceRanks | None = None

    @property
    def footprint(self) -> Footprint:
        """See Runtime."""
        return Footprint(sum(tensor.nbytes for tensor in self.weights.values()))

    def decoder(self, retrieval: Retrieval, kernels: CudaKernels) -> Decoder:
        """See Runtime."""
        model = KernelModel(
            self.weights,
            retrieval,
            layer_kernels(retrieval, kernels, self.ranks),
            prompt_attention(retrieval, kernels),
            device_products(self.config, kernels, self.ranks),
        )
        if self.config.cache.cached_prefill == "sparse":
            cold = without_hot_rows(retrieval)
            reader = GraphSteps(model.with_retrieval(cold), cold)
            reader.prepare()
            model.reader = reader
        return Decoder(model, retrieval, GraphSteps(model, retrieval, DeviceDraws(kernels)))


def layer_kernels(retrieval: Retrieval, kernels: CudaKernels, ranks: DeviceRanks | None = None) -> LayerKernels:
    """Make the launcher of the kernels for all that a layer computes besides products, selection and attention."""
    window, most = retrieval.cache.window, buckets_for(retrieval.config.max_batch_size)[-1]
    sizes = kernels, retrieval.config.model, window.dtype, window.device, most
    return LayerKernels(*sizes) if ranks is None else RankLayerKernels(*sizes, ranks)


def device_products(config: EngineConfig, kernels: CudaKernels, ranks: DeviceRanks | None = None) -> Products:
    """Make what makes the products of a model on a GPU, or of a rank's part of it."""
    few = product_kernels(config, kernels)
    if few is None:
        products = Products(getattr(torch, config.dtype))
    else:
        # The same for all short chunks, so that engines with chunks of other lengths compute the same rows.
        chunk = max(config.prefill_chunk_tokens, SHORTEST_BLOCK)
        products = KernelProducts(few, chunk, logits_at_once(config.model))
    return products if ranks is None else RankPartProducts(products, ranks, config.model.vocab_size)


def prompt_attention(retrieval: Retrieval, kernels: CudaKernels) -> PromptAttention:
    """Make the attention of prompts that are read in chunks."""
    config = retrieval.config
    sizes = config.prefill_chunk_tokens, config.max_input_len
    return PromptAttention(kernels, config.model, retrieval.cache.window.dtype, *sizes)


def load_runtime(
    directory: Path, config: EngineConfig, device: torch.device, ranks: DeviceRanks | None = None
) -> Runtime:
    """Load the runtime that `config.runtime` names from an engine directory, or the part of a rank.

    Raises
    ------
    EngineDirectoryError
        If files are missing or malformed, or plans are of another version of TensorRT than is installed.
    KernelError
        If TensorRT cannot be imported, or cannot load a plan.
    """
    if config.runtime == "tensorrt":
        from kvseek.engine.tensorrt.runtime import (
            load_plans,  # the one entry to TensorRT: engines without it never import it
        )

        return load_plans(directory, config, device)
    return TorchRuntime(config, read_weights(directory, config, device, ranks), ranks)
