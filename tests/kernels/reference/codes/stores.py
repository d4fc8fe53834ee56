"""What tests do with the arrays of a CodeStore: poison them, copy them, compare the codes in them."""

from __future__ import annotations

from kvseek.kernels.reference.codes.key_codes import leading_bits, mean_integers
from kvseek.kernels.reference.codes.store import CodeStore

ARRAYS = ("high", "low", "scales", "means", "mean_steps")


def poison(store: CodeStore) -> None:
    """Fill all arrays with what no code has."""
    for name in ARRAYS:
        array = getattr(store, name)
        array.fill_(float("nan") if array.is_floating_point() else -128 if name == "means" else 255)


def copy(source: CodeStore, target: CodeStore) -> None:
    """Give a store the codes of one over the same extents."""
    for name in ARRAYS:
        getattr(target, name).copy_(getattr(source, name))


def copy_slot(source: CodeStore, target: CodeStore, slot: int, length: int) -> None:
    """Give a store the codes of a slot's first `length` places in one over other extents."""
    codes, extents = source.read(slot, length), target.context.extents
    for name in ("high", "low", "scales"):
        extents.write(getattr(target, name), slot, 0, getattr(codes, name))
    for name, values in (("means", codes.means), ("mean_steps", codes.mean_steps)):
        for place in range(0, length, target.block):
            getattr(target, name)[int(extents.table[slot, place // 1024]), :, place % 1024 // target.block] = values[
                :, place
            ]


def check_same_codes(found: CodeStore, expected: CodeStore, slot: int, length: int) -> None:
    """Equal but for channels at the border of two cells, up to rounding."""
    have, want = found.read(slot, length), expected.read(slot, length)
    assert (mean_integers(have.means.cpu()) - mean_integers(want.means.cpu())).abs().max() <= 1
    apart = (leading_bits(have, found.bits).cpu().int() - leading_bits(want, found.bits).cpu().int()).abs()
    assert apart.max() <= 1
    assert apart.sum() <= 1e-3 * apart.numel() + 2
