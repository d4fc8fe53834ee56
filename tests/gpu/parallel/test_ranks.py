"""Engines of two ranks on GPUs, real processes: what one rank answers, and faults that end the engine by name.

The ranks share a GPU where there is one. They then take turns of a few milliseconds, so every sum takes about as long.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine.leading import test_ranks as cpu_ranks
from tests.engine.leading.test_ranks import FLAGS, check_a_rank_that_dies, check_equal, follower_of, loaded, logits_of
from tests.engine.leading.test_ranks_reuse import conversation
from tests.gpu.parallel.failing_way import WAY
from tests.plugins.cases import CASES, method_flags
from tests.support.prefill import run_prefill
from torch import Tensor

from kvseek.core.config import read_config
from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.draws.sampling import Sampler
from kvseek.engine.engine import Engine
from kvseek.engine.leading.followers import RankError
from kvseek.engine.leading.leader import LeadDecoder, lead
from kvseek.engine.model.prefill import NO_CALLBACKS, LogitsCallbacks, Prefill
from kvseek.engine.parallel.cuda import ranks as device_ranks
from kvseek.engine.parallel.cuda.gpus import SHARE_VARIABLE
from kvseek.engine.parallel.cuda.sums import NCCL, SYMMETRIC
from kvseek.engine.service import EngineService

pytestmark = pytest.mark.gpu

WINDOW = (*cpu_ranks.WINDOW, "--cache.update", "64")  # codes on a GPU need whole blocks of so many keys

WAY_SECONDS = 150.0  # of a process that loads an engine and fails; NCCL itself would wait
FAULT_SECONDS = 30.0  # that an engine may take to end; without the watch it would wait for ever
SPARSE = {
    name: method_flags(name, next(iter(CASES[name].on_gpu.values()), {})) for name in ("full", "nested", "pariskv")
}
REUSE = ("--max_batch_size", "4", "--max_seq_len", "3200", "--prefill_chunk_tokens", "512")
POOL = ("--cache.kv_cache_host_memory_bytes", str(6 * 2 * 2 * 1024 * 2 * 64 * 4))  # two layers, two heads, float32
INT4_ALIKE = "int4 --weight_group 32 --quantize_lm_head"  # one rank would have groups of 64
TEACHER = [i * i * 7 % 250 + 3 for i in range(300)]


@pytest.fixture(autouse=True)
def _one_gpu_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_VARIABLE, "1")


def model_of(random_model: RandomModel, architecture: str, **shape: object) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return random_model(architecture, **{**sizes, **heads, **shape})


@pytest.mark.parametrize("offload", ["always", "never"])
@pytest.mark.parametrize(
    ("method", "architecture"), [("full", "llama"), ("nested", "llama"), ("pariskv", "llama"), ("nested", "qwen3")]
)
def test_tokens_are_those_of_one_rank(
    method: str, architecture: str, offload: str, random_model: RandomModel, on_gpu: BuildEngine
) -> None:
    """Prompts in chunks, a request that is given up, sampling, and log probabilities of a prompt."""
    model = model_of(random_model, architecture)
    flags = (*FLAGS, *WINDOW, *SPARSE[method], "--cache.offload", offload, "--dtype", "float32")
    check_equal(on_gpu(model, method, *flags), on_gpu(model, method, *flags, "--tp_size", "2"))


@pytest.mark.parametrize("precision", ["none", "int8", "int8 --quantize_lm_head", "fp8", INT4_ALIKE])
def test_logits_are_close_in_sixteen_bits(precision: str, random_model: RandomModel, on_gpu: BuildEngine) -> None:
    """Rank 0 alone adds biases; rows of the vocabulary are left over; sums of parts are rounded to bfloat16."""
    check_close(model_of(random_model, "llama", attention_bias=True, mlp_bias=True, vocab_size=401), precision, on_gpu)


@pytest.mark.parametrize(("architecture", "precision"), [("qwen2_moe", "none"), ("qwen3_moe", "int8")])
def test_logits_of_experts_are_close(
    architecture: str, precision: str, random_model: RandomModel, on_gpu: BuildEngine
) -> None:
    """Rounding chooses other experts only where two are nearly as likely: here each token has them all."""
    model = model_of(random_model, architecture, num_experts=4, num_experts_per_tok=4)
    check_close(model, precision, on_gpu)


def check_close(model: Path, precision: str, on_gpu: BuildEngine) -> None:
    flags = (*FLAGS, *WINDOW, "--dtype", "bfloat16", "--weight_only_precision", *precision.split())
    expected, found = (logits_of(on_gpu(model, "full", *flags, *more)) for more in ((), ("--tp_size", "2")))
    assert found.shape == expected.shape
    assert (found - expected).norm() / expected.norm() <= 5e-2


@pytest.mark.parametrize("method", ["full", "nested"])
def test_prefixes_are_reused_as_by_one_rank(method: str, random_model: RandomModel, on_gpu: BuildEngine) -> None:
    model = model_of(random_model, "llama", hidden_size=64, intermediate_size=64)
    flags = (*WINDOW, *REUSE, *POOL, *SPARSE[method], "--cache.offload", "always", "--dtype", "float32")
    found = []
    for more in ((), ("--tp_size", "2")):
        with loaded(on_gpu(model, method, *flags, *more)) as engine:
            found.append(conversation(engine))
            assert engine.cache_usage.reuse.reused_tokens > 4000
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, on_gpu: BuildEngine) -> Path:
    return on_gpu(model_of(random_model, "llama"), "full", *FLAGS, "--dtype", "bfloat16", "--tp_size", "2")


def test_a_rank_that_dies_ends_the_engine(directory: Path) -> None:
    service = EngineService.load(directory)
    try:
        check_a_rank_that_dies(service, FAULT_SECONDS)
    finally:
        service.close()
    with loaded(directory) as engine:  # nothing of it is left on the GPU, or waits there
        assert len(engine.generate([Request((5, 6), 3)])[0]) == 3


def first_step(decoder: LeadDecoder) -> Callable[[], object]:
    run_prefill(decoder, 0, [5, 6, 7], 5)
    return lambda: decoder.decode([8], [0])


def first_token(decoder: LeadDecoder) -> Callable[[], object]:
    run_prefill(decoder, 0, [5, 6, 7], 5)
    return lambda: decoder.launch([8], [0], [None]).collect()


def first_logits(decoder: LeadDecoder) -> Callable[[], object]:
    run_prefill(decoder, 0, [5, 6, 7], 5)
    sampler = Sampler(Request((5,), 5, SamplingConfig(temperature=1.0)), decoder.config.model.vocab_size)
    return lambda: decoder.launch([8], [0], [sampler]).collect()


def rest_of_a_prompt(decoder: LeadDecoder) -> Callable[[], object]:
    """In more launches than the driver takes before the host has to wait inside it, were they not bounded.

    Another prompt is read before, as a kernel that is loaded at its first launch would wait inside the driver as well.
    """

    def read(prefill: Prefill) -> Tensor:
        while prefill.progress < 1:
            prefill.advance(2)
        return prefill.finish()

    read(begin_prompt(decoder))
    decoder.cache.close(0)
    prefill = begin_prompt(decoder)
    prefill.advance(2)
    return lambda: read(prefill)


def end_of_a_prompt(decoder: LeadDecoder) -> Callable[[], object]:
    prefill = begin_prompt(decoder)
    read_layers(prefill, decoder)
    return prefill.finish


def logits_of_a_prompt(decoder: LeadDecoder) -> Callable[[], object]:
    """As they are computed where a request asks for `return_context_logits`."""
    prefill = begin_prompt(decoder, {0: lambda first, logits: None})
    read_layers(prefill, decoder)
    return lambda: prefill.advance(len(TEACHER))


def begin_prompt(decoder: LeadDecoder, on_logits: LogitsCallbacks = NO_CALLBACKS) -> Prefill:
    decoder.cache.open(0, len(TEACHER) + 1)
    return decoder.prefill([(0, TEACHER)], on_logits)


def read_layers(prefill: Prefill, decoder: LeadDecoder) -> None:
    """All layers, in parts of at most a chunk; what `finish` does is left."""
    read, units = 0, decoder.config.model.num_layers * len(TEACHER)
    while read < units:
        read += prefill.advance(len(TEACHER))
    assert read == units


@pytest.mark.parametrize(
    "begin", [first_step, first_token, first_logits, rest_of_a_prompt, end_of_a_prompt, logits_of_a_prompt]
)
def test_a_rank_that_hangs_ends_the_engine(
    begin: Callable[[LeadDecoder], Callable[[], object]], directory: Path
) -> None:
    decoder = lead(directory, read_config(directory))
    follower, watch = follower_of(decoder), decoder._followers._watch
    assert watch is not None
    try:
        call = begin(decoder)
        os.kill(follower, signal.SIGSTOP)
        watch._timeout = 1.0  # loading may take long on a slow machine; what follows is to be quick
        with pytest.raises(
            RankError, match=r"^rank 1: no answer within 1 s \(silent for \d+ s, after: .*\); the engine's ranks"
        ):
            call()
    finally:
        os.kill(follower, signal.SIGCONT)
        decoder.close()


def test_a_release_that_is_held_up_ends_the_process(directory: Path, tmp_path: Path) -> None:
    """Rank 0 is a process of its own, which launches a whole prompt at once; it writes down the process of rank 1."""
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from kvseek.core.config import read_config\n"
        "from kvseek.engine.leading import leader; from kvseek.engine.parallel import watch\n"
        "from tests.gpu.parallel import test_ranks\n"
        "leader.UNITS_AHEAD, watch.RELEASED_SECONDS, directory = 100_000, 3.0, Path(sys.argv[1])\n"
        "decoder = leader.lead(directory, read_config(directory))\n"
        "call, follower = test_ranks.rest_of_a_prompt(decoder), test_ranks.follower_of(decoder)\n"
        "print(follower, flush=True); os.kill(follower, signal.SIGSTOP)\n"
        "decoder._followers._watch._timeout = 1.0\n"
        "call()\n"
    )
    log, command = tmp_path / "log", [sys.executable, "-c", program, str(directory)]
    with log.open("w") as errors:  # no pipe, which rank 1 would keep open
        rank_0 = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert rank_0.stdout is not None
    follower = int(rank_0.stdout.readline())
    try:
        status = rank_0.wait(WAY_SECONDS)
    finally:
        rank_0.kill()
        rank_0.stdout.close()
        os.kill(follower, signal.SIGKILL)  # a process that is stopped does not notice that rank 0's has ended
    found = log.read_text()
    assert status == 1, found
    assert "and what waits for it on rank 0 could not be released within 3 s: this process ends" in found
    assert "in _release" in found, "the stack of the thread that was to release it"


def check_a_way_that_fails(directory: Path, way: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 1 alone: rank 0 would wait in it, and ends all. Rank 0 is a process of its own, as a thread of it stays there."""
    monkeypatch.setenv(WAY, way)
    program = (
        "import os, sys, time; from pathlib import Path\n"
        "from kvseek.core.config import read_config\n"
        "from kvseek.engine.leading import followers; from kvseek.engine.leading.leader import lead\n"
        "followers.FOLLOWER, directory = 'tests.gpu.parallel.failing_way', Path(sys.argv[1])\n"
        "try: lead(directory, read_config(directory))\n"
        "except followers.RankError as error: print(error, flush=True)\n"
        "os._exit(0)\n"
    )
    command = [sys.executable, "-c", program, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAY_SECONDS, check=True)
    # Where rank 0's own attempt has timed out meanwhile, it goes on to the next way, which fails as well; the log has the reason.
    assert done.stdout.startswith(("rank 1: cannot sum by", "rank 1: SumError: the ranks' GPUs can sum neither")), done
    assert "the engine's ranks cannot go on without each other" in done.stdout, done
    assert f"cannot sum by {name}: RuntimeError: no way to the other GPUs" in done.stdout + done.stderr, done


def test_a_way_that_fails_on_one_rank_ends_the_engine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_way_that_fails(directory, "SymmetricSums", SYMMETRIC, monkeypatch)


@pytest.mark.multi_gpu
def test_nccl_that_fails_on_one_rank_ends_the_engine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARE_VARIABLE)
    check_a_way_that_fails(directory, "NcclSums", NCCL, monkeypatch)


def test_a_rank_whose_cache_differs_ends_the_engine(directory: Path) -> None:
    cpu_ranks.test_a_rank_whose_cache_differs_ends_the_engine(directory)


def test_cores_are_given_back(directory: Path) -> None:
    before = os.sched_getaffinity(0)
    for _ in range(2):
        with loaded(directory):
            pass
    assert os.sched_getaffinity(0) == before


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", [SYMMETRIC, NCCL])
@pytest.mark.parametrize("method", ["full", "nested", "pariskv"])
def test_both_ways_to_sum_on_two_gpus(
    method: str, way: str, random_model: RandomModel, on_gpu: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARE_VARIABLE)
    monkeypatch.setattr(device_ranks, "choose", lambda seconds: next(name for name in seconds if name == way))
    flags = (*FLAGS, *WINDOW, *SPARSE[method], "--dtype", "float32")
    model = model_of(random_model, "llama")
    directory = on_gpu(model, method, *flags, "--tp_size", "2")
    with loaded(directory) as engine:
        assert isinstance(engine.decoder, LeadDecoder)
        assert engine.decoder.sums == way
    check_equal(on_gpu(model, method, *flags), directory)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", [SYMMETRIC, NCCL])
def test_a_rank_that_dies_ends_the_engine_on_two_gpus(
    way: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARE_VARIABLE)
    monkeypatch.setattr(device_ranks, "choose", lambda seconds: next(name for name in seconds if name == way))
    test_a_rank_that_dies_ends_the_engine(directory)


@pytest.mark.multi_gpu
def test_a_rank_that_dies_ends_an_engine_with_sums_of_both_ways(
    random_model: RandomModel, on_gpu: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of several requests exceed SMALL_BYTES: they are summed by NCCL, in graphs whose other sums are not."""
    monkeypatch.delenv(SHARE_VARIABLE)
    monkeypatch.setattr(device_ranks, "choose", lambda seconds: next(name for name in seconds if name == SYMMETRIC))
    model = model_of(random_model, "llama", vocab_size=300_000, tie_word_embeddings=True)
    directory = on_gpu(model, "full", *FLAGS, "--dtype", "bfloat16", "--tp_size", "2")
    test_a_rank_that_dies_ends_the_engine(directory)


def test_too_few_gpus_are_refused_by_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARE_VARIABLE)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Exception, match="tp_size = 2: must be <= 1, the GPUs that PyTorch sees on this host"):
        Engine.load(directory)
