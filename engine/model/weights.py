"""The weights of an engine directory: safetensors shards and an index, written by builder/checkpoints/weights.py, or random ones.

A step costs the same whatever the weights say. So an engine directory with RANDOM_FILE has no weights: each rank makes its own
part when it is loaded. Benchmarks write such directories (bench/engines.py); what the engine answers means nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.errors import EngineDirectoryError
from kvseek.core.model_config import ModelConfig
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
# Likewise, of a Gated DeltaNet layer; those of its MLP are as of other layers.
DELTA_WEIGHTS = {
    "attention_norm": ("input_layernorm.weight",),
    "qkvz": ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
    "ba": ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
    "conv": ("linear_attn.conv1d.weight",),
    "a_log": ("linear_attn.A_log",),
    "dt": ("linear_attn.dt_bias",),
    "delta_norm": ("linear_attn.norm.weight",),
    "o": ("linear_attn.out_proj.weight",),
}
JOINT = {"qkvz": "linear_attn.in_proj_qkvz.weight", "ba": "linear_attn.in_proj_ba.weight"}  # of qwen3_next instead
IN_FLOAT32 = (".a_log.weight", ".dt.bias")  # whatever the engine's dtype: an error in a decay grows with the tokens
HEAD_NORMS = ("q_norm", "k_norm")  # of models with qk_norm
MLP = ("gate_up", "down")  # of layers without experts


@dataclass(frozen=True)
class Weight:
    """One weight of an engine: `sources` are Hugging Face names, concatenated along the first axis.

    `order`, int64, has the numbers of the rows that the weight has of these, in their order; None: it has all, as they are.
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    order: Tensor | None = field(default=None, compare=False, repr=False)


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

    With gated attention the rows of qkv are those of queries, keys, values and gates. Where RoPE rotates the first channels of a
    head only, those of queries, keys and their norms are in the order of `rotary_order`. A Gated DeltaNet layer has instead of
    qkv, q_norm and k_norm: qkvz [2 keys + 2 values, hidden] for queries, keys, values and output gates, ba [2 value heads,
    hidden] for write strengths and decays, conv [2 keys + values, kernel], a_log and dt [value heads], and delta_norm, of a value
    head's outputs.
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
    mixed, prefix = model.has_experts(layer), f"model.layers.{layer}."
    if model.has_state(layer):
        yield from _delta_weights(model, layer)
    for name, sources in LAYER_WEIGHTS.items():
        of_attention = name not in ("mlp_norm", *MLP)
        if (name in HEAD_NORMS and not model.qk_norm) or (mixed and name in MLP):
            continue
        if of_attention and model.has_state(layer):
            continue
        order = row_order(model, name)
        for kind in ("weight", "bias") if biases.get(name) else ("weight",):
            own = [f"{prefix}{source}.{kind}" for source in sources]
            yield _weight(model, f"layers.{layer}.{name}.{kind}", *own, order=order)
    if mixed:
        yield from _expert_weights(model, layer)


def _delta_weights(model: ModelConfig, layer: int) -> Iterator[Weight]:
    for name, sources in DELTA_WEIGHTS.items():
        if model.architecture == "qwen3_next" and name in JOINT:
            sources = (JOINT[name],)
        own = [f"model.layers.{layer}.{source}" for source in sources]
        kind = "bias" if name == "dt" else "weight"
        weight = _weight(model, f"layers.{layer}.{name}.{kind}", *own, order=row_order(model, name))
        # A convolution of each channel alone has an axis of one input.
        yield replace(weight, shape=(weight.shape[0], weight.shape[-1])) if name == "conv" else weight


@lru_cache(maxsize=64)
def row_order(model: ModelConfig, name: str) -> Tensor | None:
    """The `order` of a layer's weight of this name; see list_weights."""
    states, dim = model.delta_net, model.head_dim
    rotary = None if model.rotary_dim is None else rotary_order(dim, model.rotary_dim)
    if name in HEAD_NORMS:
        return rotary
    if name == "qkv" and (model.gated_attention or rotary is not None):
        channels, each = torch.arange(dim), dim * (1 + model.gated_attention)
        rotary = channels if rotary is None else rotary
        queries, kv_heads = torch.arange(model.num_heads)[:, None] * each, torch.arange(model.num_kv_heads)[:, None]
        first = model.num_heads * each
        keys, values = (kv_heads * dim + first + n * model.num_kv_heads * dim for n in (0, 1))
        parts = [queries + rotary, keys + rotary, values + channels]
        parts += [queries + dim + channels] if model.gated_attention else []
        return torch.cat([part.flatten() for part in parts])
    if model.architecture == "qwen3_next" and states is not None and name in JOINT:
        shared = states.num_value_heads // states.num_key_heads
        of_values = shared * states.value_head_dim
        sizes = [states.key_head_dim] * 2 + [of_values] * 2 if name == "qkvz" else [shared] * 2
        rows = torch.arange(states.num_key_heads * sum(sizes)).view(states.num_key_heads, -1)  # by key head
        return torch.cat([part.flatten() for part in torch.split(rows, sizes, dim=1)])
    return None


def rotary_order(dim: int, rotary_dim: int) -> Tensor:
    """Order the channels of a head so that those which RoPE rotates together, i and i + rotary_dim / 2, are dim / 2 apart.

    They are the first pairs; channels from rotary_dim on, which it does not rotate, are the other pairs.
    """
    first, second = torch.arange(rotary_dim).chunk(2)
    rest = torch.arange(rotary_dim, dim).view(2, -1)
    return torch.cat((first, rest[0], second, rest[1]))


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


def _weight(model: ModelConfig, name: str, *sources: str, order: Tensor | None = None) -> Weight:
    shapes = [source_shape(model, source) for source in sources]
    rows = sum(shape[0] for shape in shapes) if order is None else len(order)
    return Weight(name, sources, (rows, *shapes[0][1:]), order)


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a weight that is not quantised, in an engine of a dtype."""
    return torch.float32 if name.endswith(IN_FLOAT32) else dtype


def source_shape(model: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the shape of a model's tensor with this Hugging Face name; raises KeyError if the decoder has no such tensor."""
    *parents, module, kind = name.split(".")
    if "linear_attn" in (module, *parents):
        return _delta_shape(model, name)
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
        "q_proj": (queries * (1 + model.gated_attention), hidden),
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


def _delta_shape(model: ModelConfig, name: str) -> tuple[int, ...]:
    states, hidden = model.delta_net, model.hidden_size
    if states is None:
        raise KeyError(name)
    heads = states.num_value_heads
    return {
        "in_proj_qkvz.weight": (states.channels + states.values, hidden),
        "in_proj_ba.weight": (2 * heads, hidden),
        "in_proj_qkv.weight": (states.channels, hidden),
        "in_proj_z.weight": (states.values, hidden),
        "in_proj_b.weight": (heads, hidden),
        "in_proj_a.weight": (heads, hidden),
        "conv1d.weight": (states.channels, 1, states.conv_kernel),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (states.value_head_dim,),
        "out_proj.weight": (hidden, states.values),
    }[name.rpartition("linear_attn.")[2]]


def weight_shapes(model: ModelConfig, size: int = 1) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of the whole model, or of one of `size` ranks, whose `model` it is (core/ranks.py)."""
    own = replace(
        model, vocab_size=vocabulary_rows(model, size), bos_token_id=None, eos_token_ids=(), pad_token_id=None
    )
    return {weight.name: weight.shape for weight in list_weights(own)}


def fill_weight(tensor: Tensor, name: str, layers: int, generator: torch.Generator, size: int = 1) -> None:
    """Draw a weight, or one of `size` ranks' parts of it.

    Matrices are normal with variance 1/fan-in, so that products keep the size of what they multiply; those that write to the
    residual stream are smaller by √(2 layers), so that activations stay of order one through all layers. Norms are one, and
    so are decays, biases are zero, embeddings of variance one.
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
        tensor = torch.empty(shape, dtype=stored_dtype(name, getattr(torch, config.dtype)), device=device)
        fill_weight(tensor, name, config.model.num_layers, generator, size)
        weights |= stored(name, tensor)
    if config.quantize_lm_head and config.model.tie_word_embeddings:
        weights |= stored(HEAD, weights["embed.weight"])
    return weights
