"""The weights of an engine directory: safetensors shards and an index, written by builder/checkpoints/weights.py, or random ones.

A step costs the same whatever the weights say. So an engine directory with RANDOM_FILE has no weights: each rank makes its own
part when it is loaded. Benchmarks write such directories (bench/engines.py); what the engine answers means nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvseek.core.config import EngineConfig, ModelConfig
from kvseek.core.errors import EngineDirectoryError
from kvseek.core.ranks import vocabulary_rows
from kvseek.core.weight_only import HEAD, stored_weight

RANDOM_FILE = "random_weights.json"
LAYER_WEIGHTS = {  # weight of a layer of an engine, in the order of the computation → its Hugging Face sources
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "o": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
ROUTER, EXPERTS, SHARED, SHARED_GATE = "router", "experts", "shared", "shared_gate"  # of layers with experts
HEAD_NORMS = ("q_norm", "k_norm")  # of models with qk_norm
MLP = ("gate_up", "down")  # of layers without experts


@dataclass(frozen=True)
class Weight:
    """One weight of an engine: `sources` are Hugging Face names, concatenated along the first axis."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]


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
        Fused weights under the names of `list_weights`.

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


def list_weights(model: ModelConfig, *, quantize_lm_head: bool = False) -> list[Weight]:
    """List every weight of an engine, in the order of the computation.

    embed.weight, then per layer i layers.{i}.attention_norm, qkv, q_norm, k_norm, o, mlp_norm, gate_up, down (norms that the
    model lacks are left out; qkv, o, gate_up and down may have a .bias), then norm.weight and lm_head.weight. That is left out if
    it is tied to the embedding, unless it is quantised, which the embedding is not.
    A weight that is quantised is followed by its .weight_scale.

    A layer with experts has instead of gate_up and down: router [experts, hidden], experts.gate_up [experts · 2 I, hidden] and
    experts.down [experts · hidden, I], in which the experts follow each other, and those of a shared expert: shared.gate_up,
    shared.down and shared_gate [1, hidden].
    """
    embedding = _weight(model, "embed.weight", "model.embed_tokens.weight")
    weights = [embedding]
    for layer in range(model.num_layers):
        weights += _layer_weights(model, layer)
    weights.append(_weight(model, "norm.weight", "model.norm.weight"))
    if not model.tie_word_embeddings:
        weights.append(_weight(model, HEAD, "lm_head.weight"))
    elif quantize_lm_head:
        weights.append(replace(embedding, name=HEAD))
    return weights


def _layer_weights(model: ModelConfig, layer: int) -> Iterator[Weight]:
    biases = {"qkv": model.qkv_bias, "o": model.output_bias, "gate_up": model.mlp_bias, "down": model.mlp_bias}
    mixed = model.has_experts(layer)
    for name, sources in LAYER_WEIGHTS.items():
        if (name in HEAD_NORMS and not model.qk_norm) or (mixed and name in MLP):
            continue
        for kind in ("weight", "bias") if biases.get(name) else ("weight",):
            own = [f"model.layers.{layer}.{source}.{kind}" for source in sources]
            yield _weight(model, f"layers.{layer}.{name}.{kind}", *own)
    if mixed:
        yield from _expert_weights(model, layer)


def _expert_weights(model: ModelConfig, layer: int) -> Iterator[Weight]:
    experts, prefix, source = model.experts, f"layers.{layer}.", f"model.layers.{layer}.mlp."
    assert experts is not None, "the layer has experts"

    def weight(name: str, *sources: str) -> Weight:
        return _weight(model, f"{prefix}{name}.weight", *(f"{source}{one}.weight" for one in sources))

    yield weight(ROUTER, "gate")
    each = [f"experts.{expert}." for expert in range(experts.num_experts)]
    yield weight(f"{EXPERTS}.gate_up", *(f"{one}{part}_proj" for one in each for part in ("gate", "up")))
    yield weight(f"{EXPERTS}.down", *(f"{one}down_proj" for one in each))
    if experts.shared_intermediate_size is not None:
        yield weight(f"{SHARED}.gate_up", "shared_expert.gate_proj", "shared_expert.up_proj")
        yield weight(f"{SHARED}.down", "shared_expert.down_proj")
        yield weight(SHARED_GATE, "shared_expert_gate")


def _weight(model: ModelConfig, name: str, *sources: str) -> Weight:
    shapes = [source_shape(model, source) for source in sources]
    return Weight(name, sources, (sum(shape[0] for shape in shapes), *shapes[0][1:]))


def source_shape(model: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the shape of a model's tensor with this Hugging Face name; raises KeyError if the decoder has no such tensor."""
    *parents, module, kind = name.split(".")
    intermediate, experts = model.intermediate_size, model.experts
    if experts is not None and "experts" in parents:
        intermediate = experts.intermediate_size
    elif experts is not None and "shared_expert" in parents:
        intermediate = experts.shared_intermediate_size or 0
    hidden, queries = model.hidden_size, model.num_heads * model.head_dim
    keys, vocabulary = model.num_kv_heads * model.head_dim, (model.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": vocabulary,
        "input_layernorm": (hidden,),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "q_norm": (model.head_dim,),
        "k_norm": (model.head_dim,),
        "o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
        "gate": (0 if experts is None else experts.num_experts, hidden),
        "shared_expert_gate": (1, hidden),
        "norm": (hidden,),
        "lm_head": vocabulary,
    }
    return shapes[module] if kind == "weight" else shapes[module][:1]


def weight_shapes(model: ModelConfig, size: int = 1) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of the whole model, or of one of `size` ranks, whose `model` it is (core/ranks.py)."""
    own = replace(
        model, vocab_size=vocabulary_rows(model, size), bos_token_id=None, eos_token_ids=(), pad_token_id=None
    )
    return {weight.name: weight.shape for weight in list_weights(own)}


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
    stored = partial(
        stored_weight,
        precision=config.weight_only_precision,
        weight_group=config.weight_group,
        quantize_lm_head=config.quantize_lm_head,
        weight_formats=config.weight_formats,
    )
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
