"""Says how an engine's logits compare with transformers', and refuses an engine whose logits are others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.options import CheckOptions
from kvseek.core.config import EngineConfig
from kvseek.core.config_file import read_config
from kvseek.core.errors import CapacityError, CheckError, ConfigError, KernelError
from kvseek.core.manifest import read_manifest, verify
from kvseek.engine.model import bfloat16
from kvseek.engine.parallel.cuda.gpus import ranks_share_gpus

from .comparison import GREEDY_TOKENS, Comparison, compare


@dataclass(frozen=True)
class Found:
    """What a check found, as a line of text; `checked` is False if this machine cannot run the engine."""

    text: str
    checked: bool


def check_engine(directory: Path, checkpoint: Checkpoint) -> Found:
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
        return Found(f"not compared with transformers: {reason}", checked=False)
    _refuse_other_model(config, checkpoint)
    try:
        comparison = compare(directory, checkpoint)
    except (KernelError, CapacityError) as error:  # such as a GPU of another architecture, or one that is in use
        if config.device == "cpu":
            raise
        return Found(f"not compared with transformers: the engine cannot be run here ({error})", checked=False)
    if not comparison.agrees:
        raise CheckError(
            f"{checkpoint.path}: {_describe(comparison, config)}: the engine does not compute what transformers computes from "
            "this checkpoint. Check that config.json and weights belong together; if they do, this is a fault of kvseek: please "
            "report it. --no-check builds the engine all the same"
        )
    note = f" ({comparison.unchecked})" if comparison.unchecked else ""
    return Found(f"compared with transformers: {_describe(comparison, config)}{note}", checked=True)


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
    if config.device == "cpu" and config.dtype == "bfloat16" and not bfloat16.usable():
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
