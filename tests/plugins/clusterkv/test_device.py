"""ClusterKV's kernels without a GPU: which of them an engine has, and that Python mirrors what they take."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from tests.builder.compile.cubin import parameter_bytes
from tests.support.structs import fields_of

import kvseek.plugins
from kvseek.builder.compile.cuda import Specialisation, compile_cubin
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.device import SelectArguments, cuda_macros
from kvseek.plugins.clusterkv.kmeans import KMeansArguments
from kvseek.plugins.clusterkv.rerank import RerankArguments
from kvseek.plugins.codes.device import EncodeArguments

MIRRORS = {
    "score": SelectArguments,
    "choose": SelectArguments,
    "mean": KMeansArguments,
    "cluster": KMeansArguments,
    "rerank": RerankArguments,
}


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """Bytes of the arguments of every kernel of an engine with all options, by the kernel's name."""
    macros = cuda_macros(Config(spread_weight=3.0, rerank_bits=2, group_reduce="max"), 96, 3)
    return parameter_bytes(compile_cubin(Specialisation("bfloat16", 96, 3, "clusterkv", tuple(macros.items())), 90))


def test_an_engine_with_codes_has_their_kernels(sizes: dict[str, int]) -> None:
    taken = {name: sizes[f"kvseek_clusterkv_{name}"] for name in MIRRORS}
    assert taken == {name: ctypes.sizeof(mirror) for name, mirror in MIRRORS.items()}
    assert sizes["kvseek_codes_encode"] == ctypes.sizeof(EncodeArguments)


@pytest.mark.parametrize("mirror", [SelectArguments, KMeansArguments, RerankArguments, EncodeArguments])
def test_python_mirrors_the_arguments(mirror: type[ctypes.Structure]) -> None:
    root = Path(kvseek.plugins.__file__).parent
    folder = root / ("codes" if mirror is EncodeArguments else "clusterkv")
    assert list(mirror._fields_) == fields_of(mirror.__name__, sorted(folder.rglob("*.cu*")))
