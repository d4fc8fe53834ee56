"""What tests/engine/test_equal_bits.py asks of engines on the CPU: the same logits, however a prompt was read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.engine.test_equal_bits import LIMITS, SHAPE, WINDOW, ask, check_equal_bits, numbers
from tests.gpu.kernels.layer.test_delta_net import run_all
from tests.gpu.plugins.test_methods import CONTESTANTS
from tests.support.random_models import WINDOWS

from kvseek.engine.engine import Engine

pytestmark = pytest.mark.gpu

EVERY_512 = ("--dtype", "bfloat16", "--cache.reuse_state_tokens", "512")

METHODS = {"full": ("full", ()), **CONTESTANTS}
FORMS = [("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"), ("float16", "fp8")]


@pytest.mark.parametrize(("dtype", "precision"), FORMS)
@pytest.mark.parametrize("name", METHODS)
def test_logits_do_not_depend_on_how_the_prompt_was_read(
    name: str, dtype: str, precision: str, random_model: RandomModel, on_gpu: BuildEngine
) -> None:
    model = random_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=64, **SHAPE)
    method, few = METHODS[name]
    numbers_of_16_bits = ("--dtype", dtype, "--weight_only_precision", precision)
    check_equal_bits(on_gpu(model, method, *WINDOW, *LIMITS, *few, *numbers_of_16_bits))


@pytest.mark.parametrize(("dtype", "precision"), FORMS)
@pytest.mark.parametrize("name", METHODS)
def test_logits_do_not_depend_on_the_batch(
    name: str, dtype: str, precision: str, random_model: RandomModel, on_gpu: BuildEngine
) -> None:
    """Requests of many lengths, one of them dense: alone, in pairs, and all at once, in any order."""
    model = random_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=64, **SHAPE)
    method, few = METHODS[name]
    numbers_of_16_bits = ("--dtype", dtype, "--weight_only_precision", precision)
    check_batches(on_gpu(model, method, *WINDOW, *LIMITS, *few, *numbers_of_16_bits))


def check_batches(directory: Path) -> None:
    engine = Engine.load(directory)
    prompts = [numbers(size, size) for size in (2500, 20, 700, 90, 1500, 300, 1100, 33)]
    alone = [ask(engine, prompt)[0] for prompt in prompts]
    for chosen in ([0, 1], [3, 2], [4, 6, 1], [7, 5, 3, 1, 2], [*range(8)], [*reversed(range(8))]):
        assert ask(engine, *(prompts[number] for number in chosen)) == [alone[number] for number in chosen], chosen


@pytest.mark.parametrize(("architecture", "precision"), [("qwen3_next", "none"), ("qwen3_5", "int4")])
def test_states_do_not_depend_on_how_the_prompt_was_read(
    architecture: str, precision: str, random_model: RandomModel, on_gpu: BuildEngine
) -> None:
    heads = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "head_dim": 64}
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = random_model(architecture, max_position_embeddings=4096, **sizes, **kinds, **heads)
    form = ("--dtype", "bfloat16", "--weight_only_precision", precision, "--cache.reuse_state_tokens", "512")
    directory = on_gpu(model, "full", *WINDOW, *LIMITS, *form)
    check_equal_bits(directory)
    check_batches(directory)


@pytest.mark.parametrize(("architecture", "window"), [("qwen3", 300), ("gemma3", 128)])
def test_windows_do_not_depend_on_how_the_prompt_was_read(
    architecture: str, window: int, random_model: RandomModel, on_gpu: BuildEngine
) -> None:
    directory = on_gpu(windowed(architecture, window, random_model), "full", *WINDOW, *LIMITS, *EVERY_512)
    check_equal_bits(directory)
    check_batches(directory)


@pytest.mark.parametrize(("architecture", "window"), [("qwen3", 100), ("gemma3", 50)])
def test_windows_have_the_logits_of_the_cpu(
    architecture: str, window: int, random_model: RandomModel, build_engine: BuildEngine, on_gpu: BuildEngine
) -> None:
    """Steps in graphs, at batches of several sizes, and prompts in chunks."""
    model, form = windowed(architecture, window, random_model), ("--dtype", "bfloat16", "--max_batch_size", "4")
    decoders = (Engine.load(build(model, "full", *WINDOW, *form)).decoder for build in (build_engine, on_gpu))
    prompts = {slot: [(7 * token + slot) % 379 for token in range(180 - 20 * slot)] for slot in range(3)}
    steps = [[(31 * step + 17 * slot) % 379 for slot in range(3)] for step in range(12)]
    expected, found = (run_all(decoder, prompts, steps)[0] for decoder in decoders)
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 0.05


def windowed(architecture: str, window: int, random_model: RandomModel) -> Path:
    """A model of three layers, of which the middle one attends to all tokens."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "head_dim": 64}
    fields = WINDOWS | sizes | {"sliding_window": window, "max_position_embeddings": 4096}
    if architecture == "gemma3":
        del fields["use_sliding_window"]
    return random_model(architecture, **fields)


@pytest.mark.parametrize(
    ("architecture", "dtype", "precision"),
    [
        ("qwen2_moe", "bfloat16", "none"),
        ("qwen3_moe", "bfloat16", "int4"),
        ("qwen3_moe", "bfloat16", "int8"),
        ("qwen3_moe", "float16", "none"),
    ],
)
def test_experts_that_others_choose_change_nothing(
    architecture: str, dtype: str, precision: str, random_model: RandomModel, on_gpu: BuildEngine
) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 32, "num_experts_per_tok": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}
    model = random_model(architecture, num_hidden_layers=2, **sizes)
    numbers_of_16_bits = ("--dtype", dtype, "--weight_only_precision", precision)
    directory = on_gpu(model, "full", *WINDOW, *LIMITS, *numbers_of_16_bits)
    check_equal_bits(directory)
    check_batches(directory)
