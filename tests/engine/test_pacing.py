"""How fast prompts are read beside streams, on machines whose times are simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvseek.core.request import Request
from kvseek.core.statistics import RequestStatistics
from kvseek.engine.draws.sampling import Sampler
from kvseek.engine.schedule.reading import LARGEST_CHARGE, REST_INTERVAL, SLOWDOWN, SMALLEST_PACK, Pacing, PromptReader
from kvseek.engine.schedule.sequence import RequestSequence


@dataclass
class Machine:
    """Seconds of a decode step, and of a prompt's token in all layers; attention makes later tokens dearer.

    An index is built whenever a layer of a long prompt is done.
    """

    decode: float
    token: float
    layers: int = 30
    growth: float = 0.0  # share by which a token costs more for each 1,000 tokens before it
    build: float = 0.0  # seconds

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
            took += 0.0 if row else machine.build
        pacing.record(took, units, units * chunk)
        seconds.append(took)
    return seconds


def mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)


class SimulatedPrefill:
    """Prompts that take the time of a machine and nothing else."""

    def __init__(self, machine: Machine, prompts: list[tuple[int, tuple[int, ...]]], spend: Callable[[float], None]):
        self.slots = tuple(slot for slot, _ in prompts)
        self.tokens = sum(len(ids) for _, ids in prompts)
        self._machine, self._spend, self._layer, self._row = machine, spend, 0, 0

    @property
    def progress(self) -> float:
        return self._layer / self._machine.layers

    def advance(self, max_tokens: int) -> int:
        tokens = min(max_tokens, self.tokens - self._row)
        self._spend(self._machine.unit(tokens, self._row))
        self._row += tokens
        if self._row == self.tokens:
            self._layer, self._row = self._layer + 1, 0
        return tokens

    def finish(self) -> torch.Tensor:
        return torch.zeros(len(self.slots), 1)


class Server:
    """Streams on a machine, beside which PromptReader reads; prompts of up to 128 tokens stay in the window."""

    def __init__(self, machine: Machine, chunk: int) -> None:
        cache = SimpleNamespace(retrieval_tokens=lambda tokens: max(0, tokens - 128))
        decoder: Any = SimpleNamespace(
            model=SimpleNamespace(reads_packs=True),
            config=SimpleNamespace(
                model=SimpleNamespace(num_layers=machine.layers), prefill_chunk_tokens=chunk, max_input_len=1 << 20
            ),
            cache=cache,
            prefill=lambda prompts, on_logits: SimulatedPrefill(machine, prompts, self._spend),
        )
        prefixes: Any = SimpleNamespace(
            cache=SimpleNamespace(prefixes={}),
            find_more=lambda *prompt: None,
            loads=lambda slot: False,
            load=lambda *prompt, **wait: True,
            share=lambda *prompt: None,
        )
        self._machine, self._reader, self._seconds = machine, PromptReader(decoder, prefixes, 8192), 0.0
        self._unread: list[RequestSequence] = []
        self.steps = list[float]()
        self.waited = dict[int, int]()  # steps until a request's first token, by its number
        self._arrived = dict[int, int]()

    def _spend(self, seconds: float) -> None:
        self._seconds += seconds

    def arrive(self, tokens: int) -> int:
        number, request = len(self._arrived), Request((1,) * tokens, 4)
        statistics = RequestStatistics(tokens, 0.0)
        self._unread.append(RequestSequence(number, request, Sampler(request, 10), statistics, number))
        self._arrived[number] = len(self.steps)
        return number

    def step(self) -> None:
        self._seconds = self._machine.decode
        readings, work = self._reader.read(self._unread, beside=True), self._reader.work
        for reading in readings:
            if reading.logits is not None:
                self._unread.remove(reading.sequence)
                number = reading.sequence.request_id
                self.waited[number] = len(self.steps) - self._arrived[number]
        self._reader.pacing.record(self._seconds, work.units, work.token_layers, work.pack, work.long_waits)
        self.steps.append(self._seconds)


@pytest.mark.parametrize("every", [3, 5, 12])
@pytest.mark.parametrize("tokens", [2, SMALLEST_PACK])
@pytest.mark.parametrize("machine", [CPU, GPU])
def test_short_prompts_beside_a_long_one_are_read_at_once_and_paid_for(
    machine: Machine, tokens: int, every: int
) -> None:
    """The long prompt waits for them, the streams do not become slower."""
    server = Server(machine, 512)
    server.arrive(1 << 20)
    for step in range(2000):
        if step > 100 and step % every == 0:
            server.arrive(tokens)
        server.step()
    assert mean(server.steps[200:]) <= 2 * machine.decode
    assert max(server.waited.values()) <= 2, "a step may measure, and another read the long prompt"
    assert mean([float(steps) for steps in server.waited.values()]) <= 0.5


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_a_long_prompt_is_read_on_however_many_short_ones_arrive(machine: Machine) -> None:
    """What is promised then: short prompts in every second step, and a part of the allowance for the long one."""
    server = Server(machine, 512)
    long = server.arrive(2048)
    for step in range(6000):
        if step % 2 == 0:
            server.arrive(SMALLEST_PACK)
        server.step()
        if long in server.waited:
            break
    assert long in server.waited
    assert mean(server.steps) <= 2.1 * machine.decode


@pytest.mark.parametrize("build", [5, 20, 80])
@pytest.mark.parametrize("machine", [CPU, GPU])
def test_indexes_that_are_built_are_paid_for(machine: Machine, build: int) -> None:
    """A build takes as long as so many steps."""
    machine = replace(machine, build=build * machine.decode)
    settled = read(machine, Pacing(machine.layers, 2048), 8000, 512, 2048)[100:]
    assert 0.85 * SLOWDOWN * machine.decode <= mean(settled) <= 1.03 * SLOWDOWN * machine.decode


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


def test_packs_without_a_long_prompt_neither_wait_for_debts_nor_make_them() -> None:
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
    made_up = int(LARGEST_CHARGE / (SLOWDOWN - 1)) + REST_INTERVAL
    assert made_up * CPU.decode <= 60.0 / 4, "less than what the hiccup took"
    assert mean(read(CPU, pacing, made_up + 100, 64)[made_up:]) >= 1.5 * CPU.decode


def test_a_pack_adds_two_steps_at_most() -> None:
    for machine in (CPU, GPU):
        pacing = Pacing(machine.layers, 2048)
        read(machine, pacing, 300, 64)
        added = machine.layers * machine.unit(pacing.pack)
        assert added <= 2.2 * machine.decode or pacing.pack == SMALLEST_PACK
        assert pacing.pack >= SMALLEST_PACK
