"""Who waits, runs, makes room and goes on: the queue, and random requests through scheduler and extents, without a model."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.engine.cache.prefixes.test_cache import make

from kvseek.core.errors import ConfigError, QueueFullError
from kvseek.core.request import FinishReason, Request, RequestStatistics
from kvseek.engine.draws.sampling import Sampler
from kvseek.engine.schedule.scheduler import LEVEL_SECONDS, MOST_PREEMPTIONS, RequestQueue, Scheduler, order
from kvseek.engine.schedule.sequence import RequestSequence


def waiting(
    number: int, at: float = 0.0, *, tokens: int = 1, priority: int = 128, timeout: float | None = None
) -> RequestSequence:
    request = Request((1,) * tokens, 4, priority=priority, timeout_seconds=timeout)
    return RequestSequence(number, request, Sampler(request, 10), RequestStatistics(tokens, at))


def drain(queue: RequestQueue) -> list[int]:
    found = []
    while (sequence := queue.pop(lambda head: True)) is not None:
        found.append(sequence.request_id)
    return found


def filled(*sequences: RequestSequence) -> RequestQueue:
    queue = RequestQueue()
    for sequence in sequences:
        queue.push(sequence)
    return queue


def test_first_come_first_served_within_a_priority() -> None:
    assert drain(filled(waiting(3, 5.0), waiting(1, 1.0), waiting(2, 1.0))) == [1, 2, 3]


def test_a_higher_priority_starts_first() -> None:
    assert drain(filled(waiting(1, 0.0), waiting(2, 0.1, priority=0), waiting(3, 0.2, priority=255))) == [3, 1, 2]


def test_a_request_is_overtaken_only_for_a_time() -> None:
    """One level of priority is worth LEVEL_SECONDS, whatever else arrives: nobody starves."""
    low = waiting(1, 0.0, priority=100)
    in_time, too_late = (waiting(2, 9.9 * LEVEL_SECONDS, priority=110), waiting(3, 10.1 * LEVEL_SECONDS, priority=110))
    assert drain(filled(too_late, low, in_time)) == [2, 1, 3]
    assert drain(filled(waiting(1, 0.0, priority=0), waiting(2, 256 * LEVEL_SECONDS, priority=255))) == [1, 2]


def test_the_head_is_not_passed_by() -> None:
    queue = filled(waiting(1, 0.0, tokens=100), waiting(2, 1.0))
    assert queue.pop(lambda head: len(head.request.prompt_ids) < 50) is None
    assert len(queue) == 2


def test_a_full_queue_says_how_many_wait_and_what_to_do() -> None:
    queue = RequestQueue(2)
    queue.push(waiting(1))
    queue.push(waiting(2))
    message = r"2 requests wait for a slot: at most max_queue_size = 2 may; send .* later, or serve with a larger --max_queue_"
    with pytest.raises(QueueFullError, match=message):
        queue.push(waiting(3))
    assert queue.remove(1) is not None
    queue.push(waiting(3))
    assert drain(queue) == [2, 3]
    with pytest.raises(ConfigError, match="max_queue_size = 0: must be >= 1"):
        RequestQueue(0)


def test_requests_for_which_slots_are_free_do_not_count_as_waiting() -> None:
    queue = RequestQueue(1)
    for number in range(4):
        queue.push(waiting(number), free_slots=3)
    with pytest.raises(QueueFullError, match="1 requests wait for a slot"):
        queue.push(waiting(4), free_slots=3)


def test_removal() -> None:
    queue = filled(waiting(1), waiting(2), waiting(3))
    removed = queue.remove(2)
    assert removed.request_id == 2
    assert queue.remove(2) is None
    assert drain(queue) == [1, 3]


def test_expiry() -> None:
    queue = filled(
        waiting(1, 0.0, timeout=5.0), waiting(2, 0.0, timeout=3.0), waiting(3, 0.0), waiting(4, 0.0, timeout=1.0)
    )
    assert queue.next_deadline() == 1.0
    queue.remove(4)
    assert queue.next_deadline() == 3.0, "not that of a request that has left"
    assert queue.expired(2.9) == []
    assert [sequence.request_id for sequence in queue.expired(3.0)] == [2]
    assert [sequence.request_id for sequence in queue.expired(100.0)] == [1]
    assert queue.next_deadline() is None
    assert drain(queue) == [3]


def test_each_sequence_leaves_once_whoever_asks() -> None:
    queue = RequestQueue()
    taken: list[int] = []

    def cancel(numbers: range) -> None:
        taken.extend(number for number in numbers if queue.remove(number) is not None)

    def start() -> None:
        for _ in range(3000):
            sequence = queue.pop(lambda head: True)
            if sequence is not None:
                taken.append(sequence.request_id)

    def arrive() -> None:
        for number in range(1000):
            queue.push(waiting(number, float(number), timeout=0.5))

    def expire() -> None:
        for now in range(0, 1000, 10):
            taken.extend(sequence.request_id for sequence in queue.expired(float(now)))

    works = [(arrive, ()), (cancel, (range(1000),)), (cancel, (range(999, -1, -1),)), (start, ()), (expire, ())]
    threads = [threading.Thread(target=work, args=arguments) for work, arguments in works]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted([*taken, *drain(queue)]) == list(range(1000))


SLOTS, CAPACITY, MOST_WAITING = 6, 5, 4


class Admission:
    """What an engine does with requests, step by step, but for numbers: rows are not written."""

    def __init__(self, form: str = "entries", enabled: bool = True) -> None:
        self.prefixes, self.retrieval = make(capacity=CAPACITY, form=form, slots=SLOTS)
        self.prefixes.enabled = enabled
        self.cache, self.extents = self.prefixes.cache, self.prefixes.cache.extents
        self.queue = RequestQueue(MOST_WAITING)
        self.left = list[RequestSequence]()
        self.scheduler = Scheduler(self.prefixes, SLOTS, self.queue, self.left.append)
        self.ids, self.now = itertools.count(), 0.0
        self.alive = dict[int, RequestSequence]()
        self.resumes = self.most_running = 0

    def submit(self, prompt: tuple[int, ...], more: int, priority: int = 128, timeout: float | None = None) -> None:
        request = Request(prompt, more, priority=priority, timeout_seconds=timeout)
        sequence = RequestSequence(
            next(self.ids), request, Sampler(request, 16), RequestStatistics(len(prompt), self.now)
        )
        returned = sum(
            one.statistics.num_preemptions > 0 for one in self.alive.values() if one not in self.scheduler.running
        )
        waiting = len(self.queue) - returned - self.scheduler.free_slots
        try:
            self.queue.push(sequence, self.scheduler.free_slots)
        except QueueFullError:
            assert waiting >= MOST_WAITING
        else:
            assert waiting < MOST_WAITING, "what was preempted takes nobody's place in the queue"
            self.alive[sequence.request_id] = sequence

    def step(self) -> None:
        self.now += 1.0
        first = min(self.scheduler.running, key=order, default=None)
        self.expire()
        for sequence in self.scheduler.short():
            if self.scheduler.make_room(sequence):
                self.scheduler.grow(sequence)
        while (admitted := self.scheduler.admit()) is not None:
            self.scheduler.open(admitted)
            if admitted.resumes:
                assert admitted.generated
                self.retrieval.resume(admitted.slot)
                self.scheduler.resumed(admitted)
                self.resumes += 1
        assert first is None or first.request_id not in self.alive or first in self.scheduler.running, "it stays"
        unread, decoding = self.scheduler.unread(), self.scheduler.decoding()
        assert unread or decoding or not self.queue.has_ready, "somebody goes on"
        self.most_running = max(self.most_running, len(self.scheduler.running))
        if unread:
            self.read(unread[0])
        for sequence in decoding:
            self.cache.begin_step([sequence.slot], [])
            self.cache.end_step([sequence.slot], [])
            if sequence.replay:
                sequence.replay -= 1
            else:
                self.take(sequence)

    def read(self, sequence: RequestSequence) -> None:
        slot, prompt, before = sequence.slot, sequence.packed_prompt, sequence.reused_before
        if self.cache.retrieval_tokens(len(sequence.request.prompt_ids)):
            self.prefixes.find_more(slot, prompt, None, sequence.reserved_tokens, None, before)
        self.retrieval.expect(slot, len(sequence.request.prompt_ids))
        self.retrieval.finish_rows(slot)
        self.prefixes.share(slot, prompt, None)
        self.scheduler.begin_steps(sequence)
        if not sequence.generated:
            self.take(sequence)

    def take(self, sequence: RequestSequence) -> None:
        known = len(sequence.request.prompt_ids) + len(sequence.generated)
        assert self.cache.tokens[sequence.slot] == known
        sequence.generated.append(sequence.request_id % 2)
        if len(sequence.generated) == sequence.request.max_tokens:
            self.end(sequence)

    def end(self, sequence: RequestSequence) -> None:
        if self.queue.remove(sequence.request_id) is None:
            self.scheduler.remove(sequence)
            self.scheduler.close(sequence, keep=True)
        del self.alive[sequence.request_id]

    def make_way(self, number: int) -> None:
        able = [one for one in self.scheduler.running if one.statistics.num_preemptions < MOST_PREEMPTIONS]
        if able:
            self.scheduler.preempt(able[number % len(able)])

    def expire(self) -> None:
        for sequence in self.queue.expired(self.now):
            reason = sequence.expired(self.now).finish_reason
            preempted = sequence.statistics.num_preemptions > 0
            assert reason is (FinishReason.TIMEOUT if preempted else FinishReason.ERROR)
            del self.alive[sequence.request_id]

    def run_to_end(self) -> None:
        """Everybody ends, in no more steps than all would take one after the other, with as many preemptions as there may be."""
        alive = list(self.alive.values())
        for _ in range(sum(one.total_tokens + 2 for one in alive) * (MOST_PREEMPTIONS + 1)):
            if not self.alive:
                break
            self.step()
        assert not self.alive
        assert all(len(one.generated) == one.request.max_tokens for one in alive if one.request.timeout_seconds is None)
        assert self.extents.used == 0
        assert len(self.scheduler._free_slots) == SLOTS

    def check(self) -> None:
        """Each extent is free, kept, or used by those that count as its users; each request has room for its rows."""
        extents = self.extents
        users = Counter(itertools.chain.from_iterable((*extents._owned, *self.cache._sources.values())))
        assert extents._users == [users[extent] for extent in range(extents.capacity)]
        kept = {node.extent for node in self.prefixes._tree}
        assert kept == extents._kept
        assert len(kept) == len(self.prefixes._tree), "no extent stands for two things"
        assert sorted(extents._free) == sorted(set(range(extents.capacity)) - kept - set(users))
        written = Counter[int]()
        for sequence in self.scheduler.running:
            slot = sequence.slot
            assert self.cache.lengths[slot] <= extents.room(slot)
            shared = self.cache.shared_places(slot) // 1024
            written.update(extents.of_slot(slot)[shared:])
            assert sequence.statistics.num_preemptions <= MOST_PREEMPTIONS
        assert max(written.values(), default=0) <= 1, "whoever writes to an extent has it alone"
        assert sum(one.statistics.num_preemptions for one in self.alive.values()) <= self.scheduler.preemptions
        assert len(self.left) == self.scheduler.preemptions
        assert len(self.queue) + len(self.scheduler.running) == len(self.alive)


@pytest.mark.parametrize("ahead", [0, 16])
def test_steps_with_room_are_those_until_an_eviction_has_none(ahead: int) -> None:
    cache = Admission().cache
    cache.evict_ahead = ahead
    cache.open(0, 1100)
    for tokens in range(1, 1600):
        cache.tokens[0] = tokens
        steps = cache.steps_with_room(0)
        soon = cache.tokens_soon(0)
        assert cache.retrieval_tokens(soon + steps - 1) <= cache.extents.room(0) < cache.retrieval_tokens(soon + steps)
        cache.lengths[0] = cache.retrieval_tokens(tokens)
        if steps > 0:  # what the step, and the eviction that it prepares, write
            assert cache.retrieval_tokens(tokens + 1) <= cache.extents.room(0)
            near = cache.config.sink + cache.lengths[0] + cache.ring <= tokens + 1 + ahead
            assert not near or cache.lengths[0] + cache.config.update <= cache.extents.room(0)


def test_the_first_waits_for_those_that_stay() -> None:
    """The second has been preempted as often as may be, and has all extents that it needs; the first wants one of them."""
    run, waits = Admission(), 0
    run.submit((0,) * 1000, 2000)
    run.submit((1,) * 1000, 2000)
    first, second = run.alive.values()
    run.step()
    while second.statistics.num_preemptions < MOST_PREEMPTIONS:
        run.scheduler.preempt(second)
        run.step()
    assert (len(run.extents.of_slot(first.slot)), len(run.extents.of_slot(second.slot))) == (1, 3)
    while run.alive:
        before = len(first.generated)
        run.step()
        waits += len(first.generated) == before
        run.check()
    assert first.statistics.num_preemptions == 0 < waits
    assert run.scheduler.preemptions == MOST_PREEMPTIONS


class AdmissionMachine(RuleBasedStateMachine):
    """Requests of all lengths and several priorities, which come, are given up and run out of time."""

    form, enabled = "entries", True

    def __init__(self) -> None:
        super().__init__()
        self.run = Admission(self.form, self.enabled)

    @rule(
        document=st.integers(0, 1),
        tokens=st.sampled_from([3, 60, 900, 1000, 1040, 2600]),
        more=st.sampled_from([1, 900, 2000]),
        priority=st.sampled_from([0, 128, 128, 255]),
        timeout=st.sampled_from([None, None, 300.0]),
    )
    def submit(self, document: int, tokens: int, more: int, priority: int, timeout: float | None) -> None:
        self.run.submit((document,) * tokens, more, priority, timeout)

    @rule(steps=st.sampled_from([1, 10, 200, 700]))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.run.step()

    @precondition(lambda self: self.run.alive)
    @rule(number=st.integers(0, 20))
    def give_up(self, number: int) -> None:
        alive = list(self.run.alive.values())
        self.run.end(alive[number % len(alive)])

    @rule(number=st.integers(0, 20))
    def make_way(self, number: int) -> None:
        """One is preempted without need, so that all numbers of preemptions occur."""
        self.run.make_way(number)

    @invariant()
    def extents_are_whole(self) -> None:
        self.run.check()

    def teardown(self) -> None:
        self.run.run_to_end()
        self.run.check()


class CopiesMachine(AdmissionMachine):
    """The same where nothing is shared, and prompts are read again."""

    form = "copies"


class NothingKeptMachine(AdmissionMachine):
    """The same where nothing is kept."""

    enabled = False


for machine in (AdmissionMachine, CopiesMachine, NothingKeptMachine):
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestAdmission, TestCopies, TestNothingKept = (
    one.TestCase for one in (AdmissionMachine, CopiesMachine, NothingKeptMachine)
)
