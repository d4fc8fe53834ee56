"""With numbers of 16 bits an answer's logits are the same, to the bit, however its prompt was read (tests/engine/test_equal_bits)."""

from __future__ import annotations

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.engine.test_equal_bits import LIMITS, SHAPE, WINDOW, check_equal_bits
from tests.gpu.plugins.test_methods import CONTESTANTS

pytestmark = pytest.mark.gpu

METHODS = {"full": ("full", ()), **CONTESTANTS}
FORMS = [("bfloat16", "none"), ("bfloat16", "int8"), ("float16", "fp8")]


@pytest.mark.parametrize(("dtype", "precision"), FORMS)
@pytest.mark.parametrize("name", METHODS)
def test_logits_do_not_depend_on_how_the_prompt_was_read(
    name: str, dtype: str, precision: str, random_model: RandomModel, on_gpu: BuildEngine
) -> None:
    model = random_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=64, **SHAPE)
    method, few = METHODS[name]
    numbers_of_16_bits = ("--dtype", dtype, "--weight_only_precision", precision)
    check_equal_bits(on_gpu(model, method, *WINDOW, *LIMITS, *few, *numbers_of_16_bits))
