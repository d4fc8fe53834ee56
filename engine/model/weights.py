"""The weights of an engine directory: safetensors shards and an index, written by builder/checkpoints/weights.py, or random ones.

A step costs the same whatever the weights say. So an engine directory with RANDOM_FILE has no weights: each rank makes its own
part when it is loaded. Benchmarks write such directories (bench/engines.py); what the engine answers means nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvseek.core.config import EngineConfig, ModelConfig
from kvseek.core.errors import EngineDirectoryError
from kvseek.core.ranks import vocabulary_rows
from kvseek.core.weight_only import HEAD, stored_weight

RANDOM_FILE = "random_weights.json"


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


def write_random(directory: Path, seed: int) -> None:
    """Say in an engine directory that its weights are random."""
    (directory / RANDOM_FILE).write_text(json.dumps({"seed": seed}) + "\n", encoding="utf-8")


def random_seed(directory: Path) -> int | None:
    """Read the seed of a directory's random weights; None if they are not random. Raises EngineDirectoryError."""
    path = directory / RANDOM_FILE
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["seed"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise EngineDirectoryError(f"{path} is corrupt ({error!r}); run the benchmark again") from None


def weight_shapes(model: ModelConfig, size: int = 1) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that a decoder of `model` reads, in the engine's naming.

    Parameters
    ----------
    model : ModelConfig
        Of the whole model, or of one of `size` ranks (core/ranks.py).
    """
    hidden, dim, vocabulary = model.hidden_size, model.head_dim, vocabulary_rows(model, size)
    qkv = (model.num_heads + 2 * model.num_kv_heads) * dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocabulary, hidden), "norm.weight": (hidden,)}
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (hidden,),
        "qkv.weight": (qkv, hidden),
        "o.weight": (hidden, model.num_heads * dim),
        "mlp_norm.weight": (hidden,),
        "gate_up.weight": (2 * model.intermediate_size, hidden),
        "down.weight": (hidden, model.intermediate_size),
    }
    if model.qkv_bias:
        layer["qkv.bias"] = (qkv,)
    if model.output_bias:
        layer["o.bias"] = (hidden,)
    if model.mlp_bias:
        layer |= {"gate_up.bias": (2 * model.intermediate_size,), "down.bias": (hidden,)}
    if model.qk_norm:
        layer |= {"q_norm.weight": (dim,), "k_norm.weight": (dim,)}
    for number in range(model.num_layers):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def fill_weight(tensor: Tensor, name: str, layers: int, generator: torch.Generator, size: int = 1) -> None:
    """Draw a weight, or one of `size` ranks' parts of it.

    Matrices are normal with variance 1/fan-in, so that products keep the size of what they multiply; those that write to the
    residual stream are smaller by √(2 layers), so that activations stay of order one through all layers. Norms are one,
    biases zero, embeddings of variance one.
    """
    if name.endswith("bias"):
        tensor.zero_()
    elif tensor.dim() == 1:
        tensor.fill_(1)
    elif name == "embed.weight":
        tensor.normal_(generator=generator)
    else:
        residual = name.endswith((".o.weight", ".down.weight"))  # ranks have a part of their inputs each
        fan_in = tensor.shape[1] * (size if residual else 1)
        tensor.normal_(std=fan_in**-0.5 * ((2 * layers) ** -0.5 if residual else 1.0), generator=generator)


def make_weights(
    config: EngineConfig,
    device: torch.device,
    seed: int,
    rank: int = 0,
    size: int = 1,
    begin: Callable[[str], None] | None = None,
) -> dict[str, Tensor]:
    """Make the weights of one of `size` ranks on `device`, as an engine of this configuration of a rank stores them.

    Ranks draw different numbers, and so does an engine of one rank: those of two sizes are no parts of one model.

    Parameters
    ----------
    begin : callable, optional
        Called with the name of each tensor before it is made.
    """
    generator = torch.Generator(device).manual_seed(seed + rank)
    stored = partial(stored_weight, precision=config.weight_only_precision, quantize_lm_head=config.quantize_lm_head)
    weights: dict[str, Tensor] = {}
    for name, shape in weight_shapes(config.model, size).items():
        if begin is not None:
            begin(name)
        tensor = torch.empty(shape, dtype=getattr(torch, config.dtype), device=device)
        fill_weight(tensor, name, config.model.num_layers, generator, size)
        weights |= stored(name, tensor)
    if config.quantize_lm_head and config.model.tie_word_embeddings:
        weights |= stored(HEAD, weights["embed.weight"])
    return weights
