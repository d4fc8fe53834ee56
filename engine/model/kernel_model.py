"""The model on a GPU: PyTorch's matrix products, and kvseek's kernels for the work between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.engine.retrieval import Retrieval
from kvseek.plugins.batch import Batch

from .attention import causal_attention_device
from .graphs import StepResult
from .layer import Head, Layer
from .layer_kernels import LayerKernels
from .prefill import LayerwiseModel, Prefill, attend_pieces, pieces_of
from .rope import Rotation
from .torch_model import Stream
from .weight_only_kernels import WeightOnlyKernels

# Parts of a step that an observer is told of, in order: "begin" and "head" once a step, the others once a layer.
PARTS = ("begin", "norm", "qkv", "rope", "select", "attend", "o", "mlp_norm", "gate_up", "silu", "down", "head")


class KernelModel(LayerwiseModel[Stream]):
    """Runs prompts and decode steps on a GPU; a StepModel of engine/model/graph_steps.py.

    Parameters
    ----------
    weights : dict of str to Tensor
        Weights as engine/model/weights.py loads them, on the cache's device and in its dtype.
    weight_only : WeightOnlyKernels or None
        Kernels that multiply with weights of 8 bits, for a model that has such weights.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        retrieval: Retrieval,
        ops: LayerKernels,
        weight_only: WeightOnlyKernels | None = None,
    ) -> None:
        super().__init__(retrieval)
        self.ops, self.embed, self.norm = ops, weights["embed.weight"], weights["norm.weight"]
        self.lm_head = self.embed if self.model.tie_word_embeddings else weights["lm_head.weight"]
        self.layers = [Layer(self.model, weights, number, weight_only) for number in range(self.model.num_layers)]
        self.head = Head(self.model, self.norm, self.lm_head)

    def begin_prompt(self, prefill: Prefill) -> Stream:
        """See LayerwiseModel."""
        ids = to_device(prefill.ids, torch.int64, self.embed.device)
        residual = F.embedding(ids, self.embed)
        return Stream.begin(residual, prefill.borders, self.ops.rotation, self.model.short_reach)

    def read_chunk(self, layer: int, prompt: Stream, start: int, stop: int, keys: Tensor, values: Tensor) -> Tensor:
        """See LayerwiseModel."""
        weights, x = self.layers[layer], prompt.residual[start:stop]
        qkv, rotation = weights.project(self.ops, x, None), prompt.rotation_of(start, stop, self.ops.rotation)
        q = self.ops.rope_prompt(qkv, rotation, keys, values, start, weights.q_norm, weights.k_norm).transpose(0, 1)
        pieces = pieces_of(prompt.borders, start, stop)
        out = attend_pieces(causal_attention_device, q, keys, values, self.scaling, pieces)
        x += weights.finish(self.ops, x, out.flatten(1))
        return q

    def logits_of(self, prompt: Stream, spans: Sequence[tuple[int, int]]) -> Tensor:
        """See LayerwiseModel."""
        return self.head(prompt.rows(spans))

    @torch.inference_mode()
    def run_layers(self, batch: Batch) -> StepResult:
        """See StepModel.run_layers."""
        mark = self.retrieval.observer.part_ended
        x, rotation = self.ops.step_begin(batch, self.embed)
        mark("begin")
        delta: Tensor | None = None
        for number in range(len(self.layers)):
            delta = self._run_layer(number, batch, x, delta, rotation, mark)
        logits = F.linear(self.ops.add_rms_norm(x, delta, self.norm), self.lm_head)
        result = StepResult(logits, self.ops.argmax(logits))
        mark("head")
        return result

    def _run_layer(
        self,
        number: int,
        batch: Batch,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        mark: Callable[[str], None],
    ) -> Tensor:
        """Run one layer of a decode step: add `delta` and attention's output to x [batch, hidden]; returns the MLP's output."""
        layer = self.layers[number]
        normed = self.ops.add_rms_norm(x, delta, layer.attention_norm)
        mark("norm")
        qkv = layer.qkv(normed)
        mark("qkv")
        window = self.retrieval.cache.window[number]
        queries = self.ops.rope_append(qkv, batch, rotation, window, layer.q_norm, layer.k_norm)
        mark("rope")
        attended = layer.o(self.retrieval.attend(number, queries, batch).flatten(1))
        mark("o")
        normed = self.ops.add_rms_norm(x, attended, layer.mlp_norm)
        mark("mlp_norm")
        gate_up = layer.gate_up(normed)
        mark("gate_up")
        activated = self.ops.silu_mul(gate_up)
        mark("silu")
        down = layer.down(activated)
        mark("down")
        return down


def to_device(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers of the host to the device, [n], on the current stream; the host does not wait."""
    on_host = torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        on_host = on_host.pin_memory()  # a copy from pageable memory would wait for the stream
    return on_host.to(device, non_blocking=True)
