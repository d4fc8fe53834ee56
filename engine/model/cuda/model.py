"""The model on a GPU: PyTorch's matrix products, and kvseek's kernels for the work between them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvseek.core.batch import Batch, buckets_for
from kvseek.core.cuda import CudaKernels
from kvseek.core.rope import Rotation
from kvseek.engine.model.cuda.steps import StepResult
from kvseek.engine.model.layer import WeightsModel
from kvseek.engine.retrieval import Retrieval
from kvseek.kernels.cuda.layer.layer import LayerKernels

from .attention import PromptAttention


class KernelModel(WeightsModel):
    """Runs prompts and decode steps on a GPU; a StepModel of engine/model/cuda/steps.py. Parameters as WeightsModel.

    The weights are on the cache's device and in its dtype.
    """

    ops: LayerKernels

    def with_retrieval(self, retrieval: Retrieval) -> KernelModel:
        """Return a model of the same weights whose layers attend by another retrieval over the same cache."""
        other = copy.copy(self)
        other.retrieval = retrieval
        return other

    def rotate(self, start: int, stop: int, length: int) -> Rotation:
        return self.ops.rotation(start, stop, length)

    def add(self, x: Tensor, delta: Tensor) -> None:
        self.ops.add(x, delta)

    @torch.inference_mode()
    def run_layers(self, batch: Batch) -> StepResult:
        mark = self.retrieval.observer.op_launched
        x, rotation = self.ops.step_begin(batch, self.embed.weight, self.embed.first)
        x = self.embed.complete(x)
        mark("begin")
        delta: Tensor | None = None
        for number, layer in enumerate(self.layers):
            attend = partial(self.retrieval.attend, number, batch=batch)
            window = self.retrieval.cache.window[number]
            delta = layer.decode(self.ops, batch, x, delta, rotation, window, attend, mark)
        logits = self.head.project(self.ops.add_rms_norm(x, delta, self.head.norm))
        result = StepResult(logits, self.ops.argmax(logits, batch))
        mark("head")
        return result


def layer_kernels(
    retrieval: Retrieval, kernels: CudaKernels, make: Callable[..., LayerKernels] = LayerKernels
) -> LayerKernels:
    """Make the launcher of the kernels for all that a layer computes besides products, selection and attention.

    `make` takes what LayerKernels takes: that of one of several ranks adds their parts.
    """
    window, most = retrieval.cache.window, buckets_for(retrieval.config.max_batch_size)[-1]
    return make(kernels, retrieval.config.model, window.dtype, window.device, most)


def prompt_attention(retrieval: Retrieval, kernels: CudaKernels) -> PromptAttention:
    """Make the attention of prompts that are read in chunks."""
    config = retrieval.config
    sizes = config.prefill_chunk_tokens, config.max_input_len
    return PromptAttention(kernels, config.model, retrieval.cache.window.dtype, *sizes)
