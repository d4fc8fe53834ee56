"""Variants of methods for measurements: a registered name, with other values for fields of the method or of the cache.

For example BASELINE,NAME,NAME:field=value,field=value,OTHER:cache.local=256,OTHER:paper names five.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from kvseek.core.config import CHOICES, BlockSparseConfig, CacheConfig, EngineConfig, require
from kvseek.core.errors import ConfigError
from kvseek.core.fields import from_dict
from kvseek.core.sizes import optional_size
from kvseek.core.weight_only import NONE
from kvseek.plugins.registry import CACHE_PREFIX, PAPER, Method, get_method

DENSE = "dense"
BLOCK_SPARSE_PREFIX = "block_sparse."
# The engine's fields that a variant may set.
PRECISION, QUANTIZE_HEAD, PREFILL_ATTENTION = "weight_only_precision", "quantize_lm_head", "prefill_attention"
CHUNK, CHUNK_TOKENS = "prefill_chunk_tokens", EngineConfig.prefill_chunk_tokens
FORM = (
    f"NAME, NAME:field=value,field=value or NAME:{PAPER},field=value, which begins with the settings of its paper; fields of "
    f"the cache are cache.NAME, of the engine {PRECISION}, {QUANTIZE_HEAD}, {PREFILL_ATTENTION}, block_sparse.NAME and {CHUNK}"
)


@dataclass(frozen=True)
class Variant:
    """A method with settings.

    Attributes
    ----------
    label : str
        The variant as it was written; unique in a run.
    fields, cache_fields : dict
        Fields that differ from the defaults of the method, and of its cache.
    weight_only_precision : str
        Precision of the layers' weights; see EngineConfig.
    quantize_lm_head : bool
        Whether the output head has int8 weights, too; see EngineConfig.
    prefill_attention : str
        What prompts attend to; see EngineConfig.
    block_sparse_fields : dict
        Fields of `block_sparse` that differ from its defaults.
    prefill_chunk_tokens : int
        Prompt tokens that one unit of prefill processes; see EngineConfig.
    """

    label: str
    method: str
    fields: dict[str, Any] = field(default_factory=dict, hash=False)
    cache_fields: dict[str, Any] = field(default_factory=dict, hash=False)
    weight_only_precision: str = NONE
    prefill_attention: str = DENSE
    block_sparse_fields: dict[str, Any] = field(default_factory=dict, hash=False)
    quantize_lm_head: bool = False
    prefill_chunk_tokens: int = CHUNK_TOKENS

    @property
    def entry(self) -> Method:
        """The method's members."""
        return get_method(self.method)

    @property
    def settings(self) -> Any:
        """The method's own config; raises ConfigError on fields that it does not have."""
        return self.entry.configure(self.fields)

    @property
    def cache(self) -> CacheConfig:
        """Configuration of the cache: the method's defaults, and the variant's own fields."""
        defaults = self.entry.traits(self.settings).cache_defaults
        return from_dict(CacheConfig, {**defaults, **self.cache_fields}, "cache")

    @property
    def block_sparse(self) -> BlockSparseConfig:
        """What prompts attend to with prefill_attention = "block_sparse"."""
        return from_dict(BlockSparseConfig, self.block_sparse_fields, "block_sparse")

    @property
    def prompt_attention(self) -> tuple[str, BlockSparseConfig]:
        """What prompts attend to."""
        return self.prefill_attention, self.block_sparse

    def flags(self) -> list[str]:
        """Return the flags of `kvseek build` that make such an engine."""
        named = {f"{self.method}.{name}": value for name, value in self.fields.items()}
        named |= {CACHE_PREFIX + name: value for name, value in self.cache_fields.items()}
        named |= {BLOCK_SPARSE_PREFIX + name: value for name, value in self.block_sparse_fields.items()}
        words = ["--method", self.method]
        if self.weight_only_precision != NONE:
            words += [f"--{PRECISION}", self.weight_only_precision]
        if self.quantize_lm_head:
            words.append(f"--{QUANTIZE_HEAD}")
        if self.prefill_attention != DENSE:
            words += [f"--{PREFILL_ATTENTION}", self.prefill_attention]
        if self.prefill_chunk_tokens != CHUNK_TOKENS:
            words += [f"--{CHUNK}", str(self.prefill_chunk_tokens)]
        for name, value in named.items():
            words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
        return words

    def laid_out_as(self, cache: CacheConfig) -> Variant:
        """Make the same variant with the window sizes of another cache."""
        names = ("sink", "local", "update", "full_threshold")
        windows = {name: getattr(cache, name) for name in names}
        return dataclasses.replace(self, cache_fields={**self.cache_fields, **windows})

    def with_fields(self, **values: Any) -> Variant:
        """Make the same variant with further fields set; fields that it already sets are kept."""
        return dataclasses.replace(self, fields={**values, **self.fields})


def parse_variants(text: str) -> list[Variant]:
    """Read the comma-separated list of variants of --methods, each at most once; raises ConfigError.

    A part with "=" but no ":" before it is a further field of the variant before it.
    """
    labels: list[str] = []
    for part in text.split(","):
        if labels and "=" in part and ":" not in part.partition("=")[0]:
            labels[-1] += f",{part}"
        else:
            labels.append(part)
    if len(set(labels)) < len(labels):
        raise ConfigError(f"--methods = {text!r}: must name each once; leave the second out")
    variants = [_parse(label) for label in labels]
    for variant in variants:
        _ = variant.settings, variant.cache, variant.block_sparse  # raises if a field does not exist or is out of range
    return variants


def _parse(label: str) -> Variant:
    method, colon, listed = label.partition(":")
    assignments = listed.split(",") if colon else []
    preset = assignments.pop(0) if assignments[:1] == [PAPER] else None
    own, cache = get_method(method).preset(preset)
    block_sparse: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise ConfigError(f"--methods = {label!r}: must be {FORM}")
        if name.startswith(CACHE_PREFIX):
            cache[name.removeprefix(CACHE_PREFIX)] = _size(name, value) if name.endswith("_bytes") else _value(value)
        elif name.startswith(BLOCK_SPARSE_PREFIX):
            block_sparse[name.removeprefix(BLOCK_SPARSE_PREFIX)] = _value(value)
        else:
            own[name] = _value(value)
    precision, attention = (
        _choice(own, name, usual) for name, usual in ((PRECISION, NONE), (PREFILL_ATTENTION, DENSE))
    )
    idle, remedy = attention == DENSE and bool(block_sparse), f"name {PREFILL_ATTENTION}=block_sparse, too"
    require(not idle, "--methods: block_sparse", block_sparse, "left out with dense prompts", remedy)
    head = own.pop(QUANTIZE_HEAD, False)
    require(isinstance(head, bool), f"--methods: {QUANTIZE_HEAD}", head, "true or false", "leave it out for false")
    chunk = own.pop(CHUNK, CHUNK_TOKENS)
    whole = type(chunk) is int and chunk > 0
    require(whole, f"--methods: {CHUNK}", chunk, "a whole number > 0", f"leave it out for {CHUNK_TOKENS}")
    return Variant(label, method, own, cache, precision, attention, block_sparse, head, chunk)


def _choice(fields: dict[str, Any], name: str, usual: str) -> str:
    """Take an engine's field out of a variant's."""
    value, choices = fields.pop(name, usual), CHOICES[name]
    require(value in choices, f"--methods: {name}", value, f"one of {choices}", f"leave it out for {usual}")
    return str(value)


def _size(name: str, text: str) -> int | None:
    """Parse a size in bytes, as the flag of the same name takes it; raises ConfigError."""
    try:
        return optional_size(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--methods: {name} = {error}") from None


def _value(text: str) -> Any:
    """Parse a value as JSON (numbers, true, null); text that is no JSON is returned unchanged."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
