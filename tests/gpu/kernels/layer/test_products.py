"""Products of few rows on the GPU, with weights of 16, 8 and 4 bits: kernels against float64, graphs, errors, whole engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.builder.checkpoints.test_gguf_blocks import (
    WIDE,
    Types,
    all_of_8_bits,
    built,
    logits_of,
    one_left_out,
    q4_k_m,
    q4_k_m_of_odd_columns,
    q5_k_m,
    write,
)
from tests.conftest import BuildEngine
from tests.engine.model.test_weight_only import form_flags
from tests.gpu.engine.test_engine import SLOTS, TOKENS, WINDOW, kernel_model
from tests.support.checkpoint_files import save_dequantised
from tests.support.prefill import run_all
from tests.support.random_models import ARCHITECTURES, save_random_model
from torch import Tensor

from kvseek.bench.methods import load_kernels
from kvseek.builder import build
from kvseek.builder.calibration import Calibration
from kvseek.builder.compile.cuda import Specialisation
from kvseek.core.config import FP8_GROUPS, WEIGHT_GROUP, group_inputs
from kvseek.core.errors import KernelError
from kvseek.core.weight_only import (
    INT4,
    INT8_ASYMMETRIC,
    INT8_GROUPS,
    NONE,
    PRECISIONS,
    dequantise,
    layout,
    quantise,
    unpack,
)
from kvseek.engine.engine import Engine
from kvseek.engine.model.cuda.products import KernelHead, KernelLinear, KernelProducts
from kvseek.kernels.cuda.layer.products import ALIGNMENT, MOST_ROWS, SHAPES, Format, ProductKernels, choose_shape

pytestmark = pytest.mark.gpu

MakeProducts = Callable[[str, str], ProductKernels]
DTYPES = ("bfloat16", "float16")
GROUPS = ("int4-32", "int4-64", "int4-128", INT8_GROUPS, INT8_ASYMMETRIC, FP8_GROUPS)
WEIGHTS = (NONE, *PRECISIONS, *GROUPS)  # int4 by its groups' inputs
# weight_only_precision, int4 by its groups' inputs, and quantize_lm_head
FORMS = [("int8", False), ("int8", True), ("fp8", False), ("int4-32", True), ("int4-128", False), (FP8_GROUPS, False)]
ROWS = (1, 2, 3, 8, 9, 16, 17, 32, 33, 64)
INPUTS = (48, 576, 4096, 14336)
OUTPUTS = (33, 100)
SUM_ERROR = 2.0**-20  # of float32 sums, relative to the sum of magnitudes
OFFSET = 64  # of numbers of 4 bits while they are multiplied (kernels/cuda/layer/weight_formats.cuh)
# Of logits, in norm: weights that are dequantised first are rounded to 16 bits. Measured on an H200: at most 0.023 and 0.0037.
ENGINE_ERROR = {"bfloat16": 4e-2, "float16": 6e-3}


@pytest.fixture(scope="module")
def products() -> MakeProducts:
    """Compile the kernels of a precision and dtype for this GPU, once, and load them."""

    @cache
    def make(precision: str, dtype: str) -> ProductKernels:
        own, group = parts(precision)
        # Weights of int8_asymmetric may lie beside those of int4, of which heads may be of int8_groups.
        beside = own == INT8_ASYMMETRIC
        engine = INT4 if own == INT8_GROUPS or beside else own
        unit = Specialisation(dtype, 64, 4, "full", (), engine, group, beside)
        return ProductKernels(load_kernels(unit), engine, getattr(torch, dtype), group, asymmetric=beside)

    return make


def parts(precision: str) -> tuple[str, int]:
    """Precision and weight_group of one of WEIGHTS."""
    own, _, group = precision.partition("-")
    return own, int(group or WEIGHT_GROUP)


def kernel_of(precision: str) -> str:
    return Format.of(*parts(precision), torch.bfloat16).kernel


def whole_groups(precision: str, inputs: int) -> int:
    """So many inputs, or as many as are whole groups."""
    group = group_inputs(*parts(precision)) * (2 if precision == INT8_GROUPS else 1)
    return -(-inputs // group) * group


class Case:
    """Random operands on the GPU; behind x and the scales lies NaN, which would show in a result."""

    def __init__(self, precision: str, dtype: str, device: torch.device, outputs: int, inputs: int) -> None:
        generator = torch.Generator(device).manual_seed(outputs * inputs)
        self.dtype, nan, inputs = getattr(torch, dtype), float("nan"), whole_groups(precision, inputs)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        weight = random(outputs, inputs) * inputs**-0.5
        self.weight, self.scale = weight.to(self.dtype), None
        if precision != NONE:
            self.weight, scale = quantise(weight, *parts(precision))
            poison = torch.full((64, *scale.shape[1:]), nan, device=device, dtype=scale.dtype)
            self.scale = torch.cat((scale, poison))[:outputs]
        self.bias = random(outputs).to(self.dtype)
        poison = torch.full((64, inputs), nan, device=device, dtype=self.dtype)
        self._x = torch.cat((random(MOST_ROWS, inputs).to(self.dtype), poison))

    def x(self, rows: int) -> Tensor:
        """The last so many rows before the poison, as a tensor of their own."""
        return self._x[MOST_ROWS - rows : MOST_ROWS]

    def check(self, found: Tensor, rows: int, bias: Tensor | None) -> None:
        """Within the rounding of one 16-bit result, and what float32 sums lose."""
        x, weight, most = self.x(rows).double(), self.weight.double() if self.scale is None else None, None
        if self.scale is not None:
            weight = dequantise(self.weight, self.scale, torch.float64)
            if self.scale.ndim == 3:  # the terms of a weight are larger than itself
                factor, zero = (
                    self.scale.double().repeat_interleave(weight.shape[1] // self.scale.shape[1], 1).unbind(-1)
                )
                packed = self.weight.dtype is torch.uint8
                most = (unpack(self.weight) + OFFSET if packed else self.weight.double().abs()) * factor + zero.abs()
        assert weight is not None
        expected = x @ weight.T + (0 if bias is None else bias.double())
        size = x.abs() @ (weight.abs() if most is None else most).T + (0 if bias is None else bias.double().abs())
        info = torch.finfo(self.dtype)
        bound = expected.abs() * info.eps / 2 + size * SUM_ERROR + info.tiny * info.eps
        assert found.dtype is self.dtype
        assert found.shape == expected.shape
        assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", WEIGHTS)
def test_linear(precision: str, dtype: str, inputs: int, products: MakeProducts, device: torch.device) -> None:
    kernels = products(precision, dtype)
    for outputs in OUTPUTS:
        case = Case(precision, dtype, device, outputs, inputs)
        for rows in ROWS:
            for bias in (None, case.bias):
                case.check(kernels.linear(case.x(rows), case.weight, case.scale, bias), rows, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", WEIGHTS)
def test_gated_products_are_products_and_activations(
    precision: str, dtype: str, products: MakeProducts, device: torch.device
) -> None:
    kernels = products(precision, dtype)
    for intermediate in (17, 1536, 14336):
        case = Case(precision, dtype, device, 2 * intermediate, 576)
        for rows in ROWS:
            for bias in (None, case.bias):
                found = kernels.linear(case.x(rows), case.weight, case.scale, bias, gated=True)
                gate, up = kernels.linear(case.x(rows), case.weight, case.scale, bias).float().chunk(2, dim=1)
                expected = F.silu(gate) * up
                error = torch.finfo(case.dtype).eps
                torch.testing.assert_close(found.float(), expected, rtol=error, atol=torch.finfo(case.dtype).tiny)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", WEIGHTS)
def test_linear_of_every_shape(precision: str, dtype: str, products: MakeProducts, device: torch.device) -> None:
    """Few output channels choose only the shapes of small matrices: each shape has the fewest that it is for, and some."""
    multiprocessors, tried = torch.cuda.get_device_properties(device).multi_processor_count, set()
    kernel = kernel_of(precision)
    for fewest, shapes in SHAPES[kernel]:
        case = Case(precision, dtype, device, fewest * multiprocessors + 7, 576)
        for rows in (*(shape.rows for shape in shapes), 5):
            tried.add(choose_shape(kernel, rows, case.weight.shape[0] / multiprocessors))
            found = products(precision, dtype).linear(case.x(rows), case.weight, case.scale, case.bias)
            case.check(found, rows, case.bias)
    assert tried == {shape for _, shapes in SHAPES[kernel] for shape in shapes}


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up


@pytest.mark.parametrize("inputs", [48, 4112])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", WEIGHTS)
def test_a_steps_row_depends_on_no_other_row(
    precision: str, dtype: str, inputs: int, products: MakeProducts, device: torch.device
) -> None:
    """Nor on how many there are: matrices of each way to divide a sum, with bias or not, gated or not, and heads."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    made = KernelProducts(products(precision, dtype), 64, 64)
    for fewest, _ in SHAPES[kernel_of(precision)]:
        case = Case(precision, dtype, device, fewest * multiprocessors + 34, inputs)
        of_step: list[Callable[[Tensor], Tensor]] = [made.head(case.weight, case.scale)]
        linear = [made.linear(case.weight, bias, case.scale) for bias in (None, case.bias)]
        of_step += [*linear, *(partial(product.gated, silu_mul=silu_mul) for product in linear)]
        x = case.x(MOST_ROWS)
        for product in of_step:
            alone = torch.cat([product(row) for row in x.split(1)])
            for rows in (*ROWS, 12, 24, 48, 63):
                for first in (0, MOST_ROWS - rows):
                    assert torch.equal(product(x[first : first + rows]), alone[first : first + rows]), (fewest, rows)


@pytest.mark.parametrize("precision", [*PRECISIONS, INT8_GROUPS, INT8_ASYMMETRIC, FP8_GROUPS])
def test_a_head_multiplies_any_number_of_rows(precision: str, products: MakeProducts, device: torch.device) -> None:
    """In groups beyond what a kernel has room for, of an odd vocabulary, without a matrix of 16 bits beside it."""
    kernels, outputs, inputs = products(precision, "bfloat16"), 50_001, 512
    case = Case(precision, "bfloat16", device, outputs, inputs)
    head = KernelHead(kernels, case.weight, case.scale)
    x = torch.cat([case.x(MOST_ROWS)] * 3)
    for rows in (1, MOST_ROWS, MOST_ROWS + 1, 3 * MOST_ROWS):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        found = head(x[:rows])
        taken = torch.cuda.max_memory_allocated(device) - before
        assert taken <= found.nbytes + (1 << 20), "the logits alone"
        for start in range(0, rows, MOST_ROWS):
            group = found[start : start + MOST_ROWS]
            assert torch.equal(group, kernels.linear(x[: len(group)], case.weight, case.scale, None))
    case.check(found[-MOST_ROWS:], MOST_ROWS, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", WEIGHTS)
def test_a_prompts_row_depends_on_no_other_row(
    precision: str, dtype: str, products: MakeProducts, device: torch.device
) -> None:
    """The narrow matrices are those whose sums cuBLAS cuts into parts, if it multiplies few rows."""
    kernels = products(precision, dtype)
    for outputs, inputs in ((4096, 14336), (1024, 3072), (256, 8192), (6144, 1024)):
        case = Case(precision, dtype, device, outputs, inputs)
        made = KernelProducts(kernels, 2048, MOST_ROWS)
        x = torch.randn(2048, inputs, dtype=case.dtype, device=device)
        of_prompt = [made.head(case.weight, case.scale), made.linear(case.weight, case.bias, case.scale)]
        if (precision, dtype) == ("fp8", "bfloat16"):
            rounded = KernelProducts(kernels, 2048, MOST_ROWS, fp8_prompts=True)
            of_prompt += [rounded.linear(case.weight, bias, case.scale) for bias in (None, case.bias)]
        for product in of_prompt:
            whole = product(x, prompt=True)
            for rows in (*ROWS, 100, 129, 300, 400, 511, 700, 1100, 2047):
                assert torch.equal(product(x[-rows:], prompt=True), whole[-rows:]), (outputs, inputs, rows)


def check_rounded_rows(kernels: ProductKernels, inputs: int, device: torch.device) -> None:
    """The nearest numbers of e4m3, of rows of very different sizes and one of zeros."""
    sizes = torch.logspace(-4, 3, 7, device=device)[:, None]
    x = torch.randn(7, inputs, device=device).mul(sizes).to(kernels.dtype)
    x[3] = 0
    numbers, scales = kernels.quantise_rows(x)
    most = x.float().abs().amax(dim=1)
    # 448 / most would be 448 times a rounded reciprocal.
    factors = torch.where(most > 0, torch.full_like(most, 448) / most, 1.0)
    torch.testing.assert_close(scales, 1 / factors, rtol=1e-6, atol=0)
    expected = (x.float() * factors[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [16, 4096, 14336])
def test_rows_of_prompts_are_rounded_to_fp8(
    inputs: int, dtype: str, products: MakeProducts, device: torch.device
) -> None:
    check_rounded_rows(products("fp8", dtype), inputs, device)


@pytest.mark.parametrize("rows", [1, 100, 2048])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (48, 576)])
def test_fp8_prompts_are_the_products_of_what_was_rounded(
    outputs: int, inputs: int, rows: int, products: MakeProducts, device: torch.device
) -> None:
    kernels, case = products("fp8", "bfloat16"), Case("fp8", "bfloat16", device, outputs, inputs)
    made = KernelProducts(kernels, 2048, MOST_ROWS, fp8_prompts=True)
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
    assert case.scale is not None
    numbers, scales = kernels.quantise_rows(x)
    whole = (numbers.double() * scales.double()[:, None]) @ dequantise(case.weight, case.scale, torch.float64).T
    for bias in (None, case.bias):
        found = made.linear(case.weight, bias, case.scale)(x, prompt=True)
        expected = whole if bias is None else whole + bias.double()
        assert (found - expected).norm() <= 3e-3 * expected.norm(), (
            "half a unit of bfloat16, and sums of the tensor cores"
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_engines_read_prompts_in_fp8(architecture: str, tmp_path: Path, on_gpu: BuildEngine) -> None:
    model = save_random_model(tmp_path / "model", architecture, **sizes_of_model(architecture, "fp8"))
    flags = ("--dtype", "bfloat16", *flags_of("fp8", False))
    whole, rounded = (
        run_all(Engine.load(on_gpu(model, "full", *flags, *more)).decoder, SLOTS, TOKENS)[0]
        for more in ((), ("--prefill_precision", "fp8"))
    )
    errors = (rounded - whole).norm(dim=1) / whole.norm(dim=1)
    assert 1e-3 < errors.max() < 0.15, "three bits of fraction"


def every_code(precision: str, inputs: int) -> Tensor:
    """Rows [3, inputs] with all numbers of a format."""
    codes = torch.arange(3 * inputs).remainder(256).to(torch.uint8).view(PRECISIONS[precision][0]).view(3, inputs)
    return torch.where(codes.float().isnan(), torch.zeros_like(codes, dtype=torch.float32), codes.float()).to(
        codes.dtype
    )


@pytest.mark.parametrize("inputs", [16, *INPUTS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_dequantise_is_the_reference(
    precision: str, dtype: str, inputs: int, products: MakeProducts, device: torch.device
) -> None:
    drawn = torch.randn(70, inputs, generator=torch.Generator().manual_seed(inputs))
    weight, scale = quantise(drawn, precision)
    weight = torch.cat((every_code(precision, inputs).view(torch.uint8), weight.view(torch.uint8))).view(weight.dtype)
    scale = torch.cat((torch.tensor([1.0, 0.3, 7e-6]), scale))
    found = products(precision, dtype).dequantise(weight.to(device), scale.to(device)).cpu()
    expected = dequantise(weight, scale, getattr(torch, dtype))
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), "bit for bit"


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", GROUPS)
def test_dequantise_of_groups_is_the_reference(
    precision: str, dtype: str, inputs: int, products: MakeProducts, device: torch.device
) -> None:
    """All bits that weights may have, and scales of several magnitudes."""
    own, group = parts(precision)
    (shape, kind), (scales, scale_kind) = layout((70, whole_groups(precision, inputs)), own, group)
    bits = torch.arange(torch.Size(shape).numel()).remainder(256).to(torch.uint8).view(shape)
    weight = bits.view(kind)
    weight = torch.where(weight.float().isnan(), 0.0, weight.float()).to(kind) if own == FP8_GROUPS else weight
    scale = torch.randn(scales, generator=torch.Generator().manual_seed(inputs)).mul(0.3).to(scale_kind)
    found = products(precision, dtype).dequantise(weight.to(device), scale.to(device)).cpu()
    expected = dequantise(weight, scale, getattr(torch, dtype))
    assert torch.equal(found, expected)


def test_products_follow_each_other(products: MakeProducts, device: torch.device) -> None:
    """A product may start before the one whose result it reads has ended, and must wait for it all the same."""
    kernels, case = products("int8", "bfloat16"), Case("int8", "bfloat16", device, 576, 576)
    results = []
    for wait in (True, False):
        x = case.x(3)
        for _ in range(200):
            x = kernels.linear(x, case.weight, case.scale, case.bias) * 0.5
            if wait:
                torch.cuda.synchronize()
        results.append(x)
    assert torch.equal(*results)


@pytest.mark.parametrize("precision", [*PRECISIONS, "int4-32", INT8_ASYMMETRIC, FP8_GROUPS])
def test_under_a_graph(precision: str, products: MakeProducts, device: torch.device) -> None:
    kernels, case = products(precision, "float16"), Case(precision, "float16", device, 100, 4096)
    inputs = {rows: torch.zeros_like(case.x(rows)) for rows in ROWS}
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = {rows: kernels.linear(x, case.weight, case.scale, case.bias) for rows, x in inputs.items()}
        whole = kernels.dequantise(case.weight, case.scale)
    for rows, x in inputs.items():
        x.copy_(case.x(rows))
    graph.replay()
    for rows, found in results.items():
        assert torch.equal(found, kernels.linear(case.x(rows), case.weight, case.scale, case.bias))
        case.check(found, rows, case.bias)
    assert torch.equal(whole, kernels.dequantise(case.weight, case.scale))


def test_operands_that_kernels_do_not_read(products: MakeProducts, device: torch.device) -> None:
    kernels, case = products("int8", "bfloat16"), Case("int8", "bfloat16", device, 100, 48)
    x, weight, scale = case.x(2), case.weight, case.scale
    for name, operands in {
        "x": (x.half(), weight, scale, None),
        "weight": (x, weight.T.contiguous().T, scale, None),
        "scale": (x, weight, scale.bfloat16(), None),
        "bias": (x, weight, scale, case.bias.float()),
    }.items():
        with pytest.raises(KernelError, match=rf"^{name}: torch\.\w+ on cuda.*must be contiguous torch\.\w+ on"):
            kernels.linear(*operands)
    with pytest.raises(
        KernelError, match=r"^weight: torch\.float8_e4m3fn: must be torch\.bfloat16 or torch\.int8; compile"
    ):
        kernels.linear(x, weight.to(torch.float8_e4m3fn), scale, None)
    with pytest.raises(KernelError, match=r"^x: torch\.bfloat16 on cuda.*strides \(96, 2\)"):
        kernels.linear(torch.zeros(2, 96, dtype=torch.bfloat16, device=device)[:, ::2], weight, scale, None)
    odd = torch.zeros(2 * 48 + 4, dtype=torch.bfloat16, device=device)[4:].view(2, 48)
    with pytest.raises(KernelError, match=rf"^x: address 0x\w+: must be a multiple of {ALIGNMENT}; copy the tensor"):
        kernels.linear(odd, weight, scale, None)
    with pytest.raises(KernelError, match=r"^x: torch\.bfloat16 on cpu"):
        kernels.linear(x.cpu(), weight, scale, None)
    with pytest.raises(KernelError, match=rf"rows = {MOST_ROWS + 1}: must be <= {MOST_ROWS}"):
        kernels.linear(torch.zeros(MOST_ROWS + 1, 48, dtype=torch.bfloat16, device=device), weight, scale, None)
    for out, message in (
        (torch.zeros(2, 99), r"^out \(2, 99\): must be \(2, 100\)"),
        (torch.zeros(2, 100), "^out: torch"),
    ):
        with pytest.raises(KernelError, match=message):
            kernels.linear(x, weight, scale, None, out=out.to(device))
    for inputs in (40, 64):
        narrow = torch.zeros(2, inputs, dtype=torch.bfloat16, device=device)
        other = torch.zeros(100, 40, dtype=torch.int8, device=device) if inputs == 40 else weight
        with pytest.raises(KernelError, match=f"for x of {inputs} channels: must have as many, a multiple of 16"):
            kernels.linear(narrow, other, scale, None)
    with pytest.raises(KernelError, match="a multiple of 16"):
        kernels.dequantise(torch.zeros(100, 40, dtype=torch.int8, device=device), scale)


def sizes_of_model(architecture: str, precision: str) -> dict[str, int]:
    """Sizes of a random model that kernels read; with groups all matrices have whole ones."""
    sizes = {"hidden_size": 384} if architecture == "qwen2" else {"head_dim": 64}
    grouped = {"hidden_size": 384, "intermediate_size": 640}
    return sizes | (grouped if precision in GROUPS else {})


def flags_of(precision: str, quantize_head: bool) -> tuple[str, ...]:
    own, group = parts(precision)
    return (*form_flags(own, quantize_head), *(("--weight_group", str(group)) if own == INT4 else ()))


@pytest.fixture(scope="module")
def on_gpu(on_gpu: BuildEngine) -> BuildEngine:
    """Build an engine for this GPU whose prompts come in chunks of more rows than kernels multiply, and of fewer."""
    limits = ("--max_batch_size", "3", "--max_seq_len", "1000", "--prefill_chunk_tokens", "100")

    def make(model: Path, method: str, *flags: str) -> Path:
        return on_gpu(model, method, *WINDOW, *limits, *flags)

    return make


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("precision", "quantize_head"), FORMS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_engines_compute_with_dequantised_weights(
    architecture: str, precision: str, quantize_head: bool, dtype: str, tmp_path: Path, on_gpu: BuildEngine
) -> None:
    model = save_random_model(tmp_path / "model", architecture, **sizes_of_model(architecture, precision))
    number, (own, group) = getattr(torch, dtype), parts(precision)
    other = save_dequantised(model, tmp_path / "other", own, number, weight_group=group, quantize_lm_head=quantize_head)
    engine = Engine.load(on_gpu(model, "full", "--dtype", dtype, *flags_of(precision, quantize_head)))
    decoder = engine.decoder
    for layer in kernel_model(decoder).layers:
        for product in (layer.qkv, layer.o, layer.gate_up, layer.down):
            assert isinstance(product, KernelLinear)
            assert product.weight.dtype is layout((1, 128), own, group)[0][1], "8 or 4 bits a weight on the GPU, too"
    head, embedding = kernel_model(decoder).head.project, kernel_model(decoder).embed.weight
    assert isinstance(head, KernelHead if quantize_head else KernelLinear)
    assert head.weight.dtype is (torch.int8 if quantize_head else number)
    assert embedding.dtype is number
    found, attended = run_all(decoder, SLOTS, TOKENS)
    judge = Engine.load(on_gpu(other, "full", "--dtype", dtype)).decoder
    expected, expected_attended = run_all(judge, SLOTS, TOKENS)
    assert attended == expected_attended
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() <= ENGINE_ERROR[dtype]


@pytest.mark.parametrize(("precision", "quantize_head"), FORMS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_logits_of_a_whole_prompt_are_those_of_its_steps(
    architecture: str, precision: str, quantize_head: bool, tmp_path: Path, on_gpu: BuildEngine
) -> None:
    """Scores of a prompt of 90 tokens multiply the head with 90 rows at once; a tied head, and one of its own."""
    model = save_random_model(tmp_path / "model", architecture, **sizes_of_model(architecture, precision))
    kept, (own, group) = flags_of(precision, quantize_head), parts(precision)
    other = save_dequantised(
        model, tmp_path / "other", own, torch.bfloat16, weight_group=group, quantize_lm_head=quantize_head
    )
    ids, rows = torch.arange(90).mul(7).remainder(300).tolist(), []
    for checkpoint, flags in ((model, kept), (other, ())):
        decoder, found = Engine.load(on_gpu(checkpoint, "full", "--dtype", "bfloat16", *flags)).decoder, list[Tensor]()
        decoder.cache.open(0, len(ids) + 4)
        prefill = decoder.prefill([(0, ids)], {0: lambda _, logits, found=found: found.append(logits.cpu())})
        while prefill.progress < 1:
            prefill.advance(64)
        found.append(prefill.finish())
        torch.testing.assert_close(found[-1], found[0][-1:], rtol=2e-2, atol=2e-2)  # few rows and many
        found.append(decoder.decode([5], [0])[0].cpu())
        rows.append(torch.cat(found))
    errors = (rows[0] - rows[1]).norm(dim=1) / rows[1].norm(dim=1)
    assert errors.max() <= ENGINE_ERROR["bfloat16"]
    certain = rows[1].topk(2, dim=1).values.diff(dim=1).abs()[:, 0] > 2 * (rows[0] - rows[1]).abs().amax(dim=1)
    assert certain.any()
    assert torch.equal(rows[0].argmax(dim=1)[certain], rows[1].argmax(dim=1)[certain]), "greedy tokens"


@pytest.mark.parametrize("types", [q4_k_m, q4_k_m_of_odd_columns, q5_k_m, all_of_8_bits, one_left_out])
def test_engines_of_gguf_files_compute_with_the_files_numbers(types: Types, tmp_path: Path) -> None:
    """Prompts and steps against float32 on the CPU, whose weights are the file's dequantised ones."""
    model = write(tmp_path, types, head_dim=64, **WIDE)
    found = built(model, tmp_path / "own", "--device", "cuda", "--dtype", "bfloat16")
    assert found.weight_only_precision != NONE
    built(model, tmp_path / "exact")
    expected, logits = (logits_of(tmp_path / name) for name in ("exact", "own"))
    assert (logits.cpu() - expected).norm() <= ENGINE_ERROR["bfloat16"] * expected.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_calibration_agrees_with_the_cpu(
    dtype: str, tmp_path: Path, document: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_random_model(tmp_path / "model", "qwen3", head_dim=64)
    (tmp_path / "text.txt").write_text(document[:3000], encoding="utf-8")
    found = []
    for device in ("cuda", "cpu"):
        flags = ["--model", str(model), "--method", "full", "--kernels", "reference", "--dtype", dtype, "--quiet"]
        flags += ["--weight_only_precision", "int8", "--calibrate", str(tmp_path / "text.txt")]
        flags += ["--calibrate_tokens", "500", "--calibrate_window", "200", "--output_dir", str(tmp_path / device)]
        with monkeypatch.context() as patch:
            if device == "cpu":
                patch.setattr(torch.cuda, "is_available", lambda: False)
            assert build.main(flags) == 0
        found.append(Calibration.load(tmp_path / device))
    gpu, cpu = found
    assert (gpu.device, cpu.device) == ("cuda", "cpu")
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    assert gpu.perplexity == pytest.approx(cpu.perplexity, rel=tolerance)
    assert gpu.quantised is not None
    assert cpu.quantised is not None
    assert gpu.quantised.perplexity == pytest.approx(cpu.quantised.perplexity, rel=tolerance)
    if dtype == "float32":  # with 16 bits, other roundings of the activations cost about as much as int8 does
        assert gpu.quantised.mean_kl_divergence == pytest.approx(cpu.quantised.mean_kl_divergence, rel=0.02)
