"""ParisKV's fields: defaults, JSON, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from kvseek.core.errors import ConfigError
from kvseek.core.fields import from_dict
from kvseek.plugins.pariskv.config import DEFAULT_SCHEDULE, Config, ScheduleStep


class TestConfig:
    def test_default_schedule(self) -> None:
        lengths = (1, 4_999, 5_000, 9_999, 10_000, 29_999, 30_000, 10**6)
        found = [Config().schedule(n) for n in lengths]
        expected = [(0.5, 0.5)] * 2 + [(0.3, 0.25)] * 2 + [(0.25, 0.2)] * 2 + [(0.2, 0.1)] * 2
        assert found == expected

    def test_goes_through_json_values(self) -> None:
        config = Config(top_k=64, group_reduce="mean", schedule_steps=DEFAULT_SCHEDULE[2:])
        assert from_dict(Config, dataclasses.asdict(config), "pariskv") == config

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"top_k": 0}, "top_k = 0: must be >= 1"),
            ({"group_reduce": "median"}, "group_reduce = 'median': must be one of"),
            ({"rotation_seed": -1}, "rotation_seed = -1: must be in"),
            ({"schedule_steps": ()}, "schedule_steps"),
            ({"schedule_steps": ({"below_tokens": 9, "rho": 1.0, "beta": 1.0},)}, "below_tokens null"),
            ({"schedule_steps": ({"below_tokens": None, "rho": 0.0, "beta": 1.0},)}, "schedule_steps.rho = 0.0"),
            ({"schedule_steps": ({"below_tokens": None, "rho": 0.5, "beta": 1.5},)}, "schedule_steps.beta = 1.5"),
            ({"schedule_steps": ({"below_tokens": 0, "rho": 0.5, "beta": 0.5},)}, "below_tokens = 0: must be > 0"),
        ],
    )
    def test_errors_name_field_value_and_limit(self, fields: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError) as error:
            from_dict(Config, fields, "pariskv")
        assert message in str(error.value)

    @pytest.mark.parametrize("bounds", [(9, 5, None), (5, 5, None), (None, 5, None)])
    def test_schedule_must_ascend(self, bounds: tuple[int | None, ...]) -> None:
        with pytest.raises(ConfigError, match="schedule_steps"):
            Config(schedule_steps=tuple(ScheduleStep(bound, 0.5, 0.5) for bound in bounds))


def test_candidates_are_the_schedules_share_but_at_least_four_a_row() -> None:
    config = Config(top_k=100)
    assert [config.candidates(n) for n in (0, 350, 2000, 8000, 100_000)] == [0, 350, 1000, 2000, 10_000]
    assert Config(top_k=704).candidates(8000) == 2816
