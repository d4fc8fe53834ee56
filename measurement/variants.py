"""Variants of methods for measurements: a registered name, with other values for fields of the method or of the cache.

For example BASELINE,NAME,NAME:field=value,field=value,OTHER:cache.local=256 names four.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from kvseek.core.config import CHOICES, CacheConfig, require
from kvseek.core.errors import ConfigError
from kvseek.core.fields import from_dict
from kvseek.engine.model.weight_only import NONE
from kvseek.plugins.registry import Method, get_method

CACHE_PREFIX = "cache."
PRECISION = "weight_only_precision"  # the engine's field that a variant may set
FORM = f"NAME or NAME:field=value,field=value; fields of the cache are cache.NAME, of the engine {PRECISION}"


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
    """

    label: str
    method: str
    fields: dict[str, Any] = field(default_factory=dict, hash=False)
    cache_fields: dict[str, Any] = field(default_factory=dict, hash=False)
    weight_only_precision: str = NONE

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

    def flags(self) -> list[str]:
        """Return the flags of `kvseek build` that make such an engine."""
        named = {f"{self.method}.{name}": value for name, value in self.fields.items()}
        named |= {CACHE_PREFIX + name: value for name, value in self.cache_fields.items()}
        words = ["--method", self.method]
        if self.weight_only_precision != NONE:
            words += [f"--{PRECISION}", self.weight_only_precision]
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
        _ = variant.settings, variant.cache  # raises if a field does not exist or is out of range
    return variants


def _parse(label: str) -> Variant:
    method, colon, listed = label.partition(":")
    own: dict[str, Any] = {}
    cache: dict[str, Any] = {}
    for assignment in listed.split(",") if colon else ():
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise ConfigError(f"--methods = {label!r}: must be {FORM}")
        if name.startswith(CACHE_PREFIX):
            cache[name.removeprefix(CACHE_PREFIX)] = _value(value)
        else:
            own[name] = _value(value)
    precision, choices = own.pop(PRECISION, NONE), CHOICES[PRECISION]
    require(precision in choices, f"--methods: {PRECISION}", precision, f"one of {choices}", "leave it out for none")
    return Variant(label, method, own, cache, precision)


def _value(text: str) -> Any:
    """Parse a value as JSON (numbers, true, null); text that is no JSON is returned unchanged."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
