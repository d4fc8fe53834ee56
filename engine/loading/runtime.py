"""Loads what computes the products of an engine: weights, for PyTorch and kvseek's kernels, or TensorRT's plans on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.cuda import CudaKernels
from kvseek.engine.cache.memory_layout import Footprint
from kvseek.engine.draws.compiled import CompiledDraws
from kvseek.engine.model.cuda.products import KernelProducts
from kvseek.engine.model.cuda.steps import (
    GraphDecoder,
    KernelModel,
    cold_decoder,
    layer_kernels,
    prompt_attention,
)
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.model.layer import Products
from kvseek.engine.model.prefill import logits_at_once
from kvseek.engine.model.prompt_windows import SHORTEST_BLOCK
from kvseek.engine.model.weights import load_weights, make_weights, random_seed
from kvseek.engine.parallel.cuda.ranks import DeviceRanks, RankLayerKernels
from kvseek.engine.parallel.ranks import RankPartProducts, RankProducts, Ranks
from kvseek.engine.retrieval import Retrieval
from kvseek.kernels.cuda.draw.draw import DeviceDraw
from kvseek.kernels.cuda.layer.experts import expert_kernels
from kvseek.kernels.cuda.layer.layer import LayerKernels
from kvseek.kernels.cuda.layer.products import product_kernels

MakeDecoder = Callable[[Retrieval, CudaKernels], Decoder]
"""Makes the decoder that runs weights or plans on a device. Raises ConfigError if max_batch_size exceeds the largest bucket of
decode steps, or the kernels do not support a size of the model."""


def torch_decoder(
    config: EngineConfig,
    weights: dict[str, Tensor],
    ranks: DeviceRanks | None,
    retrieval: Retrieval,
    kernels: CudaKernels,
) -> Decoder:
    """Make the decoder of the runtime "torch", of weights by name (engine/model/weights.py); see MakeDecoder."""
    # With post-norms what ranks sum is normalised before it is added: products sum it, not kernels of a layer.
    apart = ranks is None or config.model.post_norms
    make = LayerKernels if ranks is None or apart else partial(RankLayerKernels, ranks=ranks)
    model = KernelModel(
        weights,
        retrieval,
        layer_kernels(retrieval, kernels, make),
        prompt_attention(retrieval, kernels),
        device_products(config, kernels, ranks),
    )
    reader: GraphDecoder | None = None
    if config.cache.cached_prefill == "sparse":
        model.reader = reader = cold_decoder(model, retrieval)
        reader.prepare()
    return GraphDecoder(model, retrieval, CompiledDraws(DeviceDraw(kernels)), reader=reader)


def device_products(config: EngineConfig, kernels: CudaKernels, ranks: DeviceRanks | None = None) -> Products:
    """Make what makes the products of a model on a GPU, or of a rank's part of it."""
    few = product_kernels(config, kernels)
    if few is None:
        products = Products(getattr(torch, config.dtype))
    else:
        # The same for all short chunks, so that engines with chunks of other lengths compute the same rows.
        chunk = max(config.prefill_chunk_tokens, SHORTEST_BLOCK)
        mixtures = config.model.experts
        experts = None if mixtures is None else expert_kernels(config, kernels, mixtures)
        rows = logits_at_once(config.model)
        # Weights of other forms have no products in FP8.
        fp8_prompts = config.prefill_precision == config.weight_only_precision == "fp8"
        products = KernelProducts(few, chunk, rows, fp8_prompts=fp8_prompts, experts=experts)
    if ranks is None:
        return products
    parts = RankProducts if config.model.post_norms else RankPartProducts
    return parts(products, ranks, config.model.vocab_size)


def load_runtime(
    directory: Path, config: EngineConfig, device: torch.device, ranks: DeviceRanks | None = None
) -> tuple[Footprint, MakeDecoder]:
    """Load the runtime that `config.runtime` names from an engine directory, or the part of a rank.

    Returns the device memory that it holds, and what makes its decoder.

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
    weights = read_weights(directory, config, device, ranks)
    return Footprint(sum(one.nbytes for one in weights.values())), partial(torch_decoder, config, weights, ranks)


def read_weights(directory: Path, config: EngineConfig, device: torch.device, ranks: Ranks | None) -> dict[str, Tensor]:
    """Load the weights of one rank, whose configuration this is, or make them if the directory says that they are random.

    Raises
    ------
    EngineDirectoryError
        See load_weights.
    """
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    begin: Callable[[str], None] | None = None
    if ranks is not None:
        reporter = ranks.reporter

        def begin(name: str) -> None:
            reporter.doing(f"reads weights: {name}")

        reporter.doing("reads weights")
    seed = random_seed(directory)
    if seed is not None:
        return make_weights(config, device, seed, rank, size, begin)
    return load_weights(directory, device, rank=rank, begin=begin)
