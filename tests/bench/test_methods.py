"""What methods offer to measurements, and what measurements get of those that offer nothing."""

from __future__ import annotations

import pytest
from tests.plugins.cases import CASES

from kvseek.bench.methods import costs_of, stages_of
from kvseek.core.errors import ConfigError


@pytest.mark.parametrize("method", CASES)
def test_offers_are_those_of_the_methods_folder(method: str) -> None:
    for offer, name in ((costs_of(method), "costs"), (stages_of(method), "stages")):
        assert offer is None or offer.__module__ == f"kvseek.plugins.{method}.{name}"
    assert (stages_of(method) is None) == (CASES[method].losses is None)


def test_what_nobody_wrote_down_is_none() -> None:
    assert costs_of("flat") is None
    assert stages_of("full") is None


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="method = 'nothing': unknown"):
        costs_of("nothing")
