"""Checkpoints that hypothesis draws: tiny models in every spelling of config.json and every layout of files, right and wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.support.random_models import class_prefix

from kvseek.builder.build import build_engine
from kvseek.builder.checking import generated_logits, greedy
from kvseek.builder.options import build_options
from kvseek.core.config import read_config
from kvseek.core.errors import KvseekError
from kvseek.engine.leading.leader import load_decoder

Tensors = dict[str, torch.Tensor]
BIASED = ("qwen2", "qwen2_moe")
ABSENT = "(absent)"  # a value that takes the key out of config.json
LAYERS = 2
EXPERT_SIZE, SHARED_SIZE = 24, 16  # intermediate sizes
KEY_HEADS, KEY_DIM, VALUE_DIM, CONV_KERNEL = 2, 8, 12, 3  # of Gated DeltaNet layers
SHARED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")  # model types whose mixtures have a shared expert
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma3")
PROMPT = [3, 17, 90, 4, 55, 3, 62, 8, 71, 29, 44, 13, 80, 6, 37, 91, 22, 58, 2, 66, 49, 11, 75, 30]
GREEDY_TOKENS = 16
MOST = 1e-4  # difference of logits, whose spread is about 1; measured: some 8e-6
FLAGS = {
    "method": "full",
    "kernels": "reference",
    "max_batch_size": 1,
    "prefill_chunk_tokens": 10,
    "check": False,
    "quiet": True,
}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Shape:
    """What the tensors are, whatever config.json says."""

    model_type: str = "llama"
    vocab_size: int = 100
    hidden_size: int = 32
    intermediate_size: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: int = 0
    chosen: int = 1
    normalised: bool = False
    dense: tuple[int, ...] = ()  # layers without experts
    states: tuple[int, ...] = ()  # layers of Gated DeltaNet, of a hybrid
    value_heads: int = 4  # of these, for two key heads of 8 channels
    head: str = "own"  # lm_head.weight: "own", "embedding" (equal to it) or "none"


@dataclass(frozen=True)
class Files:
    """How the tensors are stored, and what is wrong with them."""

    dtype: str = "float32"
    layout: str = "single"  # "single", "shards" with an index, or "both", of which the index has the newer weights
    fault: str = "none"  # see _FAULTS


@dataclass(frozen=True)
class Case:
    """One checkpoint. `config` is put over the fields that describe the shape."""

    shape: Shape = field(default_factory=Shape)
    config: dict[str, Any] = field(default_factory=dict)
    files: Files = field(default_factory=Files)


def save_case(case: Case, directory: Path) -> None:
    """Write the checkpoint of a case, with a tokenizer, into an empty directory."""
    shutil.copytree(_tokenizer().name, directory, dirs_exist_ok=True)
    values = {name: value for name, value in (_plain_config(case.shape) | case.config).items() if value != ABSENT}
    (directory / "config.json").write_text(json.dumps(values))
    tensors = _FAULTS[case.files.fault](_tensors(case.shape, seed=1))
    tensors = {name: tensor.to(getattr(torch, case.files.dtype)) for name, tensor in tensors.items()}
    if case.files.layout != "single":
        _save_shards(tensors, directory)
    if case.files.layout == "both":
        tensors = _tensors(case.shape, seed=2)
    if case.files.layout != "shards":
        save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def _plain_config(shape: Shape) -> dict[str, Any]:
    return (
        {
            "architectures": [f"{class_prefix(shape.model_type)}ForCausalLM"],
            "model_type": f"{shape.model_type}{'_text' * shape.model_type.startswith(('qwen3_5', 'gemma3'))}",
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        | ({"query_pre_attn_scalar": 8} if shape.model_type == "gemma3" else {"hidden_act": "silu"})
        | (_mixture(shape) if shape.experts else {})
        | (_hybrid(shape) if shape.states else {})
    )


def _hybrid(shape: Shape) -> dict[str, Any]:
    kinds = ["linear_attention" if layer in shape.states else "full_attention" for layer in range(LAYERS)]
    none = {"num_experts": 0} if shape.model_type == "qwen3_next" and not shape.experts else {}
    return none | {
        "layer_types": kinds,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "linear_conv_kernel_dim": CONV_KERNEL,
    }


def _mixture(shape: Shape) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": SHARED_SIZE} if shape.model_type in SHARED else {}
    return shared | {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "norm_topk_prob": shape.normalised,
        "moe_intermediate_size": EXPERT_SIZE,
        "mlp_only_layers": list(shape.dense),
    }


def _mlps(shape: Shape, layer: int) -> dict[str, int]:
    """Intermediate size of each MLP of a layer, by its name."""
    if not shape.experts or layer in shape.dense:
        return {"mlp": shape.intermediate_size}
    shared = {"mlp.shared_expert": SHARED_SIZE} if shape.model_type in SHARED else {}
    return shared | {f"mlp.experts.{expert}": EXPERT_SIZE for expert in range(shape.experts)}


def _tensors(shape: Shape, seed: int) -> Tensors:
    """Random tensors by their Hugging Face names; norms and biases have values that matter."""
    generator = torch.Generator().manual_seed(seed)
    hidden, queries, keys = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator) * columns**-0.5

    def norm(size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    found = {"model.embed_tokens.weight": matrix(shape.vocab_size, hidden) * 4, "model.norm.weight": norm(hidden)}
    if shape.head != "none":
        own = matrix(shape.vocab_size, hidden)
        found["lm_head.weight"] = own if shape.head == "own" else found["model.embed_tokens.weight"].clone()
    for layer in range(LAYERS):
        prefix, mlps, has_state = f"model.layers.{layer}.", _mlps(shape, layer), layer in shape.states
        if has_state:
            found |= {f"{prefix}linear_attn.{name}": tensor for name, tensor in _delta_net(shape, matrix, norm).items()}
        attention = [
            ("self_attn.q_proj", queries * (1 + bool(shape.states)), hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
        ]
        for name, rows, columns in (
            *([] if has_state else attention),
            *((f"{mlp}.{name}_proj", size, hidden) for mlp, size in mlps.items() for name in ("gate", "up")),
            *((f"{mlp}.down_proj", hidden, size) for mlp, size in mlps.items()),
            *([] if "mlp" in mlps else [("mlp.gate", shape.experts, hidden)]),
            *([("mlp.shared_expert_gate", 1, hidden)] if "mlp.shared_expert" in mlps else []),
        ):
            found[f"{prefix}{name}.weight"] = matrix(rows, columns)
            output, attends = name.endswith("o_proj"), name.startswith("self_attn")
            if shape.output_bias if output else shape.qkv_bias if attends else shape.mlp_bias:
                found[f"{prefix}{name}.bias"] = torch.randn(rows, generator=generator) / 2
        gemma = shape.model_type == "gemma3"
        around = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if gemma else ()
        for name in ("input_layernorm", "post_attention_layernorm", *around):
            found[f"{prefix}{name}.weight"] = norm(hidden)
        if (gemma or shape.model_type.startswith("qwen3")) and not has_state:
            for name in ("q_norm", "k_norm"):
                found[f"{prefix}self_attn.{name}.weight"] = norm(shape.head_dim)
    return found


def _delta_net(shape: Shape, matrix: Any, norm: Any) -> Tensors:
    """Tensors of a Gated DeltaNet layer."""
    hidden, heads = shape.hidden_size, shape.value_heads
    keys, values = KEY_HEADS * KEY_DIM, heads * VALUE_DIM
    inputs = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * heads}
    if shape.model_type != "qwen3_next":
        inputs = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    found = {f"{name}.weight": matrix(rows, hidden) for name, rows in inputs.items()}
    found |= {
        "conv1d.weight": matrix(2 * keys + values, CONV_KERNEL)[:, None],
        "out_proj.weight": matrix(hidden, values),
    }
    return found | {"A_log": norm(heads) * 2 - 2, "dt_bias": norm(heads), "norm.weight": norm(VALUE_DIM)}


def _without(*names: str) -> Any:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def _gates(tensors: Tensors) -> int:
    return len(tensors[_GATE if _GATE in tensors else _Q])  # of a mixture any number


_Q, _GATE = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"
_FAULTS: dict[str, Any] = {
    "none": lambda tensors: tensors,
    "missing": _without(_GATE),
    "missing norm": _without("model.norm.weight"),
    "missing embedding": _without("model.embed_tokens.weight"),
    "missing head": _without("lm_head.weight"),
    "stray": lambda tensors: tensors | {"model.layers.0.self_attn.sinks": torch.ones(4)},
    "stray layer": lambda tensors: tensors | {f"model.layers.{LAYERS}.mlp.up_proj.weight": torch.ones(4, 4)},
    "stray frequencies": lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    "stray bias": lambda tensors: tensors | {_GATE.replace("weight", "bias"): torch.ones(_gates(tensors))},
    "short": lambda tensors: tensors | {_Q: tensors[_Q][:-2].contiguous()},
    "transposed": lambda tensors: tensors | {_Q: tensors[_Q].T.contiguous()},
    "without prefix": lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
    "other prefix": lambda tensors: {f"language_{name}": tensor for name, tensor in tensors.items()},
}


def _save_shards(tensors: Tensors, directory: Path) -> None:
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@functools.cache
def _tokenizer() -> tempfile.TemporaryDirectory[str]:
    """Save one tokenizer for all cases, with few tokens, as the models have; the folder goes when the process ends."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(("<begin>", "<end>", "<unknown>", "harbour", "light"))}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<begin>", eos_token="<end>")
    folder = tempfile.TemporaryDirectory()
    tokenizer.save_pretrained(folder.name)
    return folder


def _rope_values(kind: str, pairs: int) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of one kind of RoPE for `pairs` channel pairs, without its name and theta; some may be absent."""
    factor, original = st.sampled_from([0.5, 1.0, 2.0, 4, 8.0]), st.sampled_from([16, 32, 64, 128, 256])
    right = [[1] * pairs, [1.0 + number for number in range(pairs)], [1.05 + 4 * number for number in range(pairs)]]
    lists = st.sampled_from([*right * 8, [1.0] * (pairs - 1), [0.0] * pairs, "1.0"])
    needed: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "yarn": {"factor": factor},
        "llama3": {"factor": factor, "low_freq_factor": st.sampled_from([1.0, 2]), "high_freq_factor": st.just(4.0)},
        "longrope": {"short_factor": lists, "long_factor": lists},
    }
    optional: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "yarn": {
            "beta_fast": st.sampled_from([32, 16.0, None]),
            "beta_slow": st.sampled_from([1, 2.0, None]),
            "attention_factor": st.sampled_from([1.0, 0.8, None]),
            "mscale": st.sampled_from([1.0, 0.707, None]),
            "mscale_all_dim": st.sampled_from([1.0, 0.5, 0, None]),
            "truncate": st.booleans(),
        },
        "longrope": {
            "factor": st.sampled_from([1.0, 4, 32.0, 0.5, None]),
            "attention_factor": st.sampled_from([1, 1.19, None]),
        },
    }
    # The prompt has 24 tokens, and 15 are read after it: longrope's border lies before, among and after them.
    borders = st.sampled_from([1, 16, 23, 24, 25, 30, 38, 39, 40, 64])
    shared: dict[str, st.SearchStrategy[Any]] = {
        "original_max_position_embeddings": borders if kind == "longrope" else original
    }
    own = needed.get(kind, {})
    # llama3 without its original length, or any kind without its factor, is seldom drawn: most of what is drawn should run.
    first = st.fixed_dictionaries(own | (shared if kind == "llama3" else {}))
    rare = st.fixed_dictionaries({}, optional=own | shared)
    rest = st.fixed_dictionaries(
        {}, optional=optional.get(kind, {}) | ({} if kind in ("default", "linear", "dynamic") else shared)
    )
    strays = [{"partial_rotary_factor": 1.0}, {"partial_rotary_factor": 0.5}, {"x": 1}]
    stray = st.sampled_from([{}] * 13 + strays)
    parts = st.tuples(st.one_of(*[first] * 7, rare), rest, stray)
    return parts.map(lambda found: found[0] | found[1] | found[2])


@st.composite
def _ropes(draw: st.DrawFn, head_dim: int) -> dict[str, Any]:
    """The keys of config.json that say how positions are rotated, as transformers 4 or 5 or somebody's script writes them."""
    kinds = st.sampled_from(["default", "linear", "linear", "llama3", "llama3", *["yarn", "longrope"] * 3, "dynamic"])
    thetas = st.sampled_from([10000.0, 500, 1e6])

    def object_(theta: bool) -> dict[str, Any]:
        kind = draw(kinds)
        names = draw(st.sampled_from([("rope_type",), ("rope_type",), ("type",), ("rope_type", "type"), ()]))
        values = dict.fromkeys(names, kind) | draw(_rope_values(kind, head_dim // 2))
        return values | ({"rope_theta": draw(thetas)} if theta else {})

    found: dict[str, Any] = {}
    spelling = draw(st.sampled_from(["none", "4", "4", "5", "5", "5", "both", "nested", "null"]))
    if spelling in ("4", "both"):
        found["rope_scaling"] = object_(theta=draw(st.sampled_from([False, False, True])))
    if spelling in ("5", "both"):
        found["rope_parameters"] = object_(theta=draw(st.sampled_from([True, True, True, False])))
    if spelling == "nested":
        found["rope_parameters"] = {"full_attention": object_(theta=True)}
    if spelling == "null":
        found |= {"rope_scaling": None, "rope_parameters": draw(st.sampled_from([None, {}]))}
    if draw(st.booleans() if spelling in ("4", "none", "null") else st.sampled_from([False, False, False, True])):
        found["rope_theta"] = draw(thetas)
    if draw(st.sampled_from([False] * 7 + [True])):
        found["original_max_position_embeddings"] = draw(st.sampled_from([16, 64, 128]))
    return found


# Fields that are put over a configuration: values that are right, harmless or wrong, and fields that are left out.
_EDITS: dict[str, list[Any]] = {
    "head_dim": [ABSENT, None, 16],
    "num_key_value_heads": [ABSENT, None, 1, 4],
    "rms_norm_eps": [ABSENT, 1e-3, 1],
    "tie_word_embeddings": [ABSENT, True, False, None],
    "attention_bias": [ABSENT, True, False],
    "mlp_bias": [False, True],
    "hidden_act": [ABSENT, "gelu", "swish"],
    "is_causal": [True, False],
    "use_sliding_window": [False, True],
    "sliding_window": [None, 8, 4096, ABSENT],
    "max_window_layers": [0, 1, 28],
    "layer_types": [["full_attention"] * LAYERS, ["full_attention", "sliding_attention"], ["full_attention"], None],
    "partial_rotary_factor": [1.0, 0.5],
    "pretraining_tp": [1, 2],
    "attention_dropout": [0.0, 0.5],
    "max_position_embeddings": [ABSENT, 32, 4096],  # 32 makes the prompt shorter: 16 tokens
    "torch_dtype": ["float32", "bfloat16"],
    "dtype": ["float16"],
    "transformers_version": ["4.30.0", "5.0.0"],
    "architectures": [ABSENT, ["LlamaForCausalLM"], ["Qwen3ForCausalLM"], ["LlamaModel"]],
    "model_type": [ABSENT, "llama", "qwen2", "mistral"],
    "num_hidden_layers": [1, 3],
    "hidden_size": [64],
    "vocab_size": [ABSENT, 99, 101],
    "intermediate_size": [ABSENT],
    "final_logit_softcapping": [30.0],
    "logit_scale": [0.5],
    "attn_logit_softcapping": [50.0],
    "rope_interleaved": [True],
    "num_experts": [0, 4],
    "num_experts_per_tok": [ABSENT, 1, 9],
    "norm_topk_prob": [True, ABSENT, None],
    "moe_intermediate_size": [ABSENT, 24],
    "shared_expert_intermediate_size": [ABSENT, 0, 16],
    "decoder_sparse_step": [ABSENT, 1, 2, 0],
    "mlp_only_layers": [ABSENT, None, [0], [0, 1], [7], "1"],
    "qkv_bias": [False, True],
    "quantization_config": [None, {"quant_method": "fp8"}],
    "eos_token_id": [[1, 2], ABSENT, None],
    "pad_token_id": [2, -1, 5000],
    "use_cache": [False],
    "some_key": [{"a": [1]}],
}


@st.composite
def _shapes(draw: st.DrawFn) -> Shape:
    model_type = draw(st.sampled_from(MODEL_TYPES))
    heads = draw(st.sampled_from([2, 4]))
    experts = draw(st.sampled_from([3, 4, 9])) if model_type.endswith("_moe") else 0
    return Shape(
        model_type=model_type,
        vocab_size=draw(st.sampled_from([96, 100])),
        hidden_size=draw(st.sampled_from([32, 64])),
        intermediate_size=draw(st.sampled_from([48, 80])),
        heads=heads,
        kv_heads=draw(st.sampled_from([1, 2, heads])),
        head_dim=draw(st.sampled_from([8, 16])),
        experts=experts,
        chosen=min(experts, draw(st.sampled_from([1, 2, 3]))),
        normalised=draw(st.booleans()),
        dense=draw(st.sampled_from([(), (), (0,), (1,)])),
        qkv_bias=model_type in BIASED or draw(st.sampled_from([False, False, True])),
        mlp_bias=model_type == "llama" and draw(st.sampled_from([False, False, True])),
        head=draw(st.sampled_from(["own", "own", "embedding", "none"])),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Mostly checkpoints that run, with up to two fields edited and sometimes a fault in the tensors."""
    shape = draw(_shapes())
    bias = shape.qkv_bias and shape.model_type not in BIASED
    shape = dataclasses.replace(shape, output_bias=bias)
    config: dict[str, Any] = {"attention_bias": True} if bias else {}
    config |= {"mlp_bias": True} if shape.mlp_bias else {}
    config |= {"tie_word_embeddings": shape.head == "none"} if shape.head != "own" else {}
    config |= {"sliding_window": draw(st.sampled_from([None, 4096]))} if shape.model_type == "mistral" else {}
    if shape.model_type == "gemma3":
        config |= draw(
            st.fixed_dictionaries(
                {"sliding_window": st.sampled_from([2, 5, 9, 24, 64])},
                optional={
                    "sliding_window_pattern": st.sampled_from([1, 2, 3]),
                    "layer_types": st.sampled_from([["sliding_attention", "full_attention"], ["full_attention"] * 2]),
                    "rope_local_base_freq": st.sampled_from([1e4, 500.0]),
                    "query_pre_attn_scalar": st.sampled_from([4, 8, 30]),
                    "hidden_activation": st.sampled_from(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu"]),
                },
            )
        )
    if shape.model_type in ("qwen2", "qwen3") and draw(st.booleans()):
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        config |= {"use_sliding_window": True, "sliding_window": draw(st.sampled_from([2, 5, 9, 24, 64, ABSENT]))}
        config |= draw(
            st.one_of(
                st.fixed_dictionaries({"layer_types": st.lists(kinds, min_size=LAYERS, max_size=LAYERS)}),
                st.fixed_dictionaries({}, optional={"max_window_layers": st.sampled_from([0, 1, 2])}),
            )
        )
    if shape.heads * shape.head_dim == shape.hidden_size and shape.model_type != "qwen3" and draw(st.booleans()):
        config["head_dim"] = ABSENT
    elif shape.model_type in BIASED:  # which has no such field: the size follows from others
        shape = dataclasses.replace(shape, head_dim=shape.hidden_size // shape.heads)
    config |= draw(_ropes(shape.head_dim))
    for name in draw(st.lists(st.sampled_from(sorted(_EDITS)), max_size=2)) if draw(st.booleans()) else ():
        config[name] = draw(st.sampled_from(_EDITS[name]))
    files = Files(
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        layout=draw(st.sampled_from(["single", "single", "shards", "both"])),
        fault=draw(st.sampled_from(["none"] * 2 * len(_FAULTS) + list(_FAULTS))),
    )
    return Case(shape, config, files)


# One checkpoint in kvseek and in transformers: the same logits, or refused


def outcome(case: Case) -> str:
    """Build and compare a case: returns "equal" or why kvseek refuses; raises AssertionError if the property does not hold."""
    with tempfile.TemporaryDirectory() as folder:
        model, engine = Path(folder, "model"), Path(folder, "out", "engine")
        model.mkdir()
        save_case(case, model)
        try:
            build_engine(build_options({**FLAGS, "model": model, "output_dir": engine}))
            decoder = load_decoder(engine, read_config(engine))
        except KvseekError as error:
            reason = str(error).replace(folder, "")
            assert "are available" not in reason, f"this machine has no room for the test: {reason}"
            assert not engine.parent.exists(), "a refused checkpoint left something behind"
            return f"refused: {reason}"
        count = min(GREEDY_TOKENS, decoder.config.max_seq_len // 2)  # fewer where all layers have a short window
        prompt = PROMPT[: decoder.config.max_seq_len - count]
        tokens, found = greedy(decoder, prompt, count)
        try:
            expected = transformers_logits(model, [*prompt, *tokens[:-1]], count)
        except Exception as error:
            raise AssertionError(f"kvseek accepts what transformers refuses: {type(error).__name__}: {error}") from None
        # Transformers reads the engine's own tokens. With logits this close, its greedy decoding draws the same ones: it could
        # only draw others where two tokens are as likely as each other to within the rounding.
        difference = float((found - expected).abs().max())
        assert difference <= MOST * max(1.0, float(expected.abs().max())), f"the logits differ by {difference:.3g}"
        return "equal"


def transformers_logits(model: Path, ids: list[int], count: int = GREEDY_TOKENS) -> torch.Tensor:
    """The logits of the last tokens [count, vocabulary], as whoever generates with the checkpoint gets them."""
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    return generated_logits(reference, ids, count, passes=count)
