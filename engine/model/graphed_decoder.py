"""Decode steps on a GPU, whatever computes a layer's products: batches, buckets, CUDA graphs, and what the host waits for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import CapacityError
from kvseek.core.streams import wait_on_error
from kvseek.engine.cache.activation_memory import prefill_bytes
from kvseek.engine.cache.host_cache.device_cache import DeviceCache
from kvseek.plugins.attention.device import DeviceAttention
from kvseek.plugins.attention.splits import AttentionScratch
from kvseek.plugins.batch import Batch, RequestState, pack
from kvseek.plugins.contract import DeviceIndex

from .decoder import BaseDecoder
from .graphs import DecodeStep, HostCopy, StepResult, bucket_of, buckets_for
from .layer_kernels import LayerKernels


class GraphedDecoder(BaseDecoder):
    """A decoder over a device cache and one device index per layer. A decode step is what `run_layers` launches.

    Attributes
    ----------
    device, dtype
        Of cache, activations and logits.
    ops : LayerKernels
    attentions : list of DeviceAttention
        One per layer.
    """

    cache: DeviceCache
    indexes: Sequence[DeviceIndex]

    def _start_steps(self, kernels: CudaKernels, hot_rows: bool, graphs: bool) -> None:
        """Make what steps need beside cache and indexes; arguments and errors as of DeviceDecoder."""
        self.device, self.dtype = self.cache.window.device, self.cache.window.dtype
        self.buckets = buckets_for(self.config.max_batch_size)
        self.ops = LayerKernels(kernels, self.model, self.dtype, self.device, self.buckets[-1])
        table = self.cache.extents.device_table
        # Rows that lie on the device need no copy of the last step's.
        hot_from = self.cache.plan.device_layers if hot_rows else self.model.num_layers
        self.attentions = make_attentions(self.config, kernels, self.indexes, table, self.dtype, hot_from)
        self._effort = lru_cache(maxsize=1024)(self._effort_of)  # lengths change at evictions alone
        self._graphs = graphs
        self._steps: dict[int, DecodeStep] = {}
        self._capture_stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    @abstractmethod
    def run_layers(self, batch: Batch) -> StepResult:
        """Launch a decode step on the current stream, kernel by kernel; reads nothing back."""

    # Prefill: units of work, all on the current stream. Only `Prefill.finish` waits for the device.

    def expect(self, slot: int, tokens: int) -> None:
        """See BaseDecoder.expect."""
        for attention in self.attentions:
            attention.forget(slot)
        super().expect(slot, tokens)

    @contextmanager
    def reading(self, tokens: int) -> Generator[None]:
        """See BaseDecoder.reading: raises CapacityError if device memory does not suffice; others are not affected."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise self._prefill_does_not_fit(tokens) from None

    def hand_over(self, slots: Sequence[int], logits: Tensor) -> Tensor:
        """See BaseDecoder.hand_over."""
        on_host = logits.cpu()  # the first tokens need not wait for the rows to reach the host
        for slot in slots:
            self.cache.finish_prompt(slot)
        return on_host

    def _to_device(self, numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers of the host on the device, [n]; in order with the current stream, without waiting."""
        on_host = torch.tensor(numbers, dtype=dtype)
        if self.device.type == "cuda":
            on_host = on_host.pin_memory()  # a copy from pageable memory would wait for the stream
        return on_host.to(self.device, non_blocking=True)

    def _prefill_does_not_fit(self, tokens: int) -> CapacityError:
        free, _ = torch.cuda.mem_get_info(self.device)
        idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return CapacityError(
            f"input_lengths = {tokens}: its prefill needs about {prefill_bytes(self.config, self.dtype, tokens):,} bytes of "
            f"device memory, {free + idle:,} are free; shorten the prompt, or build with a smaller prefill_chunk_tokens or "
            "cache.kv_cache_device_memory_bytes"
        )

    # Decode: begin_step, upload, launch, end_step; the host waits for the tokens alone.

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        """See BaseDecoder.decode; the logits are on the CPU."""
        with wait_on_error(self.device):
            result, attended = self._launch(tokens, slots)
            self.cache.end_step(slots, self.indexes)
            return result.logits[: len(slots)].float().cpu(), attended

    @torch.inference_mode()
    def decode_tokens(
        self, tokens: Sequence[int], slots: Sequence[int], greedy: Sequence[bool]
    ) -> tuple[list[Tensor | int], list[float]]:
        """See BaseDecoder.decode_tokens: for greedy requests only token ids leave the device."""
        sampled = [request for request, own in enumerate(greedy) if not own]
        with wait_on_error(self.device):
            result, attended = self._launch(tokens, slots)
            copies = HostCopy([result.tokens, *(result.logits[request] for request in sampled)])
            self.cache.end_step(slots, self.indexes)  # what it starts runs beside the step
            chosen, *rows = copies.wait()
        drawn: list[Tensor | int] = list(chosen.tolist()[: len(slots)])
        for request, row in zip(sampled, rows, strict=True):
            drawn[request] = row.float()
        return drawn, attended

    def step(self, size: int) -> DecodeStep:
        """The decode step for a bucket, captured when it is first asked for."""
        if size not in self._steps:
            step = DecodeStep(size, self.cache.padding_state(), self.cache.extents.device_table, self.run_layers)
            if self._graphs:
                self._capture(step)
            self._steps[size] = step
        return self._steps[size]

    def prepare(self) -> None:
        """Capture the steps of all buckets now, so that no request waits for it."""
        for size in self.buckets:
            self.step(size)

    def states(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[list[RequestState], list[float]]:
        """What the kernels read about a batch whose tokens `begin_step` has counted, and the tokens it attends to."""
        states, attended = [], []
        for token, slot in zip(tokens, slots, strict=True):
            length = self.cache.lengths[slot]
            plan, rows = self._effort(length)
            dense = self.cache.tokens[slot] < self.cache.config.full_threshold or rows >= length
            state = self.cache.state(slot, token, plan, dense)
            states.append(state)
            attended.append(state.sink_rows + state.ring_rows + (length if dense else rows))
        return states, attended

    def _launch(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[StepResult, list[float]]:
        step = self.step(bucket_of(len(slots)))
        self.cache.begin_step(slots, self.indexes)
        states, attended = self.states(tokens, slots)
        step.load(states)
        return step.launch(), attended

    def _effort_of(self, length: int) -> tuple[tuple[int, ...], float]:
        """The method's plan for a region of `length` tokens, and the rows it attends to, averaged over the layers."""
        if length == 0:
            return (), 0.0
        rows = sum(index.attended(length) for index in self.indexes)
        return self.indexes[0].plan(length), rows / len(self.indexes)

    def _capture(self, step: DecodeStep) -> None:
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        step.capture(self._capture_stream, self._pool)


def make_attentions(
    config: EngineConfig,
    kernels: CudaKernels,
    indexes: Sequence[DeviceIndex],
    table: Tensor,
    dtype: torch.dtype,
    hot_from: int = 0,
) -> list[DeviceAttention]:
    """Attention of every layer; those from `hot_from` on keep hot rows.

    `table` int32 [slots, max_extents] is the cache's, the padding slot its last. How much an index selects shows when it
    is launched once, on a padding request.
    """
    model, slots = config.model, table.shape[0]
    padding = RequestState(0, slots - 1, 0, 0, 1, 0, 0, 0, dense=True)
    batch = Batch(pack([padding]).to(table.device), table)
    queries = torch.zeros(1, model.num_heads, model.head_dim, dtype=dtype, device=table.device)
    attentions: list[DeviceAttention] = []
    scratch: dict[int, AttentionScratch] = {}  # layers that select alike take turns in one
    for layer, index in enumerate(indexes):
        selection = index.launch_select(queries, batch)
        entries = 0 if selection is None else selection.rows.shape[2]
        stored = selection is not None and selection.store is not None  # the method keeps rows itself
        attentions.append(
            DeviceAttention(
                kernels,
                num_heads=model.num_heads,
                kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                dtype=dtype,
                window_rows=config.cache.window,
                sink=config.cache.sink,
                slots=slots,
                entries=entries,
                max_batch=buckets_for(config.max_batch_size)[-1],
                scaling=model.head_dim**-0.5,
                device=table.device,
                hot_rows=layer >= hot_from and not stored,
                scratch=scratch.get(entries),
            )
        )
        scratch.setdefault(entries, attentions[-1].scratch)
    return attentions
