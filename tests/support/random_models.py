"""Tiny random Hugging Face checkpoints with a tiny tokenizer, for tests that need a model but not what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

ARCHITECTURES = ("llama", "qwen2", "qwen3")
MIXTURES = ("qwen2_moe", "qwen3_moe")
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
VOCABULARY = 384
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>")  # ids 0, 1, 2
CORPUS = ("the harbour master wrote the log", "the light was lit at dusk", "one ship, two ships, three ships in 1931")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# Where the head size is stated it differs from hidden_size / num_attention_heads; Qwen2 has no such field.
ARCHITECTURE_SHAPE: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "qwen2": {"hidden_size": 192, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": None},
    "qwen2_moe": {
        "hidden_size": 192,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 96,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}
DELTA_SHAPE = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
WINDOWS = {  # of three layers of a qwen2 or qwen3
    "use_sliding_window": True,
    "sliding_window": 50,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EXPERTS_SHAPE = {
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 64,
}
ARCHITECTURE_SHAPE["gemma3"] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 50,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
ARCHITECTURE_SHAPE |= {
    "qwen3_next": {**DELTA_SHAPE, **EXPERTS_SHAPE, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen3_5": DELTA_SHAPE,
    "qwen3_5_moe": {**DELTA_SHAPE, **EXPERTS_SHAPE},
}


def save_random_model(directory: Path, architecture: str, *, max_shard_size: str = "1GB", **config: Any) -> Path:
    """Save a random float32 checkpoint and its tokenizer; returns `directory`.

    Parameters
    ----------
    architecture : str
        One of ARCHITECTURES, MIXTURES, HYBRIDS, mistral or gemma3. Six query heads, two KV heads of 32 channels, three layers,
        1,024 positions.
    max_shard_size : str
        As save_pretrained takes it; a small one makes several shards.
    **config
        Fields of the Hugging Face configuration to set, such as rope_parameters or attention_bias.
    """
    import transformers

    prefix = class_prefix(architecture)
    text = "Text" * architecture.startswith(("qwen3_5", "gemma3"))
    config_class = getattr(transformers, f"{prefix}{text}Config")
    values = {**SHAPE, **ARCHITECTURE_SHAPE[architecture], **config}
    torch.manual_seed(20)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config_class(**values))
    randomise(model)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    save_tokenizer(directory)
    return directory


def class_prefix(architecture: str) -> str:
    """What the names of transformers' classes begin with."""
    return "".join(part.capitalize() for part in architecture.split("_")).replace("Qwen35", "Qwen3_5")


def randomise(model: torch.nn.Module) -> None:
    """Give every parameter values that matter: transformers starts biases at 0 and norms at 1, where mistakes hide."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            centred = model.config.model_type.startswith("gemma") or hasattr(model.config, "linear_key_head_dim")
            centred = centred and "linear_attn" not in name
            torch.nn.init.uniform_(parameter, 0.5 - centred, 1.5 - centred)
        elif name.endswith("A_log"):
            torch.nn.init.uniform_(parameter, -4.0, 1.0)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        else:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def save_tokenizer(directory: Path) -> None:
    """Save a byte-level BPE tokenizer with a chat template; it encodes any text and never exceeds VOCABULARY ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    begin, end, pad = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=end, pad_token=pad)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
