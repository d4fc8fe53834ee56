"""Matrix products of engines on the CPU against products in float64, for every number of rows that changes what multiplies."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import EngineDirectoryError, KernelError
from kvseek.core.weight_only import INT4, INT8_ASYMMETRIC, INT8_GROUPS, dequantise, quantise
from kvseek.engine.model import cpu
from kvseek.engine.model.cpu import (
    FEW_ROWS_OF_BFLOAT16,
    ONEDNN_LIMIT,
    WITHOUT_AMX,
    ByteLinear,
    GroupLinear,
    HostProducts,
    PackedLinear,
    WidenedLinear,
    multiplies_integers,
)
from kvseek.engine.model.layer import Linear, Product, Products
from kvseek.kernels.cpu.layer.layer import ByteProduct, GroupProduct

ROWS = (1, 2, FEW_ROWS_OF_BFLOAT16, FEW_ROWS_OF_BFLOAT16 + 1, 31, 32, 33, 150)
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((96, 64), (33, 112), (7, 40), (1, 16))
GROUPS = [(INT4, 32), (INT4, 64), (INT4, 128), (INT8_GROUPS, 32), (INT8_ASYMMETRIC, 16)]
FORMS = ((False, False), (True, False), (True, True))  # native, integers


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def skip_what_onednn_cannot_pack(dtype: torch.dtype, native: bool) -> None:
    if native and dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip(
            "oneDNN packs bfloat16 weights on processors with AVX-512 alone, and an engine asks it on those alone"
        )


def check(
    linear: Product, x: Tensor, weight: Tensor, bias: Tensor | None, prompt: bool = False, rounding: float = 0.0
) -> None:
    """Compare with float64: sums may be rounded as float32 is, and the result once or, with a bias, twice.

    `rounding` is by how much a number of x may be off, over the largest of its row.
    """
    found = linear(x, prompt=prompt)
    assert (found.dtype, found.shape) == (x.dtype, (x.shape[0], weight.shape[0]))
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    limit = size * weight.shape[1] * 2.0**-24 + size * torch.finfo(x.dtype).eps
    limit += rounding * x.double().abs().amax(1, keepdim=True) * weight.double().abs().sum(1)
    assert ((found.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_weights(dtype: torch.dtype, native: bool, with_bias: bool) -> None:
    skip_what_onednn_cannot_pack(dtype, native)
    for outputs, inputs in SHAPES:
        weight = random(outputs, inputs, dtype=dtype, seed=1)
        bias = random(outputs, dtype=dtype, seed=2) if with_bias else None
        linear = HostProducts(dtype, native=native).linear(weight, bias)
        assert isinstance(linear, WidenedLinear if dtype is torch.bfloat16 and not native else PackedLinear)
        for rows in ROWS:
            check(linear, random(rows, inputs, dtype=dtype), weight, bias)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("native", "integers"), FORMS)
@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_8_bits(
    library: CpuLibrary, dtype: torch.dtype, precision: str, native: bool, integers: bool, with_bias: bool
) -> None:
    skip_what_onednn_cannot_pack(dtype, native)
    for outputs, inputs in SHAPES:
        stored, scale = quantise(random(outputs, inputs, seed=1), precision)
        bias = random(outputs, dtype=dtype, seed=2) if with_bias else None
        linear = HostProducts(dtype, library, native, integers).linear(stored, bias, scale)
        kept = dtype is torch.bfloat16 and precision == "int8" and inputs % 16 == 0
        assert isinstance(linear, ByteLinear) == kept
        for rows, prompt in product(ROWS, (False, True)):
            # Steps and integers multiply before the scale rounds anything; oneDNN with the dequantised weight, which is rounded.
            exact = kept and (integers or not (prompt and native))
            weight = stored.double() * scale.double()[:, None] if exact else dequantise(stored, scale, dtype)
            rounding = 0.5 / 32767 if kept and integers and prompt else 0.0
            check(linear, random(rows, inputs, dtype=dtype), weight, bias, prompt, rounding)


@pytest.mark.parametrize(("native", "integers"), FORMS)
@pytest.mark.parametrize("precision", [None, "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompts_row_depends_on_no_other_row(
    library: CpuLibrary, dtype: torch.dtype, precision: str | None, native: bool, integers: bool
) -> None:
    """Whether the prompt is read whole, in chunks or behind a reused beginning: of one row up to more than a step ever has."""
    skip_what_onednn_cannot_pack(dtype, native)
    for outputs, inputs in ((576, 1536), (300, 2048), (33, 112)):
        weight = random(outputs, inputs, seed=1)
        bias, products = random(outputs, dtype=dtype, seed=2), HostProducts(dtype, library, native, integers)
        stored, scale = (weight.to(dtype), None) if precision is None else quantise(weight, precision)
        for linear in (products.linear(stored, bias, scale), products.head(stored, scale)):
            x = random(700, inputs, dtype=dtype)
            whole = linear(x, prompt=True)
            for rows in (*ROWS, 64, 65, 511):
                assert torch.equal(linear(x[-rows:], prompt=True), whole[-rows:]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_larger_tensor(library: CpuLibrary, dtype: torch.dtype) -> None:
    """Attention's output is a view; a view must be multiplied like its copy."""
    weight, x = random(48, 64, dtype=dtype, seed=1), random(6, 128, dtype=dtype)[:, 32:96]
    stored, scale = quantise(weight, "int8")
    products = HostProducts(dtype, library)
    for linear in (products.linear(weight), products.linear(stored, None, scale)):
        assert torch.equal(linear(x), linear(x.contiguous()))


@pytest.mark.parametrize(("native", "integers"), FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_row(
    library: CpuLibrary, dtype: torch.dtype, native: bool, integers: bool
) -> None:
    skip_what_onednn_cannot_pack(dtype, native)
    weight, products = random(32, 64, seed=1), HostProducts(dtype, library, native, integers)
    for linear in (products.linear(weight.to(dtype)), products.linear(*_with_scale(weight))):
        for rows, number, prompt in product(ROWS[1:], (float("inf"), float("nan")), (False, True)):
            x = random(rows, 64, dtype=dtype)
            clean = linear(x, prompt=prompt)
            x[1, 3] = number
            found = linear(x, prompt=prompt)
            assert not found[1].isfinite().any()
            others = [row for row in range(rows) if row != 1]
            torch.testing.assert_close(found[others], clean[others])


def _with_scale(weight: Tensor) -> tuple[Tensor, None, Tensor]:
    stored, scale = quantise(weight, "int8")
    return stored, None, scale


@pytest.mark.parametrize("with_bias", [False, True])
def test_few_rows_of_bytes_at_every_level(library: CpuLibrary, level: int, with_bias: bool) -> None:
    for outputs, inputs in ((1, 16), (7, 48), (67, 576), (300, 1536)):
        stored, scale = quantise(random(outputs, inputs, seed=1), "int8")
        bias = random(outputs, dtype=torch.bfloat16, seed=2) if with_bias else None
        linear = HostProducts(torch.bfloat16, library).linear(stored, bias, scale)
        for rows in (1, 2, 3, 4, 5, 32):
            x = random(rows, inputs, dtype=torch.bfloat16)
            check(linear, x, stored.double() * scale.double()[:, None], bias)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("precision", "group"), GROUPS)
def test_groups_at_every_level(library: CpuLibrary, level: int, precision: str, group: int, with_bias: bool) -> None:
    """Steps and prompts, of every number of rows that a tile may have left; weights are as exact as float32."""
    for outputs, inputs in ((1, group), (7, 3 * group), (67, 576 // group * group), (40, 1536)):
        stored, scale = quantise(random(outputs, inputs, seed=1), precision, group)
        weight = dequantise(stored, scale, torch.float32)
        bias = random(outputs, dtype=torch.bfloat16, seed=2) if with_bias else None
        products = HostProducts(torch.bfloat16, library, integers=True)
        linear: Product = products.linear(stored, bias, scale)
        assert isinstance(linear, GroupLinear)
        for rows in (*range(1, 10), 200):
            x = random(rows, inputs, dtype=torch.bfloat16)
            check(linear, x, weight, bias)
            check(linear, x, weight, bias, prompt=True, rounding=0.6 / 32767)
            head = products.head(stored, scale)
            check(head, x, weight, None, prompt=True)
            assert torch.equal(head(x)[:1], head(x[:1], prompt=True)), "of a prompt and of one row the same kernel"
        x[:], x[-1, 3] = 0, float("inf")
        found = linear(x, prompt=outputs == 7)
        assert not found[-1].isfinite().any()
        assert torch.equal(found[:-1], 0 * found[:-1] if bias is None else bias.expand(len(x) - 1, -1))


@pytest.mark.parametrize(("precision", "group"), GROUPS)
@pytest.mark.parametrize(("native", "integers"), FORMS)
def test_groups_of_prompts(
    library: CpuLibrary, native: bool, integers: bool, precision: str, group: int, level: int
) -> None:
    """By oneDNN, too, where there is no VNNI: with values in bfloat16 or float32; a row depends on no other and on no thread."""
    skip_what_onednn_cannot_pack(torch.bfloat16, native)
    stored, scale = quantise(random(300, 640, seed=1), precision, group)
    weight = dequantise(stored, scale, torch.float32)
    bias, x = random(300, dtype=torch.bfloat16, seed=2), random(150, 640, dtype=torch.bfloat16)
    linear = HostProducts(torch.bfloat16, library, native, integers).linear(stored, bias, scale)
    exact = integers or not native
    check(linear, x, weight if exact else weight.bfloat16(), bias, prompt=True, rounding=0.6 / 32767 * integers)
    threads = torch.get_num_threads()
    for prompt in (False, True):
        whole = linear(x, prompt=prompt)
        for rows in (1, 5, 33):
            assert torch.equal(linear(x[-rows:], prompt=prompt), whole[-rows:])
        try:
            torch.set_num_threads(3)
            assert torch.equal(linear(x, prompt=prompt), whole)
        finally:
            torch.set_num_threads(threads)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(GroupProduct(library, stored, scale, None).values(dtype), weight.to(dtype))


def test_integers_are_the_same_at_every_level(library: CpuLibrary, level: int) -> None:
    """Rows of zeros, of one large number and of tiny ones are among them."""
    stored, _, scale = _with_scale(random(67, 576, seed=1))
    x = random(13, 576, dtype=torch.bfloat16)
    x[3], x[4, 7], x[5] = 0, 3e4, x[5] * 1e-32
    linear = HostProducts(torch.bfloat16, library, integers=True).linear(stored, None, scale)
    check(linear, x, stored.double() * scale.double()[:, None], None, prompt=True, rounding=0.6 / 32767)


def test_few_rows_depend_neither_on_each_other_nor_on_threads(library: CpuLibrary) -> None:
    stored, _, scale = _with_scale(random(500, 128, seed=1))
    linear = HostProducts(torch.bfloat16, library, integers=True).linear(stored, None, scale)
    x, threads = random(7, 128, dtype=torch.bfloat16), torch.get_num_threads()
    try:
        for prompt in (False, True):
            torch.set_num_threads(1)
            alone = torch.cat([linear(row, prompt=prompt) for row in x.split(1)])
            torch.set_num_threads(3)
            assert torch.equal(linear(x, prompt=prompt), alone)
    finally:
        torch.set_num_threads(threads)


def test_a_head_of_bytes_is_never_dequantised(library: CpuLibrary) -> None:
    weight = random(300, 64, seed=1)
    stored, _, scale = _with_scale(weight)
    head = HostProducts(torch.bfloat16, library).head(stored, scale)
    assert isinstance(head, ByteLinear)
    for rows in ROWS:
        x = random(rows, 64, dtype=torch.bfloat16)
        check(head, x, stored.double() * scale.double()[:, None], None)
        assert torch.equal(head(x)[:1], head(x[:1])), "of many rows and of one the same kernel"
    assert isinstance(HostProducts(torch.bfloat16, library).head(weight.bfloat16()), (PackedLinear, WidenedLinear))


@pytest.mark.parametrize(
    ("vnni", "amx", "limit", "expected"),
    [
        (True, False, None, True),
        (True, True, None, False),
        (True, True, WITHOUT_AMX, True),
        (False, False, None, False),
    ],
)
def test_instructions_choose_what_multiplies_prompts(
    monkeypatch: pytest.MonkeyPatch, vnni: bool, amx: bool, limit: str | None, expected: bool
) -> None:
    """AMX that is advertised and faults has been excluded by a limit of oneDNN's instructions."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(cpu, "bfloat16_works", lambda: True)
    monkeypatch.delenv(ONEDNN_LIMIT, raising=False)
    if limit is not None:
        monkeypatch.setenv(ONEDNN_LIMIT, limit)
    assert multiplies_integers() is expected


def test_the_log_says_what_multiplies_prompts(library: CpuLibrary) -> None:
    def words(dtype: torch.dtype, *settings: bool) -> str:
        return HostProducts(dtype, library, *settings).prompts

    assert words(torch.float32, True, True) == "oneDNN in float32"
    assert words(torch.bfloat16, False, False) == "oneDNN in float32"
    assert words(torch.bfloat16, True, True) == "oneDNN in bfloat16, with weights of 8 or 4 bits integers by VNNI"


@pytest.mark.parametrize("precision", ["int8", INT4, INT8_GROUPS, INT8_ASYMMETRIC])
def test_without_a_library_the_weight_is_dequantised(precision: str) -> None:
    stored, scale = quantise(random(48, 64, seed=1), precision)
    linear, x = HostProducts(torch.bfloat16).linear(stored, None, scale), random(3, 64, dtype=torch.bfloat16)
    check(linear, x, dequantise(stored, scale, torch.bfloat16), None)


def test_what_the_kernel_cannot_read_is_refused(library: CpuLibrary) -> None:
    weight, scale = torch.ones(4, 32, dtype=torch.int8), torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match="must be int8 with a multiple of 16 inputs"):
        ByteProduct(library, weight[:, :24].contiguous(), scale, None)
    with pytest.raises(KernelError, match=r"bias: torch\.float32: must be bfloat16"):
        ByteProduct(library, weight, scale, scale.float())
    for wrong, shape in (((4, 1), "4, 1"), ((4, 2), "4, 1"), ((4, 1, 2), "4, 2, 2")):
        one = torch.ones(wrong, dtype=torch.float32 if wrong == (4, 1) else torch.float16)
        with pytest.raises(
            KernelError, match=rf"scale: .*: must be torch\.float16 \({shape}\), contiguous; quantise it"
        ):
            GroupProduct(library, weight, one, None)
    with pytest.raises(KernelError, match=r"x: torch\.float32 \(1, 32\): must be bfloat16 \[rows, 32\]"):
        ByteProduct(library, weight, scale, None)(torch.ones(1, 32))


def test_scales_of_an_older_engine_are_refused() -> None:
    stored, scale = quantise(random(32, 64), "int8")
    with pytest.raises(EngineDirectoryError, match="older kvseek: build the engine again"):
        HostProducts(torch.bfloat16).linear(stored, None, scale * (1 + 2.0**-10))


def test_without_onednn_products_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseek.engine.model.cpu._has_onednn", lambda: False)
    weight, x = random(32, 64, seed=1), random(3, 64)
    linear = HostProducts(torch.float32).linear(weight)
    assert type(linear) is Linear
    assert torch.equal(linear(x), Products(torch.float32).linear(weight)(x))


def test_prompts_of_many_lengths_take_no_memory() -> None:
    """In a process of its own: without the limit, what is kept for these 300 numbers of rows takes some 100 MB."""
    program = (
        "import ctypes, torch\n"
        "from kvseek.engine.model.cpu import PackedLinear, KEPT_PRODUCTS\n"
        "def private():\n"
        "    ctypes.CDLL(None).malloc_trim(0)\n"
        "    return int(next(line for line in open('/proc/self/status') if line.startswith('RssAnon')).split()[1]) << 10\n"
        "linear, x = PackedLinear(torch.randn(1536, 576)), torch.randn(300, 576)\n"
        "for rows in range(140, 140 - 2 * KEPT_PRODUCTS, -1): linear(x[:rows])\n"
        "before = private()\n"
        "for rows in range(1, 301): linear(x[:rows])\n"
        "print(private() - before)\n"
    )
    unset = {"LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    assert int(done.stdout) <= 16 << 20
