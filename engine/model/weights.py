"""The weights of an engine directory: safetensors shards and an index, written by builder/checkpoints/weights.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvseek.core.errors import EngineDirectoryError


def index_file(rank: int) -> str:
    """Return the name of the index of a rank's shards: {"metadata": {"total_size": bytes}, "weight_map": {tensor: shard}}."""
    return f"rank{rank}.index.json"


def load_weights(
    directory: Path,
    device: torch.device,
    wanted: Callable[[str], bool] | None = None,
    rank: int = 0,
    begin: Callable[[str], None] | None = None,
) -> dict[str, Tensor]:
    """Load weights of an engine directory onto `device`, as they are stored.

    On the CPU the weights are views of the memory-mapped shards: pages are read when first used and shared between processes.

    Parameters
    ----------
    wanted : callable, optional
        Takes the name of a tensor and returns whether to load it; None: all tensors are loaded.
    rank : int
        Whose part of the weights to load.
    begin : callable, optional
        Called with the name of each tensor before it is read.

    Returns
    -------
    dict of str to Tensor
        Fused weights under the names that builder/checkpoints/weights.py lists.

    Raises
    ------
    EngineDirectoryError
        If the index or a shard is missing or malformed, or a shard lacks a tensor that the index names.
    """
    from safetensors import SafetensorError, safe_open

    weights: dict[str, Tensor] = {}
    for file, listed in _read_index(directory / index_file(rank)).items():
        names = listed if wanted is None else [name for name in listed if wanted(name)]
        if not names:
            continue
        try:
            with safe_open(directory / file, framework="pt", device=str(device)) as shard:
                for name in names:
                    if begin is not None:
                        begin(name)
                    weights[name] = shard.get_tensor(name)
        except (SafetensorError, FileNotFoundError) as error:
            raise EngineDirectoryError(f"cannot read {directory / file}: {error}; build the engine again") from None
    return weights


def _read_index(path: Path) -> dict[str, list[str]]:
    """Read the names of the tensors in each shard file."""
    try:
        weight_map: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names: dict[str, list[str]] = {file: [] for file in weight_map.values()}
    except FileNotFoundError:
        raise EngineDirectoryError(f"{path} is missing; build the engine again, or copy all of its files") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineDirectoryError(f"{path} is corrupt ({error!r}); build the engine again") from None
    for name, file in weight_map.items():
        names[file].append(name)
    return names
