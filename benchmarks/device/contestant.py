"""Who takes part in the GPU benchmark: a decoder on a cache full of synthetic rows, one decode step at a time.

Contestants may share a cache: each puts the lengths back to where its own sequence stands before it steps. What others
wrote to the newest window rows in between changes values, not work. No step evicts: the update buffer is not full.

Indexes may have a state of their own (rings of queries, rows and pages kept by position), so positions over one index
only ever ascend: those who share one run one after the other, each from where the one before stopped. The baseline may take
turns with any of them, for it has no state.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.errors import KvseekError

from .memory_plan import Cell
from .memory_rates import elapsed_seconds, timing_event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvseek.engine.cache.cache import Cache
    from kvseek.engine.model.torch_model.device_decoder import DeviceDecoder
    from kvseek.engine.model.graphs import StepResult
    from kvseek.plugins.attention.device import DeviceAttention
    from kvseek.plugins.batch import Batch
    from kvseek.plugins.contract import DeviceIndex
    from kvseek.plugins.selection import Selection

STAGE_REPEATS = 9  # replays of the graph that times stages; the median counts
OVERLAP_STEPS = 9  # steps whose selections are compared with the step before


class DeviceContestant:
    """A decoder that generates greedily for the requests in slots 0 .. batch - 1 of its cache.

    Attributes
    ----------
    name, method : str
        Its own, and the label of its variant.
    hot : bool
        Whether the common attention keeps the rows of the last step on the device.
    wall : list of float
        Host seconds of each step since `start`, from counting the tokens to having the next ones and starting upkeep.
    found : float or None
        Share of the selected rows that the attention read from what the device keeps, in the steps of `overlap`; None
        before, or if nothing was read by it.
    attended : float
        Tokens that one KV head of a request attended to in the last step (mean over layers and requests).
    """

    def __init__(self, name: str, method: str, decoder: DeviceDecoder, hot: bool) -> None:
        self.name, self.method, self.decoder, self.hot = name, method, decoder, hot
        self.cache: DeviceCache = decoder.cache
        self.wall: list[float] = []
        self.attended = 0.0
        self.found: float | None = None

    @property
    def done(self) -> int:
        """Steps since the cell's context, those that it began behind included."""
        return self._done

    @property
    def keeps_rows(self) -> bool:
        """Whether the common attention of any layer keeps rows; methods may keep rows of their own instead."""
        return any(attention.hot_rows is not None for attention in self.decoder.attentions)

    def start(self, cell: Cell, behind: int = 0) -> None:
        """Begin `behind` tokens behind the cell's context, which the cache holds already."""
        self._slots, self._context, self._done = list(range(cell.batch)), cell.context, behind
        self._tokens = [slot + 1 for slot in self._slots]
        self.wall = []
        for attention in self.decoder.attentions:
            for slot in self._slots:
                attention.forget(slot)

    def step(self) -> float:
        """One decode step; device seconds of its graph, by CUDA events around the replay."""
        begin = time.perf_counter()
        self._load()
        first, last = timing_event(), timing_event()
        first.record()
        result = self._step.launch()
        last.record()
        self._tokens = result.tokens[: len(self._slots)].tolist()
        self.decoder.refresh(self._slots)
        self.wall.append(time.perf_counter() - begin)
        if min(self._tokens) < 0:
            raise KvseekError(f"{self.name}: a step's logits are not finite: its time would mean nothing")
        return elapsed_seconds(first, last)

    def stages(self) -> dict[str, float]:
        """Device seconds of each stage of a step, summed over the layers: a graph of its own, with events in it.

        The events stand between kernels that otherwise overlap a little, so the sum exceeds the time of a step.
        """
        from kvseek.engine.model.graphs import DecodeStep, bucket_of

        clock = StageClock()

        def run(batch: Batch) -> StepResult:
            clock.restart()
            return self.decoder.run_layers(batch, clock.mark)

        size, table = bucket_of(len(self._slots)), self.cache.extents.device_table
        step = DecodeStep(size, self.cache.padding_state(), table, run)
        with torch.inference_mode():
            step.capture(stage_stream(self.cache.window.device), torch.cuda.graph_pool_handle())
            times = []
            for _ in range(STAGE_REPEATS):
                self._load()
                step.load(self._states)
                step.launch()
                torch.cuda.synchronize()
                times.append(clock.seconds())
                self.decoder.refresh(self._slots)
        return {name: statistics.median(one[name] for one in times) for name in times[0]}

    def overlap(self) -> float | None:
        """Share of the selected rows that the step before had selected too; None if no selection reaches the device.

        Steps run kernel by kernel here, what each layer's index gives is kept, and the attention counts (`found`): timed
        steps do not, as that takes time.
        """
        counters = torch.zeros(2, dtype=torch.int64, device=self.cache.window.device)  # rows found, and rows read
        shares: list[float] = []
        before: list[Tensor] = []
        for _ in range(OVERLAP_STEPS + 1):
            self._load()
            counting = counted(self.decoder.attentions, counters)
            with torch.inference_mode(), counting, overheard(self.decoder.indexes) as selections:
                result = self.decoder.run_layers(self._step.batch)
            self._tokens = result.tokens[: len(self._slots)].tolist()
            rows = [selected[: len(self._slots)] for selected in selections]
            pairs = zip(before, rows, strict=True) if before else ()
            shares += [shared_rows(old, new) for old, new in pairs if bool((new >= 0).any())]
            before = rows
            self.decoder.refresh(self._slots)
        found, read = counters.tolist()
        self.found = found / (found + read) if found + read else None
        return statistics.mean(shares) if shares else None

    def hit_rate(self) -> float | None:
        """Share of rows that the method's own device cache held so far, mean over its layers; None without such a cache."""
        asked = (getattr(index, "hit_rate", None) for index in self.decoder.indexes)
        found = [rate for rate in (ask() for ask in asked if ask is not None) if rate is not None]
        return statistics.mean(found) if found else None

    @torch.inference_mode()
    def _load(self) -> None:
        """Count a token per request and upload what the step reads."""
        from kvseek.engine.model.graphs import bucket_of

        if self._context + self._done - self.cache.lengths[0] >= self.cache.config.sink + self.cache.ring:
            raise KvseekError(f"{self.name}: the update buffer is full after {self._done} steps; time fewer steps")
        for slot in self._slots:
            self.cache.tokens[slot] = self._context + self._done
        self._done += 1
        self._step = self.decoder.step(bucket_of(len(self._slots)))
        self.cache.begin_step(self._slots, self.decoder.indexes)
        self._states, attended = self.decoder.states(self._tokens, self._slots)
        self.attended = sum(attended) / len(attended)
        self._step.load(self._states)


class StageClock:
    """Events between the stages of a step; in a captured graph they are nodes of it, which every replay passes."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._names: list[str] = []

    def restart(self) -> None:
        """Begin a step: events of an earlier one are dropped."""
        self._events, self._names = [], []
        self._record()

    def mark(self, stage: str) -> None:
        """The stage's kernels have been launched."""
        self._names.append(stage)
        self._record()

    def seconds(self) -> dict[str, float]:
        """Device seconds of each stage, summed over its occurrences; the device must have passed all events."""
        totals: dict[str, float] = {}
        for number, name in enumerate(self._names):
            passed = elapsed_seconds(self._events[number], self._events[number + 1])
            totals[name] = totals.get(name, 0.0) + passed
        return totals

    def _record(self) -> None:
        event = timing_event(in_graph=True)
        event.record()
        self._events.append(event)


@contextmanager
def overheard(indexes: Sequence[DeviceIndex]) -> Iterator[list[Tensor]]:
    """Collect copies of what each index selects, int32 [batch, G, entries] per layer, while the context lasts."""
    selections: list[Tensor] = []

    def listen(index: DeviceIndex) -> None:
        select = index.launch_select

        def heard(queries: Tensor, batch: Batch) -> Selection | None:
            selection = select(queries, batch)
            if selection is not None:
                selections.append(selection.rows.clone())
            return selection

        index.launch_select = heard  # type: ignore[method-assign]  # of this instance alone

    for index in indexes:
        listen(index)
    try:
        yield selections
    finally:
        for index in indexes:
            del index.launch_select  # the class's own shows again


@contextmanager
def counted(attentions: Sequence[DeviceAttention], counters: Tensor) -> Iterator[None]:
    """Let every layer's attention count the rows that it finds and reads while the context lasts, outside of graphs."""
    for attention in attentions:
        attention.counters = counters
    try:
        yield
    finally:
        for attention in attentions:
            attention.counters = None


@cache
def stage_stream(device: torch.device) -> torch.cuda.Stream:
    """Where stages are captured: one for all, as cuBLAS keeps a work space for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def shared_rows(before: Tensor, rows: Tensor) -> float:
    """Share of rows [..., entries] that occur in `before` [..., entries] too; entries of -1 are none."""
    exists = rows >= 0
    found = (rows[..., :, None] == before[..., None, :]).any(dim=-1) & exists
    return (found.sum() / exists.sum()).item()
