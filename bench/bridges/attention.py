"""kvseek's selection as an attention of transformers: of a Llama or Qwen model, with one sequence in a DynamicCache.

    with selecting(model, Selector("nested", {"top_k": 256})):
        model.generate(prompt)

The call that begins a cache is the prompt, which attends to everything. In all later calls each token attends as a decode step
of an engine does, also where a call brings several: a question behind a document that has been read finds what is selected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .selector import Selector

NAME = "kvseek"


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with PyTorch's attention to what the module's selector chooses; see transformers' AttentionInterface."""
    selector: Selector = module.kvseek_selector
    if query.shape[2] == key.shape[2]:
        selector.begin(module.layer_idx, key, query, module.scaling)
    else:
        chosen = selector.choose(module.layer_idx, query, key)
        attention_mask = chosen if attention_mask is None else chosen & attention_mask
    dense = ALL_ATTENTION_FUNCTIONS["sdpa"]
    attended: tuple[Tensor, Tensor | None] = dense(module, query, key, value, attention_mask, dropout=dropout, **kwargs)
    return attended


@contextmanager
def selecting(model: PreTrainedModel, selector: Selector) -> Iterator[None]:
    """Let a model attend to what a selector chooses; the sequence goes on in a later context with the same selector."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    layers: list[Module] = [module for module in model.modules() if hasattr(module, "layer_idx")]
    before = model.config._attn_implementation, [getattr(layer, "kvseek_selector", None) for layer in layers]
    for layer in layers:
        layer.kvseek_selector = selector  # type: ignore[assignment]  # no parameter of the module
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before[0]
        for layer, outer in zip(layers, before[1], strict=True):
            layer.kvseek_selector = outer  # type: ignore[assignment]
