"""Runs the prefill of one slot of a decoder, without an engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def run_prefill(decoder: Any, slot: int, prompt: list[int], room: int) -> Tensor:
    """Logits of the prompt's last token; the slot has room for `room` tokens more."""
    decoder.cache.open(slot, len(prompt) + room)
    prefill = decoder.prefill([(slot, prompt)])
    while prefill.progress < 1:
        prefill.advance(decoder.config.prefill_chunk_tokens)
    logits: Tensor = prefill.finish()
    return logits[0]
