"""The model on a GPU: PyTorch's matrix products, and kvseek's kernels for the work between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvseek.core.batch import Batch, buckets_for
from kvseek.core.cuda import CudaKernels
from kvseek.core.streams import to_device
from kvseek.engine.model.cuda.steps import StepResult
from kvseek.engine.model.layer import Head, Layer
from kvseek.engine.model.prefill import (
    NO_CALLBACKS,
    AttendChunk,
    BlockReader,
    Continuation,
    LayerwiseModel,
    LogitsCallbacks,
    Prefill,
    Prompts,
    Stream,
)
from kvseek.engine.model.reference.attention import CausalAttention
from kvseek.engine.model.reference.products import Products
from kvseek.engine.retrieval import Retrieval
from kvseek.kernels.cuda.layer.layer import LayerKernels

from .attention import PromptAttention


class KernelModel(LayerwiseModel[Stream]):
    """Runs prompts and decode steps on a GPU; a StepModel of engine/model/cuda/steps.py.

    Parameters
    ----------
    weights : dict of str to Tensor
        Weights as engine/model/weights.py loads them, on the cache's device and in its dtype.
    attention : callable
        Causal attention over a prompt.
    products : Products
        Makes the products of the weights.

    Attributes
    ----------
    reader : BlockReader or None
        What reads the rest of a prompt sparsely, in an engine that does (cache.cached_prefill).
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        retrieval: Retrieval,
        ops: LayerKernels,
        attention: CausalAttention,
        products: Products,
    ) -> None:
        super().__init__(retrieval, attention)
        self.ops = ops
        self.embed, self.norm = products.embedding(weights["embed.weight"]), weights["norm.weight"]
        self.layers = [Layer(self.model, weights, number, products) for number in range(self.model.num_layers)]
        self.head = Head.of(self.model, weights, products)
        self.reader: BlockReader | None = None

    def prefill(self, prompts: Prompts, on_logits: LogitsCallbacks = NO_CALLBACKS) -> Prefill:
        if self.reader is not None and self.retrieval.resumes([slot for slot, _ in prompts]):
            return Continuation(self.reader, self.retrieval, prompts)
        return super().prefill(prompts, on_logits)

    def with_retrieval(self, retrieval: Retrieval) -> KernelModel:
        """Return a model of the same weights whose layers attend by another retrieval over the same cache."""
        other = copy.copy(self)
        other.retrieval = retrieval
        return other

    def begin_prompt(self, prefill: Prefill) -> Stream:
        ids = to_device(prefill.ids, torch.int64, self.norm.device)
        residual = self.embed(ids)
        return Stream.begin(residual, prefill.borders, self.ops.rotation, self.model.short_reach)

    def read_chunk(
        self, layer: int, prompt: Stream, start: int, stop: int, keys: Tensor, values: Tensor, attend: AttendChunk
    ) -> Tensor:
        weights, x, mark = self.layers[layer], prompt.residual[start:stop], self.retrieval.observer.prompt_op_launched
        rotation = prompt.rotation_of(start, stop, self.ops.rotation)
        qkv = weights.project(self.ops, x, None, mark, prompt=True)
        q = self.ops.rope_prompt(qkv, rotation, keys, values, start, weights.q_norm, weights.k_norm).transpose(0, 1)
        mark("rope")
        out = attend(q)
        mark("attend")
        self.ops.add(x, weights.finish(self.ops, x, out.flatten(1), mark, prompt=True))
        return q

    def logits_of(self, prompt: Stream, spans: Sequence[tuple[int, int]]) -> Tensor:
        return self.head(prompt.rows(spans), prompt=True)

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
        logits = self.head.project(self.ops.add_rms_norm(x, delta, self.norm))
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
