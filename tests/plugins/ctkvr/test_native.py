"""CTkvr on host cores: every instruction level against float64, threads, errors."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.ctkvr.host_steps import Case, check_results

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.plugins.ctkvr.native import ERRORS, HostPool, host_step, raise_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = 2e-5  # products of 16-bit numbers are exact in float32, so the type makes no difference


@pytest.fixture
def pool(library: CpuLibrary) -> Iterator[HostPool]:
    with closing(HostPool(library, 2, pinned=False)) as pool:
        yield pool


# Channels, query heads a KV head, number in DTYPES, and bits of codes (0: none).
STEPS = [(64, 3, 0, 0), (96, 8, 1, 0), (128, 4, 2, 0), (256, 1, 0, 0), (32, 16, 1, 0), (160, 7, 2, 0), (128, 6, 1, 0)]
STEPS += [(64, 3, 0, 4), (96, 8, 1, 4), (256, 1, 1, 4), (32, 16, 2, 4)]


@pytest.mark.parametrize(("dim", "group", "dtype", "bits"), STEPS)
def test_every_level_does_what_float64_says(
    library: CpuLibrary, level: int, dim: int, group: int, dtype: int, bits: int
) -> None:
    counts = [[300, 1111], [0, 0], [1, 17], [40, 39]]
    case = Case(counts, group, dim, DTYPES[dtype], top_k=40, rho=100, seed=dim + group, bits=bits)
    assert case.run(library) == 0
    check_results(case, TOLERANCE)
    case.recalled[0, 1, 700] = 3 * 1024  # beyond the slot's extents
    assert case.run(library) == 4


def test_codes_give_no_attention(library: CpuLibrary) -> None:
    case = Case([[300, 200]], 4, 64, torch.float32, top_k=40, rho=100, bits=4)
    for field, value in (("out", case.out.data_ptr()), ("padded_dim", 32), ("padded_dim", 96)):
        step = case.step()
        setattr(step, field, value)
        if field == "out":
            step.lse = case.lse.data_ptr()
        case.error.value = 0
        host_step(library)(step)
        assert case.error.value == 1, field
        assert (case.selected == -2).all(), "nothing is written"


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.lists(st.integers(0, 700), min_size=2, max_size=2), min_size=1, max_size=3),
    group=st.integers(1, 16),
    dim=st.integers(1, 8).map(lambda steps: 32 * steps),
    dtype=st.sampled_from(DTYPES),
    top_k=st.integers(1, 300),
    rho=st.integers(1, 600),
    loudness=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_any_shape(
    library: CpuLibrary,
    counts: list[list[int]],
    group: int,
    dim: int,
    dtype: torch.dtype,
    top_k: int,
    rho: int,
    loudness: float,
    seed: int,
) -> None:
    case = Case(counts, group, dim, dtype, top_k, rho, tokens=1500, seed=seed, loudness=loudness)
    assert case.run(library, threads=2) == 0
    check_results(case, TOLERANCE * max(1.0, loudness))


def test_ties_go_to_the_lowest_place(library: CpuLibrary, level: int) -> None:
    case = Case([[900]], 4, 128, torch.bfloat16, top_k=50, rho=120)
    places = case.recalled[0, 0].tolist()
    case.rows[:, :, :, 0] = 0.5  # all keys alike
    assert case.run(library) == 0
    assert sorted(case.selected[0, 0].tolist()) == sorted(places)[:50]
    assert sorted(case.best[0, 0].tolist()) == sorted(places)[:120]
    check_results(case, TOLERANCE)


def test_ties_between_better_and_worse_keys(library: CpuLibrary, level: int) -> None:
    case = Case([[600]], 2, 64, torch.float32, top_k=100, rho=500)
    places = case.recalled[0, 0].long()
    loud = torch.tensor([2.0] * 70 + [1.0] * 400 + [0.0] * 130)[torch.randperm(600)]
    case.queries[:] = 1.0
    case.rows[case.table[0, places // 1024].long(), 0, places % 1024, 0] = loud[:, None].expand(-1, 64)
    assert case.run(library) == 0
    best, middle, worst = (sorted(places[loud == value].tolist()) for value in (2.0, 1.0, 0.0))
    assert sorted(case.selected[0, 0].tolist()) == sorted(best + middle[:30])
    assert sorted(case.best[0, 0].tolist()) == sorted(best + middle + worst[:30])


@pytest.mark.parametrize("outlier", [-1e30, 1e4, -60000.0])
def test_an_outlier_does_not_blur_the_ranking(library: CpuLibrary, level: int, outlier: float) -> None:
    case = Case([[700]], 1, 64, torch.float32, top_k=60, rho=90)
    place = int(case.recalled[0, 0, 5])
    case.rows[int(case.table[0, place // 1024]), 0, place % 1024, 0] = 0.0
    case.rows[int(case.table[0, place // 1024]), 0, place % 1024, 0, 3] = outlier * float(case.queries[0, 0, 3].sign())
    assert case.run(library) == 0
    check_results(case, 1e-4 if outlier < 0 else 1e-2)  # float32 scores of 1e3 differ by 1e-4


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_key_shows(library: CpuLibrary, level: int, poison: float) -> None:
    case = Case([[300]], 2, 64, torch.bfloat16, top_k=300, rho=300)
    place = int(case.recalled[0, 0, 9])
    case.rows[int(case.table[0, place // 1024]), 0, place % 1024, 0] = poison
    assert case.run(library) == 0
    assert case.out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_depend_neither_on_the_batch_nor_on_threads(library: CpuLibrary, dtype: torch.dtype) -> None:
    together = Case([[1300, 250], [2, 800], [129, 128]], 4, 128, dtype, top_k=200, rho=400)
    assert together.run(library) == 0
    for threads in (2, 5):
        with closing(HostPool(library, threads, pinned=False)) as pool:
            again = Case(**_fields(together))
            assert again.run(library, pool.pointer) == 0
            assert _same(together, again, slice(None))
    for request in range(3):
        alone = Case(**_fields(together))
        keep = torch.zeros(3, 1, dtype=torch.int32)
        keep[request] = 1
        alone.recalled_count *= keep
        assert alone.run(library, threads=2) == 0
        assert _same(together, alone, slice(request, request + 1))


def _fields(case: Case) -> dict[str, object]:
    return {field.name: getattr(case, field.name) for field in dataclasses.fields(case) if field.init}


def _same(a: Case, b: Case, requests: slice) -> bool:
    names = ("out", "lse", "selected", "best")
    return all(torch.equal(getattr(a, name)[requests], getattr(b, name)[requests]) for name in names)


def test_slots_of_requests_that_are_not_served_do_not_matter(library: CpuLibrary) -> None:
    case = Case([[30, 20], [0, 0]], 2, 64, torch.float32, top_k=5, rho=8)
    case.slots[1] = 99
    assert case.run(library) == 0
    check_results(case, TOLERANCE)


def test_parts_that_are_not_wanted(library: CpuLibrary) -> None:
    case = Case([[500, 20]], 4, 64, torch.bfloat16, top_k=64, rho=100)
    assert case.run(library) == 0
    for left_out in (("out", "lse"), ("selected",), ("best",)):
        other = Case(**_fields(case))
        step = other.step()
        for name in left_out:
            setattr(step, name, None)
        host_step(library)(step)
        assert other.error.value == 0
        for name in ("out", "lse", "selected", "best"):
            same = torch.equal(getattr(case, name), getattr(other, name))
            assert same == (name not in left_out)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_pools_come_and_go(library: CpuLibrary, threads: int) -> None:
    before = threading.active_count()
    for _ in range(3):
        tasks_before = len(os.listdir("/proc/self/task"))
        with closing(HostPool(library, threads, pinned=False)) as pool:
            assert len(os.listdir("/proc/self/task")) == tasks_before + threads - 1
            case = Case([[700, 300]], 4, 128, torch.bfloat16, top_k=100, rho=250)
            for _ in range(3):
                assert case.run(library, pool.pointer) == 0
                check_results(case, TOLERANCE)
        assert len(os.listdir("/proc/self/task")) == tasks_before
        pool.close()  # once more does no harm
    assert threading.active_count() == before


def test_pinning_the_caller_is_for_its_thread_alone(library: CpuLibrary) -> None:
    cores: list[set[int]] = []

    def call(pool: HostPool) -> None:
        assert Case([[50]], 1, 64, torch.float32, 10, 10).run(library, pool.pointer) == 0
        cores.append(os.sched_getaffinity(0))

    before = os.sched_getaffinity(0)
    with closing(HostPool(library, 2, pinned=True)) as pool:
        thread = threading.Thread(target=call, args=(pool,))
        thread.start()
        thread.join()
    assert cores == [{min(before)}]
    assert os.sched_getaffinity(0) == before


def test_pools_work_side_by_side_and_one_pool_for_many_callers(library: CpuLibrary) -> None:
    failures: list[str] = []

    def call(pool: HostPool, seed: int) -> None:
        case = Case([[400 + seed, 90]], 4, 64, torch.bfloat16, top_k=50, rho=80, seed=seed)
        for _ in range(20):
            if case.run(library, pool.pointer) != 0:
                failures.append(f"{seed}: error {case.error.value}")
        check_results(case, TOLERANCE)
        failures.append("")  # came to its end

    with closing(HostPool(library, 2, pinned=False)) as first, closing(HostPool(library, 3, pinned=False)) as second:
        threads = [threading.Thread(target=call, args=(pool, i)) for i, pool in enumerate((first, second, first))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == ["", "", ""]


def test_sleeping_threads_wake_up_and_memory_stays(library: CpuLibrary, pool: HostPool) -> None:
    case = Case([[600, 600]], 4, 128, torch.bfloat16, top_k=100, rho=250)
    pause = threading.Event()
    for _ in range(20):
        assert case.run(library, pool.pointer) == 0
        pause.wait(0.002)  # longer than threads watch
    check_results(case, TOLERANCE)
    page, statm = os.sysconf("SC_PAGESIZE"), "/proc/self/statm"
    with open(statm) as file:
        before = int(file.read().split()[1])
    for _ in range(300):
        assert case.run(library, pool.pointer) == 0
    with open(statm) as file:
        grown = (int(file.read().split()[1]) - before) * page
    assert grown < 4 << 20


def test_errors_are_codes_and_results_are_cleared(library: CpuLibrary, pool: HostPool) -> None:
    def failed(code: int, **changes: object) -> None:
        case = Case([[30, 20], [10, 10]], 2, 64, torch.float32, top_k=5, rho=8)
        step = case.step(pool.pointer)
        for name, value in changes.items():
            if name == "place":
                case.recalled[1, 0, 3] = value
            elif name == "count":
                case.recalled_count[1, 1] = value
            elif name == "slot":
                case.slots[0] = value
            else:
                setattr(step, name, value)
        host_step(library)(step)
        assert case.error.value == code
        if code != 1:
            assert case.out.eq(0).all()
            assert case.lse.eq(-torch.inf).all()
            assert case.selected.eq(-1).all()
        with pytest.raises(KernelError, match="CTkvr on host cores"):
            raise_error(case.error.value)

    failed(1, head_dim=80)
    failed(1, head_dim=288)
    failed(1, heads=3)
    failed(1, dtype=3)
    failed(1, lse=None)
    failed(2, count=31)
    failed(2, count=-1)
    failed(3, slot=2)
    failed(3, slot=-1)
    failed(4, place=-1)
    failed(4, place=4096)  # beyond the table
    failed(4, place=3072)  # in the table, but no extent there
    raise_error(0)
    assert set(ERRORS) == set(range(1, 6))
