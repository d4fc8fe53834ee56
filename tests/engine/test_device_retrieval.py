"""What retrieval on a GPU is made of: which layers keep hot rows, and what invalidates them. Kernels launch nothing here."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.engine.cache.test_dry_run import SMALL, codebooks, engine

from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import lay_out_rows, layer_extent_bytes
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.loading.indexes import IndexMaker, device_retrieval
from kvseek.engine.loading.memory import HOPPER, UnloadedKernels
from kvseek.engine.retrieval import Retrieval
from kvseek.kernels.cuda.attention.attend import LayerAttention

CPU, META = torch.device("cpu"), torch.device("meta")
DTYPE = torch.bfloat16
ON_DEVICE = 2  # of five layers


def make(
    method: str, device: torch.device = META, *, hot_rows: bool = True, **fields: int
) -> tuple[Retrieval, list[LayerAttention]]:
    """Retrieval of five layers, on a device that holds the rows of two; on the CPU host and device are the same."""
    config = engine(SMALL, method, fields)
    extents = config.max_batch_size * config.max_seq_len // 1024
    limits = {"kv_cache_device_memory_bytes": ON_DEVICE * extents * layer_extent_bytes(config, DTYPE)}
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, offload="auto", **limits))
    kernels = UnloadedKernels(HOPPER)
    kernels.device = device
    layout = lay_out_rows(config, DTYPE, None)
    assert layout.device_layers == ON_DEVICE
    cache = Cache(config, DTYPE, device, RowStorage(config, DTYPE, device, layout))
    indexes = IndexMaker(config, codebooks(config), None, kernels).over(cache)
    retrieval = device_retrieval(config, cache, indexes, kernels, hot_rows=hot_rows)
    attentions = [one for one in retrieval.attentions if isinstance(one, LayerAttention)]
    assert len(attentions) == SMALL.num_layers
    return retrieval, attentions


def test_layers_whose_rows_lie_on_the_host_keep_hot_rows() -> None:
    retrieval, attentions = make("pariskv")
    assert [one.kernel.hot is not None for one in attentions] == [False, False, True, True, True]
    assert list(retrieval.hot_rows) == [one.kernel.hot for one in attentions[ON_DEVICE:]]
    assert all(one.kernel.hot is None for one in make("pariskv", hot_rows=False)[1])


def test_a_layers_attention_has_the_layers_memory() -> None:
    retrieval, attentions = make("pariskv", CPU)
    for layer, one in enumerate(attentions):
        assert one.window.data_ptr() == retrieval.cache.window[layer].data_ptr()
        assert one.rows.pointer == retrieval.cache.rows.of_layer(layer).pointer


def test_a_method_says_of_how_many_steps() -> None:
    assert all(one.kernel.hot is None for one in make("full")[1]), "it selects no rows"
    assert all(one.kernel.hot is None for one in make("clusterkv", cache_steps=0)[1])
    kept = [one.kernel.hot for one in make("clusterkv", cache_steps=2)[1]]
    assert [hot is None or tuple(hot.rows.shape[2:4]) for hot in kept] == [True, True, (3, 512), (3, 512), (3, 512)]


def test_steps_that_are_not_kept_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    _, attentions = make("clusterkv", top_k=8192, candidates=1, cache_steps=8)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "steps whose rows stay on the device = 8: must be <= 6 with 8192 selected rows"
    )
    hot = attentions[-1].kernel.hot
    assert hot.rows.shape[2] == 7


def test_a_prompt_invalidates_what_its_slot_kept() -> None:
    retrieval, _ = make("pariskv", CPU)
    for hot in retrieval.hot_rows:
        hot.places.fill_(7)
    retrieval.expect(1, 100)
    for hot in retrieval.hot_rows:
        assert (hot.places[1] == -1).all()
        assert (hot.places[0] == 7).all(), "those of other slots hold"


def test_layers_that_select_alike_share_scratch() -> None:
    _, attentions = make("pariskv")
    assert len({id(one.kernel.scratch) for one in attentions}) == 1
