"""Configurations of the GPU benchmark, for its tests without a GPU."""

from __future__ import annotations

import dataclasses

from kvseek.bench.speed.device.bench import ROOM
from kvseek.core.config import EngineConfig, ModelConfig

KIB = 1024
METHODS = ["--methods", "full,pariskv"]


def config_for(model: ModelConfig, method: str, context: int, batch: int) -> EngineConfig:
    """An engine of the benchmark for requests of `context` tokens."""
    longest = context + ROOM
    model = dataclasses.replace(model, max_position_embeddings=longest)
    lengths = {"max_input_len": longest, "max_seq_len": longest}
    return EngineConfig(model, method, dtype="bfloat16", device="cuda", max_batch_size=batch, **lengths)
