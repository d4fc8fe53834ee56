"""Runs the prefill of one slot of a decoder without an engine, two decoders side by side, and an engine to its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kvseek.core.request import StepOutput
from kvseek.engine.engine import Engine


def run_prefill(decoder: Any, slot: int, prompt: list[int], room: int) -> Tensor:
    """Logits of the prompt's last token; the slot has room for `room` tokens more."""
    decoder.cache.open(slot, len(prompt) + room)
    prefill = decoder.prefill([(slot, prompt)])
    while prefill.progress < 1:
        prefill.advance(decoder.config.prefill_chunk_tokens)
    logits: Tensor = prefill.finish()
    return logits[0]


def run_all(decoder: Any, prompts: Mapping[int, list[int]], steps: list[list[int]]) -> tuple[Tensor, list[list[float]]]:
    """Logits of prompts by slot and of every step, whose tokens are in the order of the slots; what each step attended to."""
    rows, attended = [run_prefill(decoder, slot, prompt, len(steps))[None] for slot, prompt in prompts.items()], []
    for tokens in steps:
        logits, share = decoder.decode(tokens, list(prompts))
        rows.append(logits)
        attended.append(share)
    for slot in prompts:
        decoder.cache.close(slot)
    return torch.cat([part.cpu() for part in rows]), attended


def check_agreement(
    ours: Any, reference: Any, prompts: Mapping[int, list[int]], steps: int, *, room: int, most: float
) -> None:
    """Logits of two decoders for three prompts by slot, and for decode steps of changing batches, differ by at most `most`."""
    for slot, prompt in prompts.items():
        found, expected = (run_prefill(decoder, slot, prompt, room) for decoder in (ours, reference))
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() <= most
    for step in range(steps):
        slots = [2, 0, 1] if step % 5 else [1, 0]
        tokens = [(step * 31 + slot * 17) % 100 for slot in slots]
        logits, attended = ours.decode(tokens, slots)
        expected, expected_attended = reference.decode(tokens, slots)
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= most
        assert attended == pytest.approx(expected_attended)


def run_to_end(engine: Engine) -> list[StepOutput]:
    """Steps until the engine has nothing left to do."""
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs
