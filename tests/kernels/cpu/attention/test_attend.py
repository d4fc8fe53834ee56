"""Native attention against the reference, and the library that holds it: levels, symbols, threads, compilers."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvseek.builder.compile import cpu as compilation
from kvseek.core.batch import Batch, RequestState, Selection
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.engine.cache.row_storage import RowForm
from kvseek.kernels.cpu.attention.attend import HostAttention
from kvseek.kernels.reference.attention.rounded_rows import round_rows

SINK, RING = 4, 40
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NAN = float("nan")


@dataclass(frozen=True)
class Cache:
    """A layer's window and rows, and a batch of requests in it."""

    window: Tensor
    rows: Tensor
    batch: Batch
    scales: Tensor | None = None  # of rows in 8 bits

    def attend(
        self, queries: Tensor, selection: Selection | None, scaling: float, library: CpuLibrary | None = None
    ) -> Tensor:
        """By the compiled kernel of a library, or by the reference."""
        kernel = HostAttention(self.window, self.rows, SINK, scaling, library, self.scales)
        return kernel(queries, self.batch, selection)


def make_cache(
    lengths: Sequence[int],
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    wrapped: bool = True,
    held: int = SINK,
    rounded: bool = False,
) -> Cache:
    """Random rows for slots in reverse order; NaN in every row that belongs to no token, and in a neighbouring layer."""
    batch = len(lengths)
    table = ExtentTable(batch, 4, sum(map(extents_for, lengths)) + 2)
    form = RowForm(kv_heads, dim, dtype, rounded)
    planes = form.planes(torch.zeros(form.shape(2, table.capacity), dtype=form.dtype))
    planes[-1].fill_(NAN)
    window = torch.full((batch, kv_heads, SINK + RING, 2, dim), NAN).to(dtype)
    slots = list(reversed(range(batch)))
    first = RING - 7 if wrapped else 3
    ring_rows = 21 if held else 0
    ring = (torch.arange(first, first + ring_rows) % RING) + SINK
    for slot, length in zip(slots, lengths, strict=True):
        table.reserve(slot, length)
        own = torch.randn(kv_heads, length, 2, dim).to(dtype)
        for plane, part in zip(planes, round_rows(own) if rounded else (own,), strict=True):
            table.write(plane[:, 1], slot, 0, part)
        for index in (torch.arange(held), ring):
            window[slot][:, index] = torch.randn(kv_heads, len(index), 2, dim).to(dtype)
    requests = [
        RequestState(slot=slot, sink_rows=held, ring_first=first, ring_rows=ring_rows, length=length)
        for slot, length in zip(slots, lengths, strict=True)
    ]
    rows, *scales = (plane[:, 1] for plane in planes)
    return Cache(window, rows, Batch.of(requests, table.table), *scales)


def choose(lengths: Sequence[int], kv_heads: int) -> Selection:
    """Two fifths of the entries of each request, in random order among entries of -1."""
    most = max(1, *lengths)
    rows = torch.full((len(lengths), kv_heads, most), -1, dtype=torch.int32)
    for request, head in itertools.product(range(len(lengths)), range(kv_heads)):
        entries = torch.randperm(lengths[request])
        filled = torch.randperm(most)[: max(1, round(0.4 * len(entries)))][: len(entries)]
        rows[request, head, filled] = entries[: len(filled)].int()
    return Selection(rows)


def compare(
    library: CpuLibrary,
    lengths: Sequence[int],
    group: int,
    dim: int,
    dtype: torch.dtype,
    selects: bool,
    wrapped: bool = True,
    rounded: bool = False,
) -> None:
    kv_heads = 2
    cache = make_cache(lengths, kv_heads, dim, dtype, wrapped, rounded=rounded)
    selection = choose(lengths, kv_heads) if selects else None
    queries = (3 * torch.randn(len(lengths), kv_heads * group, dim)).to(dtype)
    expected = cache.attend(queries, selection, dim**-0.5)
    assert not expected.isnan().any()
    found = cache.attend(queries, selection, dim**-0.5, library)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dim", "group"), [(2, 2), (12, 6), (40, 16), (64, 3), (80, 5), (96, 4), (100, 7), (128, 9), (256, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_level_equals_the_reference(
    library: CpuLibrary, level: int, dim: int, group: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(level)
    for selects, rounded in itertools.product((True, False), (True, False)):
        compare(library, [1100, 37], group, dim, dtype, selects, wrapped=False, rounded=rounded)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    lengths=st.lists(st.integers(0, 2100), min_size=1, max_size=4),
    group=st.integers(1, 16),
    dim=st.integers(1, 32).map(lambda eighths: 8 * eighths),
    selects=st.booleans(),
    rounded=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_equals_the_reference(
    library: CpuLibrary,
    dtype: torch.dtype,
    lengths: list[int],
    group: int,
    dim: int,
    selects: bool,
    rounded: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    compare(library, lengths, group, dim, dtype, selects, rounded=rounded)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_request_does_not_depend_on_its_batch_nor_on_threads(library: CpuLibrary, rounded: bool) -> None:
    lengths = [3000, 700, 2048]
    cache, selection = make_cache(lengths, 2, 64, torch.float32, rounded=rounded), choose(lengths, 2)
    queries = torch.randn(3, 6, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = cache.attend(queries, selection, 0.125, library)
        torch.set_num_threads(1)
        for i in range(3):
            alone, chosen = replace(cache, batch=cache.batch.subset([i])), Selection(selection.rows[i : i + 1])
            assert torch.equal(alone.attend(queries[i : i + 1], chosen, 0.125, library)[0], together[i])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_a_poisoned_row_that_is_attended_to_shows(library: CpuLibrary, level: int, poison: float) -> None:
    cache = make_cache([1200], 1, 64, torch.float32)
    cache.rows[cache.batch.table[0, 1], 0, 5] = poison
    assert cache.attend(torch.randn(1, 1, 64), None, 0.125, library).isnan().all()


def test_large_scores_do_not_overflow(library: CpuLibrary, level: int) -> None:
    cache = make_cache([500], 1, 64, torch.float32)
    queries = 1e4 * torch.randn(1, 3, 64)
    torch.testing.assert_close(cache.attend(queries, None, 1.0, library), cache.attend(queries, None, 1.0))


def test_no_rows_at_all_give_zeros(library: CpuLibrary) -> None:
    cache = make_cache([0], 1, 64, torch.float32, held=0)
    for nothing in (Selection(torch.full((1, 1, 3), -1, dtype=torch.int32)), None):
        for kernels in (library, None):
            assert cache.attend(torch.randn(1, 2, 64), nothing, 0.125, kernels).eq(0).all()


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "names"),
    [
        (264, 1, torch.float32, "head_dim = 264"),
        (64, 17, torch.float32, "num_heads / num_kv_heads = 17"),
        (64, 1, torch.float64, "dtype = torch.float64"),
    ],
)
def test_unsupported_shapes_are_refused(
    library: CpuLibrary, dim: int, group: int, dtype: torch.dtype, names: str
) -> None:
    cache, selection = make_cache([10], 1, dim, dtype), choose([10], 1)
    with pytest.raises(KernelError, match=f"{names}.*--kernels reference"):
        cache.attend(torch.randn(1, group, dim, dtype=dtype), selection, 0.125, library)


def test_unsupported_layouts_are_refused(library: CpuLibrary) -> None:
    cache, queries = make_cache([10], 2, 64, torch.float32), torch.randn(1, 2, 64)
    selection = choose([10], 2)

    def refuses(pattern: str, selection: Selection, queries: Tensor, cache: Cache) -> None:
        with pytest.raises(KernelError, match=pattern):
            cache.attend(queries, selection, 0.125, library)

    refuses("selection dtype", Selection(selection.rows.long()), queries, cache)
    refuses("cache dtype", selection, queries.bfloat16(), cache)
    turned = cache.window.transpose(1, 2).contiguous().transpose(1, 2)
    refuses("window strides", selection, queries, replace(cache, window=turned))


def test_one_openmp_runtime_serves_torch_and_the_kernels(library: CpuLibrary) -> None:
    program = (
        "import torch, sys; from kvseek.core.cpu_library import CpuLibrary; CpuLibrary(__import__('pathlib').Path(sys.argv[1]))\n"
        "torch.ones(1 << 20).sum()\n"
        "print(*sorted({line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.split('/')[-1]}), sep='\\n')"
    )
    command = [sys.executable, "-c", program, str(compilation.cached_cpu_library())]
    runtimes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len([path for path in runtimes if "libgomp" in path or "libomp" in path or "libiomp" in path]) == 1


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")
def test_no_symbol_could_be_merged_across_levels() -> None:
    table = subprocess.run(["nm", str(compilation.cached_cpu_library())], capture_output=True, text=True, check=True)
    kinds = [line.split()[-2:] for line in table.stdout.splitlines()]
    assert any(name.startswith("kvseek_attend") for _, name in kinds)
    assert [name for kind, name in kinds if kind in "WVu"] == []


def test_without_a_compiler_the_error_names_the_remedies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelError, match=r"no C\+\+ compiler.*install g\+\+.*--kernels reference"):
        compilation.compile_cpu_library(tmp_path / "cpu.so")
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(KernelError, match="CXX = 'no-such-compiler -m64'"):
        compilation.compile_cpu_library(tmp_path / "cpu.so")


def test_a_failing_compiler_is_quoted_and_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'cannot do that' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", os.fspath(compiler))
    output = tmp_path / "kernels" / "cpu.so"
    output.parent.mkdir()
    output.write_bytes(b"before")
    with pytest.raises(KernelError, match=r"exited with 3[\s\S]*cannot do that"):
        compilation.compile_cpu_library(output)
    assert output.read_bytes() == b"before"
    assert list(output.parent.iterdir()) == [output]
