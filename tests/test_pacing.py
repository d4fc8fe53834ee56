"""How fast prompts are read beside streams, on machines whose times are simulated."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest

from kvseek.engine.pacing import REST_INTERVAL, SLOWDOWN, SMALLEST_CHUNK, Pacing


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


def read(machine: Machine, pacing: Pacing, steps: int, prompt: int = 1 << 30) -> tuple[list[float], list[int]]:
    """Read a long prompt as PromptReader does: seconds of each step, and chunk sizes."""
    seconds, chunks, row = [], [], 0
    for _ in range(steps):
        took, units, tokens, largest = machine.decode, 0, 0, 0
        while not pacing.rests:
            chunk = pacing.chunk
            if units and pacing.cost(0) * units + pacing.cost(tokens + chunk) > pacing.allowance:
                break
            took += machine.unit(chunk, row)
            units, tokens, largest, row = units + 1, tokens + chunk, max(largest, chunk), (row + chunk) % prompt
            chunks.append(chunk)
        pacing.record(took, units, tokens, largest)
        seconds.append(took)
    return seconds, chunks


@pytest.mark.parametrize("machine", [CPU, GPU, Machine(0.010, 0.0001, 32, growth=0.05)])
def test_steps_stay_below_the_slowdown(machine: Machine) -> None:
    """Also over a prompt of 128K tokens a layer, whose attention makes the last tokens several times as dear."""
    pacing = Pacing(machine.layers, 2048)
    seconds, chunks = read(machine, pacing, 2000, 131072)
    settled = seconds[50:]
    assert sum(settled) / len(settled) <= SLOWDOWN * machine.decode
    assert max(settled) <= 2.2 * machine.decode, "where attention grows, a step may be a little late"
    assert max(seconds) <= 3 * machine.decode, "what is not known yet is tried with small chunks"
    assert all(SMALLEST_CHUNK <= chunk <= 2048 and chunk % SMALLEST_CHUNK == 0 for chunk in chunks)


def test_the_allowance_is_used() -> None:
    seconds, chunks = read(GPU, Pacing(GPU.layers, 2048), 500)
    read_seconds = [second for second in seconds[100:] if second > GPU.decode]
    assert min(read_seconds) >= 1.5 * GPU.decode
    assert chunks[-1] >= 1024, "one large unit rather than many small ones"


def test_a_slow_machine_reads_the_smallest_chunk() -> None:
    slow = Machine(decode=0.01, token=0.1)
    _, chunks = read(slow, Pacing(slow.layers, 2048), 100)
    assert set(chunks[20:]) == {SMALLEST_CHUNK}


def test_undisturbed_steps_are_measured_again_and_again() -> None:
    pacing = Pacing(30, 2048)
    assert pacing.rests, "the first step measures"
    seconds, _ = read(CPU, pacing, 1000)
    rests = [step for step, second in enumerate(seconds) if second == CPU.decode]
    assert rests[:2] == [0, 4]
    gaps = {after - before for before, after in pairwise(rests[10:])}
    assert gaps == {REST_INTERVAL}


def test_it_follows_a_batch_that_becomes_slower_and_faster() -> None:
    pacing = Pacing(30, 2048)
    for machine in (CPU, Machine(0.090, 0.002), CPU):
        read(machine, pacing, 4 * REST_INTERVAL)
        seconds, _ = read(machine, pacing, 200)
        assert sum(seconds) / len(seconds) <= 1.9 * machine.decode


def test_a_hiccup_is_forgotten() -> None:
    pacing = Pacing(30, 2048)
    _, chunks = read(CPU, pacing, 200)
    pacing.record(5.0, 1, 288, 288)
    assert chunks[-1] / 4 <= pacing.chunk < chunks[-1], "one step alone does not say much"
    pacing.record(5.0, 0, 0)
    _, later = read(CPU, pacing, 100)
    assert later[-1] == pytest.approx(chunks[-1], abs=16)


def test_a_pack_adds_two_steps_at_most() -> None:
    for machine in (CPU, GPU):
        pacing = Pacing(machine.layers, 2048)
        read(machine, pacing, 300)
        added = machine.layers * machine.unit(pacing.pack)
        assert added <= 2.2 * machine.decode or pacing.pack == SMALLEST_CHUNK
        assert pacing.pack >= SMALLEST_CHUNK
