"""What an observer is told of decode steps: parts in order, what each layer selected, and nothing of dense requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.support.device_stand_ins import make_decoder
from tests.support.prefill import run_prefill
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.engine.engine import Engine
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.retrieval import OPS, Observer

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "40")
LIMITS = ("--max_batch_size", "3", "--max_seq_len", "400", "--prefill_chunk_tokens", "50", "--kernels", "reference")
PROMPT = torch.arange(180).mul(7).remainder(100).tolist()
LAYERS = range(3)
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

    monkeypatch.setattr(retrieval, "attentions", [recording(layer) for layer in LAYERS])
    decoder.decode([5, 6], [0, 2])
    assert notes.parts == ["begin", *OPS[1:-1] * 3, "head"]
    assert notes.steps == [[0, 2]]
    assert [layer for layer, *_ in notes.selections] == list(LAYERS)
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
    assert [(layer, slots) for layer, slots, _, _ in notes.selections] == [(layer, [1]) for layer in LAYERS]


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
    assert len(notes.selections) == 6 * len(LAYERS)


def test_parts_cover_a_step_of_the_gpu(directories: dict[str, Path]) -> None:
    """There dense requests are observed too: batches are not taken apart."""
    decoder = make_decoder(directories["flat"])
    notes = begin(decoder, {0: PROMPT[:25], 1: PROMPT})
    decoder.decode([5, 6], [0, 1])
    assert notes.parts == ["begin", *OPS[1:-1] * len(LAYERS), "head"]
    assert [(layer, slots) for layer, slots, _, _ in notes.selections] == [(layer, [0, 1]) for layer in LAYERS]
