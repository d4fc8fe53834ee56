"""Nested key codes of the compiled kernel against those of the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels.reference.codes import stores
from tests.plugins.index_cases import KV_HEADS, context_of

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import IndexContext
from kvseek.kernels.cpu.codes.store import NativeCodeStore
from kvseek.kernels.reference.codes.key_codes import leading_bits, mean_integers
from kvseek.kernels.reference.codes.rotation import padded_dim, rotation_signs
from kvseek.kernels.reference.codes.store import CodeStore


def context(library: CpuLibrary, dim: int, lengths: list[int], dtype: torch.dtype, group: int = 1) -> IndexContext:
    table = ExtentTable(len(lengths), 4, 4 * len(lengths))
    for slot in reversed(range(len(lengths))):
        table.reserve(slot, lengths[slot])
    return context_of(None, dim, group, table, lengths, library=library, dtype=dtype)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dim", [2, 8, 20, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_encoding_equals_the_reference(
    library: CpuLibrary, level: int, dtype: torch.dtype, dim: int, bits: int
) -> None:
    torch.manual_seed(dim)
    lengths, signs = [1500, 0, 6], rotation_signs(1, padded_dim(dim))
    expected, found = (
        kind(context(library, dim, lengths, dtype), signs, bits) for kind in (CodeStore, NativeCodeStore)
    )
    found.high.fill_(255)
    found.low.fill_(255)
    found.scales.fill_(float("nan"))
    for slot, n in enumerate(lengths):
        keys = (torch.randn(KV_HEADS, n, dim) * (0.1 + 3 * torch.rand(KV_HEADS, n, 1)) + 1).to(dtype)
        if n > 8:
            keys[:, 8] *= 1e6  # its scale is beyond float16
        for store in (expected, found):
            store.append(slot, 0, keys[:, : n // 2])  # which ends inside a block
            store.append(slot, n // 2, keys[:, n // 2 :])
        ours, theirs = found.read(slot, n), expected.read(slot, n)
        if n > 8:  # what is left of its block, less a mean of thousands, is rounding
            for codes in (ours, theirs):
                assert codes.scales[:, 8].eq(65504).all()
                for array in vars(codes).values():
                    array[:, :256] = 0
        steps = (leading_bits(ours, bits).int() - leading_bits(theirs, bits).int()).abs()
        assert not bool((steps > 1).any())
        assert int((steps > 0).sum()) <= max(1, steps.numel() // 10_000)  # a channel within rounding of a border
        torch.testing.assert_close(ours.scales, theirs.scales, rtol=2e-2, atol=1e-7)
        assert n == 0 or (mean_integers(ours.means) - mean_integers(theirs.means)).abs().max() <= 1
        torch.testing.assert_close(ours.mean_steps, theirs.mean_steps)


@pytest.mark.parametrize("update", [256, 320, 24, 7])
@pytest.mark.parametrize("kind", [CodeStore, NativeCodeStore])
def test_codes_do_not_depend_on_how_the_keys_came(library: CpuLibrary, kind: type[CodeStore], update: int) -> None:
    """All at once, or some as a prompt and the others by evictions, at other extents, with any number of threads."""
    torch.manual_seed(update)
    total = 2600 // update * update
    keys, signs = torch.randn(KV_HEADS, total, 64) + 3 * torch.randn(KV_HEADS, 1, 64), rotation_signs(1, 64)
    store = kind(replace(context(library, 64, [total, total], torch.float32), update=update), signs)
    stores.poison(store)
    store.append(0, 0, keys)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 + threads % 2)
        prompt = total // 2 // update * update
        store.append(1, 0, keys[:, :prompt])
        for start in range(prompt, total, update):
            store.append(1, start, keys[:, start : start + update])
    finally:
        torch.set_num_threads(threads)
    for whole, grown in zip(vars(store.read(0, total)).values(), vars(store.read(1, total)).values(), strict=True):
        assert torch.equal(whole, grown)


def test_what_kernels_do_not_support_is_refused(library: CpuLibrary) -> None:
    signs = rotation_signs(0, 64)
    store = NativeCodeStore(context(library, 64, [10], torch.float32), signs)
    with pytest.raises(KernelError, match=r"keys: torch\.bfloat16 on cpu: must be torch\.float32 on cpu"):
        store.append(0, 0, torch.zeros(KV_HEADS, 10, 64, dtype=torch.bfloat16))
    for dim, group, dtype, message in (
        (264, 1, torch.float32, "head_dim = 264"),
        (64, 17, torch.float32, r"num_heads / num_kv_heads = 17: must be at most 16; .*--kernels reference"),
        (64, 1, torch.float16, r"dtype = torch\.float16: must be float32 or bfloat16"),
    ):
        with pytest.raises(KernelError, match=message):
            NativeCodeStore(context(library, dim, [10], dtype, group), rotation_signs(0, padded_dim(dim)))
