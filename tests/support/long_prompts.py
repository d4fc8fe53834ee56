"""What tests of long prompts share: a small model, a document, engines with other settings, and their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.prefill import run_to_end
from torch import Tensor

from kvseek.core.config import read_config
from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.engine import Engine
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.tokenizer import Tokenizer

SHAPE = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 4096}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SINK, LOCAL, UPDATE = 4, 16, 8
WINDOW = tuple(
    word
    for name, tokens in {"sink": SINK, "local": LOCAL, "update": UPDATE, "full_threshold": 32}.items()
    for word in (f"--cache.{name}", str(tokens))
)
DOCUMENT = tuple(i * i * 13 % 379 + 3 for i in range(2300))
Load = Callable[..., Engine]
Plain = Callable[[Request], list[int]]


def load_changed(directory: Path, cache: Mapping[str, Any] | None = None, **fields: Any) -> Engine:
    """Load an engine with fields of its configuration, and of its cache's, changed."""
    config = read_config(directory)
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, **(cache or {})), **fields)
    return Engine(config, load_decoder(directory, config), Tokenizer(directory))


def known_answers(engine: Engine) -> Plain:
    """What an engine answers that keeps nothing, and has only one request; each is asked for once."""
    known: dict[Request, list[int]] = {}

    def answer(request: Request) -> list[int]:
        if request not in known:
            known[request] = engine.generate([request])[0]
        return known[request]

    return answer


def ask_logits(engine: Engine, prompt: tuple[int, ...], tokens: int = 1) -> tuple[Tensor, list[int], int]:
    """Logits of the tokens drawn, these tokens, and the number of the prompt's tokens that were reused."""
    engine.submit(Request(prompt, tokens, SamplingConfig(return_generation_logits=True)))
    outputs = run_to_end(engine)
    statistics = outputs[-1].statistics
    assert statistics is not None
    assert engine._cache.extents.used == 0
    logits = torch.from_numpy(np.frombuffer(b"".join(one.generation_logits for one in outputs), np.float32).copy())
    assert len(logits), "logits of every token drawn"
    return logits, [one.token_id for one in outputs if one.token_id is not None], statistics.reused_tokens
