"""What the tests that every method goes through need to know of a method: `CASES` in tests/plugins/<method>/cases.py.

A folder of plugins/ is found by a scan (plugins/registry.py), and so are its cases: a new method edits no list of tests. Those of
the competing systems are all in tests/plugins/peers/cases.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvseek.plugins.registry import METHODS, PEERS

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class NeedleCase:
    """What real engines must find in 4K tokens with the method's defaults (tests/bench/accuracy/test_tasks.py)."""

    margin: float  # points of 100 that the mean over the tasks may lose
    tasks: str = "niah_single,niah_multivalue,variable_tracking"
    most_attended: float = 0.6  # share of the cached tokens


@dataclass(frozen=True)
class MethodCases:
    """Settings, fields of the method's Config by name, for the common tests.

    sparse: an engine selects rows with them from prompts of some 200 tokens.
    index: an index alone keeps 64 rows with them (for a method that is not dense).
    options: further settings, each of which goes through the tests of indexes together with those of `index`.
    everything: every row of 8,192 tokens is kept.
    on_gpu: settings with which an engine on a GPU keeps few of 500 tokens, each under its own name; none for a method
        that has no index for the GPU.
    counted: settings whose bytes on a GPU are counted without one, beside the defaults.
    mass: least share of the softmax mass of exact top-k after long growth; a random choice of the rows keeps less than a tenth.
    recall: least share of the softmax mass of exact top-k, on real keys, at 1,024 of 8,192 tokens; None: not measured.
    needle: see NeedleCase; None: not measured.
    refused: fields that are refused, with what the message says.
    paper: what `--preset paper` makes of the method's fields and of the cache's; none for a method of no paper.
    """

    sparse: Settings
    index: Settings = field(default_factory=dict)
    options: tuple[Settings, ...] = ()
    everything: Settings = field(default_factory=lambda: {"top_k": 8192})
    on_gpu: Mapping[str, Settings] = field(default_factory=dict)
    counted: tuple[Settings, ...] = ()
    mass: float = 0.45
    recall: float | None = None
    needle: NeedleCase | None = None
    refused: tuple[tuple[Settings, str], ...] = ()
    paper: Settings = field(default_factory=dict)

    @property
    def dense(self) -> bool:
        """Whether the method attends to every row, whatever its settings."""
        return not self.everything


def method_flags(method: str, settings: Settings) -> tuple[str, ...]:
    """Settings of a method as flags of `kvseek build`."""
    return tuple(word for name, value in settings.items() for word in (f"--{method}.{name}", str(value)))


def _cases(method: str) -> MethodCases:
    try:
        found: MethodCases = importlib.import_module(f"tests.plugins.{method}.cases").CASES
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: give the method {method} a tests/plugins/{method}/cases.py") from error
    return found


CASES: dict[str, MethodCases] = {method: _cases(method) for method in METHODS}
CASES |= {peer: importlib.import_module("tests.plugins.peers.cases").CASES[peer] for peer in PEERS}
WITH_PAPER = [method for method, cases in CASES.items() if cases.paper]
SELECTING = [method for method, cases in CASES.items() if not cases.dense]
ON_GPU = [method for method, cases in CASES.items() if cases.on_gpu]
