"""What lies between layers and cache: builds beside the prompt, hot rows, what prompts invalidate, what observers are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine.cache.test_dry_run import SMALL, codebooks, engine
from tests.support.cache_runs import CPU, LAYERS, KeyList, make_cache, make_config, read_rows, rows_of
from tests.support.device_stand_ins import make_decoder
from tests.support.prefill import run_prefill
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.errors import KvseekError
from kvseek.core.streams import SideWork
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import lay_out_rows, layer_extent_bytes
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.engine import Engine
from kvseek.engine.loading.indexes import IndexMaker, device_retrieval
from kvseek.engine.loading.memory import HOPPER, UnloadedKernels
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.retrieval import BUILDS_IN_FLIGHT, OPS, Observer, Retrieval
from kvseek.kernels.cuda.attention.attend import LayerAttention
from kvseek.plugins.contract import Budget

MADE = make_config(4, 8, 8, offload="always")
CONFIG = dataclasses.replace(MADE, cache=dataclasses.replace(MADE.cache, full_threshold=30))
TOKENS = 100


class Build(SideWork):
    """Notes in `waits` that it was waited for; it runs until then."""

    def __init__(self, layer: int, waits: list[int]) -> None:
        super().__init__(CPU, None)
        self.layer, self.waits = layer, waits

    @property
    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self.waits.append(self.layer)


class SideIndex(KeyList):
    """Builds beside the prompt, and selects a number of rows that depends on the layer."""

    waits: list[int]

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> SideWork | None:
        super().build(slot, keys, queries)
        return Build(self.context.layer, self.waits)

    def budget(self, length: int) -> Budget:
        return Budget(10.0 * (self.context.layer + 1), (length, self.context.layer))


class UpkeptIndex(SideIndex):
    """Notes the slots whose upkeep it is asked for."""

    def refresh(self, slots: Sequence[int]) -> None:
        self.waits += slots


class Forgetful:
    """Stands for the hot rows of a layer."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def forget(self, slot: int) -> None:
        self.forgotten.append(slot)


@pytest.fixture
def waits() -> list[int]:
    return []


@pytest.fixture
def hot() -> Forgetful:
    return Forgetful()


@pytest.fixture
def retrieval(waits: list[int], hot: Any) -> Retrieval:
    cache = make_cache(CONFIG)
    indexes = [SideIndex(layer, cache) for layer in range(LAYERS)]
    for index in indexes:
        index.waits = waits
    return Retrieval(CONFIG, cache, indexes, [], [hot])


def read(retrieval: Retrieval, slot: int, layers: int = LAYERS, tokens: int = TOKENS) -> None:
    """Store the first layers of a prompt."""
    retrieval.cache.open(slot, tokens + 20)
    retrieval.expect(slot, tokens)
    for layer in range(layers):
        keys = rows_of(slot, layer, torch.arange(tokens))
        retrieval.store_layer(layer, slot, keys, -keys, keys)


def test_few_builds_run_beside_a_prompt(retrieval: Retrieval, waits: list[int]) -> None:
    assert BUILDS_IN_FLIGHT == 2
    read(retrieval, 0)
    assert waits == [0], "the third layer's build began when the first had ended"
    retrieval.finish_indexes(0)
    assert waits == [0, 1, 2]


def test_a_slots_next_prompt_follows_the_builds_of_one_that_was_given_up(
    retrieval: Retrieval, waits: list[int], hot: Forgetful
) -> None:
    read(retrieval, 1, 2)
    retrieval.cache.close(1)
    assert waits == []
    read(retrieval, 1, 0)
    assert waits == [0, 1]
    assert hot.forgotten == [1, 1], "each prompt makes the hot rows of the slot's last request invalid"


def test_rows_lie_in_the_order_of_their_tokens(retrieval: Retrieval) -> None:
    read(retrieval, 2)
    retrieval.finish_rows(2)
    cache, n = retrieval.cache, retrieval.cache.lengths[2]
    for layer in range(LAYERS):
        found = read_rows(cache, layer, 2)
        assert torch.equal(found[:, :, 0], rows_of(2, layer, torch.arange(4, 4 + n)))


def test_what_a_step_attends_to(retrieval: Retrieval) -> None:
    """Rows are the mean over the layers, 20 here. Short requests are dense, and those whose region has no more rows."""
    for slot, tokens in enumerate((TOKENS, 28, 31)):
        read(retrieval, slot, tokens=tokens)
    states, attended = retrieval.begin_step([7, 8, 9], [0, 1, 2])
    batch = Batch(states, retrieval.cache.extents.table)
    assert batch.column("token").tolist() == [7, 8, 9]
    assert batch.column("length").tolist() == [88, 16, 16]
    assert batch.column("dense").tolist() == [False, True, True]
    assert attended == [4 + 9 + 20, 29, 32]
    assert states[:, 9:11].tolist() == [[88, 0], [16, 0], [16, 0]], "the first layer's: alike in all"


def test_upkeep_is_for_slots_that_select(waits: list[int]) -> None:
    """A slot attends to everything while it is short: in its 30th token's step it selects rows for the first time."""
    cache = make_cache(CONFIG)
    index = UpkeptIndex(0, cache)
    index.waits = waits
    retrieval = Retrieval(CONFIG, cache, [index], [])
    for slot, tokens in enumerate((TOKENS, 28)):
        read(retrieval, slot, 1, tokens)
        retrieval.finish_indexes(slot)
    upkept = []
    for _ in range(3):
        waits.clear()
        retrieval.begin_step([7, 8], [0, 1])
        retrieval.refresh([0, 1])
        upkept.append(list(waits))
    assert upkept == [[0], [0, 1], [0, 1]]
    retrieval.refresh([1])
    assert waits[-1] == 1


META = torch.device("meta")
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


WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "40")
LIMITS = ("--max_batch_size", "3", "--max_seq_len", "400", "--prefill_chunk_tokens", "50", "--kernels", "reference")
PROMPT = torch.arange(180).mul(7).remainder(100).tolist()
WATCHED = range(3)
Seen = list[tuple[int, list[int], Tensor, Selection | None]]


class Notes(Observer):
    """All that the observer was told."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.selections: Seen = []
        self.steps: list[list[int]] = []

    def op_launched(self, name: str) -> None:
        self.parts.append(name)

    def selected(self, layer: int, queries: Tensor, batch: Batch, selection: Selection | None) -> None:
        self.selections.append((layer, batch.column("slot").tolist(), queries, selection))

    def step_ended(self, slots: Sequence[int]) -> None:
        self.steps.append(list(slots))


@pytest.fixture(scope="module")
def directories(random_model: RandomModel, build_engine: BuildEngine) -> dict[str, Path]:
    model = random_model("llama")
    flags = {"full": (), "flat": ("--flat.top_k", "12")}
    return {method: build_engine(model, method, *WINDOW, *LIMITS, *own) for method, own in flags.items()}


def begin(decoder: Decoder, prompts: dict[int, list[int]]) -> Notes:
    for slot, prompt in prompts.items():
        run_prefill(decoder, slot, prompt, 20)
    notes = Notes()
    decoder.observe(notes)
    return notes


def test_selections_are_what_attention_attends_to(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Engine.load(directories["flat"]).decoder
    notes, attended = begin(decoder, {2: PROMPT, 0: PROMPT[30:130]}), Seen()
    retrieval = decoder.retrieval

    def recording(layer: int) -> object:
        attention = retrieval.attentions[layer]

        def attend(queries: Tensor, batch: Batch, selection: Selection | None) -> Tensor:
            attended.append((layer, batch.slots, queries, selection))
            return attention(queries, batch, selection)

        return attend

    monkeypatch.setattr(retrieval, "attentions", [recording(layer) for layer in WATCHED])
    decoder.decode([5, 6], [0, 2])
    assert notes.parts == ["begin", *OPS[1:-1] * 3, "head"]
    assert notes.steps == [[0, 2]]
    assert [layer for layer, *_ in notes.selections] == list(WATCHED)
    for told, used in zip(notes.selections, attended, strict=True):
        assert told[:2] == used[:2] == (told[0], [0, 2])
        assert told[2] is used[2]
        assert told[3] is used[3]
        assert told[3] is not None
        assert (told[3].rows >= 0).sum(dim=2).tolist() == [[12, 12]] * 2


def test_nothing_is_told_of_dense_requests(directories: dict[str, Path]) -> None:
    decoder = Engine.load(directories["flat"]).decoder
    notes = begin(decoder, {0: PROMPT[:25], 1: PROMPT})  # the first is below full_threshold
    decoder.decode([5], [0])
    assert not notes.selections
    decoder.decode([5, 6], [0, 1])
    assert [(layer, slots) for layer, slots, _, _ in notes.selections] == [(layer, [1]) for layer in WATCHED]


def test_a_method_that_keeps_everything_selects_nothing(directories: dict[str, Path]) -> None:
    decoder = Engine.load(directories["full"]).decoder
    notes = begin(decoder, {0: PROMPT})
    decoder.decode([5], [0])
    assert not notes.selections, "all of its requests are dense"


def test_an_observer_changes_nothing_and_can_be_replaced(directories: dict[str, Path]) -> None:
    decoder, other = (Engine.load(directories["flat"]).decoder for _ in range(2))
    notes = begin(decoder, {0: PROMPT})
    run_prefill(other, 0, PROMPT, 20)
    for step in range(12):
        assert torch.equal(decoder.decode([step], [0])[0], other.decode([step], [0])[0])
        if step == 5:
            decoder.observe(Observer())
    assert len(notes.selections) == 6 * len(WATCHED)


def test_parts_cover_a_step_of_the_gpu(directories: dict[str, Path]) -> None:
    """There dense requests are observed too: batches are not taken apart."""
    decoder = make_decoder(directories["flat"])
    notes = begin(decoder, {0: PROMPT[:25], 1: PROMPT})
    decoder.decode([5, 6], [0, 1])
    assert notes.parts == ["begin", *OPS[1:-1] * len(WATCHED), "head"]
    assert [(layer, slots) for layer, slots, _, _ in notes.selections] == [(layer, [0, 1]) for layer in WATCHED]


@pytest.mark.parametrize(
    ("architecture", "layers"), [("qwen3_5", "Gated DeltaNet layers"), ("gemma3", "sliding windows")]
)
def test_a_step_takes_eight_tokens_of_a_slot(
    architecture: str, layers: str, random_model: RandomModel, build_engine: BuildEngine
) -> None:
    """A ring has no room for more, which would be written over rows that the first of them attends to."""
    decoder = Engine.load(build_engine(random_model(architecture), "full")).decoder
    run_prefill(decoder, 1, [5, 6, 7], 10)
    tokens = list(decoder.cache.tokens)
    with pytest.raises(KvseekError, match=rf"one occurs 9 times: must be at most 8 with {layers}"):
        decoder.decode([9] * 9, [1] * 9)
    assert decoder.cache.tokens == tokens
