"""One layer's captured keys behind an index: the engine's part of prefill and decode, without a model.

The last queries captured stand for decode steps; all before them is the prompt. The row pool holds, in place of values,
the number of each row's token, so that it is known which token a place holds whatever order a method chooses or changes to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.bench.accuracy.capture import CapturedLayer
from kvseek.bench.methods import batch_of
from kvseek.bench.variants import Variant
from kvseek.core.config import EXTENT_TOKENS, CacheConfig
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import ConfigError
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.core.index_context import IndexContext, LayerRows
from kvseek.plugins.contract import LAST_QUERIES

EXACT_TOKENS = 1 << 24  # token numbers that float32 holds exactly


class Replay:
    """A prompt in slot 0 of one layer, and the decode steps after it; float32 on the CPU.

    Parameters
    ----------
    layer : CapturedLayer
        Keys of all tokens; queries of the last ones, of which `steps` are decode steps and up to 2,048 the prompt's.
    number : int
        Of the layer: methods may attend densely in the first ones.
    library : CpuLibrary or None
        Compiled kernels; None runs the method's reference.

    Attributes
    ----------
    prompt : int
        Tokens before the first decode step.
    length : int
        Tokens of the retrieval region; it begins behind the sink.
    """

    def __init__(
        self, layer: CapturedLayer, number: int, steps: int, variant: Variant, library: CpuLibrary | None = None
    ) -> None:
        self.layer, self.cache = layer, variant.cache
        self.prompt = layer.keys.shape[1] - steps
        self.length = self.prompt - self.cache.sink - self.cache.local
        _check(self.cache, layer.keys.shape[1], steps, self.length)
        self.scaling = layer.scaling
        kv_heads, _, dim = layer.keys.shape
        extents = ExtentTable(1, extents_for(self.length), extents_for(self.length))
        extents.reserve(0, self.length)
        self.pool = torch.zeros(extents.capacity, kv_heads, EXTENT_TOKENS, 2, dim)
        settings, entry = variant.settings, variant.entry
        self.index = entry.create(
            IndexContext(
                layer=number,
                num_heads=layer.queries.shape[0],
                num_kv_heads=kv_heads,
                head_dim=dim,
                scaling=layer.scaling,
                config=settings,
                codebooks=entry.traits(settings).codebooks(dim),
                extents=extents,
                lengths=[self.length],
                dtype=torch.float32,
                device=torch.device("cpu"),
                library=library,
                rows=LayerRows(self.pool, self.pool.data_ptr(), self.pool.stride(0)),
            )
        )
        self._steps = 0
        self._prefill(layer.queries[:, : layer.queries.shape[1] - steps][:, -LAST_QUERIES:])

    @property
    def region(self) -> Tensor:
        """Keys of the retrieval region by token, [G, n, D]."""
        return self.layer.keys[:, self.cache.sink : self.cache.sink + self.length]

    def step(self, query: Tensor) -> Tensor:
        """Select for a decode step's query [H, D], then let the index do its upkeep.

        Returns
        -------
        Tensor, bool [G, n]
            Tokens of the retrieval region that were selected.
        """
        chosen = self.places(query)
        held = self.tokens_by_place()
        self._steps += 1
        self.index.refresh([0])
        return torch.zeros_like(chosen).scatter_(1, held, chosen)

    def places(self, query: Tensor) -> Tensor:
        """Places that the index selects for a decode step's query [H, D], bool [G, n]; no step is counted."""
        batch = batch_of(self.index, position=self.prompt + self._steps)
        selection = self.index.select(query[None], batch)
        if selection is None:
            return torch.ones(self.index.context.num_kv_heads, self.length, dtype=torch.bool)
        return membership(selection.rows[0], self.length)

    def region_weights(self, query: Tensor, step: int) -> Tensor:
        """Attention of decode step `step`'s query [H, D] on the retrieval region by token, [G, g, n]; softmax over all tokens."""
        keys = self.layer.keys[:, : self.prompt + step + 1]  # a query attends to its own token, and to none after it
        grouped = query.view(keys.shape[0], -1, query.shape[-1])
        weights = (grouped @ keys.transpose(1, 2) * self.scaling).softmax(dim=-1)
        return weights[:, :, self.cache.sink : self.cache.sink + self.length]

    def tokens_by_place(self) -> Tensor:
        """Token of the retrieval region that each place holds now, int64 [G, n]."""
        return self.index.context.extents.read(self.pool, 0, self.length)[:, :, 1, 0].long()

    def _prefill(self, queries: Tensor) -> None:
        keys, index = self.region, self.index
        tokens = torch.arange(self.length).expand(keys.shape[0], -1)
        work = index.build(0, keys.contiguous(), queries.contiguous())
        rows = torch.zeros(keys.shape[0], self.length, 2, keys.shape[2])
        rows[:, :, 0], rows[:, :, 1, 0] = keys, tokens.float()
        index.context.extents.write(self.pool, 0, 0, rows)
        if work is not None:
            work.wait()


def _check(cache: CacheConfig, tokens: int, steps: int, length: int) -> None:
    if tokens >= EXACT_TOKENS:
        raise ConfigError(f"--context = {tokens}: must be below {EXACT_TOKENS}; token numbers lie in float32 rows")
    if not 1 <= steps <= cache.update:
        limit = f"between 1 and cache.update = {cache.update}, so that nothing leaves the window"
        raise ConfigError(f"--queries = {steps}: must be {limit}; 32 is the default")
    if length < 1:
        least = cache.sink + cache.local + steps + 1
        raise ConfigError(f"--context = {tokens}: must be at least {least} (sink, local window, queries); raise it")


def membership(rows: Tensor, n: int) -> Tensor:
    """Which of n positions are among rows [G, entries], where -1 is none: bool [G, n]."""
    found = torch.zeros(rows.shape[0], n + 1, dtype=torch.bool, device=rows.device)
    return found.scatter_(1, torch.where(rows < 0, n, rows).long(), True)[:, :n]
