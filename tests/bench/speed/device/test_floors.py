"""Floors of decode steps, ratios of results, and variants of methods: what the GPU benchmark computes from figures."""

from __future__ import annotations

import pytest
import torch
from tests.bench.speed.device.configs import config_for

from kvseek.bench.speed.device import floors
from kvseek.bench.speed.device.decode import borrow_baselines, dense_floor, peaks, pooled, with_times
from kvseek.bench.speed.device.floors import Rates, Step, Work, host_memory_rate, work
from kvseek.bench.speed.device.main import over_baseline
from kvseek.bench.speed.shapes import LLAMA_3_1_8B
from kvseek.bench.timing import Samples
from kvseek.core.errors import ConfigError
from kvseek.plugins.measurements.costs import SelectionCosts

CPU = torch.device("cpu")


class TestFloor:
    rates = Rates(4.4e12, host_link=50e9, host_memory=100e9)

    def moved(self, costs: SelectionCosts, step: Step, monkeypatch: pytest.MonkeyPatch) -> Work:
        monkeypatch.setattr(floors, "costs_of", lambda config, length, itemsize: costs)
        return work(config_for(LLAMA_3_1_8B, "full", 131_072, 1), step, 2)

    def test_dense_attention_at_128k(self) -> None:
        """The design's figures for one H200: 3.4 ms of matrices at the full rate, 3.9 ms of rows."""
        moved = work(config_for(LLAMA_3_1_8B, "full", 131_072, 1), Step(130_752, 320, 1, 0), 2)
        floor = moved.floor(self.rates)
        assert floor["weights"] == pytest.approx(3.4e-3, rel=0.02)
        assert floor["device_rows"] == pytest.approx(3.9e-3, rel=0.01)
        assert floor["host_rows"] == floor["scan"] == floor["rerank"] == 0
        assert floor["total"] == pytest.approx(sum(value for part, value in floor.items() if part != "total"))

    def test_pariskv_at_a_million_tokens(self) -> None:
        """The design's figures: 1.0 ms of scan and 0.6 ms of rerank per million tokens, 25,600 rows over the host link."""
        moved = work(config_for(LLAMA_3_1_8B, "pariskv", 1_000_000, 1), Step(1_000_000, 0, 1, 32), 2)
        floor = moved.floor(self.rates)
        assert floor["scan"] == pytest.approx(0.98e-3, rel=0.06)
        assert floor["rerank"] == pytest.approx(0.56e-3, rel=0.01)
        assert moved.host_rows == 25_600 * 512
        assert floor["host_rows"] == pytest.approx(25_600 * 512 / 50e9)

    def test_hot_rows_are_read_on_the_device(self) -> None:
        config = config_for(LLAMA_3_1_8B, "pariskv", 131_072, 2)
        cold, hot = (work(config, Step(100_000, 320, 2, 16, rate), 2) for rate in (0.0, 0.75))
        assert cold.host_rows == 2 * 8 * 16 * 100 * 512
        assert hot.host_rows == cold.host_rows / 4
        assert hot.device_rows - cold.device_rows == 0.75 * cold.host_rows

    def test_small_regions_and_unknown_methods(self) -> None:
        short = work(config_for(LLAMA_3_1_8B, "pariskv", 4096, 1), Step(50, 320, 1, 32), 2)
        assert short.host_rows == 32 * 8 * 50 * 512
        with pytest.raises(ConfigError, match="--methods: 'flat': must say what its step moves"):
            work(config_for(LLAMA_3_1_8B, "flat", 4096, 1), Step(50, 320, 1, 32), 2)
        with pytest.raises(ConfigError, match="hit_rate ="):
            Step(1, 1, 1, 1, 1.5)

    @pytest.mark.parametrize("host_cores", [True, False])
    def test_keys_and_rows_in_host_memory(self, host_cores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Half of the layers on the device: their keys are reranked there."""
        costs = SelectionCosts(rows=512, reranked_keys=6144, host_cores=host_cores)
        moved = self.moved(costs, Step(100_000, 320, 2, 16), monkeypatch)
        lists = 2 * 16 * 8
        away = lists * (512 * 512 + 6144 * 256)
        assert (moved.host_rows, moved.host_cores) == ((0, away) if host_cores else (away, 0))
        assert moved.rerank == lists * 6144 * 256
        assert moved.floor(self.rates)["host_cores"] == pytest.approx(moved.host_cores / 100e9)

    @pytest.mark.parametrize("host_layers", [0, 31, 32])
    def test_dense_layers_come_first(self, host_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        moved = self.moved(SelectionCosts(rows=100, dense_layers=2), Step(5000, 320, 1, host_layers), monkeypatch)
        dense = max(0, 2 - (32 - host_layers))
        assert moved.host_rows == 8 * 512 * (dense * 5000 + (host_layers - dense) * 100)
        in_all = 8 * 512 * (2 * 5000 + 30 * 100 + 32 * 320)
        assert sum(moved.bytes_by_part().values()) - moved.weights == in_all


def entry(method: str, median: float, baseline: float | None) -> dict[str, object]:
    return with_times({"method": method, "batch": 1, "floor": {"total": 0.001}}, [median], [median], baseline)


def test_ratios_and_borrowed_baselines() -> None:
    with_baseline = [entry("full", 0.008, 0.008), entry("pariskv", 0.004, 0.016)]
    without, other = [entry("pariskv", 0.002, None)], [entry("pariskv", 1.0, None)]
    cells = [{"context": 10, "batch": 1, "results": results} for results in (with_baseline, without)]
    document = {"phases": [{"cells": [cell]} for cell in (*cells, {"context": 20, "batch": 1, "results": other})]}
    borrow_baselines(document, "full")
    assert [e["to_baseline"] for e in (*with_baseline, *without, *other)] == [1.0, 0.25, 0.25, None]
    assert ["baseline_of_another_phase" in e for e in (*with_baseline, *without)] == [False, False, True]
    found = peaks([{**one, "context": 10} for one in with_baseline + without], "full")
    assert [(one["method"], one["tokens_per_second"], one["to_baseline"]) for one in found] == [
        ("full", 125.0, 1.0),
        ("pariskv", 500.0, 4.0),
    ]


def test_a_baseline_that_does_not_fit_is_replaced_by_its_floor() -> None:
    """One million tokens, the rows of 10 of 32 layers in host memory, half of the method's rows hot."""
    config, step = config_for(LLAMA_3_1_8B, "full", 1_000_000, 1), Step(1_000_000, 576, 1, 10, hit_rate=0.5)
    found = dense_floor(config, step, 2, TestFloor.rates)
    weights, rows = 15.0e9 / 4.4e12, 8 * 512 * 1e6
    assert found == pytest.approx(weights + rows * (22 / 4.4e12 + 10 / 50e9), rel=0.01)
    alone = {**entry("pariskv", 0.09, None), "dense_floor_seconds": found}
    assert over_baseline(alone) == f"{0.09 / found:.3f}†"
    assert over_baseline({**alone, "to_baseline": 0.5}) == "0.500"


def test_a_baseline_of_several_rounds() -> None:
    found = pooled(entry("full", 0.008, 0.008), Samples([0.004, 0.006]), [0.01, 0.01])
    assert found["samples"] == [0.008, 0.004, 0.006]
    assert (found["step_seconds"]["median"], found["to_baseline"]) == (0.006, 1.0)
    assert found["wall_seconds"]["count"] == 3


def test_host_memory_is_read() -> None:
    assert 1e8 < host_memory_rate(1 << 24) < 1e13
