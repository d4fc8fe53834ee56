"""Chooses the storage of the model's weights in an engine directory: safetensors, or TensorRT plans.

This file is the only entry to builder/tensorrt/, which is imported only for engines of `--runtime tensorrt`.
"""

from __future__ import annotations

from kvseek.builder.checkpoints.storage import WeightStorage
from kvseek.core.config import EngineConfig


def weight_storage(config: EngineConfig) -> WeightStorage:
    """Choose the storage of an engine's weights."""
    if config.runtime == "tensorrt":
        from kvseek.builder.tensorrt.storage import PlanStorage

        return PlanStorage(config)
    return WeightStorage(config)
