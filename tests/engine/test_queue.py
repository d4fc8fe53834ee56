"""The queue of waiting requests: order, bound, time limits, and use from many threads."""

from __future__ import annotations

import threading

import pytest

from kvseek.core.errors import ConfigError, QueueFullError
from kvseek.core.request import Request
from kvseek.core.statistics import RequestStatistics
from kvseek.engine.draws.sampling import Sampler
from kvseek.engine.schedule.scheduler import LEVEL_SECONDS, RequestQueue
from kvseek.engine.schedule.sequence import RequestSequence


def make(
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
    assert drain(filled(make(3, 5.0), make(1, 1.0), make(2, 1.0))) == [1, 2, 3]


def test_a_higher_priority_starts_first() -> None:
    assert drain(filled(make(1, 0.0), make(2, 0.1, priority=0), make(3, 0.2, priority=255))) == [3, 1, 2]


def test_a_request_is_overtaken_only_for_a_time() -> None:
    """One level of priority is worth LEVEL_SECONDS, whatever else arrives: nobody starves."""
    low = make(1, 0.0, priority=100)
    in_time, too_late = (make(2, 9.9 * LEVEL_SECONDS, priority=110), make(3, 10.1 * LEVEL_SECONDS, priority=110))
    assert drain(filled(too_late, low, in_time)) == [2, 1, 3]
    assert drain(filled(make(1, 0.0, priority=0), make(2, 256 * LEVEL_SECONDS, priority=255))) == [1, 2]


def test_the_head_is_not_passed_by() -> None:
    queue = filled(make(1, 0.0, tokens=100), make(2, 1.0))
    assert queue.pop(lambda head: len(head.request.prompt_ids) < 50) is None
    assert len(queue) == 2


def test_a_full_queue_says_how_many_wait_and_what_to_do() -> None:
    queue = RequestQueue(2)
    queue.push(make(1))
    queue.push(make(2))
    message = r"2 requests wait for a slot: at most max_queue_size = 2 may; send .* later, or serve with a larger --max_queue_"
    with pytest.raises(QueueFullError, match=message):
        queue.push(make(3))
    assert queue.remove(1) is not None
    queue.push(make(3))
    assert drain(queue) == [2, 3]
    with pytest.raises(ConfigError, match="max_queue_size = 0: must be >= 1"):
        RequestQueue(0)


def test_requests_for_which_slots_are_free_do_not_count_as_waiting() -> None:
    queue = RequestQueue(1)
    for number in range(4):
        queue.push(make(number), free_slots=3)
    with pytest.raises(QueueFullError, match="1 requests wait for a slot"):
        queue.push(make(4), free_slots=3)


def test_removal() -> None:
    queue = filled(make(1), make(2), make(3))
    removed = queue.remove(2)
    assert removed.request_id == 2
    assert queue.remove(2) is None
    assert drain(queue) == [1, 3]


def test_expiry() -> None:
    queue = filled(make(1, 0.0, timeout=5.0), make(2, 0.0, timeout=3.0), make(3, 0.0), make(4, 0.0, timeout=1.0))
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
            queue.push(make(number, float(number), timeout=0.5))

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
