"""Locates the tensors of a model in the files of a TensorRT-LLM checkpoint's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvseek.builder.checkpoints.headers import source_shape
from kvseek.core.config import ModelConfig, require

from .config import Mapping

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class Module:
    """TensorRT-LLM's name of a layer's module, and the axis along which ranks share its weight; None: each holds it whole."""

    name: str
    axis: int | None = None


# By the Hugging Face name. In a gated MLP TensorRT-LLM calls the projection that goes through the activation `fc`, and the
# projection that is multiplied with it `gate`.
MODULES = {
    "input_layernorm": Module("input_layernorm"),
    "self_attn.q_norm": Module("attention.q_layernorm"),
    "self_attn.k_norm": Module("attention.k_layernorm"),
    "self_attn.o_proj": Module("attention.dense", 1),
    "post_attention_layernorm": Module("post_layernorm"),
    "mlp.gate_proj": Module("mlp.fc", 0),
    "mlp.up_proj": Module("mlp.gate", 0),
    "mlp.down_proj": Module("mlp.proj", 1),
}


@dataclass(frozen=True)
class Part:
    """Location of one tensor of the model in the files of the ranks that share it.

    Attributes
    ----------
    pipeline_rank : int
        Pipeline rank whose tensor-parallel ranks hold the tensor; each pipeline rank has its own layers.
    name : str
        Name of the tensor in every rank's file.
    shape : tuple of int
        Shape of the tensor in every rank's file.
    rows : slice
        Rows of that tensor which belong to the wanted tensor.
    axis : int
        Axis along which the ranks' rows are joined.
    size : int
        Length along `axis` after joining; rows beyond it are padding.
    copies : int
        Number of neighbouring ranks that hold the same rows.
    """

    pipeline_rank: int
    name: str
    shape: tuple[int, ...]
    rows: slice
    axis: int
    size: int
    copies: int

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """Shape of the wanted tensor."""
        return (*self.shape[: self.axis], self.size, *self.shape[self.axis + 1 :])


class Layout:
    """Locations of all tensors of the model in the ranks' files.

    Parameters
    ----------
    layers : sequence of int
        Number of layers that each pipeline rank holds.

    Raises
    ------
    ConfigError
        If the model cannot be shared by that many ranks.
    """

    def __init__(self, model: ModelConfig, mapping: Mapping, layers: Sequence[int]) -> None:
        self._model, self._mapping, self._layers = model, mapping, layers
        tp_size, kv_heads = mapping.tp_size, model.num_kv_heads
        shared = {"num_attention_heads": model.num_heads, "intermediate_size": model.intermediate_size}
        if mapping.embedding_axis == 1:
            shared["hidden_size"] = model.hidden_size
        for name, value in shared.items():
            limit = f"a multiple of mapping.tp_size = {tp_size}"
            require(value % tp_size == 0, name, value, limit, "check config.json")
        limit = f"a multiple or a divisor of mapping.tp_size = {tp_size}"
        fits = kv_heads % tp_size == 0 or tp_size % kv_heads == 0
        require(fits, "num_key_value_heads", kv_heads, limit, "check config.json")

    def locate(self, name: str) -> Part:
        """Locate the tensor with a Hugging Face name."""
        model, last, axis = self._model, len(self._layers) - 1, self._mapping.embedding_axis
        vocabulary = (model.vocab_size, model.hidden_size)
        match name.split("."):
            case ["model", "embed_tokens", _]:
                return self._shared(0, "transformer.vocab_embedding.weight", vocabulary, axis)
            case ["model", "norm", _]:
                return self._shared(last, "transformer.ln_f.weight", (model.hidden_size,), None)
            case ["lm_head", _]:
                return self._shared(last, "lm_head.weight", vocabulary, 0)
            case ["model", "layers", number, *module, kind]:
                return self._in_layer(int(number), ".".join(module), kind)
        raise KeyError(name)

    def _in_layer(self, layer: int, module: str, kind: str) -> Part:
        pipeline_rank = 0
        while layer >= self._layers[pipeline_rank]:
            layer -= self._layers[pipeline_rank]
            pipeline_rank += 1
        prefix = f"transformer.layers.{layer}."
        if module in PROJECTIONS:
            return self._projection(pipeline_rank, f"{prefix}attention.qkv.{kind}", PROJECTIONS.index(module), kind)
        theirs = MODULES[module]
        axis = None if kind == "bias" else theirs.axis  # each rank holds the whole bias of a sum over the ranks
        shape = source_shape(self._model, f"{module}.{kind}")
        return self._shared(pipeline_rank, f"{prefix}{theirs.name}.{kind}", shape, axis)

    def _shared(self, pipeline_rank: int, name: str, shape: tuple[int, ...], axis: int | None) -> Part:
        """Describe a tensor that ranks share evenly along an axis, with padding at the last rank, or that each holds whole."""
        tp_size = self._mapping.tp_size
        if axis is None:
            return Part(pipeline_rank, name, shape, slice(None), axis=0, size=shape[0], copies=tp_size)
        local = list(shape)
        local[axis] = -(-shape[axis] // tp_size)
        return Part(pipeline_rank, name, tuple(local), slice(None), axis, size=shape[axis], copies=1)

    def _projection(self, pipeline_rank: int, name: str, which: int, kind: str) -> Part:
        """Describe the projection of queries (0), keys (1) or values (2); each rank holds the rows of its heads, in this order.

        With fewer KV heads than ranks, neighbouring ranks hold the same KV head.
        """
        model, tp_size = self._model, self._mapping.tp_size
        queries, kv_heads = model.num_heads // tp_size, max(1, model.num_kv_heads // tp_size)
        ends = [count * model.head_dim for count in (queries, queries + kv_heads, queries + 2 * kv_heads)]
        rows = slice(0 if which == 0 else ends[which - 1], ends[which])
        shape = (ends[-1], model.hidden_size) if kind == "weight" else (ends[-1],)
        heads, copies = (model.num_kv_heads, max(1, tp_size // model.num_kv_heads)) if which else (model.num_heads, 1)
        return Part(pipeline_rank, name, shape, rows, axis=0, size=heads * model.head_dim, copies=copies)
