"""The GPU benchmark without a GPU: events, steps, a decoder and rates that only count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvseek.benchmarks import device_rounds
from kvseek.benchmarks.device_memory import IndexNeeds
from kvseek.benchmarks.floors import Rates
from kvseek.benchmarks.probe import PoolSample
from kvseek.core.config import EXTENT_TOKENS
from kvseek.engine.graphs import StepResult
from kvseek.plugins.base import DeviceIndex, LayerRows
from kvseek.plugins.batch import DeviceBatch, RequestState
from kvseek.plugins.full.method import FullIndex
from kvseek.plugins.selection import DeviceSelection

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
    """An index of the GPU's kind, of the size that `inner` has: it selects by the mean query and the true keys.

    Checks what the contract promises an index: the order of calls for a slot, and positions that ascend between two builds.
    """

    reversed_order = False  # whether `arrange` asks for rows from the last token to the first

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.context)
        self.inner = inner
        self.built: list[tuple[int, int]] = []
        self.keys: dict[int, Tensor] = {}
        self.calls: dict[int, list[str]] = {}
        self.positions: dict[int, int] = {}
        self.refreshed: list[list[int]] = []

    def plan(self, length: int) -> tuple[int, ...]:
        return ()

    def attended(self, length: int) -> int:
        return length if isinstance(self.inner, FullIndex) else min(length, self.context.config.top_k)

    def forget(self, slot: int) -> None:
        self.calls[slot] = ["forget"]

    def arrange(self, slot: int, keys: Tensor, queries: Tensor) -> Tensor | None:
        self.calls[slot].append("arrange")
        if not self.reversed_order or isinstance(self.inner, FullIndex):
            return None
        return torch.arange(keys.shape[1]).flip(0).expand(keys.shape[0], -1)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        assert keys.shape[1] == self.context.lengths[slot]
        assert queries.shape[0] == self.context.num_heads
        rows = self.rows
        assert isinstance(rows, LayerRows)
        held = self.context.extents.read(rows.pool, slot, keys.shape[1])[:, :, 0]
        assert torch.equal(held, keys), "the pool holds the rows already, in this order"
        self.calls[slot].append("build")
        self.built.append((slot, keys.shape[1]))
        self.keys[slot] = keys.float()
        self.positions.pop(slot, None)

    def finish_build(self, slot: int) -> None:
        assert self.calls[slot] == ["forget", "arrange", "build"]
        self.calls[slot].append("finish_build")

    def refresh(self, slots: Sequence[int]) -> None:
        self.refreshed.append(list(slots))

    def stage(self, slot: int, start: int, keys: Tensor) -> None:
        raise AssertionError("no timed step evicts")

    def commit(self, slot: int, start: int, count: int) -> None:
        raise AssertionError("no timed step evicts")

    def launch_select(self, queries: Tensor, batch: DeviceBatch) -> DeviceSelection | None:
        if isinstance(self.inner, FullIndex):
            return None
        means = queries.float().reshape(batch.size, self.context.num_kv_heads, -1, queries.shape[2]).mean(dim=2)
        rows = torch.full((batch.size, self.context.num_kv_heads, self.context.config.top_k), -1, dtype=torch.int32)
        for request, (slot, position) in enumerate(batch.requests[:, 1:3].tolist()):
            if slot not in self.keys:
                continue  # padding, when a step is captured
            asked = position == self.context.lengths[slot]  # by Index.select, out of turn
            assert asked or position >= self.positions.get(slot, 0), "positions over an index ascend"
            self.positions[slot] = max(position, self.positions.get(slot, 0))
            scores = (self.keys[slot] @ means[request][..., None])[..., 0]
            entries = min(rows.shape[2], scores.shape[1])
            rows[request, :, :entries] = scores.topk(entries).indices.sort().values
        return DeviceSelection(rows)

    @property
    def bytes_per_token(self) -> float:
        return self.inner.bytes_per_token


def fake_needs(bench: Any, variant: Any) -> IndexNeeds:
    """Needs as the index states them, where nothing can be measured."""
    cells = [bench.cells[0]]
    cache = bench_cache(bench, variant, cells)
    index = bench.indexes(variant, cache, cells)[0]
    return IndexNeeds(round(bench.model.num_layers * index.bytes_per_token * EXTENT_TOKENS))


def bench_cache(bench: Any, variant: Any, cells: Any) -> Any:
    """A small cache for a variant, before the bench has planned anything."""
    from kvseek.benchmarks.device_memory import Needs
    from kvseek.benchmarks.device_setup import with_budget
    from kvseek.engine.device_cache import DeviceCache

    config = bench.config(variant, cells)
    row_extent = Needs.of(config, bench.dtype.itemsize, IndexNeeds()).row_extent
    return DeviceCache(with_budget(config, "always", 1, row_extent, 0), bench.dtype, bench.device, None)


class FakeStep:
    """A decode step without a graph."""

    def __init__(
        self, size: int, padding: RequestState, table: Tensor, run: Callable[[DeviceBatch], StepResult]
    ) -> None:
        self.size, self.padding, self.run = size, padding, run
        self.batch = DeviceBatch(torch.tensor([padding.numbers()] * size, dtype=torch.int32), table)
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
        kept = object() if hot_rows and config.method != "full" else None
        own: dict[str, Any] = {"forget": lambda slot: None, "hot_rows": kept, "counters": None}
        self.attentions = [SimpleNamespace(**own) for _ in indexes]
        self.hot_rows, self.steps = hot_rows, {}
        assert config.cache.window == cache.window.shape[3]
        assert weights["layers.1.qkv.weight"].dtype is torch.bfloat16

    def step(self, size: int) -> FakeStep:
        if size not in self.steps:
            table = self.cache.extents.device_table
            self.steps[size] = FakeStep(size, self.cache.padding_state(), table, self.run_layers)
        return self.steps[size]

    def states(self, tokens: list[int], slots: list[int]) -> tuple[list[RequestState], list[float]]:
        states = [self.cache.state(slot, token, (), False) for slot, token in zip(slots, tokens, strict=True)]
        return states, [float(self.indexes[0].attended(state.length)) for state in states]

    def refresh(self, slots: Sequence[int]) -> None:
        for index in self.indexes:
            index.refresh(slots)

    def run_layers(self, batch: DeviceBatch, marker: Callable[[str], None] = lambda stage: None) -> StepResult:
        model = self.config.model
        marker("begin")
        for index in self.indexes:
            queries = torch.randn(batch.size, model.num_heads, model.head_dim)
            for stage in STAGES[1:-1]:
                if stage == "select":
                    selection = index.launch_select(queries, batch)
                    self.count(index, selection)
                marker(stage)
        marker("head")
        return StepResult(torch.zeros(batch.size, 4), torch.ones(batch.size, dtype=torch.int32))

    def count(self, index: Any, selection: DeviceSelection | None) -> None:
        """A quarter of the rows is found, where rows are kept."""
        attention = self.attentions[self.indexes.index(index)]
        if attention.counters is not None and selection is not None:
            attention.counters += torch.tensor([1, 3] if attention.hot_rows else [0, 4])

    def prefill(self, prompts: Sequence[tuple[int, list[int]]]) -> Any:
        for slot, ids in prompts:
            self.cache.begin_prefill(slot, len(ids))
        return SimpleNamespace(progress=1.0, finish=lambda: None)


class FakeProbe:
    """Rates of round figures."""

    def __init__(self, device: torch.device) -> None: ...

    def rates(self, memory: Tensor, pool: PoolSample) -> Rates:
        assert pool.rows.numel() == device_rounds.PROBED_ROWS
        assert pool.pages.numel() == device_rounds.PROBED_PAGES
        assert pool.row_bytes == 64
        return Rates(1e9, 1e6, 1e8, 1e10, 1e-6, 1e-5)
