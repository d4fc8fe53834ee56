"""SmolLM2 on the GPU against the CPU engine: greedy tokens after a long document."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import BuildEngine

from kvseek.core.request import Request
from kvseek.engine.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.model]

PROMPT_TOKENS = 3000
TOKENS = 512
SEGMENT = 64  # after so many tokens both engines go on from the CPU's: a near tie must not decide all that follows
AGREEMENT = 0.98


@pytest.mark.parametrize("method", ["full", "pariskv"])
def test_greedy_tokens_are_those_of_the_cpu(
    method: str, smollm2_gguf: Path, document: str, build_engine: BuildEngine, on_gpu: BuildEngine
) -> None:
    sizes = ("--max_seq_len", "4096", "--max_input_len", "4096", "--max_batch_size", "8")
    cpu = Engine.load(build_engine(smollm2_gguf, method, *sizes))
    prompt = cpu.tokenizer.encode(document)[:PROMPT_TOKENS]
    expected = cpu.generate([Request(tuple(prompt), TOKENS)])[0]
    gpu = Engine.load(on_gpu(smollm2_gguf, method, *sizes, "--cache.offload", "always"))
    starts = range(0, TOKENS, SEGMENT)
    found = gpu.generate([Request((*prompt, *expected[:start]), SEGMENT) for start in starts])
    tokens = [token for segment in found for token in segment]
    same = sum(a == b for a, b in zip(tokens, expected, strict=True)) / TOKENS
    assert same >= AGREEMENT, f"{same:.1%} of {TOKENS} tokens agree"
