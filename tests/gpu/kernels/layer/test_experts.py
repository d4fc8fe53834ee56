"""Mixtures of experts on the GPU: routes, products of decode steps, prompts, and whole engines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import BuildEngine, RandomModel
from tests.gpu.engine.test_engine import WINDOW, run_all
from tests.support.random_models import MIXTURES
from torch import Tensor

from kvseek.bench.methods import load_kernels
from kvseek.builder.compile.cuda import Specialisation
from kvseek.core.errors import KernelError
from kvseek.core.model_config import ExpertsConfig
from kvseek.core.weight_only import NONE, dequantise, quantise
from kvseek.engine.engine import Engine
from kvseek.engine.model.cuda import experts
from kvseek.engine.model.cuda.experts import GROUPING, KernelExperts
from kvseek.engine.model.experts import Parts, route
from kvseek.kernels.cuda.layer.experts import ExpertKernels

pytestmark = pytest.mark.gpu

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIGS = [
    ExpertsConfig(128, 8, 40, norm_topk_prob=True),
    ExpertsConfig(4, 1, 136, norm_topk_prob=False),
    ExpertsConfig(33, 16, 8, norm_topk_prob=True),
    ExpertsConfig(60, 4, 64, norm_topk_prob=False),
    ExpertsConfig(512, 10, 8, norm_topk_prob=True),
    ExpertsConfig(1, 1, 8, norm_topk_prob=True),
    ExpertsConfig(40, 32, 8, norm_topk_prob=True),  # of 64 rows there is no room for all products of a block
]
ROWS = (1, 2, 7, 8, 33, 64)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def random(kernels: ExpertKernels, device: str, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, kernels.dtype)


def check_routes(kernels: ExpertKernels, device: str) -> None:
    """Experts of every row, also of equal logits, and the rows of every expert."""
    config = kernels.config
    few = config.num_experts_per_tok
    for rows in (rows for rows in ROWS if rows <= kernels.most_rows):
        logits = random(kernels, device, rows, config.num_experts, seed=1)
        logits[rows // 2] = logits[rows // 2].round()  # many are equal
        logits[rows - 1, ::2] = -0.0
        logits[rows - 1, 1::2] = 0.0
        found = kernels.route(logits)
        weights, chosen = route(logits, config)
        torch.testing.assert_close(found.weights, weights, rtol=1e-5, atol=0)
        flat, slots, starts, pairs = (
            chosen.flatten().tolist(),
            *(part.tolist() for part in (found.slots, found.starts, found.pairs)),
        )
        hit = sorted(set(flat))
        assert slots == hit + [-1] * (min(config.num_experts, rows * few) - len(hit))
        expected = [[pair for pair in range(rows * few) if flat[pair] == expert] for expert in hit]
        assert [pairs[starts[slot] : starts[slot + 1]] for slot in range(len(hit))] == expected
        assert set(starts[len(hit) :]) == {rows * few}


def expected_of(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The rows' sums, in float64, but for what is rounded between the products."""
    count, dtype = gate_up.shape[0], x.dtype
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(count):
        for row, place in (chosen == expert).nonzero().tolist():
            wide = (gate_up[expert].double() @ x[row].double()).to(dtype)
            gate, up = wide.chunk(2)
            activated = (F.silu(gate.float()) * up.float()).to(dtype)
            total[row] += weights[row, place].double() * (down[expert].double() @ activated.double())
    return total


Operands = tuple[Tensor, Tensor, Parts, Parts]


def operands(kernels: ExpertKernels, device: str, rows: int, hidden: int) -> Operands:
    """x, logits, and the weights of gate_up and down, with their scales."""
    config = kernels.config
    wide = 2 * config.intermediate_size * config.num_experts
    x, logits = (random(kernels, device, rows, size, seed=size) for size in (hidden, config.num_experts))
    gate_up = random(kernels, device, wide, hidden, seed=2) * hidden**-0.5
    down = random(kernels, device, config.num_experts * hidden, config.intermediate_size, seed=3)
    return x, 3 * logits, stored(kernels, gate_up), stored(kernels, down * config.intermediate_size**-0.5, True)


def stored(kernels: ExpertKernels, weight: Tensor, of_other: bool = False) -> Parts:
    """A weight of the engine's precision, or of the one beside it if there is one."""
    form = next(iter(kernels.formats)) if of_other else list(kernels.formats)[-1]
    return (weight, None) if form.precision == NONE else quantise(weight, form.precision, form.group)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def computed(kernels: ExpertKernels, given: Operands, *, prompt: bool = False) -> Tensor:
    x, logits, gate_up, down = given
    own = KernelExperts(kernels, gate_up, down, lambda *parts: dequantise(*parts, x.dtype))
    return own(x, logits, silu_mul, lambda _: None, prompt=prompt)


def check_products(
    kernels: ExpertKernels, device: str, rows: tuple[int, ...], hidden: int, *, prompt: bool = False
) -> None:
    config = kernels.config
    for count in rows:
        given = operands(kernels, device, count, hidden)
        x, logits, gate_up, down = given
        found = computed(kernels, given, prompt=prompt)
        wide = [one if two is None else dequantise(one, two, torch.float64) for one, two in (gate_up, down)]
        if prompt:
            wide = [one.to(x.dtype) for one in wide]  # rounded before it is multiplied
        each = [one.view(config.num_experts, -1, one.shape[1]) for one in wide]
        expected = expected_of(x, *each, *route(logits, config))
        # A number between the products may be rounded to its other neighbour, as sums have another order.
        most = 3 * ROUNDING[x.dtype] * expected.abs().amax(dim=1, keepdim=True)
        assert found.dtype is x.dtype
        assert ((found.double() - expected).abs() <= most).all()


def check_rows_alone(kernels: ExpertKernels, device: str, rows: int, hidden: int) -> None:
    """Also where more rows than are multiplied at once have chosen one expert."""
    x, logits, gate_up, down = operands(kernels, device, rows, hidden)
    logits[:, 3] = 20
    together = computed(kernels, (x, logits, gate_up, down))
    for row in range(rows):
        alone = computed(kernels, (x[row : row + 1].contiguous(), logits[row : row + 1].contiguous(), gate_up, down))
        assert torch.equal(alone[0], together[row])
    order = torch.arange(rows - 1, -1, -1, device=x.device)
    assert torch.equal(computed(kernels, (x[order], logits[order], gate_up, down)), together[order])


def check_poison(kernels: ExpertKernels, device: str) -> None:
    """A row of NaN shows, and hurts no other; weights of experts that nobody has chosen are not read."""
    x, logits, gate_up, down = operands(kernels, device, 9, 64)
    logits[:, 0] = -50
    gate_up[0].view(kernels.config.num_experts, -1)[0] = float("nan")
    clean = computed(kernels, (x, logits, gate_up, down))
    assert clean.isfinite().all()
    x[4], logits[4] = float("nan"), float("nan")
    found = computed(kernels, (x, logits, gate_up, down))
    assert found[4].isnan().all()
    others = torch.arange(9, device=x.device) != 4
    assert torch.equal(found[others], clean[others])


def kernels_of(
    config: ExpertsConfig, dtype: str = "bfloat16", precision: str = NONE, group: int = 32, asymmetric: bool = False
) -> ExpertKernels:
    unit = Specialisation(dtype, 64, 4, "full", (), precision, group, asymmetric, experts=True)
    return ExpertKernels(load_kernels(unit), DTYPES[dtype], config, precision, group, asymmetric=asymmetric)


@pytest.mark.parametrize("config", CONFIGS)
def test_routes(config: ExpertsConfig) -> None:
    check_routes(kernels_of(config), "cuda")


@pytest.mark.parametrize("prompt", [False, True], ids=["step", "prompt"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_products(config: ExpertsConfig, dtype: str, prompt: bool) -> None:
    for hidden in (72, 2048):
        check_products(kernels_of(config, dtype), "cuda", (300,) if prompt else ROWS, hidden, prompt=prompt)


@pytest.mark.parametrize("prompt", [False, True], ids=["step", "prompt"])
@pytest.mark.parametrize(
    ("precision", "group", "asymmetric"),
    [
        ("int8", 32, False),
        ("fp8", 32, False),
        ("int4", 32, False),
        ("int4", 128, False),
        ("fp8_groups", 32, False),
        ("int8_asymmetric", 32, False),
        ("int4", 32, True),
        ("int8_groups", 32, True),
    ],
)
def test_narrow_weights(precision: str, group: int, asymmetric: bool, prompt: bool) -> None:
    """With `asymmetric` down has other numbers than gate_up, as in mixed GGUF files."""
    kernels = kernels_of(ExpertsConfig(60, 4, 384, norm_topk_prob=True), "bfloat16", precision, group, asymmetric)
    check_products(kernels, "cuda", (300,) if prompt else ROWS, 1024, prompt=prompt)


@pytest.mark.parametrize("config", [ExpertsConfig(128, 8, 768, norm_topk_prob=True), CONFIGS[3]])
def test_a_row_does_not_depend_on_the_others(config: ExpertsConfig) -> None:
    check_rows_alone(kernels_of(config), "cuda", 64, 2048)


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    check_poison(kernels_of(CONFIGS[1]), "cuda")


@pytest.mark.parametrize(("count", "chosen"), [(128, 8), (8, 2)])
def test_a_prompts_row_does_not_depend_on_the_others(count: int, chosen: int) -> None:
    """PyTorch multiplies by another kernel where experts have more than 128 rows on average."""
    kernels = kernels_of(ExpertsConfig(count, chosen, 768, norm_topk_prob=True))
    x, logits, gate_up, down = operands(kernels, "cuda", 2048, 2048)
    whole = computed(kernels, (x, logits, gate_up, down), prompt=True)
    for start, stop in ((0, 1), (5, 22), (100, 433), (1024, 2048)):
        part = computed(kernels, (x[start:stop], logits[start:stop].contiguous(), gate_up, down), prompt=True)
        assert torch.equal(part, whole[start:stop])


def test_too_many_rows_are_refused() -> None:
    kernels = kernels_of(CONFIGS[3])
    with pytest.raises(KernelError, match="rows = 65: must be <= 64"):
        kernels.route(random(kernels, "cuda", 65, 60))


@pytest.mark.parametrize(("precision", "grouped"), [(NONE, True), ("int4", True), (NONE, False)])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_an_engine_has_the_logits_of_the_cpu(
    architecture: str,
    precision: str,
    grouped: bool,
    random_model: RandomModel,
    build_engine: BuildEngine,
    on_gpu: BuildEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps in graphs, at batches of several sizes, and prompts in chunks."""
    model = random_model(architecture, hidden_size=192, head_dim=32)
    monkeypatch.setattr(experts, "GROUPING", GROUPING if grouped else ())
    form = ("--dtype", "bfloat16", "--weight_only_precision", precision, "--weight_group", "32")
    flags = (*WINDOW, *(form[:4] if precision == NONE else form), "--max_batch_size", "4")
    host = Engine.load(build_engine(model, "full", *flags)).decoder
    device = Engine.load(on_gpu(model, "full", *flags)).decoder
    prompts = {slot: [(7 * token + slot) % 379 for token in range(180 - 20 * slot)] for slot in range(3)}
    steps = [[(31 * step + 17 * slot) % 379 for slot in range(3)] for step in range(12)]
    expected, found = (run_all(decoder, prompts, steps)[0] for decoder in (host, device))
    # Where two experts are nearly as likely, rounding may choose the other one: few rows differ much.
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.05
    assert (errors < 0.5).all()
