"""How fast prompts are read beside streams, on machines whose times are simulated."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest

from kvseek.engine.pacing import REST_INTERVAL, SLOWDOWN, SMALLEST_PACK, Pacing


@dataclass
class Machine:
    """Seconds of a decode step, and of a prompt's token in all layers; attention makes later tokens dearer."""

    decode: float
    token: float
    layers: int = 30
    growth: float = 0.0  # share by which a token costs more for each 1,000 tokens before it

    def unit(self, tokens: int, before: int = 0) -> float:
        return self.decode / self.layers + self.token / self.layers * tokens * (1 + self.growth * before / 1000)


CPU = Machine(decode=0.030, token=0.002)
GPU = Machine(decode=0.010, token=0.0001, layers=32)


def read(machine: Machine, pacing: Pacing, steps: int, chunk: int, prompt: int = 1 << 30) -> list[float]:
    """Read a long prompt as PromptReader does: seconds of each step."""
    seconds, row = [], 0
    for _ in range(steps):
        took, units = machine.decode, 0
        while not (pacing.rests or pacing.in_debt if not units else not pacing.affords(units + 1, (units + 1) * chunk)):
            took += machine.unit(chunk, row)
            units, row = units + 1, (row + chunk) % prompt
        pacing.record(took, units, units * chunk)
        seconds.append(took)
    return seconds


def mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)


@pytest.mark.parametrize("chunk", [16, 128, 2048])
@pytest.mark.parametrize("machine", [CPU, GPU, Machine(0.010, 0.0001, 32, growth=0.05)])
def test_steps_take_the_slowdown_on_average(machine: Machine, chunk: int) -> None:
    """Also over a prompt of 128K tokens a layer, whose attention makes the last tokens several times as dear."""
    pacing = Pacing(machine.layers, 2048)
    settled = read(machine, pacing, 4000, chunk, 131072)[100:]
    assert 0.85 * SLOWDOWN * machine.decode <= mean(settled) <= 1.03 * SLOWDOWN * machine.decode
    dearest = machine.unit(chunk, 131072)
    assert max(settled) <= machine.decode + max(dearest, SLOWDOWN * machine.decode), (
        "one unit, or what the allowance has"
    )


def test_packs_neither_wait_for_debts_nor_make_them() -> None:
    pacing = Pacing(CPU.layers, 2048)
    read(CPU, pacing, 100, 64)
    while not pacing.in_debt:
        pacing.record(CPU.decode + CPU.unit(2048), 1, 2048)
    pacing.record(CPU.decode, 0, 0)
    steps = 0
    while pacing.in_debt:
        pacing.record(3 * CPU.decode, CPU.layers, 16 * CPU.layers, pack=True)
        steps += 1
    assert steps < 16, "the allowances of these steps pay the unit"


def test_no_stretch_of_steps_is_much_slower() -> None:
    seconds = read(CPU, Pacing(CPU.layers, 2048), 1000, 2048)
    unit = CPU.unit(2048)
    for first in range(100, 900, 10):
        stretch = seconds[first : first + 64]
        assert mean(stretch) <= SLOWDOWN * CPU.decode + unit / len(stretch)


def test_undisturbed_steps_are_measured_again_and_again() -> None:
    pacing = Pacing(30, 2048)
    assert pacing.rests, "the first step measures"
    seconds = read(CPU, pacing, 1000, 16)
    rests = [step for step, second in enumerate(seconds) if second == CPU.decode]
    assert rests[0] == 0
    assert max(after - before for before, after in pairwise(rests)) <= REST_INTERVAL


def test_it_follows_a_batch_that_becomes_slower_and_faster() -> None:
    pacing = Pacing(30, 2048)
    for machine in (CPU, Machine(0.090, 0.002), CPU):
        read(machine, pacing, 4 * REST_INTERVAL, 64)
        assert mean(read(machine, pacing, 400, 64)) <= 1.9 * machine.decode


def test_a_hiccup_does_not_stop_reading_for_long() -> None:
    pacing = Pacing(30, 2048)
    read(CPU, pacing, 200, 64)
    pacing.record(60.0, 1, 64)
    seconds = read(CPU, pacing, 100, 64)
    assert mean(seconds[50:]) >= 1.5 * CPU.decode


def test_a_pack_adds_two_steps_at_most() -> None:
    for machine in (CPU, GPU):
        pacing = Pacing(machine.layers, 2048)
        read(machine, pacing, 300, 64)
        added = machine.layers * machine.unit(pacing.pack)
        assert added <= 2.2 * machine.decode or pacing.pack == SMALLEST_PACK
        assert pacing.pack >= SMALLEST_PACK
