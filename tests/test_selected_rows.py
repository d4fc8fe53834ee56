"""SamplingParams.return_selected_rows: the rows that decode steps select, of all methods, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.support.device_stand_ins import make_decoder
from tests.support.prefill import run_prefill
from tests.test_score import LIMITS, WINDOW, directory
from torch import Tensor

from kvseek import LLM, RequestError, RowReport, SamplingParams
from kvseek.core.batch import Batch, Selection
from kvseek.core.config import read_config
from kvseek.engine.retrieval import Observer
from kvseek.plugins.registry import METHODS

__all__ = ["directory"]  # a fixture
PROMPTS = [[i * 13 % 101 + 3 for i in range(170)], [5, 6, 7]]  # the second attends densely
SINK, LAYERS, KV_HEADS, TOKENS = 4, 3, 2, 20


class Notes(Observer):
    """The places that each layer selected for the first request of a step, by its position and the layer."""

    def __init__(self) -> None:
        self.rows = dict[tuple[int, int], list[list[int]] | None]()

    def selected(self, layer: int, queries: Tensor, batch: Batch, selection: Selection | None) -> None:
        position = int(batch.column("position")[0])
        rows = None if selection is None else [[p for p in own if p >= 0] for own in selection.rows[0].tolist()]
        self.rows[position, layer] = rows


@pytest.mark.parametrize("method", METHODS)
def test_they_are_what_each_layer_selected(method: str, directory: Callable[[str], Path]) -> None:
    """One by one and in blocks, beside a request that attends densely and one that does not ask; no token changes."""
    notes = Notes()
    with LLM(directory(method)) as llm:
        plain = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        ask = SamplingParams(max_tokens=TOKENS, ignore_eos=True, return_selected_rows=RowReport(block=1))
        expected = llm.generate([*PROMPTS, PROMPTS[0]], plain)
        llm.engine.decoder.retrieval.observer = notes
        outputs = llm.generate([*PROMPTS, PROMPTS[0]], [ask, ask, plain])
        coarse = SamplingParams(
            max_tokens=3, ignore_eos=True, return_selected_rows=RowReport(16, layers=(1, 2), kv_heads=(1,))
        )
        (blocks,) = llm.generate(PROMPTS[0], coarse)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert outputs[2].selected_rows is None
    for output in outputs[:2]:
        assert output.selected_rows is not None
        assert [rows is None for rows in output.selected_rows] == [True] + [False] * (TOKENS - 1)
    for number, rows in enumerate(outputs[0].selected_rows or ()):
        if rows is None:
            continue
        position = len(PROMPTS[0]) + number - 1
        assert (rows.cached_tokens, rows.start) == (position + 1, SINK)
        assert 16 <= rows.cached_tokens - rows.stop <= 16 + 8  # local window and update buffer
        for layer in range(LAYERS):
            noted = notes.rows.get((position, layer))
            for head in range(KV_HEADS):
                found = rows.of(layer, head)
                assert (found is None) == (noted is None)
                if found is not None and noted is not None:
                    assert found == {SINK + place: 1 for place in sorted(noted[head])}
    for rows in (outputs[1].selected_rows or ())[1:]:
        assert (rows.dense, rows.size) == ((0, 1, 2), 0)
    fine, coarse_rows = (outputs[0].selected_rows or ())[1], (blocks.selected_rows or ())[1]
    assert fine is not None
    assert coarse_rows is not None
    for layer in (1, 2):
        places = fine.of(layer, 1)
        assert coarse_rows.of(layer, 1) == (None if places is None else Counter(place // 16 for place in places))
    with pytest.raises(KeyError, match="layer 0, KV head 1"):
        coarse_rows.of(0, 1)


def test_a_gpus_step_copies_each_layers_rows(random_model: RandomModel, build_engine: BuildEngine) -> None:
    """Its layers may write one buffer after the other; a request that fills up the bucket and one that is dense are left out."""
    own = ("--kernels", "reference", "--flat.top_k", "12")
    directory = build_engine(random_model("llama"), "flat", *WINDOW, *LIMITS, *own)
    decoder, notes = make_decoder(directory), Notes()
    for slot, prompt in enumerate(PROMPTS):
        run_prefill(decoder, slot, prompt, 20)
    decoder.retrieval.observer = notes
    asked = RowReport(block=1).fitted(decoder.config, 240)
    launched = decoder.launch([9, 8], [0, 1], [None, None], {0: asked, 1: asked})
    launched.collect()
    reports = launched.selected_rows()
    for layer in range(LAYERS):
        noted = notes.rows[len(PROMPTS[0]), layer]
        assert noted is not None
        assert [reports[0].of(layer, head) for head in range(KV_HEADS)] == [
            {SINK + place: 1 for place in sorted(own)} for own in noted
        ]
    assert reports[1].dense == (0, 1, 2)
    assert decoder.launch([9, 8], [0, 1], [None, None]).selected_rows() == {}


def test_what_cannot_be_reported_is_refused(directory: Callable[[str], Path]) -> None:
    config = read_config(directory("nested"))
    assert RowReport().fitted(config, 240) == RowReport(16, (0, 1, 2), (0, 1))
    assert RowReport().fitted(config, 1 << 20).block == 128  # 6 lists of 8,192 numbers
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"layers": (3,)}, r"return_selected_rows.layers = \[3\]: must be in \[0, 3\)"),
        ({"kv_heads": (1, 0)}, "kv_heads = .*: must be numbers that ascend"),
        ({"block": 0}, r"return_selected_rows.block = 0: must be in \[1, 1048576\]; leave it out"),
        ({"block": 1}, "must be <= 65536; take a larger block"),
    )
    for fields, message in cases:
        with pytest.raises(RequestError, match=message):
            RowReport(**fields).fitted(config, 1_000_000)
    with LLM(directory("nested")) as llm:
        with pytest.raises(RequestError, match=r"return_selected_rows.layers = \[9\]"):
            llm.generate([3], SamplingParams(max_tokens=9, return_selected_rows=RowReport(layers=(9,))))
        decoder: Any = llm.engine.decoder
        decoder.__class__ = type("OneOfSeveral", (type(decoder),), {"reports_rows": False})
        with pytest.raises(
            RequestError, match="return_selected_rows: is given: must be absent with --runtime tensorrt"
        ):
            llm.generate([3], SamplingParams(max_tokens=9, return_selected_rows=True))
    with pytest.raises(RequestError, match="return_selected_rows = 'yes'"):
        SamplingParams(return_selected_rows="yes")  # type: ignore[arg-type]
