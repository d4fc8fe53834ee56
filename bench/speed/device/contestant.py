"""Who takes part in the GPU benchmark: a decoder on a cache full of synthetic rows, one decode step at a time.

Contestants may share a cache: each puts the lengths back to where its own sequence stands before it steps. What others
wrote to the newest window rows in between changes values, not work. No step evicts: the update buffer is not full.

Indexes and hot rows have a state by position (rings of queries, buffers of rows), so positions over one index
only ever ascend: those who share one run one after the other, each from where the one before stopped. The baseline may take
turns with any of them, for it has no state. Observers (engine/retrieval.py) time the parts of a step or a prompt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch

from kvseek.bench.speed.device.filling import with_empty_buffer
from kvseek.bench.speed.device.floors import elapsed_seconds, timing_event
from kvseek.bench.speed.device.memory_plan import Cell
from kvseek.bench.speed.device.options import WARMUP
from kvseek.core.errors import KvseekError
from kvseek.engine.retrieval import Observer
from kvseek.kernels.cuda.attention.hot_rows import hit_rate

if TYPE_CHECKING:
    from kvseek.bench.speed.device.bench import BenchDecoder
    from kvseek.core.batch import Batch
    from kvseek.engine.cache.cache import Cache
    from kvseek.engine.model.cuda.steps import StepResult
    from kvseek.engine.retrieval import Retrieval

PART_REPEATS = 9  # replays of the graph that times the parts of a step; the median counts


class PartClock(Observer):
    """Events between the parts of a step; in a captured graph they are nodes of it, which every replay passes.

    Parameters
    ----------
    in_graph : bool
        Whether a captured step is observed.
    """

    def __init__(self, in_graph: bool = True) -> None:
        self._events: list[torch.cuda.Event] = []
        self._names: list[str] = []
        self._in_graph = in_graph

    def restart(self) -> None:
        """Begin a step: events of an earlier one are dropped."""
        self._events, self._names = [], []
        self._record()

    def op_launched(self, name: str) -> None:
        """See Observer."""
        self._names.append(name)
        self._record()

    def seconds(self) -> dict[str, float]:
        """Device seconds of each part, summed over its occurrences; the device must have passed all events."""
        totals: dict[str, float] = {}
        for number, name in enumerate(self._names):
            passed = elapsed_seconds(self._events[number], self._events[number + 1])
            totals[name] = totals.get(name, 0.0) + passed
        return totals

    def _record(self) -> None:
        event = timing_event(in_graph=self._in_graph)
        event.record()
        self._events.append(event)


class PromptClock(PartClock):
    """Events between the parts of a prompt's layers; what is done between two layers counts as the next one's norm."""

    def __init__(self) -> None:
        super().__init__(in_graph=False)

    def prompt_op_launched(self, name: str) -> None:
        """See Observer."""
        self.op_launched(name)


@contextmanager
def observing(retrieval: Retrieval, observer: Observer) -> Iterator[None]:
    """Show an observer what is launched or captured while the context lasts; an engine's own steps stay as they are."""
    before, retrieval.observer = retrieval.observer, observer
    try:
        yield
    finally:
        retrieval.observer = before


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where observed steps are captured: one for all, as cuBLAS keeps a work space for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class DeviceContestant:
    """A decoder that generates greedily for the requests in slots 0 .. batch - 1 of its cache.

    Attributes
    ----------
    name, method : str
        Its own, and the label of its variant.
    hot : bool
        Whether layers keep the rows of the last steps on the device.
    wall : list of float
        Host seconds of each step since `start`, from counting the tokens to having the next ones.
    upkeep : list of float
        Device seconds of the upkeep between each step and the next: what `refresh` launches on the stream of the steps, and the
        host's time for it as far as it is longer than the step.
    attended : float
        Tokens that one KV head of a request attended to in the last step (mean over layers and requests).
    """

    def __init__(self, name: str, method: str, decoder: BenchDecoder) -> None:
        self.name, self.method, self.decoder = name, method, decoder
        self.hot = bool(decoder.retrieval.hot_rows)
        self.cache: Cache = decoder.cache
        self.wall: list[float] = []
        self.upkeep: list[float] = []
        self.attended = 0.0

    @property
    def done(self) -> int:
        """Steps since the cell's context, those that it began behind included."""
        return self._done

    def start(self, cell: Cell, behind: int = 0, warmup: int = WARMUP) -> None:
        """Begin `behind` tokens behind the cell's context, which the cache holds already; `warmup` steps are not counted."""
        self.warmup = warmup
        self._slots, self._done = list(range(cell.batch)), behind
        self._context = with_empty_buffer(self.cache, cell.context)
        self._tokens = [slot + 1 for slot in self._slots]
        self.wall, self.upkeep = [], []
        for hot in self.decoder.retrieval.hot_rows:
            for slot in self._slots:
                hot.forget(slot)

    def step(self) -> float:
        """One decode step; device seconds of its graph and of the upkeep behind it, by CUDA events between them."""
        if len(self.wall) == self.warmup:
            for hot in self.decoder.retrieval.hot_rows:
                hot.hits.zero_()
        begin = time.perf_counter()
        self._load()
        first, last, ready = (timing_event() for _ in range(3))
        first.record()
        result = self._step.launch()
        last.record()
        self.decoder.retrieval.refresh(self._slots)
        ready.record()
        self._take_tokens(result)
        self.wall.append(time.perf_counter() - begin)
        if min(self._tokens) < 0:
            raise KvseekError(f"{self.name}: a step's logits are not finite: its time would mean nothing")
        self.upkeep.append(elapsed_seconds(last, ready))
        return elapsed_seconds(first, last) + self.upkeep[-1]

    def part_seconds(self) -> dict[str, float]:
        """Device seconds of each part of a step, summed over the layers: a graph of its own, with events in it.

        The events stand between kernels that otherwise overlap a little, so the sum exceeds the time of a step.
        """
        from kvseek.core.batch import bucket_of
        from kvseek.engine.model.cuda.steps import DecodeStep

        clock = PartClock()

        def run(batch: Batch) -> StepResult:
            clock.restart()
            return self.decoder.model.run_layers(batch)

        size, table = bucket_of(len(self._slots)), self.cache.extents.device_table
        step = DecodeStep(size, self.cache.padding_state(), table, run)
        with torch.inference_mode():
            with observing(self.decoder.retrieval, clock):
                step.capture(capture_stream(self.cache.window.device), torch.cuda.graph_pool_handle())
            times = []
            for _ in range(PART_REPEATS):
                self._load()
                step.load(self._states)
                step.launch()
                torch.cuda.synchronize()
                times.append(clock.seconds())
                self.decoder.retrieval.refresh(self._slots)
        return {name: statistics.median(one[name] for one in times) for name in times[0]}

    def hit_rate(self) -> float:
        """Share of the rows selected since `start` that were hot, in the layers that keep rows; 0 without such layers.

        The first `warmup` steps do not count.
        """
        return hit_rate(self.decoder.retrieval.hot_rows) or 0.0

    @torch.inference_mode()
    def _load(self) -> None:
        """Count a token per request and upload what the step reads."""
        from kvseek.core.batch import bucket_of

        if self._context + self._done - self.cache.lengths[0] >= self.cache.config.sink + self.cache.ring:
            raise KvseekError(f"{self.name}: the update buffer is full after {self._done} steps; time fewer steps")
        for slot in self._slots:
            self.cache.tokens[slot] = self._context + self._done
        self._done += 1
        self._step = self.decoder.step(bucket_of(len(self._slots)))
        self._states, attended = self.decoder.retrieval.begin_step(self._tokens, self._slots)
        self.attended = sum(attended) / len(attended)
        self._step.load(self._states)

    def _take_tokens(self, result: StepResult) -> None:
        """The tokens of the next step, once the device has them."""
        self._tokens = result.tokens[: len(self._slots)].tolist()
