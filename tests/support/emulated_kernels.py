"""Kernels of a method compiled for the CPU, where threads of a GPU are emulated (emulated_cuda/cuda.h): tests without a GPU.

Sources are copied to a folder of their own, where instructions.cuh and the headers of CUDA are empty, and compiled as C++
with the emulation included first. Kernels with other machine instructions cannot be emulated; SOURCES names those that can.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from tests.support.structs import KERNEL, compiled_part

from kvseek.builder.compile.cuda import Specialisation
from kvseek.core.weight_only import INT8_ASYMMETRIC, NONE
from kvseek.engine.loading.memory import HOPPER, UnloadedKernels
from kvseek.kernels.cuda.layer.experts import DOWN_WARPS
from kvseek.kernels.cuda.layer.products import SHAPES, Format
from kvseek.plugins.sources import package_roots

SOURCES = {
    "nested": ("scan.cu", "choose.cu", "encode.cu"),
    "clusterkv": ("select.cu", "rerank.cu", "encode.cu"),
    "prkv": ("select.cu", "update.cu", "boxes.cu", "encode.cu"),
    "ctkvr": ("probe.cu", "recall.cu", "coded.cu", "rerank.cu"),
}
DRAW = "kernels/cuda/draw/draw.cu"
ATTENTION = "kernels/cuda/attention/attend.cu"
EXPERTS = ("kernels/cuda/layer/routing.cu", "kernels/cuda/layer/products.cu")
DELTA_NET = "kernels/cuda/layer/delta_net.cu"
HEADER = Path(__file__).parent / "emulated_cuda/cuda.h"
STAND_INS = ("cuda_bf16.h", "cuda_fp16.h", "kernels/cuda/instructions.cuh")
DYNAMIC = re.compile(r"extern __shared__ __align__\(16\) unsigned char (\w+)\[\];")
DYNAMIC_BYTES = 256 << 10
NO_MORE: Mapping[str, str] = {}
MULTIPROCESSORS = 12  # several blocks for each request and KV head, and few enough to be quick
# Libraries of several shapes define the same symbols, and must not share them.
FLAGS = ("-std=c++20", "-O1", "-w", "-mavx2", "-mf16c", "-shared", "-fPIC", "-fno-gnu-unique", "-fvisibility=hidden")


LAUNCH = """
extern "C" void {name}({arguments});
extern "C" __attribute__((visibility("default")))
void emulate_{name}(const void* arguments, unsigned x, unsigned y, unsigned z, int threads) {{
    emulated::launch<{arguments}>({name}, arguments, {{x, y, z}}, threads);
}}
"""


class EmulatedKernels(UnloadedKernels):
    """Kernels whose launches run on the CPU before they return."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(HOPPER)
        self.multiprocessors = MULTIPROCESSORS
        self.device, self._library = torch.device("cpu"), library

    def launch(  # type: ignore[override]
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: ctypes.Structure,
        shared_bytes: int = 0,
        **options: bool,
    ) -> None:
        """Run a kernel; raises AttributeError if it is none of those that are emulated."""
        assert grid[0] == 1 or not options.get("together"), "blocks run one after another"
        assert shared_bytes <= DYNAMIC_BYTES
        getattr(self._library, f"emulate_{name}")(ctypes.byref(arguments), *grid, threads)


@cache
def emulated_kernels(unit: Specialisation) -> EmulatedKernels:
    """Compile the kernels of a method that can be emulated; takes seconds."""
    with tempfile.TemporaryDirectory(prefix="kvseek-emulated-") as folder:
        return EmulatedKernels(
            _compile(unit, [f"plugins/{unit.method}/cuda/{name}" for name in SOURCES[unit.method]], folder)
        )


@cache
def emulated_draw(dtype: str) -> EmulatedKernels:
    """Compile the kernel that draws tokens, for logits of a dtype."""
    with tempfile.TemporaryDirectory(prefix="kvseek-emulated-") as folder:
        return EmulatedKernels(_compile(Specialisation(dtype, 64, 1, ""), [DRAW], folder))


@cache
def emulated_attention(dtype: str, head_dim: int, group_size: int, rounded_rows: bool) -> EmulatedKernels:
    """Compile the attention of decode steps."""
    with tempfile.TemporaryDirectory(prefix="kvseek-emulated-") as folder:
        unit = Specialisation(dtype, head_dim, group_size, "", rounded_rows=rounded_rows)
        return EmulatedKernels(_compile(unit, [ATTENTION], folder))


@cache
def emulated_delta_net(dtype: str) -> EmulatedKernels:
    """Compile the kernel of Gated DeltaNet layers."""
    with tempfile.TemporaryDirectory(prefix="kvseek-emulated-") as folder:
        return EmulatedKernels(_compile(Specialisation(dtype, 64, 1, "", delta_net=True), [DELTA_NET], folder))


@cache
def emulated_experts(dtype: str, precision: str, asymmetric: bool = False) -> EmulatedKernels:
    """Compile the kernels of mixtures of experts."""
    with tempfile.TemporaryDirectory(prefix="kvseek-emulated-") as folder:
        unit = Specialisation(dtype, 64, 1, "", weight_only_precision=precision, asymmetric=asymmetric, experts=True)
        return EmulatedKernels(_compile(unit, EXPERTS, folder, EXPERTS[:1], expert_kernels(asymmetric)))


def expert_kernels(asymmetric: bool) -> dict[str, str]:
    """Kernels that the macros of experts.cuh make, and the structs that they take."""
    found = dict[str, str]()
    for name in ("kvseek_expert", *(("kvseek_asymmetric_expert",) if asymmetric else ())):
        found[f"{name}_gate_up"] = "kvseek::ExpertGateUpArguments"
        found |= dict.fromkeys((f"{name}_down_{warps}" for warps in DOWN_WARPS), "kvseek::ExpertDownArguments")
    return found


@cache
def emulated_products(dtype: str, precision: str, weight_group: int, own: str) -> EmulatedKernels:
    """Compile the kernels of products with weights of format `own` of an engine of this precision."""
    form = Format.of(own, weight_group, torch.bfloat16)
    names = {
        f"kvseek_{gated}{form.kernel}_{shape.name}"
        for _, shapes in SHAPES[form.kernel]
        for shape in shapes
        for gated in ("", "gated_")
    }
    launched = dict.fromkeys(sorted(names), "kvseek::LinearArguments")
    if own != NONE:
        launched[f"kvseek_dequantise{f'_{own}' * (form.group > 1)}"] = "kvseek::DequantiseArguments"
    if own == "fp8":
        launched["kvseek_quantise_rows"] = "kvseek::QuantiseArguments"
    with tempfile.TemporaryDirectory(prefix="kvseek-emulated-") as folder:
        unit = Specialisation(dtype, 64, 1, "", (), precision, weight_group, asymmetric=own == INT8_ASYMMETRIC)
        return EmulatedKernels(_compile(unit, EXPERTS[1:], folder, (), launched))


def _compile(
    unit: Specialisation,
    names: Sequence[str],
    within: str,
    launched: Sequence[str] | None = None,
    more: Mapping[str, str] = NO_MORE,
) -> ctypes.CDLL:
    """Compile sources; those in `launched` have the kernels that are launched, if not all of them have.

    `more` are kernels that macros make, and the structs that they take.
    """
    folder = Path(within)
    (root,) = package_roots()
    for path in (path for room in ("kernels", "plugins") for path in (root / room).rglob("*.*")):
        if path.suffix not in (".cu", ".cuh", ".h"):
            continue
        copy = folder / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        memory = rf"alignas(16) static unsigned char \1[{DYNAMIC_BYTES}];"
        copy.write_text(DYNAMIC.sub(memory, path.read_text(encoding="utf-8")), encoding="utf-8")
    for name in STAND_INS:
        (folder / name).write_text("")  # the emulation is included before all
    sources = [folder / name for name in names]
    given = {name for name, value in unit.macros if value}
    launching = names if launched is None else launched
    texts = [compiled_part((folder / name).read_text(encoding="utf-8"), given) for name in launching]
    includes = "".join(f'#include "{path}"\n' for path in sources)
    found = dict(pair for text in texts for pair in KERNEL.findall(text)) | more
    launches = (LAUNCH.format(name=kernel, arguments=struct) for kernel, struct in found.items())
    (folder / "unit.cpp").write_text(includes + "".join(launches))
    macros = [f"-D{name}={value}" for name, value in (*unit.macros, ("__CUDA_ARCH__", 890))]
    command = ["g++", *FLAGS, *macros, f"-I{folder}", "-include", str(HEADER), "unit.cpp", "-o", "kernels.so"]
    subprocess.run(command, check=True, cwd=folder)
    return ctypes.CDLL(str(folder / "kernels.so"))
