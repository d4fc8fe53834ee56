"""Rank 0 of an engine of several ranks: it starts the others, and tells them what to do (commands.py)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.numa import bound_meanwhile
from kvseek.core.ranks import rank_config
from kvseek.core.streams import BoundedLaunches
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.prefix import Prefix, Reuse
from kvseek.engine.cache.prefixes.cache import PrefixRows
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.draws.sampling import Drawn, Launched, Sampler, Verification
from kvseek.engine.loading.load import load_rank
from kvseek.engine.loading.supported import check_supported
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.model.prefill import NO_CALLBACKS, LogitsCallbacks, Prefill, Prompts
from kvseek.engine.parallel.cuda.gpus import check_gpus
from kvseek.engine.parallel.nodes import ONE_NODE, Nodes
from kvseek.engine.parallel.ranks import Ranks
from kvseek.engine.parallel.reports import STALL_SECONDS
from kvseek.engine.row_recorder import NOBODY, Wanted

from .commands import Begin, Call, Decode, Open, digest
from .followers import TIMEOUT_SECONDS, Followers

# Units of prompts that are launched before rank 0 waits for the first of them: some hundred launches, which keep the GPU busy.
# Fewer than PromptReader's, so that it is here that the host waits: where a rank that hangs is noticed.
UNITS_AHEAD = 3


class LeadCache(Cache):
    """The cache of rank 0, which tells the other ranks whose slots are opened and closed."""

    def __init__(
        self, followers: Followers, config: EngineConfig, dtype: torch.dtype, device: torch.device, rows: RowStorage
    ) -> None:
        super().__init__(config, dtype, device, rows)
        self._followers = followers

    def open(self, slot: int, tokens: int, prefix: Prefix | None = None) -> None:
        reuse = None if prefix is None else Reuse(prefix.tokens, prefix.extents, prefix.shared, prefix.sparse)
        with self._followers.doing(Open(slot, tokens, reuse)):
            super().open(slot, tokens, prefix)

    def close(self, slot: int) -> None:
        with self._followers.doing(Call("cache.close", (slot,))):
            super().close(slot)


class LeadPrefixRows(PrefixRows):
    """Keeps rows for later requests on all ranks; errors of its methods are RankErrors."""

    def __init__(self, rows: PrefixRows, followers: Followers) -> None:
        super().__init__(rows.cache, rows.indexes, rows.shares_entries)
        self._followers = followers

    def reserve(self, slot: int, tokens: int) -> None:
        with self._followers.doing(Call("rows.reserve", (slot, tokens))):
            super().reserve(slot, tokens)

    def complete(self, slot: int, kept: int, places: int) -> None:
        with self._followers.doing(Call("rows.complete", (slot, kept, places))):
            super().complete(slot, kept, places)

    def keep(self, slot: int, extents: Sequence[int], begins: bool) -> None:
        with self._followers.doing(Call("rows.keep", (slot, tuple(extents), begins))):
            super().keep(slot, extents, begins)

    def forget(self, extents: Sequence[int]) -> None:
        with self._followers.doing(Call("rows.forget", (tuple(extents),))):
            super().forget(extents)


class LeadPrefill(Prefill):
    """A prefill that all ranks do. `launches` are those of all prefills of the engine."""

    def __init__(
        self,
        prefill: Prefill,
        followers: Followers,
        launches: BoundedLaunches,
        number: int,
        prompts: Prompts,
        on_logits: LogitsCallbacks,
    ) -> None:
        super().__init__(prefill.retrieval, prompts, on_logits)
        self._prefill, self._followers, self._launches, self._number = prefill, followers, launches, number
        self.dropped = prefill.dropped

    @property
    def progress(self) -> float:
        return self._prefill.progress

    def drop(self, slot: int) -> None:
        self._followers.tell(Call("prefill.drop", (slot,), self._number))
        self._prefill.drop(slot)

    def advance(self, max_tokens: int) -> int:
        """See Prefill; any exception is a RankError."""
        with self._followers.doing(Call("prefill.advance", (max_tokens,), self._number)):
            self._launches.wait()
            work = self._prefill.advance(max_tokens)
            self._launches.add()
            return work

    def finish(self) -> Tensor:
        """See Prefill; any exception is a RankError."""
        with self._followers.doing(Call("prefill.finish", number=self._number)):
            return self._prefill.finish()

    def _advance(self, max_tokens: int) -> int:
        raise AssertionError("advance does it")

    def _logits(self) -> Tensor:
        raise AssertionError("finish does it")


class LeadDecoder(Decoder):
    """The decoder of rank 0, with which all ranks decode; errors of its methods are RankErrors."""

    def __init__(self, decoder: Decoder, followers: Followers, ranks: Ranks) -> None:
        super().__init__(decoder.model, decoder.retrieval)
        self._decoder, self._followers, self._ranks, self._closed = decoder, followers, ranks, False
        self._numbers = itertools.count()
        self._launches = BoundedLaunches(self.retrieval.cache.window.device, UNITS_AHEAD)

    @property
    def sums(self) -> str:
        return self._ranks.way

    def prefill(self, prompts: Prompts, on_logits: LogitsCallbacks = NO_CALLBACKS) -> Prefill:
        number = next(self._numbers)
        packed = tuple((slot, tuple(tokens)) for slot, tokens in prompts)
        with self._followers.doing(Begin(number, packed, tuple(on_logits))):
            prefill = self._decoder.prefill(prompts, on_logits)
            return LeadPrefill(prefill, self._followers, self._launches, number, prompts, on_logits)

    def resume(self, slot: int) -> None:
        with self._followers.doing(Call("decoder.resume", (slot,))):
            super().resume(slot)

    def decode(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, list[float]]:
        with self._followers.doing(self._decode(tokens, slots)):
            return self._decoder.decode(tokens, slots)

    @property
    def runs_ahead(self) -> bool:
        """See Decoder. The other ranks get every token from this one, whose host has to know it."""
        return False

    def launch(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        samplers: Sequence[Sampler | None],
        wanted: Wanted = NOBODY,
        steps: int = 1,
    ) -> Launched:
        """See Decoder. The step has ended when this returns; nobody can want the rows that it selects."""
        assert steps == 1, "it does not run ahead"
        with self._followers.doing(self._decode(tokens, slots)):
            launched = self._decoder.launch(tokens, slots, samplers)
            drawn = launched.collect()
        return Launched(launched.attended, lambda: drawn)

    @property
    def most_rows(self) -> int:
        return self._decoder.most_rows

    def prepare_to_verify(self) -> None:
        with self._followers.doing(Call("decoder.prepare_to_verify")):
            self._decoder.prepare_to_verify()

    def verify(self, tokens: Sequence[int], slots: Sequence[int], wanted: Wanted = NOBODY) -> Verification:
        """See Decoder. The step has ended when this returns; nobody can want the rows that it selects."""
        with self._followers.doing(self._decode(tokens, slots, verifies=True)):
            verification = self._decoder.verify(tokens, slots)
            verification.draw([0], [None])

        def draw(rows: Sequence[int], samplers: Sequence[Sampler | None]) -> list[Drawn | int]:
            with self._followers.waiting():
                return verification.draw(rows, samplers)

        return Verification(verification.attended, draw)

    def accept(self, slots: Sequence[int], surplus: Sequence[int]) -> None:
        with self._followers.doing(Call("decoder.accept", (tuple(slots), tuple(surplus)))):
            super().accept(slots, surplus)

    def draw(self, logits: Tensor, samplers: Sequence[Sampler]) -> list[Drawn | int]:
        """See Decoder. The draw may come behind units of a prompt, whose sums wait for the other ranks."""
        with self._followers.waiting():
            return self._decoder.draw(logits, samplers)

    def prepare(self) -> None:
        with self._followers.doing(Call("decoder.prepare")):
            self._decoder.prepare()

    def prefix_rows(self) -> PrefixRows:
        return LeadPrefixRows(super().prefix_rows(), self._followers)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._followers.close()
            self._decoder.close()  # first: NCCL's communicator ends only when no graph uses it
            self._ranks.leave()
            self._followers.stop_watching()

    def _decode(self, tokens: Sequence[int], slots: Sequence[int], *, verifies: bool = False) -> Decode:
        return Decode(tuple(tokens), tuple(slots), digest(self.cache), verifies)


def load_decoder(directory: Path, config: EngineConfig, nodes: Nodes = ONE_NODE) -> Decoder:
    """Load the decoder of an engine directory onto the device of its configuration; raises as `Engine.load`.

    With several ranks, the processes of the others are started, but for those of other nodes; `Decoder.close` ends them.
    """
    check_supported(rank_config(config))
    nodes.ranks(config.tp_size, 0)
    if config.tp_size == 1:
        return load_rank(directory, config)
    return lead(directory, config, nodes)


def lead(
    directory: Path,
    config: EngineConfig,
    nodes: Nodes = ONE_NODE,
    timeout_seconds: float = TIMEOUT_SECONDS,
    stall_seconds: float = STALL_SECONDS,
) -> LeadDecoder:
    """Start the other ranks of an engine and load the part of rank 0; raises as Engine.load, and RankError.

    Waits for ranks of other nodes, however long they take. See Followers for the limits.
    """
    check_gpus(config, nodes.count)
    followers = Followers(directory, config, nodes, timeout_seconds, stall_seconds)
    try:
        # Ranks on GPUs bind themselves to cores near them, and this process may load other engines.
        with bound_meanwhile():
            ranks = followers.join()
            return LeadDecoder(_load(directory, config, followers, ranks), followers, ranks)
    except BaseException:
        followers.close()
        followers.stop_watching()
        raise


def _load(directory: Path, config: EngineConfig, followers: Followers, ranks: Ranks) -> Decoder:
    """Load the part of rank 0, and wait until the others have loaded theirs."""
    decoder: Decoder | None = None
    try:
        decoder = load_rank(directory, rank_config(config), ranks, partial(LeadCache, followers))
        followers.wait_until_loaded()
    except BaseException:
        followers.close()  # first, as this rank may have left a thread in a group that waits for them
        if decoder is not None:
            decoder.close()
        ranks.leave()
        raise
    return decoder
