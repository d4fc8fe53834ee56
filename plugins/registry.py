"""The methods: each folder of plugins/ that has a method.py, and of plugins/peers/, where the competing systems are. Nothing
outside a method's folder names it.

A method has three members: `Config` in config.py, a frozen dataclass of its fields, and in method.py
`traits(config) -> Traits` and `create(context) -> Index` (plugins/contract.py). A method of a paper has `PAPER` beside Config,
too: what the paper sets, by field; fields of the cache are `cache.NAME`. Where a row that is not selected once is gone for good,
there is `EVICTS = True`. A short method has all of them in method.py. measurements.py of its folder is for measurements alone
(bench/methods.py): the engine does not look at it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError, from_dict

if TYPE_CHECKING:
    from kvseek.core.index_context import IndexContext

    from .contract import Index, Traits


def _scan(where: str = "") -> dict[str, str]:
    """Find the folders of `where` that have a method.py. `full`, with which the others are compared, comes first."""
    folders = {path.parent.name for path in Path(__file__).parent.glob(f"{where}*/method.py")}
    package = "kvseek.plugins." + where.replace("/", ".")
    return {name: package + name for name in sorted(folders, key=lambda name: (name != "full", name))}


METHODS: dict[str, str] = _scan()
PEERS: dict[str, str] = _scan("peers/")  # named like a method, but listed, imported and given flags only then
CACHE_PREFIX = "cache."  # of the cache's fields among those of a preset
PAPER = "paper"  # the one preset: the method's settings in its paper


@dataclass(frozen=True)
class Method:
    """A method's members, loaded on demand."""

    name: str
    package: str

    @property
    def _settings(self) -> Any:
        """The module of Config: config.py, or the only one."""
        own = f"{self.package}.config"
        return importlib.import_module(own if find_spec(own) else f"{self.package}.method")

    @property
    def config_class(self) -> type[Any]:
        """The frozen dataclass of the method's own fields."""
        return cast("type[Any]", self._settings.Config)

    @property
    def paper(self) -> dict[str, Any]:
        """What the method's paper sets, as its flags are called without the method's name; empty for a method of no paper."""
        return dict(getattr(self._settings, "PAPER", {}))

    @property
    def evicts(self) -> bool:
        """Whether a row that is not selected once is gone for good."""
        return bool(getattr(self._settings, "EVICTS", False))

    def preset(self, name: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of the method and those of the cache that a preset sets; none of them for None, the defaults.

        Raises
        ------
        ConfigError
            If the method has no preset of that name.
        """
        if name is None:
            return {}, {}
        if name != PAPER or not self.paper:
            having = [method for method in METHODS if get_method(method).paper]
            raise ConfigError(
                f"preset = {name!r}: method {self.name} has none of that name; leave it out: {PAPER!r} is one of "
                f"{', '.join(having)}"
            )
        cache = {
            key.removeprefix(CACHE_PREFIX): value for key, value in self.paper.items() if key.startswith(CACHE_PREFIX)
        }
        return {key: value for key, value in self.paper.items() if not key.startswith(CACHE_PREFIX)}, cache

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
    known = METHODS | PEERS
    if name not in known:
        raise ConfigError(f"method = {name!r}: unknown; choose one of {', '.join(known)}")
    return Method(name, known[name])


def method_traits(config: EngineConfig) -> Traits:
    """Return the traits of an engine's method, for the engine's settings of that method."""
    method = get_method(config.method)
    return method.traits(method.configure(config.method_config))


def reports_rows(config: EngineConfig) -> bool:
    """Whether the process of an engine sees the rows that all layers and KV heads select."""
    seen = config.device == "cpu" or method_traits(config).reports_rows
    return config.runtime == "torch" and config.tp_size == 1 and seen
