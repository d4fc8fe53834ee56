"""Models whose products, norms, rotation, embedding and head are TensorRT plans; attention, cache and steps stay kvseek's.

docs/tensorrt.md describes the plans' inputs and outputs. A captured step runs its plans in contexts of its own, numbered by
the bucket, because its replays rely on the shapes and addresses that the context had at the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvseek.core.batch import LATEST, Batch, buckets_for
from kvseek.core.errors import KernelError
from kvseek.core.streams import to_device
from kvseek.engine.model.cuda.steps import StepResult
from kvseek.engine.model.library_attention import causal_attention_device
from kvseek.engine.model.prefill import (
    NO_CALLBACKS,
    AttendChunk,
    LayerwiseModel,
    LogitsCallbacks,
    Prefill,
    Prompts,
    new_rows,
)
from kvseek.engine.model.reference import CausalAttention
from kvseek.engine.retrieval import Retrieval
from kvseek.kernels.cuda.layer.layer import LayerKernels
from kvseek.plugins.contract import LAST_QUERIES
from kvseek.plugins.tensorrt.serving import Attend

from .session import OUTSIDE_OF_GRAPHS

Tensors = dict[str, Tensor]
FIRST_PLAN = ("queries", "keys", "values", "next_hidden", "cos", "sin")  # outputs of segment 0
NEXT_PLANS = FIRST_PLAN[:4]  # outputs of the segments after it, except the last


class Runner(Protocol):
    """Runs a plan; implemented by Plan of engine/tensorrt/session.py."""

    def run(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], context: int = OUTSIDE_OF_GRAPHS
    ) -> None: ...


class PlanTensors:
    """Makes the tensors that plans take and give, and runs attention in a decode step; common to both forms of plans."""

    def __init__(self, retrieval: Retrieval, ops: LayerKernels) -> None:
        self.retrieval, self.ops, self.model = retrieval, ops, retrieval.config.model
        window = retrieval.cache.window
        self.device, self.dtype = window.device, window.dtype
        self.rows = torch.arange(
            buckets_for(retrieval.config.max_batch_size)[-1], dtype=torch.int32, device=self.device
        )

    def attend_step(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
        """Run a layer's attention in a decode step: queries [batch, H, D], keys and values [batch, G, D] to [batch, H, D]."""
        self.ops.append(keys, values, batch, self.retrieval.cache.window[layer])
        return self.retrieval.attend(layer, queries, batch)

    def tokens_of(self, batch: Batch) -> Tensors:
        """Copy token ids and positions of a batch, int32 [batch]: plans take neither strided columns nor odd addresses."""
        ids = batch.column("token")
        if batch.latest is not None:
            drawn = batch.latest.index_select(0, batch.column("slot")).clamp_min_(
                0
            )  # a token that is none is fed in vain
            ids = torch.where(ids == LATEST, drawn, ids)
        return {"ids": ids, "positions": batch.column("position")}

    def tokens_from(self, ids: Sequence[int], start: int) -> Tensors:
        """Copy ids of a prompt's tokens, from position `start` on, and their positions to the device, int32 [tokens]."""
        positions = torch.arange(start, start + len(ids), dtype=torch.int32, device=self.device)
        return {"ids": to_device(ids, torch.int32, self.device), "positions": positions}

    def new_logits(self, rows: int) -> Tensor:
        """Allocate logits, float32 [rows, vocabulary]."""
        return torch.empty(rows, self.model.vocab_size, device=self.device)

    def result(self, logits: Tensor, batch: Batch) -> StepResult:
        """Make a step's result from float32 logits, in the engine's dtype; exact, because the head computed in that dtype."""
        own = logits.to(self.dtype)
        return StepResult(own, self.ops.argmax(own, batch))


@dataclass
class Chunk:
    """State of a prompt's chunk of T tokens from one segment to the next, in tensors of its own.

    Attributes
    ----------
    tokens : dict
        `ids` and `positions`, int32 [T].
    state : dict
        `hidden` [T, hidden], `attended` [T, H, D], `cos` and `sin` [T, 1, D/2]; empty before the first segment.
    """

    tokens: Tensors
    state: Tensors


class SegmentsModel(LayerwiseModel[list[Chunk]]):
    """Runs one plan from each layer's attention to the next; attention runs between the plans.

    Parameters
    ----------
    plans : sequence of Runner
        One more than the model has layers.
    attention : callable
        Causal attention over a prompt.
    """

    reads_packs: ClassVar[bool] = False  # a plan takes one prompt, and only in its own chunks
    scores_prompts: ClassVar[bool] = False

    def __init__(
        self, plans: Sequence[Runner], retrieval: Retrieval, ops: LayerKernels, attention: CausalAttention
    ) -> None:
        super().__init__(retrieval, attention)
        self._plans, self._tensors = plans, PlanTensors(retrieval, ops)

    def begin_prompt(self, prefill: Prefill) -> list[Chunk]:
        ids, size = prefill.ids, self.config.prefill_chunk_tokens
        starts = range(0, len(ids), size)
        return [Chunk(self._tensors.tokens_from(ids[start : start + size], start), {}) for start in starts]

    def read_chunk(
        self, layer: int, prompt: list[Chunk], start: int, stop: int, keys: Tensor, values: Tensor, attend: AttendChunk
    ) -> Tensor:
        chunk = prompt[start // self.config.prefill_chunk_tokens]
        made = self._to_attention(layer, chunk.tokens, chunk.state, stop - start, OUTSIDE_OF_GRAPHS)
        for whole, name in ((keys, "keys"), (values, "values")):
            whole[:, start:stop] = made[name].transpose(0, 1)
        queries = made["queries"].transpose(0, 1)
        out = attend(queries)
        chunk.state["attended"] = out.contiguous()
        return queries

    def logits_of(self, prompt: list[Chunk], spans: Sequence[tuple[int, int]]) -> Tensor:
        """See LayerwiseModel; `spans` is the last row."""
        # Copied, because the address of a row inside a chunk is not aligned as plans demand.
        last = {name: prompt[-1].state[name][-1:].clone() for name in ("attended", "hidden")}
        return self._to_logits(last, 1, OUTSIDE_OF_GRAPHS)

    @torch.inference_mode()
    def run_layers(self, batch: Batch) -> StepResult:
        """See StepModel.run_layers. The size of the batch must be a bucket."""
        tokens, state, size = self._tensors.tokens_of(batch), Tensors(), batch.size
        for layer in range(self.model.num_layers):
            made = self._to_attention(layer, tokens, state, size, size)
            rows = made["queries"], made["keys"], made["values"]
            state["attended"] = self._tensors.attend_step(layer, *rows, batch)
        return self._tensors.result(self._to_logits(state, size, size), batch)

    def _to_attention(self, layer: int, tokens: Tensors, state: Tensors, count: int, context: int) -> Tensors:
        """Run the plan that ends at a layer's attention; returns its outputs, attention's inputs among them.

        `state` is that of a Chunk; its `hidden` is replaced by the plan's output.
        """
        inputs = tokens if layer == 0 else state
        outputs = self._new_outputs(FIRST_PLAN if layer == 0 else NEXT_PLANS, count)
        self._plans[layer].run(inputs, outputs, context)
        state |= {name: outputs[name] for name in ("cos", "sin") if name in outputs}
        state["hidden"] = outputs["next_hidden"]
        return outputs

    def _to_logits(self, state: Tensors, count: int, context: int) -> Tensor:
        """Run the last plan for `count` tokens; returns the logits of all of them, float32 [count, vocabulary]."""
        inputs = {"attended": state["attended"], "hidden": state["hidden"], "rows": self._tensors.rows[:count]}
        logits = self._tensors.new_logits(count)
        self._plans[-1].run(inputs, {"logits": logits}, context)
        return logits

    def _new_outputs(self, names: Sequence[str], tokens: int) -> Tensors:
        """Allocate the outputs of a plan, in the engine's dtype."""
        model = self.model
        shapes = {
            "queries": (model.num_heads, model.head_dim),
            "keys": (model.num_kv_heads, model.head_dim),
            "values": (model.num_kv_heads, model.head_dim),
            "next_hidden": (model.hidden_size,),
            "cos": (1, model.head_dim // 2),
            "sin": (1, model.head_dim // 2),
        }
        return {name: self.retrieval.cache.window.new_empty(tokens, *shapes[name]) for name in names}


class WholePrefill(Prefill):
    """Reads one prompt in one unit."""

    def __init__(self, model: WholeModel, retrieval: Retrieval, prompts: Prompts) -> None:
        super().__init__(retrieval, prompts)
        self._model = model
        self._last: Tensor | None = None  # logits of the last token, [1, vocabulary]

    @property
    def progress(self) -> float:
        return 0.0 if self._last is None else 1.0

    def _advance(self, max_tokens: int) -> int:
        self._last = self._model.read_prompt(self.slots[0], self.ids)
        return self.tokens * self.retrieval.config.model.num_layers

    def _logits(self) -> Tensor:
        assert self._last is not None, "the prompt has been read"
        return self._last


class WholeModel:
    """Runs one plan, whose attention layers call back while TensorRT launches them.

    A prompt is read in one call of the plan, which is one unit of work, so TensorRT's work space holds the activations of all
    its tokens.

    Parameters
    ----------
    plan : Runner
    serving : callable
        The context manager of plugins/tensorrt/serving.py: inside it, attention layers that TensorRT launches call a function.
    """

    reads_packs: ClassVar[bool] = False  # a plan takes one prompt
    scores_prompts: ClassVar[bool] = False

    def __init__(
        self,
        plan: Runner,
        serving: Callable[[Attend], AbstractContextManager[None]],
        retrieval: Retrieval,
        ops: LayerKernels,
    ) -> None:
        self._plan, self._serving, self._retrieval = plan, serving, retrieval
        self._tensors, self._model = PlanTensors(retrieval, ops), retrieval.config.model

    def prefill(self, prompts: Prompts, on_logits: LogitsCallbacks = NO_CALLBACKS) -> Prefill:
        return WholePrefill(self, self._retrieval, prompts)

    def read_prompt(self, slot: int, prompt_ids: Sequence[int]) -> Tensor:
        """Read a prompt; returns the logits of its last token, float32 [1, vocabulary]."""

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
            self._read_layer(layer, slot, queries, keys, values, out)

        rows = to_device([len(prompt_ids) - 1], torch.int32, self._tensors.device)
        return self._call(self._tensors.tokens_from(prompt_ids, 0), rows, attend, OUTSIDE_OF_GRAPHS)

    def _read_layer(self, layer: int, slot: int, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Attend in a layer over a whole prompt of n tokens, and store its rows.

        Queries and `out` are [n, H, D], keys and values [n, G, D]. The rows are copied first, because they must outlast the
        call, and TensorRT's memory does not.
        """
        n, scaling = keys.shape[0], self._model.scaling
        own_keys = new_rows(self._retrieval, n).copy_(keys.transpose(0, 1))
        own_values = new_rows(self._retrieval, n).copy_(values.transpose(0, 1))
        out.copy_(causal_attention_device(queries.transpose(0, 1), own_keys, own_values, scaling))
        last = queries[-LAST_QUERIES:].transpose(0, 1).clone(memory_format=torch.contiguous_format)
        self._retrieval.store_layer(layer, slot, own_keys, own_values, last)

    @torch.inference_mode()
    def run_layers(self, batch: Batch) -> StepResult:
        """See StepModel.run_layers. The size of the batch must be a bucket."""
        tensors = self._tensors

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
            out.copy_(tensors.attend_step(layer, queries, keys, values, batch))

        logits = self._call(tensors.tokens_of(batch), tensors.rows[: batch.size], attend, batch.size)
        return tensors.result(logits, batch)

    def _call(self, tokens: Tensors, rows: Tensor, attend: Attend, context: int) -> Tensor:
        """Run the plan; returns the logits of `rows`, float32 [rows, vocabulary].

        Errors of `attend` pass through. Raises KernelError unless every layer attended, once and in order.
        """
        logits, served = self._tensors.new_logits(rows.shape[0]), list[int]()

        def serve(layer: int, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
            attend(layer, queries, keys, values, out)
            served.append(layer)

        with self._serving(serve):
            self._plan.run({**tokens, "rows": rows}, {"logits": logits}, context)
        if served != list(range(self._model.num_layers)):
            last = self._model.num_layers - 1
            raise KernelError(
                f"attention layers of the plan = {served}: must be 0 to {last}, in order; build the engine again"
            )
        return logits
