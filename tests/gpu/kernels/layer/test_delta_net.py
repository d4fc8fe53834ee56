"""The step of Gated DeltaNet layers on the GPU against kernels/reference/delta_net.py, and prompts that a GPU reads."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.gpu.engine.test_engine import WINDOW, run_all
from tests.support.random_models import HYBRIDS
from torch import Tensor

from kvseek.bench.methods import load_kernels
from kvseek.builder.checkpoints.model_config import model_config
from kvseek.builder.compile.cuda import Specialisation
from kvseek.core.batch import Batch, RequestState
from kvseek.core.config import MOST_DRAFTED
from kvseek.core.cuda import CudaKernels
from kvseek.core.model_config import DeltaNetConfig, ModelConfig
from kvseek.engine.engine import Engine
from kvseek.kernels.cuda.layer.layer import LayerKernels
from kvseek.kernels.reference.delta_net import DeltaParameters, DeltaPrompt, DeltaStates, delta_step, read_prompts

pytestmark = pytest.mark.gpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIGS = [
    DeltaNetConfig((0,), 2, 4, 128, 128, 4),
    DeltaNetConfig((0,), 3, 3, 16, 24, 2),
    DeltaNetConfig((0,), 1, 4, 256, 40, 1),
    DeltaNetConfig((0,), 2, 2, 24, 256, 5),
]
SLOTS, EPSILON = 5, 1e-6
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
STATE = 1e-4  # of numbers of order one, summed in another order
MODEL = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": EPSILON,
    "max_position_embeddings": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 0,
}


def model_of(config: DeltaNetConfig) -> ModelConfig:
    """A model whose first layer is of this configuration."""
    sizes = {
        "linear_num_key_heads": config.num_key_heads,
        "linear_num_value_heads": config.num_value_heads,
        "linear_key_head_dim": config.key_head_dim,
        "linear_value_head_dim": config.value_head_dim,
        "linear_conv_kernel_dim": config.conv_kernel,
    }
    return model_config(MODEL | sizes)


def draw(config: DeltaNetConfig, dtype: torch.dtype, device: str) -> tuple[DeltaParameters, DeltaStates]:
    """Parameters, and states of SLOTS slots."""
    source = torch.Generator().manual_seed(3)
    heads = config.num_value_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(device)

    conv = normal(config.channels, config.conv_kernel).to(dtype)
    parameters = DeltaParameters(
        config, conv, normal(heads) - 1, normal(heads), normal(config.value_head_dim).to(dtype), EPSILON
    )
    states = DeltaStates.zeros(config, SLOTS, MOST_DRAFTED, dtype, torch.device(device))
    states.recurrent.copy_(normal(*states.recurrent.shape) / 4)
    states.conv.copy_(normal(*states.conv.shape))
    states.tokens.copy_(7 * torch.arange(SLOTS)[:, None])
    return parameters, states


def check_steps(kernels: CudaKernels, config: DeltaNetConfig, dtype: torch.dtype, device: str) -> None:
    """Several steps of requests in other slots than their numbers, and of a batch's padding."""
    ops = LayerKernels(kernels, model_of(config), dtype, torch.empty(0, device=device).device, SLOTS)
    parameters, states = draw(config, dtype, device)
    copies = copy.deepcopy(states)
    source = torch.Generator().manual_seed(4)
    for step in range(6):
        slots = (3, 0, 1)[: 1 + step % 3]
        requests = [RequestState(slot=slot, position=int(copies.tokens[slot, 0]), length=0) for slot in slots]
        batch = Batch.of(requests, torch.zeros(SLOTS, 1, dtype=torch.int32, device=device))
        shapes = (len(slots), config.channels + config.values), (len(slots), 2 * config.num_value_heads)
        qkvz, ba = (torch.randn(shape, generator=source).to(device, dtype) for shape in shapes)
        found = ops.delta_step(qkvz, ba, batch, parameters, states)
        expected = delta_step(qkvz, ba, batch, parameters, copies)
        scale = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] * scale)
        for name in ("conv", "gates", "tokens"):
            assert torch.equal(getattr(states, name), getattr(copies, name))
        torch.testing.assert_close(states.recurrent, copies.recurrent, rtol=STATE, atol=STATE)
    untouched = draw(config, dtype, device)[1]
    for slot in (2, 4):
        assert torch.equal(states.recurrent[slot], untouched.recurrent[slot]), "no request has the slot"


def check_drafts(kernels: CudaKernels, config: DeltaNetConfig, dtype: torch.dtype, device: str) -> None:
    """Tokens that come as drafts, and are accepted or not, against steps of one token: all bits are the same.

    Two slots have drafts of other lengths in one batch, behind a third slot that has none. The first drafts are accepted whole,
    the longest ones too: blocks of heads that share a key are then as far apart as they ever are.
    """
    ops = LayerKernels(kernels, model_of(config), dtype, torch.empty(0, device=device).device, SLOTS * 8)
    parameters, states = draw(config, dtype, device)
    states.tokens.fill_(9)
    copies = copy.deepcopy(states)
    source, chance = torch.Generator().manual_seed(7), random.Random(7)
    table = torch.zeros(SLOTS, 1, dtype=torch.int32, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(device, dtype)

    def batch_of(rows: list[tuple[int, int]]) -> Batch:
        return Batch.of([RequestState(slot=slot, position=position, length=0) for slot, position in rows], table)

    lengths = dict.fromkeys((4, 1, 2), 9)
    for step in range(8):
        counts = {
            4: 1,
            1: 1 + chance.randint(0 if step > 2 else MOST_DRAFTED, MOST_DRAFTED),
            2: 1 + chance.randint(0, 3),
        }
        rows = [(slot, lengths[slot] + number) for slot, count in counts.items() for number in range(count)]
        qkvz, ba = normal(len(rows), config.channels + config.values), normal(len(rows), 2 * config.num_value_heads)
        found = ops.delta_step(qkvz, ba, batch_of(rows), parameters, states)
        for slot, count in counts.items():
            accepted = chance.randint(1 if step > 2 else count, count)
            for row in [rows.index((slot, lengths[slot] + number)) for number in range(accepted)]:
                one = ops.delta_step(qkvz[row, None], ba[row, None], batch_of(rows[row : row + 1]), parameters, copies)
                assert torch.equal(one[0], found[row])
            lengths[slot] += accepted
    ops.catch_up(batch_of(list(lengths.items())), parameters, states)
    assert torch.equal(states.recurrent, copies.recurrent)
    assert torch.equal(states.tokens, copies.tokens)
    for slot, tokens in lengths.items():
        assert torch.equal(*(one.latest(slot, tokens, config.conv_kernel) for one in (states, copies)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_drafts(config: DeltaNetConfig, dtype: str) -> None:
    kernels = load_kernels(Specialisation(dtype, 64, 1, "full", delta_net=True))
    check_drafts(kernels, config, DTYPES[dtype], "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_step(config: DeltaNetConfig, dtype: str) -> None:
    kernels = load_kernels(Specialisation(dtype, 64, 1, "full", delta_net=True))
    check_steps(kernels, config, DTYPES[dtype], "cuda")


def test_a_prompt_does_not_depend_on_others_or_on_how_it_is_cut() -> None:
    """To the bit, on a GPU as on the CPU (tests/kernels/reference/test_delta_net.py)."""
    check_cuts(CONFIGS[0], "cuda")


def check_cuts(config: DeltaNetConfig, device: str) -> None:
    """Read a prompt whole, in chunks, and in a pack of others; and the rest of one behind states that end within a block."""
    parameters, _ = draw(config, torch.bfloat16, device)
    source, counts = torch.Generator().manual_seed(5), (70, 700, 3)
    shapes = (sum(counts), config.channels + config.values), (sum(counts), 2 * config.num_value_heads)
    qkvz, ba = (torch.randn(shape, generator=source).to(device, torch.bfloat16) for shape in shapes)
    begun = DeltaPrompt.begin(config, torch.bfloat16, torch.device(device))
    packed, ends = read_prompts(qkvz, ba, [begun] * len(counts), counts, parameters)
    first, last = counts[0], counts[0] + counts[1]
    own = qkvz[first:last], ba[first:last]
    whole, (end,) = read_prompts(*own, [begun], [counts[1]], parameters)
    assert torch.equal(whole, packed[first:last])
    state, parts = begun, []
    for start, stop in ((0, 128), (128, 192), (192, 700)):
        out, (state,) = read_prompts(own[0][start:stop], own[1][start:stop], [state], [stop - start], parameters)
        parts.append(out)
    assert torch.equal(torch.cat(parts), whole)
    for one in (end, ends[1]):
        assert one.tokens == state.tokens == counts[1]
        assert torch.equal(one.recurrent, state.recurrent)
        assert torch.equal(one.latest, state.latest)
    _, (kept,) = read_prompts(own[0][:100], own[1][:100], [begun], [100], parameters)
    whole, (end,) = read_prompts(own[0][100:], own[1][100:], [kept], [600], parameters)
    state, parts = kept, []
    for start, stop in ((100, 128), (128, 512), (512, 700)):
        out, (state,) = read_prompts(own[0][start:stop], own[1][start:stop], [state], [stop - start], parameters)
        parts.append(out)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state.recurrent, end.recurrent)


@pytest.mark.parametrize("precision", ["none", "int4"])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_an_engine_has_the_logits_of_the_cpu(
    architecture: str, precision: str, random_model: RandomModel, build_engine: BuildEngine, on_gpu: BuildEngine
) -> None:
    """Steps in graphs, at batches of several sizes, and prompts in chunks."""
    heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
    experts = {} if architecture == "qwen3_5" else {"moe_intermediate_size": 64}
    model = random_model(architecture, hidden_size=192, head_dim=32, **experts, **heads)
    form = ("--dtype", "bfloat16", "--weight_only_precision", precision, "--max_batch_size", "4")
    host = Engine.load(build_engine(model, "full", *WINDOW, *form)).decoder
    device = Engine.load(on_gpu(model, "full", *WINDOW, *form)).decoder
    prompts = {slot: [(7 * token + slot) % 379 for token in range(180 - 20 * slot)] for slot in range(3)}
    steps = [[(31 * step + 17 * slot) % 379 for slot in range(3)] for step in range(12)]
    expected, found = (run_all(decoder, prompts, steps)[0] for decoder in (host, device))
    # Where two experts are nearly as likely, rounding may choose the other one: few rows differ much.
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.05
    assert (errors < 0.5).all()
