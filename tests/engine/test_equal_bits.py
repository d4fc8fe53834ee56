"""With numbers of 16 bits an answer's logits are the same, to the bit, however its prompt was read.

Read whole, in chunks of other sizes, in a pack with others, between the units of another prompt, or behind a beginning that an
earlier request left.
tests/gpu/engine/test_equal_bits.py asks the same of a GPU.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.plugins.cases import CASES, method_flags
from tests.support.long_prompts import load_changed
from tests.support.prefill import run_to_end

from kvseek.core.config import read_config
from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.engine import Engine
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.model import prompt_windows
from kvseek.engine.tokenizer import Tokenizer
from kvseek.plugins.registry import METHODS

WINDOW = ("--cache.sink", "4", "--cache.local", "64", "--cache.update", "64", "--cache.full_threshold", "32")
LIMITS = ("--max_batch_size", "8", "--max_seq_len", "4096", "--prefill_chunk_tokens", "2048")
# cuBLAS cuts the sums of a matrix that has few outputs and many inputs, if it multiplies few rows.
SHAPE = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 2, "max_position_embeddings": 4096}
SMALL = {**SHAPE, "hidden_size": 128, "intermediate_size": 256}  # where the products are those of another method
KEPT = 1300  # tokens of a document
RESTS = (1, 17, 900)  # tokens behind it
STEPS = 12
PARAMS = SamplingConfig(return_generation_logits=True)


def numbers(count: int, seed: int) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.randrange(3, 380) for _ in range(count))


def ask(engine: Engine, *prompts: tuple[int, ...], steps: int = STEPS) -> list[list[bytes]]:
    """The logits of each answer's tokens, of requests that are submitted together."""
    ids = [engine.submit(Request(prompt, steps, PARAMS)) for prompt in prompts]
    outputs = run_to_end(engine)
    assert not any(output.error for output in outputs)
    return [
        [one.generation_logits for one in outputs if one.request_id == own and one.generation_logits] for own in ids
    ]


def check_equal_bits(directory: Path) -> None:
    """See the module's first lines."""
    engine = Engine.load(directory)
    whole, chunks = (load_changed(directory, {"reuse": False}, prefill_chunk_tokens=size) for size in (2048, 333))
    document = numbers(KEPT, 1)
    ask(engine, document, steps=1)
    for rest in RESTS:
        prompt = document + numbers(rest, rest)
        (expected,) = ask(whole, prompt)
        assert len(expected) == STEPS
        assert ask(chunks, prompt) == [expected], f"in chunks, {rest} tokens behind the document"
        assert ask(engine, prompt) == [expected], f"behind the document, {rest} tokens"
        assert ask(engine, prompt) == [expected], "of which all but the last are kept"
    short = [numbers(size, size) for size in (3, 40, 90)]
    alone = [ask(whole, prompt, steps=1)[0] for prompt in short]
    assert ask(engine, *short, steps=1) == alone, "in a pack"
    check_prompts_that_pass_a_longer_one(directory, whole)


def check_prompts_that_pass_a_longer_one(directory: Path, whole: Engine) -> None:
    """They are read between its units, with its indexes under way."""
    prompts, config = [numbers(size, size) for size in (2500, 40, 700)], read_config(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_windows, "MOST_TOKENS_BESIDE", 1024)
        engine = Engine(config, load_decoder(directory, config), Tokenizer(directory), max_num_tokens=256)
    ids, outputs = [engine.submit(Request(prompts[0], STEPS, PARAMS))], engine.step()
    ids += [engine.submit(Request(prompt, STEPS, PARAMS)) for prompt in prompts[1:]]
    outputs += run_to_end(engine)
    ends = [one.request_id for one in outputs if one.finish_reason is not None]
    assert ends[-1] == ids[0]
    found = [
        [one.generation_logits for one in outputs if one.request_id == own and one.generation_logits] for own in ids
    ]
    assert found == [ask(whole, prompt)[0] for prompt in prompts], "between the units of a longer one"


@pytest.mark.parametrize(("method", "precision"), [("full", "none"), *((method, "int8") for method in METHODS)])
def test_logits_do_not_depend_on_how_the_prompt_was_read(
    method: str, precision: str, random_model: RandomModel, build_engine: BuildEngine
) -> None:
    shape = SHAPE if method == "full" else SMALL
    model = random_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=64, **shape)
    numbers_of_16_bits = ("--dtype", "bfloat16", "--weight_only_precision", precision)
    flags = (*WINDOW, *LIMITS, *method_flags(method, CASES[method].sparse), *numbers_of_16_bits)
    directory = build_engine(model, method, *flags)
    check_equal_bits(directory)
    check_steps(directory)


@pytest.mark.parametrize(("architecture", "precision"), [("qwen2_moe", "none"), ("qwen3_moe", "int4")])
def test_experts_that_others_choose_change_nothing(
    architecture: str, precision: str, random_model: RandomModel, build_engine: BuildEngine
) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "head_dim": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    sizes = {name: size for name, size in sizes.items() if not name.startswith("shared") or architecture == "qwen2_moe"}
    model = random_model(architecture, num_hidden_layers=2, **sizes)
    directory = build_engine(
        model, "full", *WINDOW, *LIMITS, "--dtype", "bfloat16", "--weight_only_precision", precision
    )
    check_equal_bits(directory)
    check_steps(directory)


@pytest.mark.parametrize(("architecture", "precision"), [("qwen3_next", "none"), ("qwen3_5", "int8")])
def test_states_do_not_depend_on_how_the_prompt_was_read(
    architecture: str, precision: str, random_model: RandomModel, build_engine: BuildEngine
) -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128, "head_dim": 64}
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = random_model(architecture, max_position_embeddings=4096, **sizes, **kinds)
    form = ("--dtype", "bfloat16", "--weight_only_precision", precision, "--cache.reuse_state_tokens", "512")
    directory = build_engine(model, "full", *WINDOW, *LIMITS, *form)
    check_equal_bits(directory)
    check_steps(directory)


def check_steps(directory: Path) -> None:
    engine = Engine.load(directory)
    prompts = [numbers(size, size) for size in (700, 40, 900)]
    alone = [ask(engine, prompt)[0] for prompt in prompts]
    assert ask(engine, *prompts) == alone, "steps on the CPU do not depend on the batch"
