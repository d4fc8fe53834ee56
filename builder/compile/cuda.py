"""Compiles the CUDA C++ of kernels/ and of one method into one cubin per GPU architecture.

One translation unit includes every kernel that an engine needs. Macros fix what never changes while an engine runs (number
type, head size, heads per group, the method's own macros), so no template is instantiated for a shape that is not served.
NVRTC compiles it, so neither a CUDA toolkit nor a GPU is needed.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvseek.core.config import FP8_GROUPS, WEIGHT_GROUP, EngineConfig, group_inputs
from kvseek.core.errors import ConfigError, KernelError, require
from kvseek.core.weight_only import INPUTS_MULTIPLE, INT4, INT8_ASYMMETRIC, INT8_GROUPS, NONE
from kvseek.kernels.cuda.attention.attend import LIMITS
from kvseek.plugins.registry import method_traits
from kvseek.plugins.sources import files_digest, package_roots

from .shared import cache_folder, compiling_threads

ARCHITECTURES = (80, 89, 90, 100, 120)  # A100; L4, L40, RTX 40; H100, H200; B200; RTX 50
DTYPE_NUMBERS = {"float32": 0, "bfloat16": 1, "float16": 2}  # kernels/cuda/numbers.cuh
# Numbers of kernels/cuda/layer/weight_formats.cuh.
WEIGHT_NUMBERS = {NONE: 0, "int8": 1, "fp8": 2, INT4: 3, FP8_GROUPS: 4, INT8_GROUPS: 5, INT8_ASYMMETRIC: 6}
# No fast math: softmax relies on infinities, and poisoned rows must show. Contraction into fused multiply-add stays on:
# kernels whose order of roundings matters say so with intrinsics.
STANDARD = "c++17"
LOG_LINES = 20
IMPORT = threading.Lock()  # a thread that imports cuda.core while another thread does may see half of it
REMEDY = "pip install 'kvseek[cuda]'"
# By folder: a header that must be in it, and the package that contains the folder.
HEADERS = {"cudart": ("cuda_bf16.h", "nvidia-cuda-runtime"), "cccl": ("nv/target", "nvidia-cuda-cccl")}


@dataclass(frozen=True)
class Specialisation:
    """Everything that a cubin is compiled for, beside the architecture.

    Attributes
    ----------
    dtype : str
        Dtype of rows, queries and outputs: float32, bfloat16 or float16.
    group_size : int
        Query heads that share a KV head.
    method : str
        Folder of plugins/ whose kernels are included.
    defines : tuple of (str, int)
        The method's own macros.
    weight_only_precision : str
        Format of the weights of products: that of EngineConfig.
    weight_group : int
        Inputs that share the scales of int4.
    asymmetric : bool
        Whether some weights are of int8_asymmetric instead.
    experts, delta_net : bool
        Whether the model has mixtures of experts, and Gated DeltaNet layers.
    rounded_rows : bool
        Whether rows have 8 bits (cache.row_dtype).
    """

    dtype: str
    head_dim: int
    group_size: int
    method: str
    defines: tuple[tuple[str, int], ...] = ()
    weight_only_precision: str = NONE
    weight_group: int = WEIGHT_GROUP
    asymmetric: bool = False
    experts: bool = False
    delta_net: bool = False
    rounded_rows: bool = False

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """All macros of the translation unit, in order."""
        return (
            ("KVSEEK_DTYPE", DTYPE_NUMBERS[self.dtype]),
            ("KVSEEK_HEAD_DIM", self.head_dim),
            ("KVSEEK_GROUP", self.group_size),
            ("KVSEEK_WEIGHT", WEIGHT_NUMBERS[self.weight_only_precision]),
            ("KVSEEK_WEIGHT_GROUP", group_inputs(self.weight_only_precision, self.weight_group)),
            ("KVSEEK_ASYMMETRIC", int(self.asymmetric or self.weight_only_precision == INT8_ASYMMETRIC)),
            ("KVSEEK_EXPERTS", int(self.experts)),
            ("KVSEEK_DELTA_NET", int(self.delta_net)),
            ("KVSEEK_ROUNDED_ROWS", int(self.rounded_rows)),
            *self.defines,
        )


def specialise(config: EngineConfig) -> Specialisation:
    """Decide what the kernels of an engine are compiled for.

    Raises
    ------
    ConfigError
        If the kernels do not support the model's shape, or a field of the method is bad.
    """
    model = config.model
    if fault := LIMITS.fault(model.head_dim, model.group_size):
        raise ConfigError(f"{fault} with device = 'cuda'; build with --device cpu")
    if config.weight_only_precision != NONE:
        limit = f"a multiple of {INPUTS_MULTIPLE} with weight_only_precision = {config.weight_only_precision!r}"
        states = {} if model.delta_net is None else {"delta_net values": model.delta_net.values}
        for name, value in {"hidden_size": model.hidden_size, **states, **model.mlp_sizes}.items():  # heads are of 32
            require(value % INPUTS_MULTIPLE == 0, name, value, limit, "build with --weight_only_precision none")
    # Kernels read two scales of a row at a time.
    multiple, sizes = 2 * WEIGHT_GROUP, dict[str, int]()
    if config.weight_only_precision == INT8_GROUPS:
        sizes, why = model.matrix_inputs(), f"weight_only_precision = {INT8_GROUPS!r}"
    elif config.weight_only_precision == INT4 and config.quantize_lm_head and "lm_head" not in config.weight_formats:
        sizes, why = {"hidden_size": model.hidden_size}, "--quantize_lm_head and int4"
    for name, value in sizes.items():
        remedy = "leave it out, or build with --weight_only_precision none"
        require(value % multiple == 0, name, value, f"a multiple of {multiple} with {why}", remedy)
    macros = method_traits(config).cuda_macros(model.head_dim, model.group_size)
    return Specialisation(
        config.dtype,
        model.head_dim,
        model.group_size,
        config.method,
        tuple(sorted(macros.items())),
        config.weight_only_precision,
        config.weight_group,
        INT8_ASYMMETRIC in config.weight_formats.values(),
        model.experts is not None,
        model.delta_net is not None,
        config.cache.row_dtype == "int8",
    )


def compile_cubin(specialisation: Specialisation, arch: int, roots: Sequence[Path] | None = None) -> bytes:
    """Compile every kernel of an engine for one architecture.

    Parameters
    ----------
    arch : int
        Compute capability without the dot: 90 is 9.0.
    roots : sequence of Path, optional
        Folders that hold kernels/ and plugins/; None: those of this installation.

    Returns
    -------
    bytes
        A cubin: machine code for `arch` and later minor versions of the same major version.

    Raises
    ------
    KernelError
        If a package is missing, NVRTC does not know the architecture, or the sources do not compile (with the last lines
        of NVRTC's messages).
    """
    roots = package_roots() if roots is None else roots
    core = _compiler()
    _check_architecture(arch)
    # In quotes they would be looked for in the current folder first.
    unit = "".join(f"#include <{name}>\n" for name in unit_sources(specialisation.method, roots))
    options = core.ProgramOptions(
        name="kvseek.cu",
        arch=f"sm_{arch}",
        std=STANDARD,
        include_path=[str(path) for path in (*roots, *header_folders())],
        define_macro=[(name, str(value)) for name, value in specialisation.macros],
    )
    try:
        return bytes(core.Program(unit, "c++", options).compile("cubin").code)
    except Exception as error:  # cuda.core's own error classes are private
        text = str(error).strip()
        last = "\n".join(text.splitlines()[-LOG_LINES:])
        version = ".".join(map(str, nvrtc_version()))
        hint = f" (a header is missing: {REMEDY} in a fresh environment)" if "open source file" in text else ""
        raise KernelError(
            f"NVRTC {version} cannot compile the kernels of {specialisation} for sm_{arch}{hint}. "
            f"Its last messages:\n{last}"
        ) from None


def cached_cubin(specialisation: Specialisation, arch: int, roots: Sequence[Path] | None = None) -> bytes:
    """Compile once per source text, macros, architecture and NVRTC version; raises as `compile_cubin` does.

    The file is ``sm_<arch>-<hash>.cubin`` of the cache folder.
    """
    roots = package_roots() if roots is None else roots
    cache = cache_folder()
    file = cache / f"sm_{arch}-{_digest(specialisation, roots)}.cubin"
    if file.exists():
        return file.read_bytes()
    image = compile_cubin(specialisation, arch, roots)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".compile-") as folder:
        written = Path(folder) / file.name
        try:
            written.write_bytes(image)
        except OSError as error:
            raise KernelError(f"{file}: {error.strerror}; free space there, or set XDG_CACHE_HOME") from None
        written.replace(file)  # other processes see no file or a whole one
    return image


def cached_cubins(
    specialisation: Specialisation, archs: Sequence[int], progress: Callable[[int], None] | None = None
) -> dict[int, bytes]:
    """Compile the cubins of several architectures in parallel; `progress` is called with 1 after each."""

    def make(arch: int) -> bytes:
        image = cached_cubin(specialisation, arch)
        if progress is not None:
            progress(1)
        return image

    with compiling_threads() as pool:
        return dict(zip(archs, pool.map(make, archs), strict=True))


def unit_sources(method: str, roots: Sequence[Path]) -> list[str]:
    """List the sources of a method's translation unit in order, relative to the roots; raises KernelError without any."""
    names = [
        path.relative_to(root).as_posix()
        for folder in ("kernels", f"plugins/{method}")
        for root in roots
        for path in sorted((root / folder).rglob("*.cu"))
    ]
    if not names:
        raise KernelError(
            f"no CUDA sources below {', '.join(map(str, roots))}: kvseek's own files are missing; install it again"
        )
    return names


def header_folders() -> list[Path]:
    """Find the folders of CUDA's headers: those of the pip packages, else those of a CUDA toolkit.

    Raises
    ------
    KernelError
        If a header is in neither; the message names the package that contains it.
    """
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        raise KernelError(f"cuda.pathfinder is missing: {REMEDY}") from None
    folders = []
    for library, (header, package) in HEADERS.items():
        candidates = [find_nvidia_header_directory(library), *_toolkit_headers()]
        found = next((Path(path) for path in candidates if path and (Path(path) / header).is_file()), None)
        if found is None:
            raise KernelError(
                f"CUDA's header {header} is missing: pip install {package}, or set CUDA_HOME to a CUDA toolkit"
            )
        folders.append(found)
    return folders


def _toolkit_headers() -> list[Path]:
    """Return the header folders of the CUDA toolkit whose nvcc is on PATH."""
    nvcc = shutil.which("nvcc")
    include = Path(nvcc).resolve().parent.parent / "include" if nvcc else None
    return [] if include is None else [include, include / "cccl"]


def nvrtc_version() -> tuple[int, int]:
    """Return major and minor version of NVRTC; raises KernelError if it is not installed."""
    major, minor = _nvrtc("nvrtcVersion")
    return major, minor


def _check_architecture(arch: int) -> None:
    (supported,) = _nvrtc("nvrtcGetSupportedArchs")
    known = [number for number in supported if number >= min(ARCHITECTURES)]  # older GPUs lack bfloat16 arithmetic
    if arch not in known:
        raise KernelError(
            f"cuda_archs = {arch}: must be one of {', '.join(map(str, known))}; a newer nvidia-cuda-nvrtc may know more"
        )


def _nvrtc(function: str) -> list[Any]:
    """Call a function of NVRTC that takes no arguments; returns its results without the status."""
    try:
        from cuda.bindings import nvrtc

        results: list[Any] = list(getattr(nvrtc, function)())
    except (ImportError, RuntimeError) as error:  # RuntimeError: the first call did not find the library itself
        raise KernelError(f"NVRTC is missing ({error}): {REMEDY}") from None
    status = results.pop(0)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"{function} failed with {status.name}; {REMEDY} in a fresh environment")
    return results


def _compiler() -> Any:
    """Import the module that offers Program and ProgramOptions; raises KernelError if it is not installed."""
    try:
        with IMPORT:
            import cuda.core as core

            if not hasattr(core, "Program"):  # cuda-core before 0.5
                import cuda.core.experimental as core
    except ImportError as error:
        raise KernelError(f"cuda-core is missing ({error}): {REMEDY}") from None
    return core


def _digest(specialisation: Specialisation, roots: Sequence[Path]) -> str:
    """Digest all that decides a cubin, beside the architecture. All headers count, those of other folders included."""
    names = unit_sources(specialisation.method, roots)
    files = [root / name for root in roots for name in names if (root / name).is_file()]
    for pattern in ("kernels/*.h", "kernels/**/*.cuh", "plugins/**/*.cuh"):
        files += [path for root in roots for path in sorted(root.glob(pattern))]
    return files_digest(files, nvrtc_version(), STANDARD, specialisation.macros)[:16]
