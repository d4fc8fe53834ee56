"""What holds for the compiled indexes of all methods on the CPU: they select what their PyTorch references select."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.conftest import LEVELS
from tests.plugins.clusterkv.test_native import Pair as ClusterKV
from tests.plugins.index_cases import KV_HEADS, SHAPES, NativePair, keys_of_slots, select_rows
from tests.plugins.nested.test_indexes import Pair as Nested
from tests.plugins.pariskv.test_indexes import Pair as ParisKV
from tests.plugins.prkv.test_native import Pair as PRKV
from tests.support.instruction_levels import limited
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError

PAIRS: tuple[type[NativePair], ...] = (Nested, ParisKV, PRKV, ClusterKV)


def variants(few: bool) -> pytest.MarkDecorator:
    """A method's pair with each of its configurations, or with the few that are run at every instruction level."""
    found = []
    for pair in PAIRS:
        name = pair.method.__name__.split(".")[-2]
        chosen = pair.configs[: pair.few] if few else pair.configs
        found += [pytest.param(pair, config, id=f"{name}-{number}") for number, config in enumerate(chosen)]
    return pytest.mark.parametrize(("pair", "config"), found)


OF_EVERY_METHOD = pytest.mark.parametrize("pair", PAIRS)


@variants(few=False)
@pytest.mark.parametrize(("dim", "group", "dtype"), SHAPES)
def test_selection_equals_the_reference(
    library: CpuLibrary, pair: type[NativePair], config: Any, dim: int, group: int, dtype: torch.dtype
) -> None:
    """At the processor's best instruction level, which is LEVELS' last or lower, and with few configurations at all others."""
    torch.manual_seed(group)
    made = pair(library, config, group, dim, keys_of_slots([1500, 1, 3100 if dim < 256 else 900, 100], dim, dtype))
    for _ in range(pair.steps):
        made.check(torch.randn(4, KV_HEADS * group, dim).to(dtype), [2, 0, 3, 1])
    for level in LEVELS[:-1] if config in pair.configs[: pair.few] else ():
        with limited(library, level):
            made.check(torch.randn(1, KV_HEADS * group, dim).to(dtype), [2])


@OF_EVERY_METHOD
def test_selection_does_not_depend_on_batch_order_or_threads(library: CpuLibrary, pair: type[NativePair]) -> None:
    torch.manual_seed(3)
    config = pair.configs[0]
    index = pair(library, config, 3, 64, keys_of_slots([900, 3100, 1300], 64)).found
    queries = torch.randn(3, 3 * KV_HEADS, 64)
    torch.set_num_threads(3)  # the next test has as many as at first (conftest.py)
    together = select_rows(index, queries, [0, 1, 2]).rows
    assert torch.equal(select_rows(index, queries[[2, 0, 1]], [2, 0, 1]).rows, together[[2, 0, 1]])
    torch.set_num_threads(1)
    for slot in range(3):
        assert torch.equal(select_rows(index, queries[slot : slot + 1], [slot]).rows[0], together[slot])


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair is not PRKV])  # whose rows are of pages
def test_equal_keys_are_taken_from_the_front(library: CpuLibrary, pair: type[NativePair]) -> None:
    made = pair(library, pair.configs[0], 2, 64, [torch.randn(KV_HEADS, 1, 64).expand(-1, 500, -1)])
    queries = torch.randn(1, 2 * KV_HEADS, 64)
    for index in (made.expected, made.found):
        assert select_rows(index, queries, [0]).rows.tolist() == [[list(range(pair.configs[0].top_k))] * KV_HEADS]


def check_valid(pair: type[NativePair], rows: Tensor, n: int, config: Any) -> None:
    for own in rows.flatten(0, 1):
        taken = own[own >= 0]
        assert 0 <= config.top_k - len(taken) < getattr(config, "page", 1)  # a page that does not fit is left out
        assert int(taken.max()) < n
        assert len(taken.unique()) == len(taken)
        assert not pair.ascending or bool((taken.diff() > 0).all())


@variants(few=True)
def test_strange_queries_still_give_valid_rows(library: CpuLibrary, pair: type[NativePair], config: Any) -> None:
    index = pair(library, config, 3, 64, keys_of_slots([3000], 64)).found
    for level, value in itertools.product(LEVELS, (float("nan"), float("inf"), 0.0)):
        with limited(library, level):
            rows = select_rows(index, torch.full((1, 3 * KV_HEADS, 64), value), [0]).rows
        check_valid(pair, rows, 3000, config)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@variants(few=True)
def test_strange_keys_still_give_valid_rows(
    library: CpuLibrary, level: int, pair: type[NativePair], config: Any, value: float
) -> None:
    index = pair.kinds[1](pair.context(library, config, 3, 64, [900]))
    keys = keys_of_slots([900], 64)[0]
    keys[:, 5] = value
    index.build(0, keys, torch.randn(3 * KV_HEADS, 32, 64))
    check_valid(pair, select_rows(index, torch.randn(1, 3 * KV_HEADS, 64), [0]).rows, 900, config)


@OF_EVERY_METHOD
def test_create_follows_the_library(library: CpuLibrary, pair: type[NativePair]) -> None:
    config = pair.configs[0]
    for given, kind in zip((None, library), pair.kinds, strict=True):
        assert type(pair.method.create(pair.context(given, config, 1, 64, [10]))) is kind


@OF_EVERY_METHOD
def test_unsupported_queries_are_refused(library: CpuLibrary, pair: type[NativePair]) -> None:
    index = pair.kinds[1](pair.context(library, pair.configs[0], 1, 64, [10]))
    with pytest.raises(KernelError, match=r"queries: torch\.bfloat16 on cpu: must be torch\.float32 on cpu"):
        select_rows(index, torch.zeros(1, KV_HEADS, 64, dtype=torch.bfloat16), [0])


@pytest.mark.parametrize(
    ("group", "dim", "message"),
    [(17, 64, "num_heads / num_kv_heads = 17: must be at most 16"), (1, 264, "head_dim = 264: must be at most 256")],
)
@variants(few=False)
def test_unsupported_shapes_are_refused(
    library: CpuLibrary, pair: type[NativePair], config: Any, group: int, dim: int, message: str
) -> None:
    with pytest.raises(KernelError, match=f"{message}.*--kernels reference"):
        pair.kinds[1](pair.context(library, config, group, dim, [10]))
