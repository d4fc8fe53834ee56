"""How fast prompts are read beside streams, on machines whose times are simulated."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvseek.core.request import Request, RequestStatistics
from kvseek.engine.draws.sampling import Sampler
from kvseek.engine.schedule import reading
from kvseek.engine.schedule.reading import (
    BURST,
    LARGEST_CHARGE,
    LONG_SHARE,
    REST_INTERVAL,
    SLOWDOWN,
    SMALLEST_PACK,
    PromptReader,
    Work,
)
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
    launch: float = 0.0  # seconds of a layer, whatever its tokens; a decode step is launched whole

    def unit(self, tokens: int, before: int = 0) -> float:
        return (
            self.launch
            + self.decode / self.layers
            + self.token / self.layers * tokens * (1 + self.growth * before / 1000)
        )


CPU = Machine(decode=0.030, token=0.002)
GPU = Machine(decode=0.010, token=0.0001, layers=32)
# Llama-3.1-8B on an H200: 131,072 tokens in 11.2 s, 32,768 in 1.3 s (docs/measurements.md).
H200 = Machine(decode=0.0055, token=22.6e-6, layers=32, growth=0.042)
LONG = 131_072  # tokens


def mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)


class SimulatedPrefill:
    """Prompts that take the time of a machine's device and nothing else."""

    def __init__(self, server: Server, prompts: list[tuple[int, tuple[int, ...]]]) -> None:
        self.slots = tuple(slot for slot, _ in prompts)
        self.tokens = sum(len(ids) for _, ids in prompts)
        self._server, self._layer, self._row = server, 0, 0

    @property
    def progress(self) -> float:
        layers = self._server.machine.layers
        return (self._layer * self.tokens + self._row) / (layers * self.tokens)

    def advance(self, max_tokens: int) -> int:
        tokens = min(max_tokens, self.tokens - self._row)
        self._server.launch(self._server.machine.unit(tokens, self._row))
        self._row += tokens
        if self._row == self.tokens:
            self._layer, self._row = self._layer + 1, 0
            self._server.launch(self._server.machine.build)
        return tokens

    def finish(self) -> torch.Tensor:
        self._server.wait(self._server.busy_until)
        return torch.zeros(len(self.slots), 1)


class SimulatedLaunches:
    """BoundedLaunches of a machine's device."""

    def __init__(self, server: Server) -> None:
        self._server, self._ends = server, deque[float]()

    def wait(self) -> None:
        while len(self._ends) >= reading.UNITS_AHEAD:
            self._server.wait(self._ends.popleft())

    def add(self) -> None:
        self._ends.append(self._server.busy_until)


class Server:
    """Streams on a machine, beside which PromptReader reads; prompts of up to `window` tokens stay in the window.

    The device does one thing after the other; the host waits for it where the engine does. `ahead`: a step is launched before
    the one before it has ended.
    """

    def __init__(self, machine: Machine, chunk: int, window: int = 128, ahead: bool = False) -> None:
        device = SimpleNamespace(device=torch.device("cpu"))
        cache = SimpleNamespace(retrieval_tokens=lambda tokens: max(0, tokens - window), prefixes={}, window=device)
        model = SimpleNamespace(num_layers=machine.layers)
        config = SimpleNamespace(model=model, prefill_chunk_tokens=chunk, max_input_len=1 << 20)
        decoder: Any = SimpleNamespace(
            model=SimpleNamespace(reads_packs=True),
            config=config,
            cache=cache,
            prefill=lambda prompts, on_logits: SimulatedPrefill(self, prompts),
        )
        prefixes: Any = SimpleNamespace(
            cache=cache,
            find_more=lambda *prompt: None,
            begin_states=lambda slot, tokens: None,
            loads=lambda slot: False,
            load=lambda *prompt, **wait: True,
            share=lambda *prompt: None,
        )
        self.machine, self.now, self.busy_until = machine, 0.0, 0.0
        self._reader, self._ahead = PromptReader(decoder, prefixes, 8192), ahead
        launches: Any = SimulatedLaunches(self)
        self._reader._launches = launches
        self.unread = list[RequestSequence]()
        self._flight: tuple[float, Work, float] | None = None
        self.tokens = [0.0]  # when each step's tokens came
        self.waited = dict[int, int]()  # steps until a request's first token, by its number
        self.ttft = dict[int, float]()
        self._arrived = dict[int, tuple[float, int]]()

    def launch(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.now) + seconds

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def arrive(self, tokens: int, at: float | None = None) -> int:
        """A request comes now, or has come while the host waited."""
        number, request = len(self._arrived), Request((1,) * tokens, 4)
        statistics = RequestStatistics(tokens, 0.0)
        self.unread.append(RequestSequence(number, request, Sampler(request, 10), statistics, number))
        self._arrived[number] = self.now if at is None else at, len(self.tokens)
        return number

    @property
    def steps(self) -> list[float]:
        """Seconds of each step."""
        return [later - earlier for earlier, later in pairwise(self.tokens)]

    def step(self, streams: bool = True, watched: bool = True) -> None:
        begun = self.now
        for one in self._reader.read(self.unread, streams, watched):
            if one.logits is not None:
                self.unread.remove(one.sequence)
                number = one.sequence.request_id
                arrived, steps = self._arrived[number]
                self.ttft[number], self.waited[number] = self.now - arrived, len(self.tokens) - steps
        before, self._flight = self._flight, None
        if streams:
            self.launch(self.machine.decode)
            self._flight = self.busy_until, self._reader.work, begun
        if before is not None:
            self._collect(*before)
        if self._flight is not None and not self._ahead:
            (flight, self._flight) = self._flight, None
            self._collect(*flight)

    def _collect(self, ended: float, work: Work, begun: float) -> None:
        self.wait(ended)
        self._reader.note_step(work, max(begun, self.tokens[-1]))
        self.tokens.append(self.now)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the servers of a test tell the time; of several, the last that was made."""
    servers, make = list[Server](), Server.__init__

    def note(server: Server, *arguments: Any, **named: Any) -> None:
        servers.append(server)
        make(server, *arguments, **named)

    monkeypatch.setattr(Server, "__init__", note)
    monkeypatch.setattr(reading, "time", SimpleNamespace(perf_counter=lambda: servers[-1].now))


def read(server: Server, steps: int, prompt: int = 1 << 20) -> list[float]:
    """Read prompts one after the other: seconds of each step."""
    before = len(server.steps)
    for _ in range(steps):
        if not server.unread:
            server.arrive(prompt)
        server.step()
    return server.steps[before:]


def time_alone(machine: Machine, tokens: int) -> float:
    """Seconds until a prompt has been read on an idle machine."""
    server = Server(machine, 2048)
    number = server.arrive(tokens)
    while number not in server.ttft:
        server.step(streams=False)
    return server.ttft[number]


def share_of(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("tokens", "every"), [(300, 1.0), (300, 0.3), (1000, 1.0), (4000, 1.0)])
def test_long_prompts_hold_up_neither_streams_nor_short_prompts(
    tokens: int, every: float, ahead: bool, together: int
) -> None:
    """What is promised on an H200 while prompts of 128K tokens arrive, several of them at once too.

    Times of a device alone: a server's own, which are the same with and without long prompts, only make the ratios smaller.
    """
    alone, server = time_alone(H200, tokens), Server(H200, 2048, window=576, ahead=ahead)
    for _ in range(50):
        server.step()
    first, due, long, short = len(server.tokens), server.now, list[int](), list[int]()
    while len(short) < 60 or short[-1] not in server.ttft:
        if due <= server.now and len(short) < 60:
            short.append(server.arrive(tokens, due))
            due += every * (1 + 0.0004 * (len(short) % 7))
        while sum(number not in server.ttft for number in long) < together:
            long.append(server.arrive(LONG))
        server.step()
    ratios = [server.ttft[number] / alone for number in short[3:]]  # the first show what reading takes
    assert share_of(ratios, 0.5) <= 3
    assert share_of(ratios, 1.0) <= 3.5
    pieces = [
        later - earlier for earlier, later in zip(server.tokens[first::8], server.tokens[first + 32 :: 8], strict=False)
    ]
    assert share_of(pieces, 0.99) <= 2 * 32 * H200.decode
    if server.now > 45.0:
        assert server.ttft[long[0]] <= 3.5 * time_alone(H200, LONG), "it gets what the others leave of the allowance"


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
    assert mean(server.steps[200:]) <= 1.03 * SLOWDOWN * machine.decode
    assert max(server.waited.values()) <= 2, "a step may measure, and another read the long prompt"
    assert mean([float(steps) for steps in server.waited.values()]) <= 0.5


@pytest.mark.parametrize("tokens", [SMALLEST_PACK, 1000])
@pytest.mark.parametrize("machine", [CPU, GPU])
def test_a_long_prompt_is_read_on_however_many_short_ones_arrive(machine: Machine, tokens: int) -> None:
    """What is promised then: streams that are no slower than beside the long prompt, and a part of the allowance for it."""
    seconds, server = time_alone(machine, 10_000), Server(machine, 512)
    long = server.arrive(10_000)
    while long not in server.ttft:
        if len(server.unread) < 4:
            server.arrive(tokens)
        server.step()
    assert mean(server.steps) <= 1.03 * SLOWDOWN * machine.decode
    share = LONG_SHARE * (SLOWDOWN - 1) / SLOWDOWN
    assert server.ttft[long] <= 1.2 * seconds / share


@pytest.mark.parametrize("build", [5, 20, 80])
@pytest.mark.parametrize("machine", [CPU, GPU])
def test_indexes_that_are_built_are_paid_for(machine: Machine, build: int) -> None:
    """A build takes as long as so many steps."""
    machine = replace(machine, build=build * machine.decode)
    settled = read(Server(machine, 512), 8000, 10_240)[100:]
    assert 0.85 * SLOWDOWN * machine.decode <= mean(settled) <= 1.03 * SLOWDOWN * machine.decode


@pytest.mark.parametrize("chunk", [16, 128, 2048])
@pytest.mark.parametrize("machine", [CPU, GPU, Machine(0.010, 0.0001, 32, growth=0.05)])
def test_steps_take_the_slowdown_on_average(machine: Machine, chunk: int) -> None:
    """Also over a prompt of 128K tokens a layer, whose attention makes the last tokens several times as dear."""
    settled = read(Server(machine, chunk), 4000, LONG)[100:]
    assert 0.85 * SLOWDOWN * machine.decode <= mean(settled) <= 1.03 * SLOWDOWN * machine.decode
    dearest = machine.unit(chunk, LONG)
    assert max(settled) <= 1e-9 + machine.decode + max(dearest, SLOWDOWN * machine.decode), (
        "one unit, or what the allowance has"
    )


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("longer", [False, True])
def test_prompts_do_not_wait_for_requests_that_nobody_watches(longer: bool, ahead: bool) -> None:
    """But for a long one, which they would have to wait for; a stream that comes later pays for none of them."""
    server = Server(H200, 2048, ahead=ahead)
    for _ in range(5):
        server.step()
    numbers = [server.arrive(tokens) for tokens in [300] * 40 + [LONG] * longer]
    for _ in range(2):
        server.step(watched=False)
    assert (set(numbers) <= set(server.ttft)) != longer
    if not longer:
        for _ in range(4):
            server.step(watched=False)
        assert server._reader.pacing.steps_in(1.0) == pytest.approx(1 / H200.decode), "nothing counts as a step's time"
        last = server.arrive(300)
        for _ in range(4):
            server.step()
        assert last in server.waited


def test_packs_without_a_long_prompt_neither_wait_for_debts_nor_make_them() -> None:
    server = Server(CPU, 2048)
    server.step()
    for step in range(200):
        if step % 10:
            server.arrive(SMALLEST_PACK)
        server.step()
    assert max(server.waited.values()) <= 2, "a step in so many measures"
    assert mean(server.steps) <= 3.1 * CPU.decode
    long = server.arrive(10_000)
    for _ in range(3):
        server.step()
    assert server.unread[0].request_id == long
    assert server._reader._jobs[reading.Kind.LONG].prefill.progress > 0


@pytest.mark.parametrize("tokens", [100, 200, 300])
def test_short_prompts_that_wait_are_packed_where_launches_are_dear(tokens: int) -> None:
    """A small model on a GPU, whose layers take longer to launch than to compute."""
    machine = Machine(decode=0.0007, token=0.5e-6, layers=4, launch=0.0005)
    server = Server(machine, 2048, window=576)
    for _ in range(20):
        server.step()
    for _ in range(64):
        server.arrive(tokens)
    before = len(server.steps)
    while server.unread:
        server.step()
    taken = server.steps[before:]
    assert len(taken) <= 80, "read one after the other they take over 200"
    assert sum(taken) <= (len(taken) * SLOWDOWN + BURST + 2) * machine.decode


def test_a_burst_of_short_prompts_is_made_up_for() -> None:
    server = Server(GPU, 2048)
    for _ in range(50):
        server.step()
    server.arrive(1 << 20)
    for _ in range(6):
        server.arrive(1000)
    before = len(server.steps)
    for _ in range(64):
        server.step()
    taken = sum(server.steps[before:])
    assert taken <= (64 * SLOWDOWN + BURST + 2) * GPU.decode


def test_no_stretch_of_steps_is_much_slower() -> None:
    seconds = read(Server(CPU, 2048), 1000)
    unit = CPU.unit(2048)
    for first in range(100, 900, 10):
        stretch = seconds[first : first + 64]
        assert mean(stretch) <= SLOWDOWN * CPU.decode + unit / len(stretch)


def test_undisturbed_steps_are_measured_again_and_again() -> None:
    seconds = read(Server(CPU, 16), 1000)
    rests = [step for step, second in enumerate(seconds) if second == pytest.approx(CPU.decode)]
    assert rests[0] == 0, "the first step measures"
    assert max(after - before for before, after in pairwise(rests)) <= REST_INTERVAL


def test_it_follows_a_batch_that_becomes_slower_and_faster() -> None:
    server = Server(CPU, 64)
    for machine in (CPU, Machine(0.090, 0.002), CPU):
        server.machine = machine
        read(server, 4 * REST_INTERVAL)
        assert mean(read(server, 400)) <= 1.9 * machine.decode


def test_a_hiccup_does_not_stop_reading_for_long() -> None:
    server = Server(CPU, 64)
    read(server, 200)
    server._reader.pacing.record(60.0, [Work(1, 64)])
    made_up = int(LARGEST_CHARGE / (SLOWDOWN - 1)) + REST_INTERVAL
    assert made_up * CPU.decode <= 60.0 / 4, "less than what the hiccup took"
    assert mean(read(server, made_up + 100)[made_up:]) >= 1.5 * CPU.decode


def test_a_pack_adds_two_steps_at_most() -> None:
    """Whatever tokens of a long prompt take."""
    for machine in (CPU, GPU, H200):
        server = Server(machine, 2048)
        server.arrive(LONG)
        for step in range(300):
            if step % 20 == 0:
                server.arrive(50)
            server.step()
        pack = server._reader.pacing.pack
        added = machine.layers * machine.unit(pack)
        assert added <= 2.2 * machine.decode or pack == SMALLEST_PACK
        assert added >= 1.5 * machine.decode
