"""A Hugging Face model on a GPU selects as the same model on the CPU does; the index is on the CPU with both."""

from __future__ import annotations

import pytest
import torch
from tests.bench.bridges.test_attention import CACHE, FORCED, PROMPT, check_close, selected_logits
from tests.conftest import RandomModel
from tests.plugins.cases import CASES
from transformers import AutoModelForCausalLM, DynamicCache

from kvseek.bench.bridges.attention import selecting
from kvseek.bench.bridges.selector import Selector

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", ["nested", "prkv", "quest"])
def test_logits_are_those_of_the_cpu(method: str, random_model: RandomModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_model("qwen3"), dtype=torch.float32).eval()
    selector, calls = Selector(method, CASES[method].sparse, CACHE), [PROMPT, FORCED[:10], FORCED[10:]]
    expected = selected_logits(model, selector, calls)
    model, cache = model.cuda(), DynamicCache()
    with selecting(model, selector), torch.no_grad():
        found = [model(torch.tensor([own]).cuda(), past_key_values=cache).logits[0].cpu() for own in calls]
    check_close(torch.cat([found[0][-1:], *found[1:]]), expected)
