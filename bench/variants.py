"""Variants of methods for measurements: a registered name, with other values for fields of the method, the cache or the engine.

For example BASELINE,NAME,NAME:field=value,field=value,OTHER:cache.local=256,OTHER:paper names five.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvseek.core.command_line import optional_size
from kvseek.core.config import CHOICES, BlockSparseConfig, CacheConfig, EngineConfig
from kvseek.core.errors import ConfigError, from_dict, require
from kvseek.plugins.registry import CACHE_PREFIX, METHODS, PAPER, PEERS, Method, get_method

DENSE = EngineConfig.prefill_attention
BLOCK_SPARSE_PREFIX = "block_sparse."
ENGINE_FIELDS = (
    "weight_only_precision",
    "weight_group",
    "quantize_lm_head",
    "prefill_attention",
    "prefill_precision",
    "prefill_chunk_tokens",
)
ALL = ("full", *(name for name in (*METHODS, *PEERS) if name != "full"))  # what `--methods all` names
FORM = (
    f"all, NAME, NAME:field=value,field=value or NAME:{PAPER},field=value, which begins with the settings of its paper; fields "
    f"of the cache are cache.NAME, of the engine block_sparse.NAME, {', '.join(ENGINE_FIELDS)}"
)


class WeightForm(NamedTuple):
    """Fields of EngineConfig that say how weights are stored."""

    weight_only_precision: str = EngineConfig.weight_only_precision
    weight_group: int = EngineConfig.weight_group
    quantize_lm_head: bool = EngineConfig.quantize_lm_head

    @classmethod
    def of(cls, config: EngineConfig) -> WeightForm:
        """Those of an engine."""
        return cls(*(getattr(config, name) for name in cls._fields))


PLAIN = WeightForm()


@dataclass(frozen=True)
class Variant:
    """A method with settings.

    Attributes
    ----------
    label : str
        The variant as it was written; unique in a run.
    fields, cache_fields, block_sparse_fields, engine_fields : dict
        Fields that differ from the defaults: of the method, its cache, BlockSparseConfig, and of EngineConfig (ENGINE_FIELDS).
    """

    label: str
    method: str
    fields: dict[str, Any] = field(default_factory=dict, hash=False)
    cache_fields: dict[str, Any] = field(default_factory=dict, hash=False)
    block_sparse_fields: dict[str, Any] = field(default_factory=dict, hash=False)
    engine_fields: dict[str, Any] = field(default_factory=dict, hash=False)

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
    def engine(self) -> dict[str, Any]:
        """Fields of EngineConfig: ENGINE_FIELDS, and `block_sparse`, what prompts attend to."""
        sparse = from_dict(BlockSparseConfig, self.block_sparse_fields, "block_sparse")
        return (
            {name: getattr(EngineConfig, name) for name in ENGINE_FIELDS}
            | self.engine_fields
            | {"block_sparse": sparse}
        )

    @property
    def weights(self) -> WeightForm:
        """How an engine of the variant stores weights."""
        return WeightForm(**{name: self.engine[name] for name in WeightForm._fields})

    @property
    def prompt_attention(self) -> tuple[str, BlockSparseConfig]:
        """What prompts attend to."""
        return self.engine["prefill_attention"], self.engine["block_sparse"]

    def flags(self) -> list[str]:
        """Return the flags of `kvseek build` that make such an engine."""
        named = dict(self.engine_fields)
        named |= {f"{self.method}.{name}": value for name, value in self.fields.items()}
        named |= {CACHE_PREFIX + name: value for name, value in self.cache_fields.items()}
        named |= {BLOCK_SPARSE_PREFIX + name: value for name, value in self.block_sparse_fields.items()}
        words = ["--method", self.method]
        for name, value in named.items():
            if name != "quantize_lm_head":
                words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
            elif value:
                words.append(f"--{name}")
        return words

    def laid_out_as(self, cache: CacheConfig) -> Variant:
        """Make the same variant with the window sizes of another cache."""
        names = ("sink", "local", "update", "full_threshold")
        windows = {name: getattr(cache, name) for name in names}
        return dataclasses.replace(self, cache_fields={**self.cache_fields, **windows})

    def with_fields(self, **values: Any) -> Variant:
        """Make the same variant with further fields set; fields that it already sets are kept."""
        return dataclasses.replace(self, fields={**values, **self.fields})

    def within(self, budget: int) -> Variant:
        """Make the same variant with the rows that a budget of tokens leaves beside its window, in whole pages.

        A window of more than half of the budget becomes a sink of a sixteenth and a local window of a quarter of it, unless the
        variant sets their sizes. A top_k that it sets is kept.

        Raises
        ------
        ConfigError
            If the window leaves no room, or the method has no top_k.
        """
        if not hasattr(self.settings, "top_k"):
            raise ConfigError(f"--methods: {self.label!r}: must be a method with a field top_k; leave it out")
        sized, page = self, getattr(self.settings, "page", 1)
        if 2 * (self.cache.sink + self.cache.local) > budget:
            sizes = {"sink": budget // 16, "local": budget // 4}
            sized = dataclasses.replace(self, cache_fields={**sizes, **self.cache_fields})
        window = sized.cache.sink + sized.cache.local
        limit = f">= {window + page}, as the window of {self.label!r} has {window} tokens"
        require(budget >= window + page, "--budget", budget, limit, "raise it")
        return sized.with_fields(top_k=(budget - window) // page * page)

    def with_engine(self, **values: Any) -> Variant:
        """Make the same variant with these fields of the engine."""
        return dataclasses.replace(self, engine_fields={**self.engine_fields, **values})


def parse_variants(text: str) -> list[Variant]:
    """Read the comma-separated list of variants of --methods, each at most once; raises ConfigError.

    A part with "=" but no ":" before it is a further field of the variant before it. `all` stands for ALL.
    """
    text = ",".join(ALL) if text == "all" else text
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
        _ = variant.settings, variant.cache, variant.engine  # raises if a field does not exist or is out of range
    return variants


def _parse(label: str) -> Variant:
    method, colon, listed = label.partition(":")
    assignments = listed.split(",") if colon else []
    preset = assignments.pop(0) if assignments[:1] == [PAPER] else None
    own, cache = get_method(method).preset(preset)
    block_sparse, engine = dict[str, Any](), dict[str, Any]()
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not name or not equals:
            raise ConfigError(f"--methods = {label!r}: must be {FORM}")
        if name.startswith(CACHE_PREFIX):
            cache[name.removeprefix(CACHE_PREFIX)] = _size(name, text) if name.endswith("_bytes") else _value(text)
        elif name.startswith(BLOCK_SPARSE_PREFIX):
            block_sparse[name.removeprefix(BLOCK_SPARSE_PREFIX)] = _value(text)
        elif name in ENGINE_FIELDS:
            engine[name] = _engine_value(name, _value(text))
        else:
            own[name] = _value(text)
    idle = bool(block_sparse) and engine.get("prefill_attention", DENSE) == DENSE
    remedy = "name prefill_attention=block_sparse, too"
    require(not idle, "--methods: block_sparse", block_sparse, "left out with dense prompts", remedy)
    return Variant(label, method, own, cache, block_sparse, engine)


def _engine_value(name: str, value: Any) -> Any:
    """The value of one of ENGINE_FIELDS; raises ConfigError if it is of another kind than the default."""
    usual = getattr(EngineConfig, name)
    if name in CHOICES:
        fits, limit = value in CHOICES[name], f"one of {CHOICES[name]}"
    elif isinstance(usual, bool):
        fits, limit = isinstance(value, bool), "true or false"
    else:
        fits, limit = type(value) is int and value > 0, "a whole number > 0"
    require(fits, f"--methods: {name}", value, limit, f"leave it out for {json.dumps(usual)}")
    return value


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
