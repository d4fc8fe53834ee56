"""The model of GPUs on several ranks, threads here: what one rank computes, ways to sum, and a rank's end that is noticed."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.support.device_stand_ins import make_decoder
from tests.support.prefill import run_prefill
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.engine.leading import leader
from kvseek.engine.leading.followers import Followers, RankError
from kvseek.engine.loading import load
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.parallel.channel import Channel
from kvseek.engine.parallel.cuda import ranks as device_ranks
from kvseek.engine.parallel.cuda import sums as sums_module
from kvseek.engine.parallel.cuda.gpus import gpu_of_rank
from kvseek.engine.parallel.cuda.ranks import DeviceRanks
from kvseek.engine.parallel.cuda.sums import (
    NCCL,
    SMALL_BYTES,
    SYMMETRIC,
    NcclSums,
    SumError,
    SymmetricSums,
    choose,
    release_signals,
    try_to_make,
)
from kvseek.engine.parallel.ranks import Ranks, create_store, find_store
from kvseek.engine.parallel.reports import Reporter, Reports
from kvseek.engine.parallel.watch import Watch, has_failed

CPU = torch.device("cpu")
WAIT_SECONDS = 60.0  # after which a thread that waits for another one fails
FLAGS = ("--max_batch_size", "3", "--max_seq_len", "1000", "--prefill_chunk_tokens", "50", "--kernels", "reference")
WINDOW = ("--cache.sink", "4", "--cache.local", "32", "--cache.update", "64", "--cache.full_threshold", "40")
PROMPTS = {0: [i * 7 % 100 for i in range(180)], 2: [i * 5 % 100 for i in range(25)]}
Result = TypeVar("Result")


class ThreadSums:
    """Sums of threads that share a list of parts."""

    name = "threads"

    def __init__(self, rank: int, parts: list[Tensor | None], barrier: threading.Barrier) -> None:
        self._rank, self._parts, self._barrier = rank, parts, barrier
        self.count = 0

    def sum(self, tensor: Tensor) -> Tensor:
        self.count += 1
        self._parts[self._rank] = tensor
        self._barrier.wait()
        total = torch.stack([part for part in self._parts if part is not None]).sum(0)
        self._barrier.wait()
        return total

    def release(self) -> None:
        self._barrier.abort()

    def close(self) -> None:
        pass


def thread_ranks(size: int) -> list[DeviceRanks]:
    """Ranks of this process, one for each of as many threads; what is small and what is large is counted apart."""
    parts, barrier = cast("list[Tensor | None]", [None] * size), threading.Barrier(size, timeout=WAIT_SECONDS)
    loading: Any = None
    made = [[ThreadSums(rank, parts, barrier) for _ in range(2)] for rank in range(size)]
    return [DeviceRanks(rank, size, CPU, 1, small, large, loading) for rank, (small, large) in enumerate(made)]


def together(work: Callable[[DeviceRanks], Result], ranks: list[DeviceRanks]) -> list[Result]:
    """Do the same on all ranks, each in a thread."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def logits_of(decoder: Decoder) -> Tensor:
    """Of prompts that are read in chunks, and of steps."""
    rows = [run_prefill(decoder, slot, prompt, 40)[None] for slot, prompt in PROMPTS.items()]
    rows += [decoder.decode([step, step + 90], [0, 2])[0] for step in range(30)]
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("architecture", "size", "shape"),
    [
        ("llama", 2, {}),
        ("qwen3", 3, {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 401}),  # rows are left over
        ("qwen2", 4, {}),  # biases; two ranks have the same KV head
        ("llama", 2, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ],
)
def test_logits_are_those_of_one_rank(
    architecture: str,
    size: int,
    shape: dict[str, Any],
    random_model: RandomModel,
    build_engine: BuildEngine,
) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 16, "max_position_embeddings": 2048}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = random_model(architecture, **(sizes | shape))
    one = build_engine(model, "full", *FLAGS, *WINDOW)
    several = build_engine(model, "full", *FLAGS, *WINDOW, "--tp_size", str(size))
    expected = logits_of(make_decoder(one))
    found = together(lambda own: logits_of(make_decoder(several, ranks=own)), thread_ranks(size))
    for logits in found:  # of all ranks: each draws the token with the largest logit
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= 1e-4


def test_large_tensors_are_summed_the_other_way() -> None:
    ranks = thread_ranks(2)
    count = SMALL_BYTES // 4

    def work(own: DeviceRanks) -> tuple[float, float]:
        small, large = (torch.full((n,), float(own.rank + 1)) for n in (count, count + 1))
        return own.sum(small)[0].item(), own.sum(large)[-1].item()

    assert together(work, ranks) == [(3.0, 3.0)] * 2
    assert [(cast("ThreadSums", own.small).count, cast("ThreadSums", own.large).count) for own in ranks] == [(1, 1)] * 2


def test_gathered_parts_lie_side_by_side() -> None:
    parts = torch.arange(12.0).view(3, 4).split(2, dim=1)
    found = together(lambda own: own.gather(parts[own.rank]), thread_ranks(2))
    assert all(one.equal(torch.arange(12.0).view(3, 4)) for one in found)


@pytest.mark.parametrize(("available", "fits"), [((2 << 30) + (1 << 30), True), ((2 << 30) + (1 << 30) - 1, False)])
def test_host_memory_must_hold_the_pools_of_all_ranks(
    available: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_ranks, "available_bytes", lambda: available)
    monkeypatch.setattr(device_ranks, "_most", lambda reporter, group, number: number)
    (own, _) = thread_ranks(2)
    if fits:
        own.check_host_memory(1 << 30)
        return
    message = (
        r"the row pools of 2 ranks need 2,147,483,648 bytes of host memory together, 3,221,225,471 are available; lower"
    )
    with pytest.raises(device_ranks.CapacityError, match=message):
        own.check_host_memory(1 << 30)


def test_an_engine_that_does_not_load_drops_its_graphs_before_its_ranks_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's communicator would wait for the graphs: those of a step that failed, or while another rank fails later."""
    done: list[str] = []

    class Stub:
        def __getattr__(self, name: str) -> Callable[[], None]:
            return lambda: done.append(name)

    class Failing(Stub):
        def prepare(self) -> None:
            raise torch.OutOfMemoryError

    class Late(Stub):
        def wait_until_loaded(self) -> None:
            raise RankError("rank 1 cannot load its part")

    decoder: Any = Failing()
    with pytest.raises(torch.OutOfMemoryError):
        load._prepare(decoder)
    assert done == ["close"]
    done.clear()
    monkeypatch.setattr(leader, "load_rank", lambda *_: decoder)
    monkeypatch.setattr(leader, "rank_config", lambda config: config)
    late, ranks = cast("Followers", Late()), cast("Ranks", Stub())
    with pytest.raises(RankError, match="rank 1 cannot load"):
        leader._load(Path(), cast("EngineConfig", None), late, ranks)
    assert done == ["close", "close", "leave"], "the ranks' processes, the graphs, the group"


def test_the_faster_way_is_chosen() -> None:
    assert choose({SYMMETRIC: 7e-6, NCCL: 21e-6}) == SYMMETRIC
    assert choose({SYMMETRIC: 30e-6, NCCL: 21e-6}) == NCCL
    assert choose({NCCL: 21e-6}) == NCCL
    with pytest.raises(SumError, match="the ranks' GPUs can sum neither in symmetric memory nor by NCCL"):
        choose({})


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_signals_free_a_kernel_whose_neighbours_are_dead(rank: int) -> None:
    """Threads of a block as PyTorch's kernels have them, which wait eight times for three ranks; only this one lives."""
    size, blocks, passed = 3, 2, 0
    pads = [[one % 2] * (size * blocks) for one in range(size)]  # whatever the others left
    here = pads[rank]

    def thread(block: int, target: int) -> Iterator[None]:
        for _ in range(8):
            for pad, number, wanted in ((pads[target], rank, 0), (here, target, 1)):
                while pad[block * size + number] != wanted:
                    yield
                pad[block * size + number] = 1 - wanted

    waiting = [thread(block, target) for block in range(blocks) for target in range(size)]
    turns = itertools.cycle(signals.tolist() for signals in release_signals(size * blocks, rank, size))
    for _ in range(200):
        here[:] = next(turns)
        for other, pad in enumerate(pads):
            if other != rank:
                pad[:] = [0] * len(pad)
        waiting = [one for one in waiting if next(one, "ended") != "ended"]
        passed = size * blocks - len(waiting)
    assert passed == size * blocks


def test_a_way_that_is_not_there_says_why() -> None:
    def broken() -> SymmetricSums:
        raise RuntimeError("CUDASymmetricMemory is not there\nwith a second line")

    assert try_to_make(broken) == (None, "RuntimeError: CUDASymmetricMemory is not there")
    half = torch.float16

    def refused() -> SymmetricSums:
        group: torch.distributed.ProcessGroup = None  # type: ignore[assignment]
        return SymmetricSums(group, torch.device("cuda"), half, 1, 8)

    _, reason = try_to_make(refused)
    assert "dtype = torch.float16: must be one of" in reason


def test_kernels_are_freed_while_nccl_waits_for_graphs() -> None:
    """A graph may have sums of both ways: those in symmetric memory must be freed before NCCL's abort has returned."""
    gone, begun = threading.Event(), threading.Semaphore(0)

    class Backend:
        def abort(self) -> None:
            begun.release()
            gone.wait()

    class Group:
        def _get_backend(self, device: torch.device) -> Backend:
            return Backend()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums_module.dist, "new_group", lambda **_: Group())
        patch.setattr(sums_module.torch.cuda, "synchronize", lambda _: None)
        patch.setattr(sums_module.dist, "all_reduce", lambda tensor, group: None)
        sums = NcclSums(torch.device("cpu"))
    for _ in range(3):
        sums.release()  # returns although no graph is gone
    assert begun.acquire(timeout=60)
    closing = threading.Thread(target=sums.close, daemon=True)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "the group must not end before"
    gone.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not begun.acquire(blocking=False), "it is aborted once"


def test_each_rank_takes_a_gpu_of_its_own() -> None:
    assert [gpu_of_rank(rank, 4, 8, share=False) for rank in range(4)] == [0, 1, 2, 3]
    assert [gpu_of_rank(rank, 4, 4, share=True) for rank in range(4)] == [0, 1, 2, 3]
    assert [gpu_of_rank(rank, 4, 2, share=True) for rank in range(4)] == [0, 1, 0, 1]
    for count, share in ((1, False), (0, True)):
        message = f"tp_size = 2: must be <= {count}, the GPUs that PyTorch sees on this host"
        with pytest.raises(ConfigError, match=message):
            gpu_of_rank(0, 2, count, share)


@pytest.fixture
def pair() -> tuple[Channel, Channel]:
    """Both ends of a rank's connection; rank 0's is the first."""
    own, theirs = Pipe()
    return Channel(own), Channel(theirs)


@pytest.fixture
def store() -> TCPStore:
    """A store that lives as long as the test."""
    return create_store(60.0)


@pytest.fixture
def reports(store: TCPStore) -> Reports:
    """Of rank 1, which reports nothing."""
    return Reports(find_store(store.host, store.port, 60.0), Reporter(), [1])


def test_a_connection_tells_whether_its_rank_has_failed(pair: tuple[Channel, Channel]) -> None:
    own, theirs = pair
    assert not has_failed(own)
    theirs.send(b"")  # READY
    assert not has_failed(own)
    assert own.receive() == b""
    theirs.send(b"an error")
    assert has_failed(own)
    assert own.receive() == b"an error", "nothing was read"
    theirs.close()
    assert has_failed(own)
    own.close()
    assert has_failed(own)


def test_kernels_are_released_when_a_rank_ends(pair: tuple[Channel, Channel], reports: Reports) -> None:
    own, theirs = pair
    released = threading.Semaphore(0)
    watch = Watch({1: own}, released.release, 600.0, reports)
    watch.begin()
    assert not watch.failure
    theirs.close()
    for _ in range(3):  # again and again: each lets kernels pass one wait
        assert released.acquire(timeout=60)
    assert watch.failure == "rank 1: it has ended or failed"
    watch.end()
    watch.close()
    watch.close()


def test_kernels_are_released_when_the_engine_is_closed(pair: tuple[Channel, Channel], reports: Reports) -> None:
    released = threading.Event()
    watch = Watch({1: pair[0]}, released.set, 600.0, reports)
    watch.free()
    assert released.wait(60)
    assert not watch.failure
    watch.close()


def test_pipes_of_ranks_are_sockets() -> None:
    """has_failed looks into them without reading."""
    own, _ = Pipe()
    with socket.socket(fileno=own.fileno()) as peer:
        assert peer.family == socket.AF_UNIX
        peer.detach()
