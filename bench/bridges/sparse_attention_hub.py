"""A masker for sparse-attention-hub (xAlg-ai, Apache-2.0) whose mask is what a method of kvseek selects.

    ResearchAttentionConfig(masker_configs=[KvseekMaskerConfig("nested", {"top_k": 256})])

The hub reads a context with dense attention and asks no masker. So the masker meets the context's keys with the first tokens of
the question, and never its queries: methods whose index is made from a prompt's queries are refused by name, unless the
hub's sparse mode is on while the context is read. The mask has a window of its own: no sink or local masker need stand beside it.

The hub is no package of PyPI, and CI skips the tests that need it: `make test-bridges` runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparse_attention_hub.sparse_attention.research_attention.maskers.base import (
    MaskerConfig,
    MaskerRegistry,
    ResearchMasker,
)
from sparse_attention_hub.sparse_attention.utils.mask import Mask
from torch import Tensor

from kvseek.core.errors import require

from .selector import Selector


@dataclass
class KvseekMaskerConfig(MaskerConfig):  # type: ignore[misc]  # what the hub gives mypy is Any
    """See Selector."""

    method: str = "nested"
    settings: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int = 4096


@MaskerRegistry.register(KvseekMaskerConfig)
class KvseekMasker(ResearchMasker):  # type: ignore[misc]
    """Adds to a mask what is selected, for one sequence at a time; a sequence begins with its sparse_meta_data."""

    def __init__(self, config: KvseekMaskerConfig) -> None:
        """Raise ConfigError for what a Selector refuses."""
        super().__init__(config)
        self.selector = Selector(**vars(config))

    @classmethod
    def create_from_config(cls, config: KvseekMaskerConfig) -> KvseekMasker:
        """Make the masker."""
        return cls(config)

    def add_mask(
        self,
        keys: Tensor,
        queries: Tensor,
        values: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        dropout: float,
        sparse_meta_data: dict[Any, Any],
        previous_mask: Mask,
        **kwargs: Any,
    ) -> Mask:
        """Merge the mask with what is selected for queries [1, H, q, D], the last tokens of keys [1, G, n, D]."""
        layer, new, n = kwargs["layer_idx"], queries.shape[2], keys.shape[2]
        begun: set[int] = sparse_meta_data.setdefault(self, set())
        if new == n:  # the hub's sparse mode is on while the context is read
            begun.add(layer)
            self.selector.begin(layer, keys, queries, scaling)
            return Mask.create_full_mask((*queries.shape[:3], n), previous_mask.dtype, previous_mask.device)
        if layer not in begun:
            begun.add(layer)
            needs, method = self.selector.needs_queries(n - new), self.selector.method.name
            remedy = "choose one without, or read the context in the hub's sparse mode"
            require(not needs, "method", method, "one whose index needs no queries of the context", remedy)
            self.selector.begin(layer, keys[:, :, : n - new], queries[:, :, :0], scaling)
        chosen = self.selector.choose(layer, queries, keys)
        mask = Mask.create_mask_from_dense_mask(tuple(chosen.shape), chosen.to(queries.dtype), previous_mask.dtype)
        return previous_mask.merge_mask(mask, inplace=False)
