"""GPU kernels without a GPU: they compile for every architecture and shape, and Python knows what they take."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.plugins.cases import CASES as CASES_OF_METHODS
from tests.plugins.cases import Settings
from tests.support.emulated_kernels import expert_kernels
from tests.support.random_models import save_random_model
from tests.support.structs import KERNEL, NVRTC_OFFSET, ROOT, compiled_part, declared_structs, layout_assertions

from kvseek.builder import build
from kvseek.builder.compile import cuda as compile_cuda
from kvseek.builder.compile.cuda import ARCHITECTURES, Specialisation, cached_cubin, compile_cubin, specialise
from kvseek.core.config import EngineConfig, read_config
from kvseek.core.errors import ConfigError, EngineDirectoryError, KernelError
from kvseek.core.manifest import read_manifest, verify
from kvseek.core.model_config import DeltaNetConfig, ExpertsConfig, ModelConfig
from kvseek.core.weight_only import INT4
from kvseek.kernels.cuda.layer.products import SHAPES, Format
from kvseek.plugins.registry import METHODS, get_method
from kvseek.plugins.sources import SOURCES_FILE

CUDA_MACHINE = 190  # e_machine of NVIDIA's ELF files
PARAMETER_BYTES = 0x19  # attribute: bytes of a kernel's parameters, in the record itself
IN_RECORD = 3  # format: the record holds the value; the others are followed by one


def sections(image: bytes) -> dict[str, bytes]:
    """Contents of every section of a 64-bit ELF file, by name."""
    assert image[:5] == b"\x7fELF\x02", "a 64-bit ELF file"
    assert struct.unpack_from("<H", image, 18)[0] == CUDA_MACHINE
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names_index = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + number * size) for number in range(count)]
    names_offset = headers[names_index][4]
    found = {}
    for name, _kind, _flags, _address, offset, length in headers:
        start = names_offset + name
        found[image[start : image.index(b"\0", start)].decode()] = image[offset : offset + length]
    return found


def parameter_bytes(image: bytes) -> dict[str, int]:
    """Bytes of the parameters of every kernel, by name."""
    prefix, found = ".nv.info.", {}
    for name, content in sections(image).items():
        if not name.startswith(prefix):
            continue
        offset = 0
        while offset < len(content):
            form, attribute, value = struct.unpack_from("<BBH", content, offset)
            offset += 4 if form <= IN_RECORD else 4 + value
            if (form, attribute) == (IN_RECORD, PARAMETER_BYTES):
                found[name.removeprefix(prefix)] = value
    return found


SOURCE = """
#include "kernels/scale.cuh"
extern "C" __global__ void __launch_bounds__(64) kvseek_NAME(const __grid_constant__ kvseek::ScaleArguments a) {
    a.values[threadIdx.x] *= kvseek::SCALE * KVSEEK_HEAD_DIM + KVSEEK_GROUP * EXTRA;
}
"""
HEADER = """
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace kvseek {
constexpr float SCALE = 3.0f;
struct ScaleArguments {
    float* values;
    long long count;
};
}
"""
NO_SETTINGS: Settings = {}
SMALL = Specialisation("float16", 128, 4, "toy", (("EXTRA", 2),))


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """A source tree of three kernels, one in each folder that a translation unit takes them from."""
    files = {"kernels/scale.cuh": HEADER}
    files |= {
        f"{folder}/kernel.cu": SOURCE
        for folder in ("kernels/attention", "kernels/layer", "plugins/toy", "plugins/other")
    }
    for name, text in files.items():
        path = tmp_path / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("NAME", Path(name).parent.name))
    return [tmp_path / "sources"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/kvseek"


def config(
    method: str,
    dtype: str,
    head_dim: int,
    group_size: int,
    precision: str = "none",
    settings: Settings = NO_SETTINGS,
    *,
    experts: bool = False,
) -> EngineConfig:
    model = ModelConfig("llama", 100, 128, 256, 2, 2 * group_size, 2, head_dim, 1e-6, 1e4, 8192)
    if experts:
        mixture, states = ExpertsConfig(4, 2, 128, norm_topk_prob=True), DeltaNetConfig((0,), 2, 4, 64, 64, 4)
        model = dataclasses.replace(model, architecture="qwen3_next", experts=mixture, delta_net=states)
    own = EngineConfig(model, method, dict(settings), dtype=dtype, device="cuda", weight_only_precision=precision)
    return dataclasses.replace(own, weight_formats={"layers.0.o": "int8_asymmetric"} if precision == INT4 else {})


def product_names(kernel: str) -> set[str]:
    """Kernels of products with weights of a format."""
    names = {f"{kernel}_{shape.name}" for _, shapes in SHAPES[kernel] for shape in shapes}
    return {f"kvseek_{gated}{name}" for gated in ("", "gated_") for name in names}


def written_kernels(
    method: str, dtype: str, precision: str = "none", settings: Settings = NO_SETTINGS, *, experts: bool = False
) -> dict[str, str]:
    """Name of each kernel of a method's translation unit in the sources, and of the struct that it takes, with namespaces.

    Those of products are there for numbers of 16 bits, those of weights of 8 bits with such weights alone, and those of an
    option with its macro. `experts` stands for a hybrid with experts.
    """
    macros = macro_names(method, settings) | ({"KVSEEK_EXPERTS", "KVSEEK_DELTA_NET"} if experts else set())
    names = compile_cuda.unit_sources(method, [ROOT])
    texts = [compiled_part((ROOT / name).read_text(), macros) for name in names if not name.endswith("/products.cu")]
    found = {kernel: arguments for text in texts for kernel, arguments in KERNEL.findall(text)}
    # kernels/cuda/layer/products.cu makes its kernels by macros, as tests/kernels/cuda/layer checks.
    if dtype == "float32":
        return found
    beside = {INT4: ["int8_groups", "int8_asymmetric"]}.get(precision, [])
    found |= expert_kernels("int8_asymmetric" in beside) if experts else {}
    for form in (Format.of(one, 32, torch.bfloat16) for one in {"none", precision, *beside}):
        found |= dict.fromkeys(product_names(form.kernel), "kvseek::LinearArguments")
        if form.precision != "none":
            name = f"kvseek_dequantise{f'_{form.precision}' * (form.group > 1)}"
            found[name] = "kvseek::DequantiseArguments"
    if precision == "fp8":  # from compute capability 8.9 on
        found["kvseek_quantise_rows"] = "kvseek::QuantiseArguments"
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_one_cubin_holds_every_kernel(roots: list[Path], arch: int) -> None:
    image = compile_cubin(SMALL, arch, roots)
    assert parameter_bytes(image) == {"kvseek_attention": 16, "kvseek_layer": 16, "kvseek_toy": 16}
    assert {f".text.kvseek_{name}" for name in ("attention", "layer", "toy")} <= set(sections(image))


def test_sources_of_the_current_folder_are_not_taken(
    roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (file for root in roots for file in root.rglob("*") if file.is_file()):
        other = tmp_path / "checkout" / next(file.relative_to(root) for root in roots if file.is_relative_to(root))
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("#error of another checkout\n")
    monkeypatch.chdir(tmp_path / "checkout")
    assert "kvseek_toy" in parameter_bytes(compile_cubin(SMALL, 90, roots))


def test_macros_reach_the_kernels(roots: list[Path]) -> None:
    (roots[0] / "plugins/toy/kernel.cu").write_text(
        "static_assert(KVSEEK_DTYPE == 2 && KVSEEK_HEAD_DIM == 128 && KVSEEK_GROUP == 4 && EXTRA == 2);\n"
        'extern "C" __global__ void kvseek_only(const __grid_constant__ kvseek::ScaleArguments a) {}\n'
    )
    assert "kvseek_only" in parameter_bytes(compile_cubin(SMALL, 90, roots))
    with pytest.raises(KernelError, match="static assertion failed"):
        compile_cubin(Specialisation("bfloat16", 128, 4, "toy", (("EXTRA", 2),)), 90, roots)


def test_a_broken_source_shows_the_compilers_words(roots: list[Path]) -> None:
    (roots[0] / "kernels/layer/kernel.cu").write_text("__device__ int oops( { }\n" + "#include <no_such_header.h>\n")
    with pytest.raises(KernelError) as caught:
        compile_cubin(SMALL, 90, roots)
    text = str(caught.value)
    assert re.search(r"NVRTC \d+\.\d+ cannot compile the kernels of Specialisation\(dtype='float16'.* for sm_90", text)
    assert "no_such_header.h" in text
    assert "a header is missing: pip install 'kvseek[cuda]'" in text
    assert len(text.splitlines()) <= compile_cuda.LOG_LINES + 2


@pytest.mark.parametrize("arch", [75, 95])
def test_an_architecture_that_cannot_be_is_refused(roots: list[Path], arch: int) -> None:
    with pytest.raises(KernelError, match=rf"cuda_archs = {arch}: must be one of 80, .*90"):
        compile_cubin(SMALL, arch, roots)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("cuda.core", "cuda-core is missing"),
        ("cuda.pathfinder", "pathfinder is missing"),
        ("cuda.bindings", "NVRTC is"),
    ],
)
def test_missing_packages_are_named(
    roots: list[Path], monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
    with pytest.raises(KernelError, match=rf"{message}.*pip install 'kvseek\[cuda\]'"):
        compile_cubin(SMALL, 90, roots)


def test_missing_headers_are_named(roots: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import cuda.pathfinder

    def nowhere(library: str) -> str | None:
        return None if library == "cccl" else find(library)

    find = cuda.pathfinder.find_nvidia_header_directory
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", nowhere)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelError, match="nv/target is missing: pip install nvidia-cuda-cccl, or set CUDA_HOME"):
        compile_cubin(SMALL, 90, roots)
    headers = Path(find("cccl"))
    (tmp_path / "toolkit/bin").mkdir(parents=True)
    (tmp_path / "toolkit/bin/nvcc").touch(mode=0o755)
    (tmp_path / "toolkit/include").mkdir()
    (tmp_path / "toolkit/include/cccl").symlink_to(headers)
    monkeypatch.setenv("PATH", str(tmp_path / "toolkit/bin"))
    assert "kvseek_toy" in parameter_bytes(compile_cubin(SMALL, 90, roots)), "the toolkit of the nvcc on PATH"


def test_missing_sources_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="no CUDA sources below"):
        compile_cubin(SMALL, 90, [tmp_path])


def test_cubins_are_compiled_once(roots: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    def counted(specialisation: Specialisation, arch: int, roots: list[Path]) -> bytes:
        compiled.append(arch)
        return compile_cubin(specialisation, arch, roots)

    monkeypatch.setattr(compile_cuda, "compile_cubin", counted)

    def get(specialisation: Specialisation = SMALL, arch: int = 90) -> bytes:
        return cached_cubin(specialisation, arch, roots)

    first = get()
    assert get() == first == compile_cubin(SMALL, 90, roots)
    assert compiled == [90]
    get(arch=80)
    get(Specialisation("float16", 64, 4, "toy", (("EXTRA", 2),)))
    get(Specialisation("float16", 128, 4, "toy", (("EXTRA", 3),)))
    assert "kvseek_other" in parameter_bytes(get(Specialisation("float16", 128, 4, "other", (("EXTRA", 2),))))
    assert compiled == [90, 80, 90, 90, 90]
    header = roots[0] / "kernels/scale.cuh"
    header.write_text(header.read_text().replace("3.0f", "5.0f"))
    assert get() != first
    assert len(compiled) == 6
    assert all(re.fullmatch(r"sm_\d+-\w{16}\.cubin", path.name) for path in cache.iterdir()), "no half-written file"


# Every dtype, head size, group size, precision of weights and architecture occurs; the rest of the product would take minutes.
CASES = (
    ("float32", 64, 1, "none", 80),
    ("bfloat16", 128, 4, "fp8", 89),
    ("float16", 96, 3, "none", 90),
    ("float32", 128, 8, "none", 100),
    ("bfloat16", 256, 16, "int8", 120),
    ("float16", 64, 4, INT4, 90),
    ("bfloat16", 128, 4, "fp8_groups", 89),
    ("bfloat16", 64, 4, "int8_groups", 100),
    ("float16", 128, 4, "int8_asymmetric", 80),
)


def macro_names(method: str, settings: Settings) -> set[str]:
    """The method's own macros, but for those that are 0."""
    entry = get_method(method)
    macros = entry.traits(entry.configure(dict(settings))).cuda_macros(128, 4)
    return {name for name, value in macros.items() if value}


def has_kernels(method: str) -> bool:
    return any((ROOT / "plugins" / method).rglob("*.cu"))


COMPILED = list(
    filter(has_kernels, METHODS)
)  # the others' units have the shared kernels alone, which each of these has, too
# Settings for the GPU that have macros which the defaults have not, and so may have kernels of their own.
OPTIONS = [
    (method, settings)
    for method in COMPILED
    for settings in CASES_OF_METHODS[method].on_gpu.values()
    if macro_names(method, settings) - macro_names(method, NO_SETTINGS)
]
VARIANTS = [*((method, NO_SETTINGS) for method in COMPILED), *OPTIONS]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(max(len(VARIANTS), len(CASES))))
def test_kernels_compile_and_lie_in_memory_as_python_thinks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared kernels, which are in every method's unit, for every case; those of a method for one of them.

    Without most optimisations, which take two thirds of the time: nothing here runs.
    """
    core = compile_cuda._compiler()
    monkeypatch.setattr(core, "ProgramOptions", partial(core.ProgramOptions, ofast_compile="max"))
    method, settings = VARIANTS[number % len(VARIANTS)]
    dtype, dim, group, precision, arch = CASES[(number + 1) % len(CASES)]
    experts = dtype != "float32" and (number % 2 == 0 or precision == "int8_asymmetric")
    written = written_kernels(method, dtype, precision, settings, experts=experts)
    of_gpus = [structs for source, structs in declared_structs().items() if source.endswith((".cu", ".cuh"))]
    made = {name: one for structs in of_gpus for name, one in structs.items()}
    checks = tmp_path / "plugins" / method / "zz_layout.cu"  # the unit's last source
    checks.parent.mkdir(parents=True)
    checks.write_text(
        "".join(layout_assertions(name, made[name], NVRTC_OFFSET) for name in sorted(set(written.values())))
    )
    own = config(method, dtype, dim, group, precision, settings, experts=experts)
    row_dtype = "int8" if dtype != "float32" and number % 2 else "auto"
    unit = specialise(dataclasses.replace(own, cache=dataclasses.replace(own.cache, row_dtype=row_dtype)))
    sizes = parameter_bytes(compile_cubin(unit, arch, [ROOT, tmp_path]))
    assert sizes == {kernel: ctypes.sizeof(made[name]) for kernel, name in written.items()}


def test_shapes_that_kernels_do_not_support_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"head_dim = 80: must be a multiple of 32 up to 256.*--device cpu"):
        specialise(config("full", "bfloat16", 80, 4))
    with pytest.raises(ConfigError, match="num_heads / num_kv_heads = 32: must be at most 16"):
        specialise(config("full", "bfloat16", 64, 32))
    narrow = config("full", "bfloat16", 64, 4, INT4)
    narrow = dataclasses.replace(narrow, quantize_lm_head=True, model=dataclasses.replace(narrow.model, hidden_size=96))
    with pytest.raises(
        ConfigError, match=r"^hidden_size = 96: must be a multiple of 64 with --quantize_lm_head and int4"
    ):
        specialise(narrow)


def test_threads_may_compile_first() -> None:
    """All architectures of an engine start to compile at once, in a process that has not imported cuda.core."""
    code = """
from concurrent.futures import ThreadPoolExecutor
from kvseek.builder.compile.cuda import _compiler
with ThreadPoolExecutor(4) as pool:
    assert all(hasattr(core, "Program") for core in pool.map(lambda _: _compiler(), range(4)))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def run(model: Path, output_dir: Path, *flags: str) -> int:
    arguments = ("--model", str(model), "--output_dir", str(output_dir), "--device", "cuda", "--quiet")
    return build.main([*arguments, *(flags if "--method" in flags else ("--method", "full", *flags))])


@pytest.mark.usefixtures("cache")
def test_an_engine_for_the_gpu(tmp_path: Path) -> None:
    flags = ("--cache.offload", "always", "--dtype", "float32", "--method", "pariskv")
    model = save_random_model(tmp_path / "model", "qwen3", head_dim=64)
    assert run(model, tmp_path / "engine", *flags, "--cuda_archs", "90") == 0
    directory = tmp_path / "engine"
    built = read_config(directory)
    assert (built.device, built.dtype, built.kernels, built.cache.offload) == ("cuda", "float32", "native", "always")
    kernels = [name for name in read_manifest(directory).files if name.startswith("kernels/")]
    assert kernels == ["kernels/sm_90.cubin", SOURCES_FILE]
    image = (directory / "kernels/sm_90.cubin").read_bytes()
    assert set(parameter_bytes(image)) == set(written_kernels("pariskv", "float32"))
    verify(directory)
    (directory / "kernels/sm_90.cubin").write_bytes(image[:-1] + b"?")
    with pytest.raises(EngineDirectoryError, match=r"kernels/sm_90\.cubin is corrupt"):
        verify(directory)


def test_architectures_default_to_all(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cuda, "cached_cubin", lambda _, arch: f"cubin {arch}".encode())
    assert run(model, tmp_path / "engine") == 0
    names = {path.name for path in (tmp_path / "engine/kernels").glob("*.cubin")}
    assert names == {f"sm_{arch}.cubin" for arch in ARCHITECTURES}
    fingerprint = read_manifest(tmp_path / "engine").fingerprint
    assert run(model, tmp_path / "engine", "--cuda_archs", "90") == 0
    assert read_manifest(tmp_path / "engine").fingerprint != fingerprint
    assert [path.name for path in (tmp_path / "engine/kernels").glob("*.cubin")] == ["sm_90.cubin"]
    assert run(model, tmp_path / "engine", "--cuda_archs", "90,80") == 0
    assert {path.name for path in (tmp_path / "engine/kernels").glob("*.cubin")} == {"sm_80.cubin", "sm_90.cubin"}
