"""Prompts that are being read: one prompt in chunks, or a pack of several short prompts at once.

What follows a reused beginning may be read as decode steps would read it, to selected rows (cache.cached_prefill): its tokens
pass the layers in blocks, each token as a request of a decode step, so that the products are those of a prompt. Nothing is
copied for the beginning but what lies in the window: what a token costs does not grow with it, but for the selection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kvseek.core.config import STATE_BLOCK
from kvseek.core.errors import CapacityError
from kvseek.core.model_config import ModelConfig
from kvseek.core.rope import Rotation
from kvseek.core.streams import SideWork, wait_for_stream
from kvseek.engine.cache.states import Snapshot
from kvseek.engine.model.activation_memory import prefill_bytes
from kvseek.engine.model.block_sparse import BlockSparseAttention, mass_of
from kvseek.engine.model.prompt_windows import row_tokens
from kvseek.engine.retrieval import Retrieval
from kvseek.kernels.reference.delta_net import DeltaPrompt
from kvseek.plugins.contract import LAST_QUERIES

from .block_sparse import RepeatedTokens
from .fp8_attention import Fp8Past
from .reference import BlockAttention, CausalAttention

RotatePrompt = Callable[[int, int, int], Rotation]
"""Rotation of positions start .. stop - 1 of a prompt of so many tokens: takes start, stop and the length."""

Prompt = TypeVar("Prompt")
Prompts = Sequence[tuple[int, Sequence[int]]]  # slot and token ids of each prompt
LogitsCallback = Callable[[int, Tensor], None]
"""Takes logits of consecutive tokens of a prompt, float32 [tokens, vocabulary] on the engine's device; the number is the first
token's position."""
LogitsCallbacks = Mapping[int, LogitsCallback]  # by slot
AttendChunk = Callable[[Tensor], Tensor]
"""Causal attention of a chunk's queries [H, chunk, D], each prompt to itself; returns [chunk, H, D]."""
Rows = tuple[Tensor, Tensor]  # keys and values of a layer, [G, n, D]
NO_CALLBACKS: LogitsCallbacks = {}
# Most logits that are computed at once: 16 MiB, for which RESERVE_BYTES of activation_memory.py has room.
PIECE_LOGITS = 1 << 22
BLOCK_TOKENS = 32  # least tokens of a block: fewer would hardly take less time, as the weights are read for each block


@dataclass(frozen=True)
class Stream:
    """State of one prompt, or of a pack of prompts, that is kept from layer to layer.

    Attributes
    ----------
    residual : Tensor [rows, hidden]
        The residual stream, which every layer changes in place.
    rotation : Rotation or None
        That of all rows of a pack, in which positions begin anew with every prompt. None for a single prompt,
        in which a row's number is its position.
    local : Rotation or None
        Likewise, in layers that have a RoPE of their own.
    """

    residual: Tensor
    rotation: Rotation | None
    local: Rotation | None = None

    @classmethod
    def begin(cls, residual: Tensor, borders: tuple[int, ...], rotate: RotatePrompt, short_reach: int) -> Stream:
        """Begin with embeddings [rows, hidden]; `borders` are those of Prefill, `short_reach` is that of ModelConfig."""
        lengths = [stop - start for start, stop in pairwise(borders)]
        if len(lengths) == 1:
            return cls(residual, None)
        # Prompts on one side of short_reach are rotated alike: the longest of them has the rotation of all.
        longest = {n > short_reach: n for n in sorted(lengths)}
        tables = {beyond: rotate(0, n, n) for beyond, n in longest.items()}
        cos, sin = ([tables[n > short_reach][part][:n] for n in lengths] for part in (0, 1))
        return cls(residual, (torch.cat(cos), torch.cat(sin)))

    def rows(self, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Return rows start .. stop - 1 of each (start, stop), [rows, hidden]."""
        # Slices rather than an index: a list of rows would be copied to a GPU, and the host would wait for it.
        rows = [self.residual[start:stop] for start, stop in spans]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def rotation_of(self, start: int, stop: int, rotate: RotatePrompt) -> Rotation:
        """Return the rotation of rows start .. stop - 1."""
        if self.rotation is None:
            return rotate(start, stop, self.residual.shape[0])
        cos, sin = self.rotation
        return cos[start:stop], sin[start:stop]


def new_rows(retrieval: Retrieval, tokens: int) -> Tensor:
    """Allocate the keys or the values of a layer of a prompt, [G, tokens, D], whose KV heads are `row_tokens` tokens apart."""
    config = retrieval.config
    shape = config.model.num_kv_heads, row_tokens(config, tokens), config.model.head_dim
    return retrieval.cache.window.new_empty(shape)[:, :tokens]


def logits_at_once(model: ModelConfig) -> int:
    """Return the most rows of prompts whose logits are computed at once."""
    return max(1, PIECE_LOGITS // model.vocab_size)


@dataclass(frozen=True)
class Piece:
    """Rows start .. stop - 1 of a pack, which belong to one prompt: the prompt has rows first .. end - 1.

    The token of row r has position r - first, and attends to rows first .. r.
    """

    first: int
    start: int
    stop: int
    end: int


def pieces_of(borders: Sequence[int], start: int, stop: int) -> list[Piece]:
    """Cut rows start .. stop - 1 at the borders of prompts: prompt i has rows borders[i] .. borders[i + 1] - 1."""
    return [
        Piece(first, max(first, start), min(end, stop), end)
        for first, end in pairwise(borders)
        if max(first, start) < min(end, stop)
    ]


def score_units(prompts: Sequence[tuple[int, tuple[int, int]]], most: int) -> Generator[list[tuple[int, Piece]]]:
    """Cut prompts, each a slot and the border rows (first, stop), into units of `most` rows; the last unit may have fewer.

    A unit is a list of pieces, each with the slot of its prompt.
    """
    unit, left = list[tuple[int, Piece]](), most
    for slot, (first, stop) in prompts:
        start = first
        while start < stop:
            end = min(start + left, stop)
            unit.append((slot, Piece(first, start, end, stop)))
            left -= end - start
            start = end
            if left == 0:
                yield unit
                unit, left = [], most
    if unit:
        yield unit


class Prefill(ABC):
    """Reads prompts in units of work; made by PromptModel.prefill. A prefill that is given up needs no call: just drop it.

    Attributes
    ----------
    slots : tuple of int
    borders : tuple of int
        The tokens of prompt i are rows borders[i] .. borders[i + 1] - 1 of the pack.
    on_logits : mapping
        Functions that are given the logits of all tokens of a prompt, piece by piece and in order; prompts without one cost
        nothing more.
    """

    def __init__(self, retrieval: Retrieval, prompts: Prompts, on_logits: LogitsCallbacks = NO_CALLBACKS) -> None:
        self.slots = tuple(slot for slot, _ in prompts)
        self.ids = [token for _, ids in prompts for token in ids]
        self.borders = tuple(accumulate((len(ids) for _, ids in prompts), initial=0))
        self.retrieval, self._begun = retrieval, False
        self.on_logits = on_logits
        self.dropped: set[int] = set()

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return len(self.ids)

    @property
    @abstractmethod
    def progress(self) -> float:
        """Share of the work that is done, 0 to 1."""

    def drop(self, slot: int) -> None:
        """Store nothing more for a slot, which is about to be closed; reading of the pack's other prompts goes on."""
        self.dropped.add(slot)

    @torch.inference_mode()
    def advance(self, max_tokens: int) -> int:
        """Run one unit of work over at most `max_tokens` tokens, unless the model has units of a fixed size.

        Returns the work done: tokens, times the layers that they passed; 0 for a unit that computed logits for `on_logits`. An
        exception ends this prefill and affects no other: CapacityError if the device's memory does not suffice.
        """
        with self._guard():
            if not self._begun:
                self._begun = True
                self._begin()
            return self._advance(max_tokens)

    @torch.inference_mode()
    def finish(self) -> Tensor:
        """Return the logits of each prompt's last token, float32 [prompts, vocabulary] on the CPU; call it at progress 1.

        After it the first decode step of the prompts may be launched.
        """
        kept = [slot for slot in self.slots if slot not in self.dropped]
        with self._guard():
            for slot in kept:
                self.retrieval.finish_indexes(slot)
            logits = self._logits()
            wait_for_stream(logits.device)
            logits = logits.cpu()  # the first tokens need not wait for the rows to reach the host
            for slot in kept:
                self.retrieval.finish_rows(slot)
            return logits

    def _begin(self) -> None:
        """Prepare cache and indexes for the prompts."""
        for slot, (first, stop) in zip(self.slots, pairwise(self.borders), strict=True):
            if slot not in self.dropped:
                self.retrieval.expect(slot, stop - first)

    @abstractmethod
    def _advance(self, max_tokens: int) -> int:
        """Run the unit of `advance`; cache and indexes expect the prompts by now."""

    @abstractmethod
    def _logits(self) -> Tensor:
        """Compute the logits of each prompt's last token, float32 [prompts, vocabulary], on the engine's device."""

    @contextmanager
    def _guard(self) -> Generator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            if self.retrieval.config.device != "cuda":
                raise
            raise does_not_fit(self.retrieval, self.tokens) from None


def does_not_fit(retrieval: Retrieval, tokens: int) -> CapacityError:
    """Make the error of a prefill of `tokens` tokens for which the device's memory did not suffice."""
    window = retrieval.cache.window
    free, _ = torch.cuda.mem_get_info(window.device)
    idle = torch.cuda.memory_reserved(window.device) - torch.cuda.memory_allocated(window.device)
    needed = prefill_bytes(retrieval.config, window.dtype, tokens)
    return CapacityError(
        f"input_ids has {tokens} tokens: its prefill needs about {needed:,} bytes of device memory, {free + idle:,} are free; "
        "shorten the prompt, or build with a smaller prefill_chunk_tokens or cache.kv_cache_device_memory_bytes"
    )


class LayerwiseModel(ABC, Generic[Prompt]):
    """A model that reads prompts layer by layer (LayerwisePrefill). It keeps a `Prompt` from one layer to the next.

    Parameters
    ----------
    attention : callable
        Causal attention over a prompt. With prefill_attention = "block_sparse" it reads what is chosen (block_sparse.py).
    """

    reads_packs: ClassVar[bool] = True
    scores_prompts: ClassVar[bool] = True

    def __init__(self, retrieval: Retrieval, attention: CausalAttention) -> None:
        self.retrieval, self.config, self.model = retrieval, retrieval.config, retrieval.config.model
        self.scaling = self.model.scaling
        self.attention = attention
        sparse = self.config.prefill_attention == "block_sparse"
        self.sparse = BlockSparseAttention(self.config, attention, mass_of(self.config, attention)) if sparse else None

    def prefill(self, prompts: Prompts, on_logits: LogitsCallbacks = NO_CALLBACKS) -> Prefill:
        return LayerwisePrefill(self, self.retrieval, prompts, on_logits)

    @abstractmethod
    def begin_prompt(self, prefill: Prefill) -> Prompt:
        """Make what the first layer begins with, such as the embeddings."""

    @abstractmethod
    def read_chunk(
        self, layer: int, prompt: Prompt, start: int, stop: int, keys: Tensor, values: Tensor, attend: AttendChunk
    ) -> Tensor:
        """Run one layer over rows start .. stop - 1, and write their keys and values to `keys` and `values` [G, n, D].

        Returns the chunk's queries, [H, stop - start, D]. `keys` and `values` are those of all rows; `attend` attends to them.
        """

    def read_states(
        self, layer: int, prompt: Prompt, start: int, counts: Sequence[int], states: Sequence[DeltaPrompt]
    ) -> list[DeltaPrompt]:
        """Run a layer with a state over rows from `start` on, so many of each prompt; returns the prompts' states after them.

        `states` are those before; none at the prompts' first tokens. Only of a model that has such layers.
        """
        raise AssertionError(f"layer {layer} has no state")

    def end_prompt(self, prompt: Prompt, slot: int, ids: Sequence[int], first: int, row: int) -> None:
        """Take note of a slot's tokens behind the last layer: `ids[n]` has row `row` + n, and those from `first` on were read."""

    @abstractmethod
    def logits_of(self, prompt: Prompt, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Compute the logits of rows start .. stop - 1 of each (start, stop), float32 [rows, vocabulary], after the last layer.

        A model that scores no prompts is only asked for the last row.
        """


class LayerwisePrefill(Prefill):
    """Reads layer by layer, in units of one layer and one chunk of tokens; a pack of several prompts in one chunk.

    Units that compute the logits for `on_logits`, at most PIECE_LOGITS each, follow the last layer.
    """

    def __init__(
        self,
        model: LayerwiseModel[Any],
        retrieval: Retrieval,
        prompts: Prompts,
        on_logits: LogitsCallbacks = NO_CALLBACKS,
    ) -> None:
        super().__init__(retrieval, prompts, on_logits)
        self._model, self._layers = model, model.model.num_layers
        self._prompt: Any = None  # what the model keeps from layer to layer
        # Of a prompt whose first tokens have rows already, no layer reads these. Prompts of a pack have no such tokens.
        self._first = retrieval.reused(self.slots[0]) if len(self.slots) == 1 else 0
        self._layer, self._row = 0, self._first  # the next unit begins here
        self._rows: Rows | None = None  # keys and values of the layer
        self._fp8: Fp8Past | None = None  # the same, if prompts are read in FP8
        self._dense = model.attention  # that of the layer, which knows these
        self._next: tuple[Rows, SideWork] | None = None  # those of the next one, whose first tokens are on their way
        self._queries: list[Tensor] = []  # queries of the layer that its index will be given
        self._states: list[DeltaPrompt] = []  # of each prompt, in a layer that has no rows
        self._snapshots: dict[int, Snapshot] = {}  # to be written, by the tokens before
        self._rows_before, self._states_before = 0, 0  # layers before this one that have rows, and states
        asked = [one for one in zip(self.slots, pairwise(self.borders), strict=True) if one[0] in on_logits]
        self._to_score = sum(stop - first for _, (first, stop) in asked)  # rows whose logits are asked for
        self._scored = 0  # of these rows
        self._units = score_units(asked, logits_at_once(model.model))

    def finish(self) -> Tensor:
        logits, attention = super().finish(), self._model.attention
        if isinstance(attention, BlockAttention) and attention.fp8 is not None:
            attention.fp8.warn_of_clipping()
        return logits

    @property
    def progress(self) -> float:
        """See Prefill.progress. A row's logits count like a layer."""
        unread = self.tokens - self._first
        done = self._layer * unread + self._row - self._first + self._scored
        return done / (self._layers * unread + self._to_score)

    def _advance(self, max_tokens: int) -> int:
        if self._layer == self._layers:
            self._score()
            return 0
        if self._prompt is None:
            self._prompt = self._model.begin_prompt(self)
            states = self.retrieval.cache.states
            if states is not None and len(self.slots) == 1:
                self._snapshots = states.pending.get(self.slots[0], {})
        if self._model.model.has_state(self._layer):
            return self._advance_states(max_tokens)
        if self._rows is None:
            self._rows = self._begin_layer()
            attention, window = self._model.attention, self._model.model.window_of(self._layer)
            if window is None and len(self.slots) == 1 and isinstance(attention, BlockAttention):
                self._fp8 = attention.fp8_past(row_tokens(self._model.config, self.tokens))
                self._dense = partial(attention, past=self._fp8)
        start = self._row
        size = max_tokens if self._model.reads_packs else self._model.config.prefill_chunk_tokens
        stop = self.tokens  # a pack is one chunk
        if len(self.slots) == 1:
            # Chunks end where those of the whole prompt end: on a GPU with a window (engine/model/prompt_windows.py).
            chunk = self._model.config.prefill_chunk_tokens
            stop = min(start + size, (start // chunk + 1) * chunk, stop)
        attend = partial(self._attend, start)
        queries = self._model.read_chunk(self._layer, self._prompt, start, stop, *self._rows, attend)
        # An index is given each prompt's last queries. A pack is one chunk, so this chunk has the queries of all its prompts.
        part = queries if len(self.slots) > 1 else queries[:, max(0, self.tokens - LAST_QUERIES - start) :]
        if part.shape[1] > 0:  # an empty part would keep the queries of its chunk
            self._queries.append(part)
        del queries, part
        self._row = stop
        if stop == self.tokens:
            self._end_layer()
        return stop - start

    def _advance_states(self, max_tokens: int) -> int:
        """Run the unit of a layer with a state, which one prompt's units divide at multiples of STATE_BLOCK tokens."""
        start, stop, cache = self._row, self.tokens, self.retrieval.cache
        if len(self.slots) == 1:
            end = start + min(max_tokens, self._model.config.prefill_chunk_tokens)
            stop = min(max(end // STATE_BLOCK, start // STATE_BLOCK + 1) * STATE_BLOCK, stop)
            stop = min([stop, *(place for place in self._snapshots if place > start)])
        if start == self._first > 0:
            state = cache.prefixes[self.slots[0]].state
            assert state is not None, "a hybrid's prefix ends where there are states"
            self._states = [DeltaPrompt(state.tokens, *state.read(self._states_before, cache.window.device))]
        counts = [piece.stop - piece.start for piece in pieces_of(self.borders, start, stop)]
        self._states = self._model.read_states(self._layer, self._prompt, start, counts, self._states)
        if stop in self._snapshots:
            self._snapshots[stop].write(self._states[0].latest, self._states[0].recurrent)
        self._row = stop
        if stop == self.tokens:
            self._end_states()
        return stop - start

    def _end_states(self) -> None:
        states = self.retrieval.cache.states
        assert states is not None, "the model has layers with states"
        for slot, own in zip(self.slots, self._states, strict=True):
            if slot not in self.dropped:
                own.write(states.layers[self._states_before], slot)
        self._layer, self._row, self._states_before = self._layer + 1, self._first, self._states_before + 1
        self._states = []

    def _attend(self, start: int, queries: Tensor) -> Tensor:
        """Attend in the chunk that begins with row `start` of this layer; see AttendChunk."""
        assert self._rows is not None, "the chunk's keys and values have been written"
        model, (keys, values), parts = self._model, self._rows, list[Tensor]()
        window = model.model.window_of(self._layer)
        if len(self.slots) > 1 and isinstance(model.attention, BlockAttention):  # a pack is one chunk
            return model.attention.attend_pack(queries, keys, values, self.borders, model.scaling, window)
        for piece in pieces_of(self.borders, start, start + queries.shape[1]):
            own = queries[:, piece.start - start : piece.stop - start]
            rows = keys[:, piece.first : piece.stop], values[:, piece.first : piece.stop]
            # A pack is one chunk, of prompts without anything before it.
            if (
                model.sparse is None
                or window is not None
                or self._rows_before < model.config.block_sparse.dense_layers
                or len(self.slots) > 1
            ):
                parts.append(self._dense(own, *rows, model.scaling, window=window))
            else:
                following = piece.end - piece.stop
                parts.append(model.sparse(own, *rows, model.scaling, following, self._repeated, self._fp8))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @cached_property
    def _repeated(self) -> RepeatedTokens:
        assert len(self.slots) == 1, "the tokens are those of one prompt"
        return RepeatedTokens(self.ids, self.retrieval.cache.window.device)

    def _begin_layer(self) -> Rows:
        """Allocate keys and values of the layer, with those of the tokens that are not read; meanwhile the next layer's come."""
        if not self._first:
            return self._new_rows()
        if self._model.model.window_of(self._layer) is not None:
            states, state = self.retrieval.cache.states, self.retrieval.cache.prefixes[self.slots[0]].state
            assert states is not None, "the model has layers with windows"
            assert state is not None, "a prefix ends where there are states"
            rows = self._new_rows()
            states.read_ring(self._states_before, state, *rows)
            return rows
        rows, work = self._next or self._load(self._rows_before)
        ahead = self.retrieval.cache.load_ahead and self._rows_before + 1 < len(self._model.model.row_layers)
        self._next = self._load(self._rows_before + 1) if ahead else None
        work.wait()
        return rows

    def _load(self, layer: int) -> tuple[Rows, SideWork]:
        rows = self._new_rows()
        return rows, self.retrieval.cache.load_prefix(layer, self.slots[0], *rows)

    def _new_rows(self) -> Rows:
        return new_rows(self.retrieval, self.tokens), new_rows(self.retrieval, self.tokens)

    def _end_layer(self) -> None:
        assert self._rows is not None, "the layer's chunks have been read"
        keys, values = self._rows
        each = zip(self.slots, pairwise(self.borders), strict=True)
        spans = {slot: span for slot, span in each if slot not in self.dropped}
        states, windowed = self.retrieval.cache.states, self._model.model.window_of(self._layer) is not None
        if states is not None and windowed:
            if spans:
                states.write_rings(self._states_before, spans, keys, values, self._snapshots.values())
        elif len(self.slots) > 1:
            self.retrieval.store_pack(self._rows_before, spans, keys, values, self._queries[0])
        elif spans:
            last = torch.cat(self._queries, dim=1)[:, -LAST_QUERIES:].contiguous()
            self.retrieval.store_layer(self._rows_before, self.slots[0], keys, values, last)
        self._rows_before, self._states_before = self._rows_before + (not windowed), self._states_before + windowed
        self._layer, self._row = self._layer + 1, self._first
        # Freed before the next layer allocates its own.
        self._rows, self._fp8, self._dense, self._queries = None, None, self._model.attention, []

    def _score(self) -> None:
        """Compute the logits of the next unit of rows, and pass them to their callbacks."""
        unit = next(self._units)
        self._scored += sum(piece.stop - piece.start for _, piece in unit)
        wanted = [(slot, piece) for slot, piece in unit if slot not in self.dropped]
        if wanted:
            logits = self._model.logits_of(self._prompt, [(piece.start, piece.stop) for _, piece in wanted])
            wait_for_stream(logits.device)  # callbacks copy to the host
            parts = torch.split(logits, [piece.stop - piece.start for _, piece in wanted])
            for (slot, piece), part in zip(wanted, parts, strict=True):
                self.on_logits[slot](piece.start - piece.first, part)

    def _logits(self) -> Tensor:
        for slot, (row, stop) in zip(self.slots, pairwise(self.borders), strict=True):
            if slot not in self.dropped:
                self._model.end_prompt(self._prompt, slot, self.ids[row:stop], self._first, row)
        return self._model.logits_of(self._prompt, [(stop - 1, stop) for stop in self.borders[1:]])


class BlockReader(Protocol):
    """Runs decode steps of several tokens of one slot: a model on the CPU, engine/model/cuda/steps.py on a GPU."""

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest block."""

    def read_block(self, tokens: Sequence[int], slot: int) -> Tensor:
        """Append tokens that follow each other, for which the slot's ring has room (Cache.room_in_ring).

        Returns the logits after the last of them, float32 [1, vocabulary] on the engine's device.
        """


class Continuation(Prefill):
    """Reads what follows the prefix of one prompt. A unit of work is a block of tokens in all layers."""

    def __init__(self, reader: BlockReader, retrieval: Retrieval, prompts: Prompts) -> None:
        super().__init__(retrieval, prompts)
        self._reader, self._layers = reader, retrieval.config.model.num_layers
        (self._slot,) = self.slots
        self._first = self._row = retrieval.reused(self._slot)
        self._last: Tensor | None = None  # logits of the last token read

    @property
    def progress(self) -> float:
        return (self._row - self._first) / (self.tokens - self._first)

    def _begin(self) -> None:
        self.retrieval.resume(self._slot)

    def _advance(self, max_tokens: int) -> int:
        block = min(max(BLOCK_TOKENS, max_tokens // self._layers), self._reader.most_tokens)
        count = min(block, self.tokens - self._row, self.retrieval.cache.room_in_ring(self._slot))
        self._last = self._reader.read_block(self.ids[self._row : self._row + count], self._slot)
        self._row += count
        return count * self._layers

    def _logits(self) -> Tensor:
        assert self._last is not None, "at least one token follows a prefix"
        return self._last
