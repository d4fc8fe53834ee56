"""The methods: each folder of plugins/ that has a method.py. Nothing outside a method's folder names it.

A method has three members: `Config` in config.py, a frozen dataclass of its fields, and in method.py
`traits(config) -> Traits` and `create(context) -> Index` (plugins/contract.py). costs.py and stages.py of its folder are for
measurements alone (measurement/offers.py); the engine does not look at them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.core.fields import from_dict

if TYPE_CHECKING:
    from .contract import Index, IndexContext, Traits


def _scan() -> dict[str, str]:
    """Find every folder beside this file that has a method.py. `full`, with which the others are compared, comes first."""
    folders = {path.parent.name for path in Path(__file__).parent.glob("*/method.py")}
    return {name: f"kvseek.plugins.{name}" for name in sorted(folders, key=lambda name: (name != "full", name))}


METHODS: dict[str, str] = _scan()


@dataclass(frozen=True)
class Method:
    """A method's members, loaded on demand."""

    name: str
    package: str

    @property
    def config_class(self) -> type[Any]:
        """The frozen dataclass of the method's own fields."""
        return cast("type[Any]", importlib.import_module(f"{self.package}.config").Config)

    def configure(self, values: dict[str, Any]) -> Any:
        """Check `values` against the config class; raises ConfigError on unknown keys and bad values."""
        return from_dict(self.config_class, values, self.name)

    def traits(self, config: Any = None) -> Traits:
        """Return the method's traits for a Config of it; None: for its defaults."""
        config = self.configure({}) if config is None else config
        return cast("Traits", importlib.import_module(f"{self.package}.method").traits(config))

    def create(self, context: IndexContext) -> Index:
        """Make the index of one layer."""
        return cast("Index", importlib.import_module(f"{self.package}.method").create(context))


def get_method(name: str) -> Method:
    """Look a method up by name; raises ConfigError that lists the known methods."""
    if name not in METHODS:
        raise ConfigError(f"method = {name!r}: unknown; choose one of {', '.join(METHODS)}")
    return Method(name, METHODS[name])


def method_traits(config: EngineConfig) -> Traits:
    """Return the traits of an engine's method, for the engine's settings of that method."""
    method = get_method(config.method)
    return method.traits(method.configure(config.method_config))
