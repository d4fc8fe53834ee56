"""Sparse attention of prompts on a GPU, against the definition on the CPU's arithmetic and against dense attention."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine
from tests.gpu.conftest import MakeKernels
from tests.gpu.engine.test_prompt_attention import ATTENDED, KV_HEADS, check, definition, make, rows
from tests.gpu.waits import no_host_waits
from tests.support.prefill import run_prefill

from kvseek.core.config import KEY_BLOCK, BlockSparseConfig, EngineConfig, read_config
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.model.block_sparse import (
    PIECES_TOGETHER,
    Attend,
    BlockSparseAttention,
    RepeatedTokens,
    attend_by_cudnn,
    attend_by_flash,
    block_mass,
    block_mass_by_attention,
    choose,
    gather,
    mass_of,
    repeated_blocks,
    sample,
    sparse_bytes,
)

pytestmark = pytest.mark.gpu


def sparse_config(model: object, dtype: str, budget: int, dense_tail: int = 0, query_block: int = 512) -> EngineConfig:
    settings = BlockSparseConfig(budget, query_block, dense_tail=dense_tail, dense_layers=0)
    limits = {"max_seq_len": 9000, "max_input_len": 9000}
    return EngineConfig(
        model,  # type: ignore[arg-type]
        "full",
        dtype=dtype,
        device="cuda",
        prefill_attention="block_sparse",
        block_sparse=settings,
        **limits,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("past", [64, 2048, 8192 + 64, 3 * 8192])
@pytest.mark.parametrize(("dtype", "dim", "group"), [("bfloat16", 128, 4), ("float16", 64, 3), ("bfloat16", 96, 1)])
def test_mass_of_blocks(dtype: str, dim: int, group: int, past: int, device: torch.device) -> None:
    """By flash attention with one-hot values."""
    check_mass(dtype, dim, group, past, device, attend_by_flash)


@pytest.mark.parametrize("pieces", [PIECES_TOGETHER, 2 * PIECES_TOGETHER + 1])
@pytest.mark.parametrize(("dtype", "dim", "group"), [("bfloat16", 128, 6), ("float16", 64, 8)])
def test_mass_of_blocks_by_cudnn(dtype: str, dim: int, group: int, pieces: int, device: torch.device) -> None:
    """Whole groups of pieces by cuDNN, the others and the last, short one by flash attention."""
    check_mass(dtype, dim, group, pieces * dim * KEY_BLOCK + 640, device, attend_by_cudnn)


def check_mass(dtype: str, dim: int, group: int, past: int, device: torch.device, attend: Attend) -> None:
    """As the definition, up to the rounding of shares to 16 bits."""
    torch.manual_seed(past)
    kind = getattr(torch, dtype)
    queries = torch.randn(1100, KV_HEADS * group, dim, device=device).to(kind).transpose(0, 1)
    keys = torch.randn(KV_HEADS, past + 1000, dim, device=device).to(kind)[:, :past]
    samples = sample(2 * queries, KV_HEADS, 512, 32)
    found = block_mass_by_attention(samples, keys, dim**-0.5, attend)
    expected = block_mass(samples, keys, dim**-0.5)
    assert found.shape == expected.shape == (KV_HEADS, 3, past // KEY_BLOCK)
    assert (found - expected).abs().max() <= 0.02 * expected.max()
    assert (found.sum(dim=2) - samples.shape[2]).abs().max() <= 0.01 * samples.shape[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gathered_blocks_are_the_rows(dtype: str, device: torch.device) -> None:
    keys = rows(dtype, device, 5000, 128)[:, :4992]
    chosen = torch.rand(3, KV_HEADS, 78, device=device).argsort()[..., :32].sort().values
    out = torch.full((3, KV_HEADS, 2100, 128), 7.0, dtype=keys.dtype, device=device)
    gather(keys, chosen, out[:, :, :2048])
    for part, blocks in zip(out, chosen, strict=True):
        for head in range(KV_HEADS):
            expected = keys[head].view(78, KEY_BLOCK, 128)[blocks[head]].flatten(0, 1)
            assert torch.equal(part[head, :2048], expected)
    assert out[:, :, 2048:].eq(7).all()


@pytest.mark.parametrize(("q", "past"), [(2048, 6144), (1000, 4096), (2048, 6001), (300, 5000)])
@pytest.mark.parametrize(
    ("dtype", "dim", "group", "query_block", "cudnn"),
    [
        ("bfloat16", 128, 4, 512, True),
        ("bfloat16", 64, 3, 512, True),
        ("float16", 128, 1, 768, True),
        ("bfloat16", 128, 4, 96, True),
        ("bfloat16", 96, 2, 512, False),
        ("float32", 64, 3, 512, False),
    ],
)
def test_it_is_attention_to_chosen_blocks(
    dtype: str,
    dim: int,
    group: int,
    query_block: int,
    cudnn: bool,
    q: int,
    past: int,
    kernels: MakeKernels,
    device: torch.device,
) -> None:
    """Against dense attention of each query block to the rows that its own choice names; with and without cuDNN."""
    torch.manual_seed(q + past)
    dense = make(kernels, dtype, dim, group)
    if not cudnn:
        dense.refusal = "not to be asked"
    assert (dense.refusal is None) == cudnn
    config = sparse_config(dense._model, dtype, 2048, 100, query_block)
    attention = BlockSparseAttention(config, dense, mass_of(config, dense))
    queries = torch.randn(q, KV_HEADS * group, dim, device=device).to(dense.dtype).transpose(0, 1)
    keys, values = rows(dtype, device, past + q, dim, scale=2.0), rows(dtype, device, past + q, dim)
    repeated = RepeatedTokens(torch.randint(200, (past + q,)).tolist(), device)
    found, whole = attention(queries, keys, values, dim**-0.5, 0, repeated), past // KEY_BLOCK * KEY_BLOCK
    samples = sample(queries[:, : q - 100], KV_HEADS, query_block, 32)
    again = repeated.blocks(past, past + q - 100, query_block, whole // KEY_BLOCK, repeated_blocks(32))
    assert again.any(), "some pairs of tokens stood there before"
    chosen = choose(mass_of(config, dense)(samples, keys[:, :whole], dim**-0.5), 32, again)
    for number, start in enumerate(range(0, q - 100, query_block)):
        stop = min(start + query_block, q - 100)
        places = (chosen[:, number, :, None] * KEY_BLOCK + torch.arange(KEY_BLOCK, device=device)).flatten(1)
        own = torch.arange(whole, past + stop, device=device).expand(KV_HEADS, -1)
        index = torch.cat((places, own), dim=1)[..., None].expand(-1, -1, dim)
        parts = (part.double().gather(1, index) for part in (keys, values))
        check(found[start:stop], definition(queries[:, start:stop].double(), *parts), ATTENDED[dtype])
    tail = definition(queries[:, q - 100 :].double(), keys.double(), values.double())
    check(found[q - 100 :], tail, ATTENDED[dtype])


def test_a_budget_that_covers_the_past_is_dense_attention(kernels: MakeKernels, device: torch.device) -> None:
    dense = make(kernels, "bfloat16", 128, 4)
    config = sparse_config(dense._model, "bfloat16", 6144)
    queries = torch.randn(2048, KV_HEADS * 4, 128, device=device).bfloat16().transpose(0, 1)
    keys = rows("bfloat16", device, 8192, 128)
    found = BlockSparseAttention(config, dense, mass_of(config, dense))(
        queries, keys, keys, 0.1, 0, RepeatedTokens(range(8192), device)
    )
    assert torch.equal(found, dense(queries, keys, keys, 0.1))


def test_the_host_does_not_wait(kernels: MakeKernels, device: torch.device) -> None:
    dense = make(kernels, "bfloat16", 128, 4)
    config = sparse_config(dense._model, "bfloat16", 2048)
    attention = BlockSparseAttention(config, dense, mass_of(config, dense))
    queries = torch.randn(2048, KV_HEADS * 4, 128, device=device).bfloat16().transpose(0, 1)
    keys, ids = rows("bfloat16", device, 8192, 128), [i % 3000 for i in range(8192)]
    attention(queries, keys, keys, 0.1, 0, RepeatedTokens(ids, device))  # cuDNN compiles, pinned memory is allocated
    with no_host_waits():
        attention(queries, keys, keys, 0.1, 0, RepeatedTokens(ids, device))


@pytest.mark.parametrize("query_block", [512, 200])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_its_work_space_is_counted(dtype: str, query_block: int, kernels: MakeKernels, device: torch.device) -> None:
    """What sparse attention adds to the peak of the dense attention that reads the same keys."""
    dense = make(kernels, dtype, 64, 3)
    config = sparse_config(dense._model, dtype, 1024, query_block=query_block)
    attention = BlockSparseAttention(config, dense, mass_of(config, dense))
    queries = torch.randn(2048, KV_HEADS * 3, 64, device=device).to(dense.dtype).transpose(0, 1)
    keys = rows(dtype, device, 8192, 64)
    peaks = []
    for attend in (
        lambda: dense(queries, keys, keys, 0.1),
        lambda: attention(queries, keys, keys, 0.1, 0, RepeatedTokens([i % 3000 for i in range(8192)], device)),
    ):
        attend()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        attend()
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    assert peaks[1] <= peaks[0] + sparse_bytes(config, dense.dtype, 8192, 2048) + (1 << 20)


def test_an_engine_with_sparse_prompts(smollm2_gguf: Path, on_gpu: BuildEngine) -> None:
    """The GPU's engine beside the CPU's: the same choice but for rounding, so the logits are near."""
    directory = on_gpu(smollm2_gguf, "full", "--dtype", "bfloat16", "--max_seq_len", "4096", "--max_batch_size", "1")
    ids = [i * i * 13 % 3000 + 30 for i in range(3500)]
    logits = []
    for budget in (None, 3584, 2048, 512):
        config = dataclasses.replace(read_config(directory), prefill_chunk_tokens=1024)
        if budget is not None:
            settings = BlockSparseConfig(budget)
            config = dataclasses.replace(config, prefill_attention="block_sparse", block_sparse=settings)
        decoder = load_decoder(directory, config)
        logits.append(run_prefill(decoder, 0, ids, 4))
        decoder.close()
    dense, covered, half, few = logits
    assert torch.equal(covered, dense)
    assert 0 < (half - dense).norm() < (few - dense).norm() < dense.norm()
