"""Weight-only quantisation without a GPU: formats, what the builder writes, what the CPU computes, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.builder.test_capacity import planner
from tests.conftest import BuildEngine, RandomModel
from tests.engine.model.test_logits import load_transformers
from tests.support.checkpoint_files import save_dequantised
from tests.support.prefill import run_prefill
from tests.support.random_models import save_random_model
from torch import Tensor

from kvseek.builder import build
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, total_size, weight_reader, write_weights
from kvseek.core.config import FP8_GROUPS, WEIGHT_GROUPS, read_config
from kvseek.core.errors import ConfigError
from kvseek.core.weight_only import (
    HEAD,
    INPUTS_MULTIPLE,
    INT4,
    INT8_GROUPS,
    NONE,
    PRECISIONS,
    dequantise,
    is_quantised,
    layout,
    pack,
    quantise,
    unpack,
)
from kvseek.engine.engine import Engine
from kvseek.engine.model.cpu import ByteLinear, TorchModel
from kvseek.engine.model.weights import list_weights, load_weights

CPU = torch.device("cpu")
FORMS = [("int8", False), ("int8", True), ("fp8", False)]  # weight_only_precision and quantize_lm_head
STORED = {"int8": (torch.int8, "I8"), "fp8": (torch.float8_e4m3fn, "F8_E4M3")}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALLEST_FP8 = 2.0**-9  # smallest subnormal of float8_e4m3fn
SMALLEST_NORMAL_FP8 = 2.0**-6


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Random weights whose rows differ in magnitude by many powers of two, some of zeros, some with outliers."""
    rows, inputs = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    exponents = torch.tensor(draw(st.lists(st.integers(-40, 60), min_size=rows, max_size=rows)))
    weight = torch.randn(rows, inputs, generator=generator) * 2.0 ** exponents[:, None]
    weight *= torch.tensor(draw(st.lists(st.sampled_from([0.0, 1.0, 1.0]), min_size=rows, max_size=rows)))[:, None]
    weight[:, 0] *= draw(st.sampled_from([0.0, 1.0, 1000.0]))
    return weight.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


@given(matrices())
@settings(deadline=None)
def test_int8_is_within_half_a_step(weight: Tensor) -> None:
    stored, scale = quantise(weight, "int8")
    assert (stored.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert stored.shape == weight.shape
    assert stored.min() >= -127
    error = (dequantise(stored, scale, torch.float64) - weight.double()).abs()
    # A division and a product in float32 may move what lies in the middle between two steps to the other side.
    assert (error <= scale.double()[:, None] * (0.5 + 127 * 2.0**-22)).all()


@given(matrices())
@settings(deadline=None)
def test_fp8_is_within_half_a_unit_in_the_last_place(weight: Tensor) -> None:
    stored, scale = quantise(weight, "fp8")
    assert (stored.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert stored.float().isfinite().all(), "nothing is rounded up to NaN"
    error = (dequantise(stored, scale, torch.float64) - weight.double()).abs()
    size, step = weight.double().abs(), scale.double()[:, None]
    # Three bits of fraction: 2^-4 of a normal number, and half of the smallest subnormal one below them.
    assert (error <= torch.maximum(size * 2.0**-4, step * SMALLEST_FP8 / 2) * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@given(weight=matrices())
@settings(deadline=None, max_examples=50)
def test_a_row_has_the_range_of_the_format(precision: str, weight: Tensor) -> None:
    stored, scale = quantise(weight, precision)
    largest, zero = PRECISIONS[precision][1], (weight == 0).all(dim=1)
    assert torch.equal(stored.float().abs().amax(dim=1), torch.where(zero, 0.0, largest))
    assert (scale[zero] == 1).all()
    assert (dequantise(stored, scale, torch.float32)[zero] == 0).all()
    again = quantise(dequantise(stored, scale, torch.float32), precision)
    assert torch.equal(again[0].float(), stored.float()), "what was rounded once stays"
    torch.testing.assert_close(again[1], scale, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize(("precision", "numbers"), [(INT4, 15), (INT8_GROUPS, 254)])
@given(weight=matrices(), group=st.sampled_from(WEIGHT_GROUPS))
@settings(deadline=None, max_examples=50)
def test_groups_are_within_half_a_step(precision: str, numbers: int, weight: Tensor, group: int) -> None:
    """And a factor's and a zero's rounding to float16."""
    weight = weight.float().repeat(1, 256)[:, :256].clamp(-60_000, 60_000)
    stored, scale = quantise(weight, precision, group)
    groups = weight.double().view(len(weight), -1, group if precision == INT4 else 32)
    largest = groups.abs().amax(dim=2)
    span = groups.amax(dim=2) - groups.amin(dim=2) if precision == INT4 else 2 * largest
    error = (dequantise(stored, scale, torch.float32).double().view_as(groups) - groups).abs().amax(dim=2)
    assert (error <= span / numbers / 2 + largest * 2.0**-9 + numbers * 2.0**-24).all()
    assert ((stored.shape, stored.dtype), (scale.shape, scale.dtype)) == layout(tuple(weight.shape), precision, group)


@given(weight=matrices(), group=st.sampled_from(WEIGHT_GROUPS))
@settings(deadline=None, max_examples=50)
def test_searched_scales_have_no_larger_errors(weight: Tensor, group: int) -> None:
    """Nor if the errors of some inputs count more."""
    importance = torch.rand(256, generator=torch.Generator().manual_seed(group)) ** 4 + 1e-3
    weight = weight.float().repeat(1, 256)[:, :256].clamp(-60_000, 60_000)

    def errors(scales: tuple[Tensor, Tensor], counted: Tensor) -> Tensor:
        squares = (dequantise(*scales, torch.float32) - weight).square() * counted
        return squares.view(len(weight), -1, group).sum(2)

    for counted in (torch.ones(1), importance):
        plain, found = quantise(weight, INT4, group), quantise(weight, INT4, group, counted)
        assert (errors(found, counted) <= errors(plain, counted) * (1 + 1e-5)).all()
        assert found[1].isfinite().all()


def test_a_search_makes_errors_of_normal_weights_smaller() -> None:
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    for group, share in ((32, 0.95), (128, 0.95)):
        error, less = (
            (dequantise(*quantise(weight, INT4, group, importance), torch.float32) - weight).norm()
            for importance in (None, torch.ones(1))
        )
        assert less < share * error
    exact = dequantise(*quantise(weight, INT4, 64), torch.float32)
    assert torch.equal(dequantise(*quantise(exact, INT4, 64, torch.ones(1)), torch.float32), exact), (
        "none to make smaller"
    )


@given(weight=matrices())
@settings(deadline=None, max_examples=50)
def test_groups_of_fp8_are_rows_of_fp8(weight: Tensor) -> None:
    weight = weight.repeat(1, 384)[:, :384].contiguous()
    stored, scale = quantise(weight, FP8_GROUPS)
    assert ((stored.shape, stored.dtype), (scale.shape, scale.dtype)) == layout(tuple(weight.shape), FP8_GROUPS)
    rows, factors = quantise(weight.view(-1, 128), "fp8")
    assert torch.equal(scale.view(-1), factors)
    assert torch.equal(stored.float().view(-1, 128), rows.float())
    values = dequantise(rows, factors, torch.float32)
    assert torch.equal(dequantise(stored, scale, torch.float32).view(-1, 128), values)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=20)
def test_packed_numbers_are_unpacked(rows: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(16, (rows, 32 * blocks), generator=generator, dtype=torch.uint8)
    assert torch.equal(unpack(pack(numbers)), numbers)


def test_formats_by_hand() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0, 0.49], [0.0] * 6])
    stored, scale = quantise(weight, "int8")
    assert stored.tolist() == [[127, 0, 2, -2, -127, 0], [0] * 6], "ties to even"
    assert scale.tolist() == [1.0, 1.0]
    row = [448.0, SMALLEST_NORMAL_FP8 / 2, SMALLEST_FP8, 1.4 * SMALLEST_FP8, SMALLEST_FP8 / 2, -17.0]
    stored, scale = quantise(torch.tensor([row]), "fp8")
    subnormal = [SMALLEST_NORMAL_FP8 / 2, SMALLEST_FP8, SMALLEST_FP8, 0.0]
    assert stored.float().tolist() == [[448.0, *subnormal, -16.0]]
    assert scale.tolist() == [1.0]
    row = [*range(1, 17), *range(16, 0, -1)]
    stored, scale = quantise(torch.tensor([row], dtype=torch.float32), INT4)
    assert stored.tolist() == [[low | 15 - low << 4 for low in range(16)]], (
        "input j in the low bits, j + 16 in the high ones"
    )
    assert scale.tolist() == [[[1.0, 1.0]]]
    with pytest.raises(ConfigError, match="row 0 holds NaN, or a weight too large for int4: must be finite"):
        quantise(torch.full((1, 32), 1e6), INT4)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [1e-45, 3e-44, 1e-38])
def test_rows_too_small_for_a_scale_are_zeros(precision: str, size: float) -> None:
    stored, scale = quantise(torch.tensor([[size, 0.0, -size], [1.0, 0.0, -1.0]]), precision)
    largest = PRECISIONS[precision][1]
    assert stored.float().tolist() == [[0.0] * 3, [largest, 0.0, -largest]]
    assert scale.tolist()[0] == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantised_weights_are_rounded_once(dtype: torch.dtype) -> None:
    stored, scale = quantise(torch.randn(40, 64, generator=torch.Generator().manual_seed(1)), "int8")
    exact = stored.double() * scale.double()[:, None]
    assert torch.equal(dequantise(stored, scale, dtype), exact.float().to(dtype))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_not_finite_is_named(
    precision: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert run(model, tmp_path / "engine", "--weight_only_precision", precision) == 1
    message = "layers.1.gate_up.weight: row 163 holds infinity or NaN: must be finite; use another checkpoint"
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("sizes", "flags", "group"),
    [
        ({"hidden_size": 384, "intermediate_size": 512, "head_dim": 64}, (), 128),
        ({"hidden_size": 384, "intermediate_size": 512, "head_dim": 64}, ("--weight_group", "32"), 32),
        ({"hidden_size": 192, "intermediate_size": 512}, ("--quantize_lm_head",), 64),
        ({}, (), 32),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_int4_of_16_bits(
    architecture: str, sizes: dict[str, int], flags: tuple[str, ...], group: int, tmp_path: Path
) -> None:
    """In the largest group that divides all inputs, and with searched scales."""
    model, precision = save_random_model(tmp_path / "model", architecture, **sizes), ("--weight_only_precision", INT4)
    assert run(model, tmp_path / "engine", *precision, *flags, "--max_seq_len", "256") == 0, "--check agrees, too"
    config, weights = read_config(tmp_path / "engine"), load_weights(tmp_path / "engine", CPU)
    assert (config.weight_only_precision, config.weight_group) == (INT4, group)
    read = weight_reader(open_checkpoint(model), torch.float32)
    for name in (name for name in weights if f"{name}_scale" in weights and name != HEAD):
        expected = quantise(read(name), INT4, group, torch.ones(1))
        assert torch.equal(weights[name], expected[0])
        assert torch.equal(weights[f"{name}_scale"], expected[1])
    if "--quantize_lm_head" in flags:
        assert (weights[HEAD].dtype, weights[f"{HEAD}_scale"].dtype) == (torch.int8, torch.float16)


def run(model: Path, output_dir: Path, *flags: str) -> int:
    arguments = ("--model", str(model), "--method", "full", "--output_dir", str(output_dir), "--quiet")
    return build.main([*arguments, *(flags if "--device" in flags else ("--kernels", "reference", *flags))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("precision", "head"), FORMS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # which is tied
def test_what_the_builder_stores(
    architecture: str, precision: str, head: bool, dtype: torch.dtype, tmp_path: Path, random_model: RandomModel
) -> None:
    checkpoint = open_checkpoint(random_model(architecture))
    stored_format, written = WeightFormat(dtype, precision, head), []
    write_weights(checkpoint, tmp_path, stored_format, shard_bytes=100_000, progress=written.append)
    weights, read = load_weights(tmp_path, CPU), weight_reader(checkpoint, dtype)
    exact = weight_reader(checkpoint, torch.float32)
    quantised = {f"layers.{layer}.{part}.weight" for layer in range(3) for part in ("qkv", "o", "gate_up", "down")}
    quantised |= {HEAD} if head else set()
    listed = list_weights(checkpoint.config, quantize_lm_head=head)
    assert {weight.name for weight in listed if is_quantised(weight.name, quantize_lm_head=head)} == quantised
    planned = [weight.name for weight in listed]
    assert set(weights) == {*planned, *(f"{name}_scale" for name in quantised)}
    for name in planned:
        if name not in quantised:
            assert weights[name].dtype == dtype
            assert torch.equal(weights[name], read(name))
            continue
        tied = name == HEAD and checkpoint.config.tie_word_embeddings
        matrix, scale = quantise(exact("embed.weight" if tied else name), precision)
        assert weights[name].dtype == STORED[precision][0]
        assert torch.equal(weights[name].view(torch.uint8), matrix.view(torch.uint8)), "from the checkpoint's own dtype"
        assert torch.equal(weights[f"{name}_scale"], scale)
    size = sum(tensor.nbytes for tensor in weights.values())
    assert sum(written) == total_size(checkpoint.config, stored_format) == size


@pytest.mark.parametrize(("precision", "head"), FORMS)
def test_shards_and_index(precision: str, head: bool, tmp_path: Path, random_model: RandomModel) -> None:
    checkpoint = open_checkpoint(random_model("qwen3"))
    stored_format = WeightFormat(torch.bfloat16, precision, head)
    write_weights(checkpoint, tmp_path, stored_format, shard_bytes=60_000)
    index = json.loads((tmp_path / "rank0.index.json").read_text())
    found: dict[str, str] = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            names = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 (not a dictionary)
            found |= dict.fromkeys(names, path.name)
            for name, tensor in names.items():
                kind = "F32" if name.endswith("_scale") else STORED[precision][1]
                plain = stored_format.number_format(name.removesuffix("_scale")) == NONE
                assert tensor.get_dtype() == ("BF16" if plain else kind)
    assert found == index["weight_map"]
    assert len(set(found.values())) > 3
    names = [weight.name for weight in list_weights(checkpoint.config, quantize_lm_head=head)]
    for name in (name for name in names if stored_format.number_format(name) != NONE):
        assert found[name] == found[f"{name}_scale"], "a matrix and its scales lie together"
    assert index["metadata"]["total_size"] == total_size(checkpoint.config, stored_format)


@pytest.mark.parametrize(
    ("architecture", "precision", "head", "dtype"),
    [
        ("llama", "int8", True, "float32"),
        ("llama", "fp8", False, "bfloat16"),
        ("qwen2", "int8", True, "bfloat16"),
        ("qwen2", "fp8", False, "float32"),
        ("qwen3", "int8", False, "bfloat16"),
        ("llama", INT4, True, "float32"),
        ("qwen2", INT4, False, "bfloat16"),
    ],
)
def test_the_cpu_computes_with_dequantised_weights(
    architecture: str,
    precision: str,
    head: bool,
    dtype: str,
    tmp_path: Path,
    random_model: RandomModel,
    build_engine: BuildEngine,
) -> None:
    model = random_model(architecture)
    other = save_dequantised(model, tmp_path / "dequantised", precision, getattr(torch, dtype), quantize_lm_head=head)
    flags = ("--kernels", "reference", "--dtype", dtype, "--max_seq_len", "256")
    own = logits(build_engine(model, "full", *flags, *form_flags(precision, head)))
    assert torch.equal(own, logits(build_engine(other, "full", *flags)))
    assert not torch.equal(own, logits(build_engine(model, "full", *flags)))


def test_groups_of_fp8_are_dequantised_on_the_cpu(
    tmp_path: Path, random_model: RandomModel, build_engine: BuildEngine
) -> None:
    model = random_model("llama", hidden_size=384, intermediate_size=256, head_dim=64)
    other = save_dequantised(model, tmp_path / "dequantised", FP8_GROUPS, torch.bfloat16, quantize_lm_head=False)
    flags = ("--dtype", "bfloat16", "--max_seq_len", "256")
    own = logits(build_engine(model, "full", *flags, "--weight_only_precision", FP8_GROUPS))
    assert torch.equal(own, logits(build_engine(other, "full", *flags)))


def form_flags(precision: str, head: bool) -> tuple[str, ...]:
    return ("--weight_only_precision", precision, *(("--quantize_lm_head",) if head else ()))


def logits(directory: Path) -> Tensor:
    """Logits after a prompt and after each of three tokens."""
    decoder = Engine.load(directory).decoder
    rows = [run_prefill(decoder, 0, torch.arange(90).mul(7).remainder(100).tolist(), 3)]
    rows += [decoder.decode([token], [0])[0][0] for token in (5, 17, 80)]
    return torch.stack(rows)


def test_float32_on_a_gpu_is_refused(
    tmp_path: Path, random_model: RandomModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model("llama", head_dim=64)
    flags = ("--device", "cuda", "--cuda_archs", "90", "--weight_only_precision", "int8")
    assert run(model, tmp_path / "engine", *flags) == 1
    message = (
        "weight_only_precision = 'int8': must be 'none' with dtype = 'float32' on cuda; build with --dtype bfloat16"
    )
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size"])
def test_sizes_that_kernels_do_not_read_are_refused_on_a_gpu_alone(
    field: str, tmp_path: Path, random_model: RandomModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert INPUTS_MULTIPLE == 16
    model = random_model("llama", head_dim=64, **{field: 120})
    flags = ("--weight_only_precision", "fp8", "--dtype", "bfloat16")
    assert run(model, tmp_path / "engine", "--device", "cuda", "--cuda_archs", "90", *flags) == 1
    message = f"{field} = 120: must be a multiple of 16 with weight_only_precision = 'fp8'; build with"
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert run(model, tmp_path / "engine", *flags) == 0


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_logits_of_a_prompt_and_of_steps(
    architecture: str, tmp_path: Path, random_model: RandomModel, build_engine: BuildEngine
) -> None:
    """Scores of a prompt's tokens multiply the head with many rows, and steps with one; transformers is the judge."""
    model = random_model(architecture)  # qwen2 is tied
    other = save_dequantised(model, tmp_path / "dequantised", "int8", torch.bfloat16, quantize_lm_head=True)
    flags = ("--dtype", "bfloat16", "--max_seq_len", "256", *form_flags("int8", True))
    decoder, ids = Engine.load(build_engine(model, "full", *flags)).decoder, torch.arange(90).mul(7).remainder(300)
    assert isinstance(decoder.model, TorchModel)
    assert isinstance(decoder.model.head.project, ByteLinear), "multiplied as it is stored"
    assert decoder.model.embed.weight.dtype is torch.bfloat16
    decoder.cache.open(0, len(ids) + 1)
    found: list[Tensor] = []
    prefill = decoder.prefill([(0, ids.tolist())], {0: lambda _, logits: found.append(logits)})
    while prefill.progress < 1:
        prefill.advance(64)
    found += [prefill.finish(), decoder.decode([5], [0])[0]]
    with torch.inference_mode():
        expected = load_transformers(other)(torch.cat((ids, torch.tensor([5])))[None]).logits[0]
    rows = torch.cat(found)  # the last token's twice
    assert rows.shape == (92, expected.shape[1])
    errors = (rows - expected[[*range(90), 89, 90]]).norm(dim=1) / expected.norm(dim=1).mean()
    assert errors.max() <= 0.05, "activations are rounded to bfloat16"


@pytest.mark.parametrize("precision", ["none", "fp8"])
def test_only_int8_engines_have_a_head_of_8_bits(
    precision: str, tmp_path: Path, random_model: RandomModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model("llama")
    assert run(model, tmp_path / "engine", *form_flags(precision, True)) == 1
    message = (
        f"quantize_lm_head = True: must be false with weight_only_precision = {precision!r}; the head has int8 weights as the "
        "layers do: build with --weight_only_precision int8, or leave it out"
    )
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(("precision", "head"), [("none", False), *FORMS])
def test_the_memory_plan_counts_what_is_stored(
    precision: str, head: bool, architecture: str, tmp_path: Path, random_model: RandomModel
) -> None:
    model = random_model(architecture, **({"head_dim": 64} if architecture == "llama" else {"hidden_size": 384}))
    write_weights(open_checkpoint(model), tmp_path, WeightFormat(torch.bfloat16, precision, head))
    own, stored = planner(model, *form_flags(precision, head), method="full"), load_weights(tmp_path, CPU)
    assert own.weight_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert (HEAD in stored) == (head or architecture == "llama"), "qwen2 is tied"
    small = own.weight_bytes < planner(model, method="full").weight_bytes
    assert small == (precision != "none")
    plain = planner(model, *form_flags(precision, False), method="full")
    assert own.work_bytes(own.asked) == plain.work_bytes(plain.asked), "the head is never written out"


def test_inspection_shows_the_precision(
    random_model: RandomModel, build_engine: BuildEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model("llama")
    for precision in ("fp8", "int8", "none"):
        flags = form_flags(precision, precision == "int8")
        directory = build_engine(model, "full", "--kernels", "reference", *flags)
        assert build.main(["--inspect", str(directory)]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["weight_only_precision", precision] in lines
        assert ["quantize_lm_head", json.dumps(precision == "int8")] in lines
