"""Compares the disk space and the memory that a build needs with what is free, before anything is written."""

from __future__ import annotations

import functools
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, check_tensors
from kvseek.builder.weight_storage import weight_storage
from kvseek.core.command_line import readable
from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.engine.cache.host_memory import available_bytes
from kvseek.engine.model.weights import Weight, list_weights

# Upper bounds of what is small beside the weights and known only once it is made. Measured with SmolLM2 (49,152 tokens):
# tokenizer files of 72 bytes a token, a CPU library of 1.0 MB, a cubin of 0.6 MB, codebooks of 1 KB, header and index of
# 200 bytes a tensor; reading a tokenizer, 107 MB and 1.8 KB a token. Compilers, which run before weights are read and fail
# with messages of their own, are not counted.
TOKEN_BYTES = 512  # of the tokenizer's files, a token
KERNEL_BYTES = 8 << 20  # of an architecture's kernels
TENSOR_BYTES = 512  # of headers and index, a tensor
OTHER_FILE_BYTES = 8 << 20  # configuration, manifest, codebooks, chat template
TOKEN_MEMORY = 3 << 10  # of the tokenizer, a token
OTHER_MEMORY = 256 << 20  # libraries that are imported later, and buffers


@dataclass(frozen=True)
class Room:
    """Bytes of disk and of memory: the most that a build takes, or what is free."""

    disk: int
    memory: int


def needed_room(checkpoint: Checkpoint, config: EngineConfig, architectures: int = 0) -> Room:
    """Upper bounds of what a build writes and of what it holds in memory at a time.

    Parameters
    ----------
    architectures : int
        Number of GPU architectures that kernels are compiled for.

    Raises
    ------
    ConfigError
        If a tensor is missing, of another shape or of an unsupported type, or has no place in the decoder.
    """
    model, weight_format = config.model, WeightFormat.of(config)
    weights = list_weights(model, quantize_lm_head=weight_format.quantize_lm_head)
    check_tensors(checkpoint, weights)
    kernels = KERNEL_BYTES * (1 + architectures) if config.kernels == "native" else 0
    small = TOKEN_BYTES * model.vocab_size + TENSOR_BYTES * len(weights) + OTHER_FILE_BYTES
    largest = max(weight_memory(checkpoint, weight, weight_format) for weight in weights)
    storage = weight_storage(config)
    memory = largest + storage.memory_bytes + TOKEN_MEMORY * model.vocab_size + OTHER_MEMORY
    return Room(storage.disk_bytes + kernels + small, memory)


def weight_memory(checkpoint: Checkpoint, weight: Weight, weight_format: WeightFormat) -> int:
    """Bytes that a weight takes at most from reading its sources to writing it in its format.

    Sources are read, then fused, then converted; at each of these the result stands beside what it is made from.
    """
    types = [checkpoint.header(name).dtype for name in weight.sources]
    elements, fused = math.prod(weight.shape), functools.reduce(torch.promote_types, types)
    sources = elements * max(one.itemsize for one in types)
    reading = checkpoint.reading_copies * sources
    fusing = elements * fused.itemsize if len(types) > 1 else 0
    stored = weight_format.stored(weight)
    converting = elements * fused.itemsize + sum(one.nbytes for one in stored) if fused != stored[0].dtype else 0
    return max(sources + reading, sources + fusing, converting)


def available_room(output_dir: Path) -> Room:
    """Find what is free now: on the file system that `output_dir` will lie on, and in memory.

    An engine that the build will replace stays until the new one is complete, so its space is not free.
    """
    existing = next(path for path in (output_dir, *output_dir.parents) if path.exists())
    return Room(shutil.disk_usage(existing).free, available_bytes())


def refuse_too_little(needed: Room, available: Room, output_dir: Path, model: Path) -> None:
    """Raise ConfigError, naming what is short, unless what is available covers what is needed."""
    if needed.disk > available.disk:
        raise ConfigError(
            f"output_dir = {str(output_dir)!r}: the build writes up to {readable(needed.disk)}, {readable(available.disk)} "
            "are free on its disk; free some, or name a directory on another disk (an engine that is there already stays "
            "until the new one is complete)"
        )
    if needed.memory > available.memory:
        raise ConfigError(
            f"model = {str(model)!r}: building takes up to {readable(needed.memory)} of memory for the largest tensor "
            f"and the rest, {readable(available.memory)} are available; stop other programs, raise the container's memory "
            "limit, or build on a larger machine: the engine directory may be copied"
        )
