"""Fields of the nested method: JSON, what is refused, and how many candidates they mean."""

from __future__ import annotations

import dataclasses

import pytest

from kvseek.core.errors import ConfigError
from kvseek.core.fields import from_dict
from kvseek.plugins.nested.config import Config


def test_goes_through_json_values() -> None:
    config = Config(top_k=64, candidates=3, rotation_seed=9)
    assert from_dict(Config, dataclasses.asdict(config), "nested") == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, "top_k = 0: must be >= 1"),
        ({"candidates": 0}, "candidates = 0: must be >= 1"),
        ({"rotation_seed": -1}, "rotation_seed = -1: must be in"),
    ],
)
def test_errors_name_field_value_and_limit(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_dict(Config, fields, "nested")
    assert message in str(error.value)


def test_candidates_are_so_many_a_row() -> None:
    assert [Config().candidate_count(n) for n in (0, 350, 800, 100_000)] == [0, 350, 800, 800]
