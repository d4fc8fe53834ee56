"""What retrieval on a GPU is made of: which layers keep hot rows, and what invalidates them. Kernels launch nothing here."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.engine.cache.test_dry_run import SMALL, codebooks, engine

from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import lay_out_rows, layer_extent_bytes
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.loading.dry_run import HOPPER, UnloadedKernels
from kvseek.engine.loading.indexes import IndexMaker, device_retrieval
from kvseek.engine.retrieval import Retrieval
from kvseek.plugins.attention.device import LayerAttention

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
ON_DEVICE = 2  # of five layers


def make(method: str, *, hot_rows: bool = True) -> tuple[Retrieval, list[LayerAttention]]:
    config = engine(SMALL, method, {})
    extents = config.max_batch_size * config.max_seq_len // 1024
    limits = {"kv_cache_device_memory_bytes": ON_DEVICE * extents * layer_extent_bytes(config, DTYPE)}
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, offload="auto", **limits))
    kernels = UnloadedKernels(HOPPER)
    kernels.device = CPU
    layout = lay_out_rows(config, DTYPE, None)
    assert layout.device_layers == ON_DEVICE
    cache = Cache(config, DTYPE, CPU, RowStorage(config, DTYPE, CPU, layout))
    indexes = IndexMaker(config, codebooks(config), None, kernels).over(cache)
    retrieval = device_retrieval(config, cache, indexes, kernels, hot_rows=hot_rows)
    attentions = [one for one in retrieval.attentions if isinstance(one, LayerAttention)]
    assert len(attentions) == SMALL.num_layers
    return retrieval, attentions


def test_layers_whose_rows_lie_on_the_host_keep_hot_rows() -> None:
    retrieval, attentions = make("pariskv")
    assert [one.kernel.hot_rows is not None for one in attentions] == [False, False, True, True, True]
    for layer, one in enumerate(attentions):
        assert one.window.data_ptr() == retrieval.cache.window[layer].data_ptr()
        assert one.rows.pointer == retrieval.cache.rows.of_layer(layer).pointer
    assert all(one.kernel.hot_rows is None for one in make("pariskv", hot_rows=False)[1])


@pytest.mark.parametrize("method", ["full", "clusterkv"])
def test_nothing_selected_or_stored_by_the_method_is_kept_twice(method: str) -> None:
    assert all(one.kernel.hot_rows is None for one in make(method)[1])


def test_a_prompt_invalidates_what_its_slot_kept() -> None:
    retrieval, attentions = make("pariskv")
    tags = [one.kernel.hot_tags for one in attentions if one.kernel.hot_tags is not None]
    for tag in tags:
        tag.fill_(7)
    retrieval.expect(1, 100)
    for tag in tags:
        assert (tag[1] == -1).all()
        assert (tag[[0, 2]] == 7).all(), "those of other slots hold"


def test_layers_that_select_alike_share_scratch() -> None:
    _, attentions = make("pariskv")
    assert len({id(one.kernel.scratch) for one in attentions}) == 1
