"""A model of the needle tasks: a tiny Qwen3, what it makes of answers that are given, and which it gives itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import vocabulary
from .tasks import TASKS, make_dialogues

ROPE_THETA = 1e8
CHECKED_CONTEXTS = 4  # a task


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: hidden, MLP, layers, query heads, KV heads, head size."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int


SHAPES = {
    "needle": Shape(384, 1024, 5, 6, 2, 128),  # 10.8 million parameters, 21.7 MB in bfloat16
    "small": Shape(192, 384, 4, 4, 2, 64),  # 2.0 million, 4.0 MB
    "tiny": Shape(64, 128, 2, 2, 1, 32),  # 0.2 million: to see the script run
}


def make_model(shape: Shape, positions: int) -> Any:
    """A Qwen3 model with random weights, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary.SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=vocabulary.BOS,
        eos_token_id=vocabulary.EOS,
        pad_token_id=vocabulary.PAD,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def answer_logits(model: Any, ids: Tensor, positions: Tensor | None, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, vocabulary] of the tokens that `answers` marks in ids [sequences, tokens], and these tokens [n].

    The mask is given as none, which is causal attention: from positions that jump transformers would conclude that several
    texts are packed into a sequence, and hide each from the next.
    """
    causal = {"full_attention": None}
    hidden = model.model(ids, attention_mask=causal, position_ids=positions, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, :-1][answers[:, 1:]]), ids[:, 1:][answers[:, 1:]]


@torch.inference_mode()
def check(model: Any, tokens: int, device: torch.device) -> dict[str, float]:
    """Share of the answers that the model draws token by token, by task, in contexts that training does not draw."""
    found = {}
    for task in TASKS:
        right: list[bool] = []
        for dialogue in make_dialogues(task, max(tokens, 1024), CHECKED_CONTEXTS):
            ids, answers, lengths = list(dialogue.context), [False] * len(dialogue.context), []
            for _, question, gold in dialogue.rounds:
                ids += question + gold
                answers += [False] * len(question) + [True] * len(gold)
                lengths.append(len(gold))
            given, marks = torch.tensor([ids], device=device), torch.tensor([answers], device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits, gold_ids = answer_logits(model, given, None, marks)
            same = torch.split(logits.argmax(dim=-1) == gold_ids, lengths)
            right += [bool(part.all()) for part in same]
        found[task] = sum(right) / len(right)
    return found
