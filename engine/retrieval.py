"""Retrieval: the one interface of a model's layers to cache, indexes and attention. Rows go in, attended outputs come out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvseek.core.batch import (
    LATEST,
    METHOD_COLUMN,
    METHOD_FIELDS,
    REQUEST_FIELDS,
    Batch,
    Selection,
    arrange,
)
from kvseek.core.config import MOST_DRAFTED, EngineConfig
from kvseek.core.errors import KvseekError
from kvseek.core.streams import InFlight
from kvseek.engine.cache.cache import Cache
from kvseek.engine.row_recorder import RowRecorder, Wanted
from kvseek.kernels.cuda.attention.attend import LayerAttention
from kvseek.kernels.cuda.attention.hot_rows import HotRows
from kvseek.plugins.contract import LAST_QUERIES, Attention, Index
from kvseek.plugins.registry import method_traits

# Operations of a step, in order: "begin" and "head" once a step, the others once a layer. A layer with a state has neither
# "rope" nor "select", and its "attend" is the step of the state.
OPS = ("begin", "norm", "qkv", "rope", "select", "attend", "o", "mlp_norm", "gate_up", "down", "head")

Counts = float | npt.NDArray[np.int32] | npt.NDArray[np.float64]
KEPT_REGIONS = 16  # combinations of slots whose regions are kept
BUILDS_IN_FLIGHT = 2  # layers of a prompt that are indexed on side streams at a time; each keeps its layer's keys


class Observer:
    """An object that is told what decode steps and prompts do.

    Subclasses override the methods of interest; Decoder.observe installs one.

    On a GPU `op_launched` and `selected` are called while a step is captured as a graph: work that they launch on the current
    stream becomes part of the graph, and runs again at every replay.
    """

    def op_launched(self, name: str) -> None:
        """Take note that the kernels of an operation of the step, one of OPS, have been launched.

        On the CPU it has run, and a layer in which all requests attend densely has no "select".
        """

    def prompt_op_launched(self, name: str) -> None:
        """Take note that the kernels of an operation of a layer have been launched for a chunk of a prompt.

        Those of a layer in OPS, without "select".
        """

    def selected(self, layer: int, queries: Tensor, batch: Batch, selection: Selection | None) -> None:
        """Look at a layer's selection for queries [batch, H, D]. On the CPU requests that attend densely are left out."""

    def step_ended(self, slots: Sequence[int]) -> None:
        """Take note that a step of these slots has been launched; the indexes' upkeep, which may move rows, comes next."""


@dataclass(frozen=True)
class _Regions:
    """Retrieval regions of requests, which a later step has too, as long as no token leaves their windows.

    Attributes
    ----------
    changes : int
        ExtentTable.changes when they were found.
    states : array, int32 [batch, 16]
        Packed requests of the last step with these.
    rows : array, float64 [batch]
        Rows that a step selects of each region, averaged over the layers.
    """

    lengths: list[int]
    changes: int
    states: npt.NDArray[np.int32]
    rows: npt.NDArray[np.float64]


class Retrieval:
    """A cache, and one index and one attention over it per layer that has rows; these layers are numbered from 0.

    Parameters
    ----------
    attentions : sequence of Attention
        One per layer, over the windows and rows of `cache`.
    hot_rows : sequence of HotRows
        The rows that layers on a GPU keep of each slot's last steps; the slot's next prompt makes them invalid.
    of_rings : sequence of Attention
        One per layer with a sliding window, over its ring.

    Attributes
    ----------
    refresh_seconds : float
        The host's time for the upkeep of the last step.
    recorder : RowRecorder or None
        Takes the selections of the step that is being launched, if a request asks for them.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: Cache,
        indexes: Sequence[Index],
        attentions: Sequence[Attention],
        hot_rows: Sequence[HotRows] = (),
        of_rings: Sequence[Attention] = (),
    ) -> None:
        self.config, self.cache, self.indexes, self.attentions = config, cache, indexes, attentions
        self.of_rings = of_rings
        self.observer = Observer()
        self.recorder: RowRecorder | None = None
        self.hot_rows = hot_rows
        self._shares_entries = method_traits(config).prefix_reuse == "entries"
        self._builds = InFlight(BUILDS_IN_FLIGHT)
        self._selecting: set[int] = set()  # slots that did not attend to everything in their last step
        # By the slots of a step's requests, as steps that verify drafts differ in how often a slot occurs; the last step's.
        self._regions = dict[tuple[int, ...], _Regions]()
        self._latest: _Regions | None = None
        self.refresh_seconds = 0.0
        self._budget = lru_cache(maxsize=1024)(self._budget_of)  # a slot's length changes only at evictions

    def without_hot_rows(self) -> Retrieval:
        """Make another retrieval over cache and indexes, on a GPU, whose attention neither reads nor writes hot rows."""
        attentions = list[Attention]()
        for one in self.attentions:
            assert isinstance(one, LayerAttention), "engine/loading/indexes.py makes these"
            attentions.append(replace(one, kernel=one.kernel.without_hot_rows()))
        return Retrieval(self.config, self.cache, self.indexes, attentions, of_rings=self.of_rings)

    # A prompt: `expect`, then `store_layer` of every layer in order, then `finish_indexes`; `finish_rows` before a step.

    def expect(self, slot: int, tokens: int) -> None:
        """Prepare a slot for a prompt of `tokens` tokens."""
        self._builds.finish(slot)  # the builds of a prompt that was given up
        for hot in self.hot_rows:
            hot.forget(slot)
        self.cache.begin_prefill(slot, tokens)

    def reused(self, slot: int) -> int:
        """Return the number of the prompt's first tokens that are not read: an earlier request has left their rows."""
        prefix = self.cache.prefixes.get(slot)
        return 0 if prefix is None else prefix.tokens

    def selects(self, tokens: int) -> bool:
        """Whether a decode step after `tokens` tokens attends to selected rows, rather than to all."""
        length = self.cache.retrieval_tokens(tokens)
        return not self._are_dense(tokens, length, self._budget(length)[0])

    def resumes(self, slots: Sequence[int]) -> bool:
        """Whether these are one slot, whose prompt goes on behind its prefix as decode steps do."""
        return len(slots) == 1 and slots[0] in self.cache.prefixes and self.cache.prefixes[slots[0]].sparse

    def resume(self, slot: int) -> None:
        """Begin a slot with the tokens of its prefix, none of which is read; `begin_step` counts those that follow."""
        self.expect(slot, self.cache.prefixes[slot].tokens)
        for layer in range(len(self.indexes)):
            self._adopt(layer, slot, self.cache.write_prefix(layer, slot))
        self.finish_rows(slot)

    def store_layer(self, layer: int, slot: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """Index a layer of a prompt and write its rows: keys and values [G, n, D], and the last queries of those read [H, w, D].

        Rows in extents that the slot shares are there already, and so are their index entries if the method shares these.
        """
        sink, length = self.cache.config.sink, self.cache.lengths[slot]
        shared = self.cache.shared_places(slot)
        self._builds.make_room()
        if shared and self._shares_entries:
            self._adopt(layer, slot, keys[:, sink + shared : sink + length])
            self.cache.write_prompt(layer, slot, keys, values)
            return
        self._build(layer, slot, keys[:, sink : sink + length], queries)
        self.cache.write_prompt(layer, slot, keys, values)

    def store_pack(
        self, layer: int, spans: Mapping[int, tuple[int, int]], keys: Tensor, values: Tensor, queries: Tensor
    ) -> None:
        """Store a layer of several prompts as `store_layer` does with each: that of a slot has the rows first .. stop - 1.

        Prompts that stay in the window are written to it at once.
        """
        short = {slot: span for slot, span in spans.items() if not self.cache.lengths[slot]}
        self.cache.write_windows(layer, short, keys, values)
        for slot, (first, stop) in spans.items():
            last = queries[:, first:stop][:, -LAST_QUERIES:].contiguous()
            if slot in short:
                self._builds.make_room()
                self._build(layer, slot, keys[:, first:first], last)
            else:
                self.store_layer(layer, slot, keys[:, first:stop], values[:, first:stop], last)

    def _build(self, layer: int, slot: int, keys: Tensor, queries: Tensor) -> None:
        work = self.indexes[layer].build(slot, keys, queries)
        if work is not None:
            self._builds.add(slot, work)

    def _adopt(self, layer: int, slot: int, keys: Tensor) -> None:
        """Begin the index of a layer with the entries that the slot shares, and the keys [G, n, D] of the places behind them."""
        shared, index = self.cache.shared_places(slot), self.indexes[layer]
        index.adopt(slot, shared)
        index.append(slot, shared, keys)
        index.publish(slot, shared, keys.shape[1])

    def finish_indexes(self, slot: int) -> None:
        """Make the current stream wait for index work that still runs; call it after storing the prompt's last layer."""
        self._builds.finish(slot)

    def finish_rows(self, slot: int) -> None:
        """Make the current stream wait until the prompt's rows are in the pool."""
        self.cache.finish_prompt(slot)

    # A decode step: `begin_step`, `attend` in every layer, `end_step` once it has been launched, `check` once it has ended.

    def begin_step(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        """Count one more token per slot.

        A slot may occur several times, with tokens that follow each other, if its ring has room for them
        (Cache.room_in_ring): each then sees those before it.

        Returns
        -------
        states : Tensor, int32 [batch, 16], on the CPU
            Of each request, the numbers that indexes and attention read; see core/batch.py.
        attended : list of float
            Cached tokens that one KV head attends to in the step, averaged over the layers.
        """
        self.refresh_seconds = 0.0
        if self.cache.states is not None and len(set(slots)) < len(slots) - MOST_DRAFTED:
            most = max(Counter(slots).values())
            if most > 1 + MOST_DRAFTED:
                raise KvseekError(
                    f"slots = {list(slots)}: one occurs {most} times: must be at most {1 + MOST_DRAFTED} with "
                    f"{self.config.model.without_rows}, which have room for so many tokens of a step"
                )
        self.cache.begin_step(slots, self.indexes)
        lengths, regions = [self.cache.lengths[slot] for slot in slots], self._regions.get(tuple(slots))
        found = regions is None or regions.lengths != lengths or regions.changes != self.cache.extents.changes
        if regions is None or found:
            regions = self._find_regions(slots, lengths)
        states, rows = regions.states, regions.rows
        states[:, 0] = tokens
        self.cache.place(slots, states)
        dense, near = self._are_dense(states[:, 2] + 1, states[:, 7], rows), states[:, 4] + states[:, 6]
        changed = found or (dense != states[:, 8]).any()
        if changed:
            states[:, 8] = dense
            arrange(states, self.cache.extents.table.numpy())
        if changed or regions is not self._latest:
            self._latest = regions
            self._selecting.difference_update(slots)
            self._selecting.update(slot for slot, is_dense in zip(slots, dense.tolist(), strict=True) if not is_dense)
        return torch.from_numpy(states.copy()), (near + np.where(dense, states[:, 7], rows)).tolist()

    def begin_steps(self, tokens: Sequence[int], slots: Sequence[int], steps: int) -> tuple[Tensor, list[float]]:
        """Count the tokens of several steps, no more than Cache.alike_steps; each but the first reads the token before.

        Returns the states of each step, int32 [steps, batch, 16], those of one step int32 [batch, 16]; and what each request
        attends to in the last one: one token fewer in each step before.
        """
        first, attended = self.begin_step(tokens, slots)
        if steps == 1:
            return first, attended
        states = first.numpy()[None].repeat(steps, axis=0)
        for slot in slots:
            self.cache.tokens[slot] += steps - 1
        states[1:, :, 0] = LATEST
        self.cache.place(slots, states)
        return torch.from_numpy(states), [read + steps - 1 for read in attended]

    def _find_regions(self, slots: Sequence[int], lengths: list[int]) -> _Regions:
        budgets = [self._budget(length) for length in lengths]
        states = np.zeros((len(slots), REQUEST_FIELDS), dtype=np.int32)
        self.cache.describe(slots, states)
        states[:, METHOD_COLUMN : METHOD_COLUMN + METHOD_FIELDS] = [fields for _, fields in budgets]
        if len(self._regions) == KEPT_REGIONS:
            self._regions.clear()
        rows = np.array([rows for rows, _ in budgets])
        found = self._regions[tuple(slots)] = _Regions(lengths, self.cache.extents.changes, states, rows)
        return found

    def attend(self, layer: int, queries: Tensor, batch: Batch) -> Tensor:
        """Select rows and attend to them: queries [batch, H, D] to outputs [batch, H, D]."""
        index = self.indexes[layer]
        selection = index.select(queries, batch)
        if self.recorder is not None:
            self.recorder.note(selection)
        self.observer.selected(layer, queries, batch, selection)
        self.observer.op_launched("select")
        out = index.attend(queries, batch, selection, self.attentions[layer])
        self.observer.op_launched("attend")
        return out

    def in_rings(self, batch: Batch) -> Batch:
        """Make the batch that layers with a sliding window attend for; without such layers it is the same."""
        states = self.cache.states
        if states is None or not states.rings:
            return batch
        return batch.in_rings(states.window, states.rings[0].shape[2])

    def attend_latest(self, layer: int, queries: Tensor, batch: Batch) -> Tensor:
        """Attend in a layer with a sliding window, for a batch of `in_rings`: queries [batch, H, D] to outputs of this shape."""
        out = self.of_rings[layer](queries, batch, None)
        self.observer.op_launched("attend")
        return out

    def attend_densely(self, layer: int, queries: Tensor, batch: Batch) -> Tensor:
        """Attend without an index, for requests that all attend to every row; only used on the CPU."""
        out = self.attentions[layer](queries, batch, None)
        self.observer.op_launched("attend")
        return out

    @contextmanager
    def recording(self, recorder: RowRecorder | None) -> Iterator[None]:
        """Let a recorder take the selections of the step that is launched in the context."""
        self.recorder = recorder
        try:
            yield
        finally:
            self.recorder = None

    def recorder_of(
        self, states: Tensor, attended: Sequence[float], wanted: Wanted, *, together: bool
    ) -> RowRecorder | None:
        """Make a recorder of a step; None if nobody wants to know what it selects."""
        return RowRecorder(states, attended, wanted, self.cache.config.sink, together=together) if wanted else None

    def accept(self, slots: Sequence[int], surplus: Sequence[int]) -> None:
        """End a step of several tokens a slot: take back the last ones, so many of each slot, before `end_step`.

        None of them may have made others leave the window (Cache.room_in_ring).
        """
        for slot, count in zip(slots, surplus, strict=True):
            self.cache.tokens[slot] -= count
        self.end_step(slots)

    def end_step(self, slots: Sequence[int]) -> None:
        """Start the evictions that may run beside the step, which has been launched, and do the upkeep that is due."""
        self.cache.end_step(slots, self.indexes)
        self.refresh(slots)

    def refresh(self, slots: Sequence[int]) -> None:
        """Do the upkeep that is due for these slots; there is none for a slot that attended to everything in its last step."""
        self.observer.step_ended(slots)
        begun = time.perf_counter()
        selecting = [slot for slot in slots if slot in self._selecting]
        for index in self.indexes:
            index.refresh(selecting)
        self.refresh_seconds += time.perf_counter() - begun

    def _are_dense(self, tokens: Counts, lengths: Counts, rows: Counts) -> npt.NDArray[np.bool_]:
        """Whether requests of so many tokens attend to everything, if steps select so many of `lengths` retrieval tokens."""
        return np.logical_or(np.less(tokens, self.cache.config.full_threshold), np.greater_equal(rows, lengths))

    def _budget_of(self, length: int) -> tuple[float, tuple[int, ...]]:
        """Compute the rows of a step over a retrieval region of `length` tokens, averaged over the layers, and METHOD_FIELDS."""
        if length == 0:
            return 0.0, (0,) * METHOD_FIELDS
        budgets = [index.budget(length) for index in self.indexes]
        fields = budgets[0].method_fields
        assert len(fields) <= METHOD_FIELDS, f"a method has at most {METHOD_FIELDS} fields, not {len(fields)}"
        mean = sum(budget.rows for budget in budgets) / len(budgets)
        return mean, (*fields, *(0,) * (METHOD_FIELDS - len(fields)))
