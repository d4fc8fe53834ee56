"""Which contexts and batches the GPU benchmark runs, where their rows lie, and what does not fit."""

from __future__ import annotations

import dataclasses

import pytest
from tests.bench.speed.device.configs import KIB, METHODS, config_for

from kvseek.bench.speed.device.bench import ROOM
from kvseek.bench.speed.device.memory_plan import (
    GIB,
    SLOT_STRIDE,
    Cell,
    IndexNeeds,
    Limits,
    Needs,
    fill_bytes,
    plan_phases,
)
from kvseek.bench.speed.device.options import parse
from kvseek.bench.speed.shapes import LLAMA_3_1_8B
from kvseek.core.config import CacheConfig
from kvseek.core.errors import ConfigError


class TestPlan:
    filling = fill_bytes(LLAMA_3_1_8B, [Cell(786_432, 1)], 2)
    limits = Limits(device=139 * GIB, work_space=parse(METHODS).work_memory + filling, host=108 * GIB)

    def needs(self) -> Needs:
        config = config_for(LLAMA_3_1_8B, "pariskv", 1 << 17, 1)
        return Needs.of(config, 2, IndexNeeds(extent=32 * 8 * 112 * 1024))

    def plan(self, cells: list[Cell], *offloads: str, limits: Limits | None = None) -> dict[str, object]:
        phases = plan_phases(CacheConfig(), cells, offloads, ROOM, self.needs(), limits or self.limits)
        return {phase.offload: phase for phase in phases}

    def test_needs(self) -> None:
        """An extent's rows in all layers; slots and what does not grow; of several methods the most of each part."""
        assert self.needs().row_extent == 1024 * 128 * KIB
        assert IndexNeeds(10, 100, 7).of(extents=3, slots=2) == 237
        one, other = (dataclasses.replace(self.needs(), window_slot=n, index=IndexNeeds(n, 9 - n, 5)) for n in (2, 6))
        most = Needs.most([one, other])
        assert (most.window_slot, most.index) == (6, IndexNeeds(6, 7, 5))
        assert most.weights == one.weights, "of one precision they are there once"
        narrow = [dataclasses.replace(one, weights=one.weights // 2, precision=name) for name in ("int8", "fp8", "fp8")]
        assert Needs.most([one, *narrow]).weights == 2 * one.weights, "int8 and fp8 lie side by side"

    def test_bytes_of_slots_are_planned_for(self) -> None:
        """Two slots of 84 MB a layer (one is for padding) push out what fitted exactly."""
        cells, config = [Cell(131_072, 1)], config_for(LLAMA_3_1_8B, "pariskv", 131_072, 1)
        slot = 32 * 84_000_000
        plain, more = (Needs.of(config, 2, IndexNeeds(slot=bytes_)) for bytes_ in (0, slot))
        exact = plain.weights + 2 * plain.window_slot + 128 * plain.row_extent
        for needs, fits in ((plain, True), (more, False)):
            (phase,) = plan_phases(CacheConfig(), cells, ["never"], ROOM, needs, Limits(exact + GIB, GIB, GIB))
            assert (phase.cells == cells) is fits
            if not fits:
                assert f"exceed the limit by {2 * slot / GIB:.1f} GiB" in phase.skipped[cells[0]]

    def test_768k_tokens_fit_in_both_places(self) -> None:
        """The dense baseline's 96 GiB beside weights and index on the device, the same rows in host memory."""
        cells = [Cell(131_072, 1), Cell(786_432, 1)]
        phase = self.plan(cells, "always")["always"]
        assert (phase.cells, phase.baseline, phase.skipped) == (cells, cells, {})

    def test_filling_is_counted(self) -> None:
        """At 768K tokens 1.5 GiB of a layer's keys, and 5 × 1/8 of chunks."""
        assert self.filling == (1.5 + 5 / 8) * GIB
        more = fill_bytes(LLAMA_3_1_8B, [Cell(786_432, 1), Cell(4096, 2)], 2)
        assert more == self.filling, "the longest text counts"
        assert fill_bytes(LLAMA_3_1_8B, [Cell(786_432, 2)], 2) == self.filling + SLOT_STRIDE * 2 * KIB

    def test_what_does_not_fit_is_skipped_with_the_reason(self) -> None:
        cells = [Cell(131_072, 1), Cell(786_432, 1), Cell(1_048_576, 1)]
        plan = self.plan(cells, "always", "never", "auto")
        assert plan["always"].cells == cells[:2]
        assert "rows in host memory exceed the limit by 20" in plan["always"].skipped[cells[2]]
        assert plan["never"].baseline == plan["never"].cells == cells[:2]
        assert "index and rows on the device exceed" in plan["never"].skipped[cells[2]]
        assert plan["auto"].cells == cells
        assert plan["auto"].baseline == []

    def test_the_baseline_yields_to_the_index(self) -> None:
        """Half the device: rows of 786,432 tokens do not fit, but their index does."""
        cells = [Cell(131_072, 1), Cell(786_432, 1)]
        small = Limits(device=70 * GIB, work_space=6 * GIB, host=108 * GIB)
        phase = self.plan(cells, "always", limits=small)["always"]
        assert (phase.cells, phase.baseline) == (cells, cells[:1])

    def test_bad_settings_are_named(self) -> None:
        with pytest.raises(ConfigError, match="--offload = 'maybe': must be a comma list of always, never, auto"):
            self.plan([Cell(4096, 1)], "maybe")
        with pytest.raises(ConfigError, match="choose a smaller shape"):
            self.plan([Cell(4096, 1)], "auto", limits=Limits(10 * GIB, GIB, GIB))
        with pytest.raises(ConfigError, match="--host_memory: 0 bytes: must be > 0"):
            Limits(GIB, GIB, 0)
