"""Compares the logits of an engine directory with transformers' of the same checkpoint, and refuses an engine with others."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.options import CheckOptions
from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.config_file import read_config
from kvseek.core.errors import CapacityError, CheckError, ConfigError, KernelError
from kvseek.core.manifest import read_manifest, verify
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.model.cpu.products import bfloat16_works
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.parallel.cuda.gpus import ranks_share_gpus

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


@dataclass(frozen=True)
class CheckResult:
    """What a check found, as a line of text; `checked` is False if this machine cannot run the engine."""

    text: str
    checked: bool


def check_engine(directory: Path, checkpoint: Checkpoint) -> CheckResult:
    """Compare an engine directory with transformers' model of its checkpoint.

    Raises
    ------
    CheckError
        If the logits are further apart than rounding explains, or transformers cannot run the checkpoint.
    KvseekError
        If the engine cannot be loaded.
    """
    config = read_config(directory)
    if reason := _cannot_run(config):
        return CheckResult(f"not compared with transformers: {reason}", checked=False)
    _refuse_other_model(config, checkpoint)
    try:
        comparison = compare(directory, checkpoint)
    except (KernelError, CapacityError) as error:  # such as a GPU of another architecture, or one that is in use
        if config.device == "cpu":
            raise
        return CheckResult(f"not compared with transformers: the engine cannot be run here ({error})", checked=False)
    if not comparison.agrees:
        raise CheckError(
            f"{checkpoint.path}: {_describe(comparison, config)}: the engine does not compute what transformers computes from "
            "this checkpoint. Check that config.json and weights belong together; if they do, this is a fault of kvseek: please "
            "report it. --no-check builds the engine all the same"
        )
    note = f" ({comparison.unchecked})" if comparison.unchecked else ""
    return CheckResult(f"compared with transformers: {_describe(comparison, config)}{note}", checked=True)


def check_existing(options: CheckOptions, console: Console) -> int:
    """Check an engine directory that was built before; returns 0 if it agrees, 1 if it cannot be compared here.

    Raises as `check_engine`, and ConfigError if there is no checkpoint.
    """
    verify(options.directory)
    found = check_engine(options.directory, open_checkpoint(_checkpoint_path(options)))
    console.print(f"{options.directory}: {found.text}", soft_wrap=True)
    return 0 if found.checked else 1


def _checkpoint_path(options: CheckOptions) -> Path:
    """Find the checkpoint: the one that was named, or what bears the manifest's name here or beside the engine."""
    if options.model is not None:
        return options.model
    name = read_manifest(options.directory).source_model
    places = (Path.cwd(), options.directory.resolve().parent)
    for folder in places:
        if (folder / name).exists():
            return folder / name
    raise ConfigError(
        f"model: {options.directory} was built from {name}, which is neither in {places[0]} nor in {places[1]}; name the "
        "checkpoint with --model"
    )


def _cannot_run(config: EngineConfig) -> str:
    """Say why this machine cannot run the engine, or why there is nothing to compare; empty if it can."""
    if config.device == "cuda" and not torch.cuda.is_available():
        return "the engine is for device = 'cuda', and PyTorch sees no GPU here; run kvseek build --check where there is one"
    if config.device == "cuda" and config.tp_size > max(1, torch.cuda.device_count()) and not ranks_share_gpus():
        return f"PyTorch sees fewer GPUs here than tp_size = {config.tp_size}; run kvseek build --check where there are as many"
    if config.max_seq_len <= GREEDY_TOKENS:
        return f"max_seq_len = {config.max_seq_len} has no room for a prompt and {GREEDY_TOKENS} tokens"
    if config.device == "cpu" and config.dtype == "bfloat16" and not bfloat16_works():
        return "this processor cannot multiply dtype = 'bfloat16'; run kvseek build --check on another machine"
    return ""


def _refuse_other_model(config: EngineConfig, checkpoint: Checkpoint) -> None:
    engine, model = config.model, checkpoint.config
    for name in ("architecture", "vocab_size", "num_layers", "hidden_size"):
        found, expected = getattr(model, name), getattr(engine, name)
        if found != expected:
            raise ConfigError(
                f"model = {str(checkpoint.path)!r}: {name} = {found!r}, the engine's is {expected!r}: name the checkpoint that "
                "the engine was built from"
            )


def _describe(comparison: Comparison, config: EngineConfig) -> str:
    precision = config.weight_only_precision
    rounding = config.dtype if precision == "none" else f"{precision} and {config.dtype}"
    same = [ours == theirs for ours, theirs in zip(comparison.tokens, comparison.expected, strict=True)]
    tokens = "are equal" if all(same) else f"differ from number {1 + same.index(False)} on"
    return (
        f"logits differ by up to {comparison.difference:.3g} ({rounding} explains {comparison.limit * comparison.spread:.3g}), "
        f"{len(same)} greedy tokens {tokens}"
    )
