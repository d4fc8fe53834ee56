"""The GPU benchmark without a GPU: events, steps, a decoder and rates that only count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvseek.benchmarks import device_decode
from kvseek.benchmarks.floors import Rates
from kvseek.engine.graphs import StepResult
from kvseek.plugins.base import DeviceIndex
from kvseek.plugins.batch import DeviceBatch, RequestState
from kvseek.plugins.full.method import FullIndex

STAGES = ("begin", "norm", "qkv", "rope", "select", "attend", "o", "mlp_norm", "gate_up", "silu", "down", "head")


class Event:
    """An event whose time is the number of events before it, in thousandths of a second."""

    count = 0

    def __init__(self) -> None:
        self.at = 0

    def record(self) -> None:
        Event.count += 1
        self.at = Event.count


class FakeIndex(DeviceIndex):
    """An index of the GPU's kind, of the size that `inner` has: it selects by the mean query and the true keys."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.context)
        self.inner = inner
        self.built: list[tuple[int, int]] = []
        self.keys: dict[int, Tensor] = {}

    def plan(self, length: int) -> tuple[int, ...]:
        return ()

    def attended(self, length: int) -> int:
        return length if isinstance(self.inner, FullIndex) else min(length, self.context.config.top_k)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        assert keys.shape[1] == self.context.lengths[slot]
        assert queries.shape[0] == self.context.num_heads
        self.built.append((slot, keys.shape[1]))
        self.keys[slot] = keys.float()

    def stage(self, slot: int, start: int, keys: Tensor) -> None:
        raise AssertionError("no timed step evicts")

    def commit(self, slot: int, start: int, count: int) -> None:
        raise AssertionError("no timed step evicts")

    def launch_select(self, queries: Tensor, batch: DeviceBatch) -> Tensor | None:
        if isinstance(self.inner, FullIndex):
            return None
        means = queries.float().reshape(batch.size, self.context.num_kv_heads, -1, queries.shape[2]).mean(dim=2)
        rows = torch.full((batch.size, self.context.num_kv_heads, self.context.config.top_k), -1, dtype=torch.int32)
        for request, slot in enumerate(batch.requests[:, 1].tolist()):
            scores = (self.keys[slot] @ means[request][..., None])[..., 0]
            entries = min(rows.shape[2], scores.shape[1])
            rows[request, :, :entries] = scores.topk(entries).indices.sort().values
        return rows

    @property
    def bytes_per_token(self) -> float:
        return self.inner.bytes_per_token


class FakeStep:
    """A decode step without a graph."""

    def __init__(
        self, size: int, padding: RequestState, table: Tensor, run: Callable[[DeviceBatch], StepResult]
    ) -> None:
        self.size, self.padding, self.run = size, padding, run
        self.batch = DeviceBatch(torch.zeros(size, 16, dtype=torch.int32), table)
        self.loaded: list[list[RequestState]] = []

    def capture(self, stream: Any, pool: Any) -> None:
        self.run(self.batch)

    def load(self, states: Sequence[RequestState]) -> None:
        self.loaded.append(list(states))
        for request, state in enumerate(states):
            self.batch.requests[request] = torch.tensor(state.numbers())

    def launch(self) -> StepResult:
        return self.run(self.batch)


class FakeDecoder:
    """Asks every index with random queries; counts tokens, uploads and marks stages as the decoder of the GPU does."""

    def __init__(
        self, config: Any, weights: dict[str, Tensor], cache: Any, indexes: Any, kernels: Any, *, hot_rows: bool
    ):
        self.config, self.cache, self.indexes = config, cache, indexes
        self.attentions = [SimpleNamespace(forget=lambda slot: None) for _ in indexes]
        self.hot_rows, self.steps = hot_rows, {}
        assert weights["layers.1.qkv.weight"].dtype is torch.bfloat16

    def step(self, size: int) -> FakeStep:
        if size not in self.steps:
            table = self.cache.extents.device_table
            self.steps[size] = FakeStep(size, self.cache.padding_state(), table, self.run_layers)
        return self.steps[size]

    def states(self, tokens: list[int], slots: list[int]) -> tuple[list[RequestState], list[float]]:
        states = [self.cache.state(slot, token, (), False) for slot, token in zip(slots, tokens, strict=True)]
        return states, [float(self.indexes[0].attended(state.length)) for state in states]

    def run_layers(self, batch: DeviceBatch, marker: Callable[[str], None] = lambda stage: None) -> StepResult:
        model = self.config.model
        marker("begin")
        for index in self.indexes:
            queries = torch.randn(batch.size, model.num_heads, model.head_dim)
            for stage in STAGES[1:-1]:
                if stage == "select":
                    index.launch_select(queries, batch)
                marker(stage)
        marker("head")
        return StepResult(torch.zeros(batch.size, 4), torch.ones(batch.size, dtype=torch.int32))

    def prefill(self, slot: int, ids: list[int]) -> Any:
        self.cache.begin_prefill(slot, len(ids))
        yield 1.0
        return None


class FakeProbe:
    """Rates of round figures."""

    def __init__(self, device: torch.device) -> None: ...

    def rates(self, memory: Tensor, base: int, offsets: Tensor, row_bytes: int) -> Rates:
        assert offsets.numel() == device_decode.PROBED_ROWS
        assert row_bytes == 64
        return Rates(1e9, 1e6, 1e-6)
