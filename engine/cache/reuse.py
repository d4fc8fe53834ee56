"""Which engines keep rows for later requests, by their configuration alone: processes without PyTorch ask too."""

from __future__ import annotations

from kvseek.core.config import EngineConfig
from kvseek.plugins.registry import method_traits


def reuses_prefixes(config: EngineConfig) -> bool:
    """Whether an engine keeps the rows of requests for later ones that begin alike."""
    alone = config.model.delta_net is None or config.tp_size == 1
    return config.runtime == "torch" and config.cache.reuse is not False and alone


def why_no_reuse(config: EngineConfig) -> str:
    """Say why an engine for which `reuses_prefixes` is false keeps nothing, and how one that does is built."""
    if config.model.delta_net is not None and config.tp_size > 1:
        return f"ranks keep no states of its Gated DeltaNet layers: leave it out, or build with --tp_size 1, not {config.tp_size}"
    cause = "cache.reuse = False" if config.cache.reuse is False else f"runtime = {config.runtime!r}"
    remedy = "--cache.reuse true" if config.cache.reuse is False else "--runtime torch"
    return f"the engine was built with {cause}: leave it out, or build with {remedy}"


def shares_extents(config: EngineConfig) -> bool:
    """Whether requests of an engine may have extents in common."""
    return reuses_prefixes(config) and method_traits(config).prefix_reuse != "copies"
