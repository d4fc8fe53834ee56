"""Compares the logits of an engine directory with transformers' of the same checkpoint."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.config_file import read_config
from kvseek.engine.decoder import Decoder
from kvseek.engine.leading.leader import load_decoder

from .reference import reference_logits

PROMPT_TOKENS, GREEDY_TOKENS, SEED = 64, 8, 20

# The largest difference of two logits that rounding explains, in standard deviations of transformers' logits over the vocabulary.
# transformers computes in float32 with the checkpoint's own numbers, so only the engine's rounding may make a difference.
# Predicted: one rounding is off by 6e-8 (float32), 5e-4 (float16) or 4e-3 (bfloat16) of a number; some hundred roundings on
# the way through the layers add up like their square root; the largest of thousands of errors is 4 to 5 times the usual one.
# That makes 3e-6, 0.025 and 0.2. A weight of 8 bits is off by about 0.6 % (int8) or 2.6 % (fp8): 0.3 and 1.
# Measured on random models of 3 to 24 layers, the needle model (Qwen3) and SmolLM2 (30 layers, whose few very large activations
# round worst): float32 2e-6 to 1.1e-5, bfloat16 0.025 to 0.24, int8 0.04 to 0.56, fp8 0.14 to 0.70. float16, which needs a GPU,
# is not measured; its numbers have three bits more than bfloat16's.
# The limits are three times the largest, because models differ (float32: ninety times, which is still little). Logits that
# have nothing to do with each other are 5 to 8 apart. A small mistake may hide behind 8 bits, but not in float32.
LIMITS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.75}
PRECISION_LIMITS = {"none": 0.0, "int8": 1.5, "fp8": 2.0}  # beside that of the dtype


@dataclass(frozen=True)
class Comparison:
    """An engine beside transformers: logits after a prompt and after each of the engine's greedy tokens but the last.

    Attributes
    ----------
    difference : float
        Largest difference of two logits; NaN if the engine's are not finite.
    spread : float
        Standard deviation of transformers' logits of one step over the vocabulary, mean over the steps.
    limit : float
        Largest `difference` / `spread` that rounding explains.
    tokens, expected : tuple of int
        The engine's greedy tokens, and transformers' after the same tokens.
    unchecked : str
        See Reference.
    """

    difference: float
    spread: float
    limit: float
    tokens: tuple[int, ...]
    expected: tuple[int, ...]
    unchecked: str

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.limit * self.spread


def prompt_ids(config: EngineConfig) -> list[int]:
    """Draw the prompt, with a fixed seed, from the whole vocabulary, of which a text would use little.

    It is so short that all rows stay in the window, where every method attends to all of them. The engine must have room for
    more than GREEDY_TOKENS tokens.
    """
    dense = max(config.cache.full_threshold, config.cache.sink + config.cache.local)
    most = min(PROMPT_TOKENS, config.max_input_len, config.max_seq_len - GREEDY_TOKENS, dense - GREEDY_TOKENS)
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(config.model.vocab_size, (max(1, most),), generator=generator).tolist()


def compare(directory: Path, checkpoint: Checkpoint) -> Comparison:
    """Run an engine, then transformers on the same tokens; raises CheckError if transformers cannot run the checkpoint.

    transformers reads the prompt and the engine's tokens in one pass, so its weights are read once. If its likeliest token is
    the engine's after each of them, it would have drawn the same tokens by itself.
    """
    config = read_config(directory)
    prompt = prompt_ids(config)
    with closing(load_decoder(directory, _small(config))) as decoder:
        tokens, found = greedy(decoder, prompt, GREEDY_TOKENS)
    reference = reference_logits(checkpoint, [*prompt, *tokens[:-1]], len(tokens))
    expected = reference.logits
    return Comparison(
        difference=float((found - expected).abs().max()),
        spread=float(expected.std(dim=-1).mean()),
        limit=max(LIMITS[config.dtype], PRECISION_LIMITS[config.weight_only_precision]),
        tokens=tuple(tokens),
        expected=tuple(expected.argmax(dim=-1).tolist()),
        unchecked=reference.unchecked,
    )


def _small(config: EngineConfig) -> EngineConfig:
    """The same engine with memory for one short request; TensorRT's plans fix their limits."""
    if config.runtime == "tensorrt":
        return config
    cache = dataclasses.replace(config.cache, kv_cache_host_memory_bytes=None, kv_cache_device_memory_bytes=None)
    length = min(config.max_seq_len, EXTENT_TOKENS)
    most = min(config.max_input_len, length)
    return dataclasses.replace(config, cache=cache, max_batch_size=1, max_seq_len=length, max_input_len=most)


def greedy(decoder: Decoder, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
    """Draw `count` greedy tokens in slot 0; returns them and the logits [count, vocabulary] that each was drawn from."""
    decoder.cache.open(0, len(prompt) + count)
    prefill = decoder.prefill([(0, prompt)])
    while prefill.progress < 1:
        prefill.advance(decoder.config.prefill_chunk_tokens)
    rows = [prefill.finish()[0].float().cpu()]
    tokens = [int(rows[0].argmax())]
    while len(tokens) < count:
        rows.append(decoder.decode(tokens[-1:], [0])[0][0])
        tokens.append(int(rows[-1].argmax()))
    decoder.cache.close(0)
    return tokens, torch.stack(rows)
