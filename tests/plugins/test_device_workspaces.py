"""Intermediate results of selections on a GPU: loading an engine has to know their bytes. Counted here without a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.cases import ON_GPU
from tests.plugins.index_cases import KV_HEADS, context_of

from kvseek.core.batch import BUCKETS, Batch, RequestState, most_requests
from kvseek.core.extents import ExtentTable
from kvseek.engine.loading.memory import HOPPER, META, MetaBytes, UnloadedKernels
from kvseek.plugins.contract import Index
from kvseek.plugins.registry import METHODS, get_method

GROUP, DIM, LAYER = 4, 128, 3  # some methods select nothing in the first layers


def make_index(method: str, slots: int) -> Index:
    entry = get_method(method)
    config, table = entry.configure({}), ExtentTable(slots, 4, 4, META)
    books = {name: book.to(META) for name, book in entry.traits(config).codebooks(DIM).items()}
    fields = {"codebooks": books, "device": META, "cuda": UnloadedKernels(HOPPER), "layer": LAYER}
    return entry.create(context_of(config, DIM, GROUP, table, [0] * slots, **fields))


@pytest.mark.parametrize(
    ("method", "slots"),
    [(method, slots) for method in ON_GPU for slots in (2, 4, 65) if method in METHODS or slots == 4],
)
def test_steps_of_every_batch_size_take_no_memory_that_loading_has_not_counted(method: str, slots: int) -> None:
    with MetaBytes() as count:
        index = make_index(method, slots)
        before = count.used
        for size in BUCKETS:
            if size <= most_requests(slots):
                state = RequestState(slot=slots - 1, length=0, dense=True)
                batch = Batch.of([state] * size, index.context.extents.device_table)
                index.select(torch.zeros(size, KV_HEADS * GROUP, DIM, device=META), batch)
        del batch
        assert count.used == before
