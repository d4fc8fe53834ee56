"""Fields of the nested method: JSON, what is refused, and how many candidates they mean."""

from __future__ import annotations

import dataclasses

import pytest

from kvseek.core.errors import ConfigError
from kvseek.core.fields import from_dict
from kvseek.plugins.nested.config import Config


def test_goes_through_json_values() -> None:
    config = Config(top_k=64, group_reduce="max", first_bits=4, candidates=3, rotation_seed=9)
    assert from_dict(Config, dataclasses.asdict(config), "nested") == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, "top_k = 0: must be >= 1"),
        ({"group_reduce": "median"}, "group_reduce = 'median': must be one of"),
        ({"first_bits": 3}, "first_bits = 3: must be 2 or 4"),
        ({"candidates": 0}, "candidates = 0: must be >= 1"),
        ({"rotation_seed": -1}, "rotation_seed = -1: must be in"),
    ],
)
def test_errors_name_field_value_and_limit(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_dict(Config, fields, "nested")
    assert message in str(error.value)


def test_candidates_are_so_many_a_row_or_all_with_4_bits() -> None:
    assert [Config().candidate_count(n) for n in (0, 350, 800, 100_000)] == [0, 350, 800, 800]
    assert Config(first_bits=4).candidate_count(100_000) == 100_000
