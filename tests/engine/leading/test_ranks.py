"""Engines of several ranks, real processes over gloo: the tokens are those of one rank, and faults end the engine by name."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.plugins.cases import CASES, method_flags
from tests.support.prefill import run_prefill, run_to_end
from tests.support.random_models import WINDOWS
from tests.support.waiting import SECONDS, wait_for
from torch import Tensor

from kvseek.core.config import read_config
from kvseek.core.errors import ConfigError, ErrorCode, UnavailableError
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.engine.engine import Engine
from kvseek.engine.leading.followers import RankError
from kvseek.engine.leading.leader import LeadDecoder, lead, load_decoder
from kvseek.engine.service import EngineService
from kvseek.plugins.registry import METHODS

pytestmark = pytest.mark.usefixtures("forked_ranks")

FLAGS = ("--max_batch_size", "3", "--max_seq_len", "1600", "--prefill_chunk_tokens", "200")
WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
REUSING = ("full", "nested", "pariskv", "clusterkv", "prkv")  # entries, with a state, entries, copies, moved rows
REQUESTS = [
    Request(tuple(i * i * 13 % 250 + 3 for i in range(1200)), 25),
    Request(tuple(i * 7 % 250 + 3 for i in range(15)), 60),
    Request(tuple(i * i * 5 % 250 + 3 for i in range(300)), 12, SamplingConfig(temperature=0.9, top_k=40, seed=5)),
    Request(tuple(i * 11 % 250 + 3 for i in range(40)), 4, SamplingConfig(prompt_logprobs=1, logprobs=2)),
]


@contextmanager
def loaded(directory: Path) -> Iterator[Engine]:
    engine = Engine.load(directory)
    try:
        yield engine
    finally:
        engine.close()


def check_equal(one: Path, several: Path) -> None:
    """Batches of requests of all kinds, of which one is cancelled while it is read, have the same tokens."""
    answers, scores = [], []
    for directory in (one, several):
        with loaded(directory) as engine:
            given_up = engine.submit(Request(REQUESTS[0].prompt_ids[::-1], 5))
            engine.step()
            engine.cancel(given_up)
            numbers = [engine.submit(request) for request in REQUESTS]
            drawn = [output for output in run_to_end(engine) if output.token_id is not None or output.prompt_logprobs]
            assert engine._cache.extents.used == 0
            answers.append([[o.token_id for o in drawn if o.request_id == number] for number in numbers])
            scores.append([found.token for output in drawn for found in output.prompt_logprobs])
    assert answers[0] == answers[1]
    assert scores[0]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


# test_ranks_reuse.py has the others. Of the competing systems, whose index in a rank is one of fewer heads, one that has
# pages, one that evicts, and one with codes.
@pytest.mark.parametrize("method", sorted({*METHODS, "quest", "h2o", "pqcache"} - {*REUSING}))
def test_every_method_has_the_tokens_of_one_rank(
    method: str, random_model: RandomModel, build_engine: BuildEngine
) -> None:
    model = random_model("llama", num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    flags = (*FLAGS, *WINDOW, *method_flags(method, CASES[method].sparse))
    check_equal(build_engine(model, method, *flags), build_engine(model, method, *flags, "--tp_size", "2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "heads", "kv_heads", "shape", "ranks", "flags"),
    [
        ("qwen2", 4, 1, {}, 2, ()),  # biases; two ranks have the same KV head
        ("qwen3", 6, 3, {"vocab_size": 401}, 3, ()),  # QK-norm; rows of the vocabulary are left over
        ("llama", 4, 4, {"tie_word_embeddings": True}, 2, ("--weight_only_precision", "int8")),
        ("qwen3", 4, 2, {"vocab_size": 401}, 2, ("--weight_only_precision", "int8", "--quantize_lm_head")),
        ("llama", 4, 2, {"attention_bias": True, "mlp_bias": True}, 2, ("--kernels", "reference")),
        ("qwen2_moe", 4, 2, {}, 2, ()),  # a shared expert, and a layer without experts
        ("qwen3_moe", 4, 1, {}, 2, ("--weight_only_precision", "int8")),
        ("qwen3_next", 4, 2, {}, 2, ()),
        ("qwen3", 4, 2, WINDOWS, 2, ()),
        ("gemma3", 4, 1, {}, 2, ()),
        ("qwen3_5", 4, 1, {"attention_bias": True}, 2, ("--weight_only_precision", "int8")),
    ],
)
def test_every_architecture_has_the_tokens_of_one_rank(
    architecture: str,
    heads: int,
    kv_heads: int,
    shape: dict[str, Any],
    ranks: int,
    flags: tuple[str, ...],
    random_model: RandomModel,
    build_engine: BuildEngine,
) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 16, "max_position_embeddings": 2048}
    model = random_model(architecture, num_attention_heads=heads, num_key_value_heads=kv_heads, **sizes, **shape)
    flags = (*FLAGS, *flags)
    check_equal(build_engine(model, "full", *flags), build_engine(model, "full", *flags, "--tp_size", str(ranks)))


def logits_of(directory: Path) -> Tensor:
    """Of a prompt in chunks, and of steps with given tokens."""
    tokens = [i * i * 7 % 250 + 3 for i in range(300)]
    with closing(load_decoder(directory, read_config(directory))) as decoder:
        rows = [run_prefill(decoder, 0, tokens, 40)[None]]
        rows += [decoder.decode([token], [0])[0] for token in tokens[:30]]
        return torch.cat(rows)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_8_bits_is_divided_by_rows(tied: bool, random_model: RandomModel, build_engine: BuildEngine) -> None:
    """In bfloat16, whose kernel reads the bytes; rows of the vocabulary are left over, and ranks' sums are rounded."""
    shape = {"vocab_size": 401, "tie_word_embeddings": tied, "max_position_embeddings": 2048}
    model = random_model("llama", num_attention_heads=4, num_key_value_heads=2, **shape)
    flags = (*FLAGS, "--dtype", "bfloat16", "--weight_only_precision", "int8", "--quantize_lm_head")
    expected, found = (logits_of(build_engine(model, "full", *flags, *more)) for more in ((), ("--tp_size", "2")))
    assert found.shape == expected.shape == (31, 401)
    assert (found - expected).norm() / expected.norm() <= 5e-2


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    model = random_model("llama", num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    return build_engine(model, "full", *FLAGS, "--tp_size", "2")


def follower_of(decoder: LeadDecoder) -> int:
    """Process id of rank 1."""
    return decoder._followers._members[0].process.pid


def check_a_rank_that_dies(service: EngineService, seconds: float = SECONDS) -> None:
    """Kill rank 1 while a request generates: within `seconds` each, request and engine end with an error that names it."""
    outputs: list[StepOutput] = []
    service.submit(Request((5, 6, 7), 1500), outputs.append)
    wait_for(lambda: len(outputs) > 3, "tokens")
    os.kill(follower_of(service.engine.decoder), signal.SIGKILL)  # type: ignore[arg-type]
    wait_for(lambda: outputs[-1].finish_reason is not None, "the request's end", seconds)
    assert (outputs[-1].finish_reason, outputs[-1].code) == (FinishReason.ERROR, ErrorCode.UNAVAILABLE)
    wait_for(lambda: service.failure, "the engine's end", seconds)
    assert "rank 1: its process" in service.failure
    assert "has ended with status -9" in service.failure


def test_a_rank_that_dies_ends_the_engine(directory: Path) -> None:
    service = EngineService.load(directory)
    try:
        check_a_rank_that_dies(service)
        with pytest.raises(UnavailableError, match="rank 1: its process"):
            service.submit(Request((5,), 1), [].append)
    finally:
        service.close()


def test_a_rank_that_hangs_ends_the_engine(random_model: RandomModel, build_engine: BuildEngine) -> None:
    """Of three: the others wait for it as rank 0 does, and are not blamed."""
    sizes = {"hidden_size": 96, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3}
    model = random_model("llama", **sizes, intermediate_size=192, max_position_embeddings=2048)
    directory = build_engine(model, "full", *FLAGS, "--tp_size", "3")
    decoder = lead(directory, read_config(directory), timeout_seconds=60.0)
    run_prefill(decoder, 0, [5, 6, 7], 5)
    decoder._followers._members[1].process.send_signal(signal.SIGSTOP)
    # Loading may take long on a slow machine; what follows is to be quick.
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    decoder._followers._timeout_seconds = 1.0
    message = r"^rank 2: no answer within 1 s \(silent for \d+ s, after: .*\); the engine's ranks cannot go on"
    with pytest.raises(RankError, match=message):
        decoder.decode([8], [0])
    with pytest.raises(RankError, match="the engine's ranks cannot go on without each other: load it again"):
        decoder.cache.close(0)
    decoder._followers._members[1].process.send_signal(signal.SIGCONT)
    decoder.close()


def test_a_rank_whose_cache_differs_ends_the_engine(directory: Path) -> None:
    with closing(lead(directory, read_config(directory))) as decoder:
        run_prefill(decoder, 0, [5, 6, 7], 5)
        decoder.cache.tokens[1] += 1
        message = r"rank 1: RuntimeError: checksum of the cache's state = .*: must be rank 0's"
        with pytest.raises(RankError, match=message):
            decoder.decode([8], [0])


def test_a_rank_that_cannot_load_its_part_says_why_and_leaves_nothing(directory: Path, tmp_path: Path) -> None:
    """The engine that is loaded next ends neither by another one, as a process has one, nor by a terminal's signals to all."""
    damaged = shutil.copytree(directory, tmp_path / "engine")
    (damaged / "rank1.index.json").unlink()
    with pytest.raises(
        RankError, match=r"rank 1: EngineDirectoryError: .*rank1.index.json is missing; build the engine"
    ):
        lead(damaged, read_config(damaged))
    with loaded(directory) as engine:
        with pytest.raises(ConfigError, match="tp_size: another engine of several ranks runs in this process"):
            load_decoder(directory, read_config(directory))
        pid = follower_of(engine.decoder)  # type: ignore[arg-type]
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        time.sleep(0.2)
        assert len(engine.generate([Request((5, 6), 3)])[0]) == 3
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
