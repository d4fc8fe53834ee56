"""What an engine of kvseek would attend to, over the keys and queries of somebody else's model.

Kept of a method: its index, by the PyTorch reference, and the engine's window, evictions and `full_threshold`. The prompt
attends to everything. Not kept: where rows lie, and speed. All keys and values stay in the caller's cache. The index and a copy
of its keys are on the CPU, wherever the model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvseek.core.batch import Batch, RequestState
from kvseek.core.config import EXTENT_TOKENS, CacheConfig
from kvseek.core.errors import from_dict, require
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.core.index_context import IndexContext, LayerRows
from kvseek.engine.cache.cache import retrieval_tokens
from kvseek.plugins.contract import LAST_QUERIES
from kvseek.plugins.registry import get_method


class Selector:
    """Chooses keys for one sequence at a time, layer by layer: `begin` with its prompt, `choose` for all later tokens.

    Parameters
    ----------
    method : str
        Name of a method or of a competing system.
    settings : mapping
        Fields of the method's Config that are not left at their defaults, such as top_k.
    cache : mapping
        The same of CacheConfig: sink, local, update, full_threshold.
    max_new_tokens : int
        Most tokens behind a prompt, for which index arrays have room.

    Raises
    ------
    ConfigError
        If a method, a field or a value is unknown or out of range.
    """

    def __init__(
        self,
        method: str = "nested",
        settings: Mapping[str, Any] | None = None,
        cache: Mapping[str, Any] | None = None,
        max_new_tokens: int = 4096,
    ) -> None:
        self.method = get_method(method)
        self.config = self.method.configure({**(settings or {})})
        self.traits = self.method.traits(self.config)
        self.cache = from_dict(CacheConfig, {**self.traits.cache_defaults, **(cache or {})}, "cache")
        require(max_new_tokens >= 0, "max_new_tokens", max_new_tokens, ">= 0", "4096 is the default")
        self.max_new_tokens = max_new_tokens
        self.shared: dict[str, Any] = {}  # work space that the layers have in common
        self._layers: dict[int, LayerSelection] = {}
        self._codebooks: dict[int, dict[str, Tensor]] = {}

    def needs_queries(self, tokens: int) -> bool:
        """Whether the index of a prompt of `tokens` tokens is made from the prompt's queries, too."""
        return self.traits.last_queries(retrieval_tokens(self.cache, tokens)) > 0

    def codebooks(self, head_dim: int) -> dict[str, Tensor]:
        """Return the method's codebooks, which are made once."""
        if head_dim not in self._codebooks:
            self._codebooks[head_dim] = self.traits.codebooks(head_dim)
        return self._codebooks[head_dim]

    @torch.no_grad()
    def begin(self, layer: int, keys: Tensor, queries: Tensor, scaling: float) -> None:
        """Index a layer of a prompt; the sequence before it is forgotten.

        Parameters
        ----------
        keys : Tensor [1, G, n, D]
            As attention uses them.
        queries : Tensor [1, H, w, D]
            The last w queries of the prompt; all of them, or none if the method does not need them.
        scaling : float
            Softmax scale.
        """
        check_single(keys)
        self._layers[layer] = LayerSelection(self, layer, keys[0], queries[0], scaling)

    @torch.no_grad()
    def choose(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Choose keys for the latest tokens, one after the other.

        Parameters
        ----------
        queries : Tensor [1, H, q, D]
        keys : Tensor [1, G, n, D]
            All keys of the sequence, those of these tokens included.

        Returns
        -------
        Tensor, bool [1, H, q, n]
            What each query attends to, no later token among it; alike for the query heads that share a KV head.
        """
        check_single(keys)
        begun = layer in self._layers
        require(begun, "layer", layer, "one that has begun with a prompt", "let the prompt pass the model first")
        chosen = self._layers[layer].choose(queries[0], keys[0])
        return chosen.repeat_interleave(queries.shape[1] // keys.shape[1], dim=0)[None]


def check_single(keys: Tensor) -> None:
    """Raise ConfigError if there are several sequences, whose padding would take places of the sink."""
    require(keys.shape[0] == 1, "sequences of a batch", keys.shape[0], "1", "give them one by one")


class LayerSelection:
    """The index of one layer over one sequence, in slot 0, and the keys of its retrieval region."""

    def __init__(self, selector: Selector, layer: int, keys: Tensor, queries: Tensor, scaling: float) -> None:
        """Index the prompt: keys [G, n, D], queries [H, w, D]."""
        kv_heads, n, head_dim = keys.shape
        self.cache, self.tokens, self.most_tokens = selector.cache, n, n + selector.max_new_tokens
        capacity = max(1, extents_for(retrieval_tokens(self.cache, self.most_tokens)))
        self.extents = ExtentTable(1, capacity, capacity)
        self.extents.reserve(0, capacity * EXTENT_TOKENS)
        self.lengths = [retrieval_tokens(self.cache, self.tokens)]
        pool = torch.empty((capacity, kv_heads, EXTENT_TOKENS, 2, head_dim), dtype=keys.dtype)
        self.pool_keys = pool[:, :, :, 0]  # no index reads values
        self.index = selector.method.create(
            IndexContext(
                layer=layer,
                num_heads=queries.shape[0],
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                scaling=scaling,
                config=selector.config,
                codebooks=selector.codebooks(head_dim),
                extents=self.extents,
                lengths=self.lengths,
                dtype=keys.dtype,
                device=pool.device,
                update=self.cache.update,
                rows=LayerRows(pool, pool.data_ptr(), pool.stride(0)),
                shared=selector.shared,
            )
        )
        region = self._region_keys(keys, 0, self.lengths[0])
        work = self.index.build(0, region, queries[:, -LAST_QUERIES:].cpu().contiguous())
        if work is not None:
            work.wait()

    def choose(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Choose for the last q tokens: queries [H, q, D], keys [G, n, D] to bool [G, q, n]."""
        (kv_heads, n, _), new = keys.shape, queries.shape[1]
        follow = f"{self.tokens + new}, those of {self.tokens} tokens before and of {new} new ones"
        require(n == self.tokens + new, "keys", n, follow, "a cache must hold one whole sequence, as DynamicCache does")
        most = f"at most {self.most_tokens}, the prompt's and max_new_tokens more"
        require(n <= self.most_tokens, "keys", n, most, "give the selector a larger max_new_tokens")
        chosen, queries = torch.zeros((kv_heads, new, n), dtype=torch.bool), queries.cpu()
        for number in range(new):
            self._count_token(keys)
            chosen[:, number, : self.tokens] = self._attended(queries[:, number])
        return chosen.to(keys.device)

    def _count_token(self, keys: Tensor) -> None:
        """Count one more token, and move those that leave the window because of it to the index."""
        self.tokens += 1
        while (start := self.lengths[0]) < retrieval_tokens(self.cache, self.tokens):
            update = self.cache.update
            self.index.append(0, start, self._region_keys(keys, start, start + update))
            self.lengths[0] += update
            self.index.publish(0, start, update)

    def _region_keys(self, keys: Tensor, start: int, stop: int) -> Tensor:
        """Return the keys [G, u, D] of some places, which the pool holds from now on."""
        own = keys[:, self.cache.sink + start : self.cache.sink + stop].cpu().contiguous()
        self.extents.write(self.pool_keys, 0, start, own)
        return own

    def _attended(self, queries: Tensor) -> Tensor:
        """Tell what the latest token attends to: queries [H, D] to bool [G, tokens]."""
        length, sink = self.lengths[0], self.cache.sink
        attended = queries.new_ones((self.pool_keys.shape[1], self.tokens), dtype=torch.bool)
        budget = self.index.budget(length) if length else None
        if budget is None or self.tokens < self.cache.full_threshold or budget.rows >= length:
            return attended
        state = RequestState(slot=0, length=length, method_fields=budget.method_fields)
        selection = self.index.select(queries[None], Batch.of([state], self.extents.device_table))
        if selection is not None:
            rows = selection.rows[0].long()
            chosen = attended.new_zeros((len(rows), length + 1))
            chosen.scatter_(1, rows.where(rows >= 0, length), True)
            attended[:, sink : sink + length] = chosen[:, :length]
        self.index.refresh([0])
        return attended
