"""PRKV's reference: static sets, boxes, pages, updates, and what the contract promises."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tests.plugins.index_cases import KV_HEADS, extend, make_context, random_keys, random_queries, select_rows
from tests.plugins.prkv.settings import BOXES
from torch import Tensor

from kvseek.core.errors import ConfigError
from kvseek.core.index_context import LayerRows
from kvseek.core.model_config import ModelConfig
from kvseek.kernels.reference.codes.key_codes import encode, round_lanes
from kvseek.kernels.reference.codes.rotation import padded_dim, rotate, rotation_signs
from kvseek.plugins.prkv.config import PAGE_SCORES, Config
from kvseek.plugins.prkv.measurements import costs
from kvseek.plugins.prkv.method import traits
from kvseek.plugins.prkv.reference import ReferenceIndex, update_is_due
from kvseek.plugins.prkv.static import candidates, largest, observation_scores, static_first
from kvseek.plugins.prkv.summaries import CODE_BITS, Boxes, Codes, box_scores, read_pages

GROUP, DIM = 3, 32
SIGNS = {"signs": rotation_signs(0, padded_dim(DIM))}
SMALL = Config(top_k=64, static_share=0.25, page=8, window_queries=4, update_interval=8, update_queries=4)
SCORES = pytest.mark.parametrize("page_score", PAGE_SCORES)


class Case:
    """An index over slots with rows in a pool of its own; values are the keys' tokens."""

    def __init__(self, config: Config, lengths: list[int], room: int = 0) -> None:
        capacity = sum(-(-(n + room) // 1024) for n in lengths)
        context = make_context(config, DIM, GROUP, list(lengths), max(8, capacity))
        for slot, n in enumerate(lengths):
            context.extents.reserve(slot, n + room)
        self.pool = torch.full((context.extents.capacity, KV_HEADS, 1024, 2, DIM), torch.nan)
        rows = LayerRows(self.pool, self.pool.data_ptr(), self.pool.stride(0))
        self.context = replace(context, rows=rows, codebooks=SIGNS)
        self.index = ReferenceIndex(self.context)

    def rows(self, keys: Tensor) -> Tensor:
        return torch.stack((keys, keys), dim=2)

    def prompt(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        self.context.lengths[slot] = keys.shape[1]
        self.index.build(slot, keys, queries)
        self.context.extents.write(self.pool, slot, 0, self.rows(keys))

    def extend(self, slot: int, keys: Tensor) -> None:
        self.context.extents.write(self.pool, slot, self.context.lengths[slot], self.rows(keys))
        extend(self.index, slot, keys)

    def selected(self, queries: Tensor, slot: int) -> Tensor:
        """Rows that a step selects, int32 [G, top_k]."""
        return select_rows(self.index, queries, [slot]).rows[0]

    def picked(self, slot: int) -> Tensor:
        """How often each page was selected: int32 [G, pages]."""
        return read_pages(
            self.context, self.index.picked, slot, -(-self.context.lengths[slot] // self.index.config.page)
        )

    def check_summaries(self, slot: int) -> None:
        """Boxes enclose the keys of their pages exactly; codes are those of the rows."""
        n, page, static = self.context.lengths[slot], self.index.config.page, self.index.static_of(slot)
        keys = self.context.extents.read(self.pool, slot, n)[:, :, 0]
        if isinstance(self.index.summaries, Codes):
            store = self.index.summaries.store
            means = store.mean_of(slot, torch.arange(keys.shape[1]))
            high, _, scales = encode(rotate(keys, store.signs) - means, CODE_BITS)
            found = store.read(slot, keys.shape[1])
            assert torch.equal(found.high, high)
            assert torch.equal(found.scales, scales)
            return
        boxes, order = read_pages(self.context, boxes_of(self.index), slot, -(-n // page)), static_first(static, n)
        for number in range(static.shape[1] // page, boxes.shape[1]):
            tokens = order[:, number * page : (number + 1) * page]
            own = keys.gather(1, tokens[..., None].expand(-1, -1, DIM))
            assert torch.equal(boxes[:, number], torch.stack((own.amin(dim=1), own.amax(dim=1)), dim=1)), number


def boxes_of(index: ReferenceIndex) -> Tensor:
    assert isinstance(index.summaries, Boxes)
    return index.summaries.boxes


def window(queries: int = 10, seed: int = 5) -> Tensor:
    return random_queries(KV_HEADS * GROUP, queries, DIM, seed)


def test_observation_scores_are_mean_softmax_weights() -> None:
    keys, queries = random_keys(700, DIM), window()
    found = observation_scores(queries, keys, 0.2)
    for head in range(KV_HEADS):
        weights = (queries[head * GROUP : (head + 1) * GROUP] @ keys[head].T * 0.2).softmax(dim=-1)
        torch.testing.assert_close(found[head], weights.mean(dim=(0, 1)))


def test_observation_scores_do_not_depend_on_how_keys_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = random_keys(1100, DIM), window()
    valid = torch.rand(KV_HEADS, 1100, generator=torch.Generator().manual_seed(0)) > 0.3
    whole = observation_scores(queries, keys, 0.2, valid)
    monkeypatch.setattr("kvseek.plugins.prkv.static.SCORE_BYTES", 1)  # 256 keys at a time
    torch.testing.assert_close(observation_scores(queries, keys, 0.2, valid), whole)
    assert (whole[~valid] == -1).all()
    poisoned = keys.masked_fill(~valid[..., None], torch.nan)
    torch.testing.assert_close(observation_scores(queries, poisoned, 0.2, valid), whole)


def test_the_largest_are_marked_ties_by_lowest_index() -> None:
    values = torch.tensor([[3.0, 1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    assert largest(values, 2).tolist() == [[True, False, True, False, False], [True, False, False, False, True]]
    assert not largest(values, 0).any()
    assert largest(values, 5).all()


def test_candidates_are_the_static_tokens_and_the_pages_picked_most() -> None:
    picked = torch.tensor([[9, 0, 4, 1, 4, 0, 0], [0, 0, 0, 0, 0, 0, 1]], dtype=torch.int32)
    static = torch.tensor([[3, 9, 55], [8, 48, 55]])
    tokens, counts = candidates(static, picked, 8, 2)
    assert counts.tolist() == [18, 9]
    assert tokens.shape == (2, 19)
    assert tokens[0, :18].tolist() == [*range(8), 9, *range(16, 24), 55]
    assert tokens[1, :9].tolist() == [8, *range(48, 56)]
    assert candidates(static, picked, 8, 100)[1].tolist() == [34, 9]


def test_no_page_of_an_extent_that_a_slot_gets_later_has_been_selected() -> None:
    case = Case(SMALL, [1000])
    case.index.picked.fill_(7)  # by whoever had the extents before
    case.prompt(0, random_keys(1000, DIM), window())
    case.context.extents.reserve(0, 1100)
    case.extend(0, random_keys(96, DIM))
    assert case.picked(0).shape == (KV_HEADS, 137)
    assert not case.picked(0).any()


@SCORES
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_static_set_of_a_prompt_is_what_its_last_queries_attend_to(share: float, page_score: str) -> None:
    config = replace(SMALL, static_share=share, page_score=page_score)
    case, queries = Case(config, [504]), window()
    keys = random_keys(504, DIM)
    case.prompt(0, keys, queries)
    static = case.index.static_of(0)
    assert static.shape == (KV_HEADS, 64 * share)
    assert int(case.index.static_rows[0]) == 64 * share
    scores = observation_scores(queries[:, -4:], keys, case.context.scaling)
    for head in range(KV_HEADS):
        best = scores[head].argsort(descending=True, stable=True)[: static.shape[1]].sort().values
        assert torch.equal(static[head], best)
    case.check_summaries(0)


@SCORES
def test_rows_are_static_ones_and_whole_pages_within_the_budget(page_score: str) -> None:
    """As counted by hand: pages by their values, until the next one's rows that are not static do not fit."""
    case = Case(replace(SMALL, top_k=128, static_share=0.5, page_score=page_score), [1500])
    case.prompt(0, random_keys(1500, DIM), window())
    for seed in range(3):
        queries = random_queries(1, KV_HEADS * GROUP, DIM, seed=seed)
        rows, static, before = case.selected(queries, 0), case.index.static_of(0), case.picked(0)
        values = case.index.page_values(queries[0], 0, 1500)
        tokens = case.index.summaries.tokens(static, 1500)
        for head in range(KV_HEADS):
            taken: list[int] = []
            for page in values[head].argsort(descending=True, stable=True).tolist():
                new = [token for token in tokens[head, page].tolist() if token >= 0]
                if len(taken) + len(new) > 64:
                    break
                taken += new
            expected = static[head].tolist() + sorted(taken)
            assert rows[head].tolist() == expected + [-1] * (128 - len(expected))
        case.selected(queries, 0)
        assert (case.picked(0) - before).sum() > 0


@SCORES
def test_an_update_is_a_fresh_choice(page_score: str) -> None:
    """If every page was selected: the static set, and all else, of a prompt with the same last queries."""
    config = replace(SMALL, top_k=640, page_score=page_score)
    case, keys = Case(config, [640]), random_keys(640, DIM)
    case.prompt(0, keys, window())
    before = case.index.static_of(0)
    queries = random_queries(8, KV_HEADS * GROUP, DIM, seed=9)
    for step in range(8):
        case.selected(queries[step : step + 1], 0)
        case.index.refresh([0])
    fresh = Case(config, [640])
    fresh.prompt(0, keys, queries[4:].transpose(0, 1))
    assert not torch.equal(before, case.index.static_of(0))
    assert torch.equal(case.index.static_of(0), fresh.index.static_of(0))
    assert not case.picked(0).any(), "counted anew"
    case.check_summaries(0)


def test_only_what_was_selected_or_static_becomes_static() -> None:
    case = Case(replace(SMALL, page_score="codes"), [640])
    case.prompt(0, random_keys(640, DIM), window())
    before, seen = case.index.static_of(0), torch.zeros(KV_HEADS, 641, dtype=torch.bool)
    for step in range(8):
        rows = case.selected(random_queries(1, KV_HEADS * GROUP, DIM, seed=step), 0).long()
        seen.scatter_(1, torch.where(rows < 0, 640, rows), True)
        case.index.refresh([0])
    assert not torch.equal(before, case.index.static_of(0))
    assert seen.gather(1, case.index.static_of(0)).all()


@SCORES
def test_growth_with_updates(page_score: str) -> None:
    """From a prompt without a single page to 5,000 tokens: summaries stay those of their rows."""
    case = Case(replace(SMALL, page_score=page_score), [5], room=5100)
    keys = random_keys(5105, DIM)
    case.prompt(0, keys[:, :5], window())
    assert int(case.index.static_rows[0]) == 0
    for step in range(170):
        case.selected(random_queries(1, KV_HEADS * GROUP, DIM, seed=step), 0)
        case.index.refresh([0])
        first = 5 + 30 * step
        case.extend(0, keys[:, first : first + 30])
    assert case.context.lengths[0] == 5105
    assert int(case.index.static_rows[0]) == case.index.static_of(0).shape[1] == 16
    case.check_summaries(0)


def test_updates_of_layers_take_turns() -> None:
    config = Config()
    for layer in (0, 1, 31, 79):
        due = [step for step in range(1, 600) if update_is_due(config, layer, step)]
        assert due[0] >= 32
        assert all(b - a == 80 for a, b in itertools.pairwise(due))
    assert update_is_due(config, 0, 80)
    assert not update_is_due(config, 1, 80)


def test_shapes_that_the_gpu_does_not_support() -> None:
    with pytest.raises(ConfigError, match="head_dim = 80: must be a multiple of 32 up to 256"):
        traits(Config()).cuda_macros(80, 4)
    with pytest.raises(ConfigError, match="head_dim = 32: must be >= 64 with page_score = 'codes'"):
        traits(Config(page_score="codes")).cuda_macros(32, 4)
    with pytest.raises(ConfigError, match="top_k = 8192: must be at most 512 pages of 8 rows"):
        traits(Config(top_k=8192, page=8)).cuda_macros(128, 4)


def test_costs() -> None:
    model = ModelConfig("llama", 100, 64, 96, 2, 8, 2, 128, 1e-6, 1e4, 1 << 20)
    boxes = Config(**BOXES)
    found = costs(boxes, model, 131_072, 2)
    assert found.rows == 1024
    assert found.index_bytes == (131_072 - 512) / 8 * 512
    assert costs(Config(), model, 1000, 2).rows == 1000
    assert ReferenceIndex(make_context(boxes, 128, 4, [10])).bytes_per_token == KV_HEADS * (2 * 128 * 4 + 4) / 8
    for page in (8, 128):
        codes = Config(page=page, page_score="codes")
        assert costs(codes, model, 131_072, 2).index_bytes == 131_072 * (34 + 260 / 256)
        context = replace(make_context(codes, 128, 4, [10]), codebooks={"signs": rotation_signs(0, 128)})
        assert ReferenceIndex(context).bytes_per_token == KV_HEADS * (34 + 260 / 256 + 4 / page)


def test_a_page_scores_at_least_its_best_key() -> None:
    keys, queries = random_keys(64, DIM), random_queries(KV_HEADS, 2, DIM)
    pages = keys.view(KV_HEADS, 8, 8, DIM)
    boxes = torch.stack((pages.amin(dim=2), pages.amax(dim=2)), dim=2)
    bounds = box_scores(queries, boxes)
    exact = (queries @ keys.transpose(1, 2)).view(KV_HEADS, 2, 8, 8).amax(dim=-1)
    assert (bounds >= exact - 1e-4).all()
    by_hand = torch.maximum(queries[:, :, None] * boxes[:, None, :, 0], queries[:, :, None] * boxes[:, None, :, 1])
    torch.testing.assert_close(bounds, by_hand.sum(dim=-1))


@pytest.mark.parametrize("radius", [0.0, 0.3, 1.0])
def test_a_page_scores_by_centre_and_radius(radius: float) -> None:
    low, queries = random_keys(9, DIM)[:, :, None], random_queries(KV_HEADS, 2, DIM)
    boxes = torch.cat((low, low + torch.rand(KV_HEADS, 9, 1, DIM)), dim=2)
    centre, half = boxes.mean(dim=2), (boxes[:, :, 1] - boxes[:, :, 0]) / 2
    want = queries @ centre.transpose(1, 2) + radius * queries.abs() @ half.transpose(1, 2)
    torch.testing.assert_close(box_scores(queries, boxes, radius), want)


def test_what_a_query_counts_has_its_dtype() -> None:
    """What a query counts is rounded to its own 16 bits."""
    queries = random_queries(KV_HEADS * GROUP, 1, DIM)[:, 0].view(KV_HEADS, GROUP, DIM).bfloat16()
    boxes = random_keys(6, DIM).view(KV_HEADS, 3, 2, DIM).sort(dim=2).values
    rough, fine = box_scores(queries, boxes, 0.5), box_scores(queries.float(), boxes, 0.5)
    assert not torch.equal(rough, fine)
    torch.testing.assert_close(rough, fine, rtol=0, atol=0.05)


def test_a_page_scores_by_codes_what_its_rows_weigh() -> None:
    """Row by row: what codes estimate of q·k, and what the rows of a page weigh together. The last has three, of which one is
    static, and a static page weighs nothing.
    """
    page, n = 16, 16 * 5 + 3
    config = Config(top_k=64, page=page, page_score="codes")
    context = replace(make_context(config, DIM, GROUP, [n]), codebooks={"signs": rotation_signs(0, DIM)})
    codes, keys = Codes(context), random_keys(n, DIM)
    codes.store.scales.fill_(torch.nan)
    static = torch.tensor([[*range(16, 32), 81]]).expand(KV_HEADS, -1)
    codes.build(0, keys, static)
    queries = random_queries(KV_HEADS, GROUP, DIM)
    scores = codes.scores(queries, 0, static, n)
    assert scores.shape == (KV_HEADS, GROUP, 6)
    assert (scores[..., 1] == -torch.inf).all()
    for head in range(KV_HEADS):
        mean = rotate(keys[head].mean(dim=0), codes.store.signs)
        for lane, query in enumerate(round_lanes(rotate(queries[head], codes.store.signs)).integers):
            step = float(rotate(queries[head, lane], codes.store.signs).abs().max() / 127)
            for number in (0, 2, 3, 4, 5):
                weight = 0.0
                for place in range(number * page, min(n, number * page + page)):
                    if place == 81:
                        continue
                    rotated = rotate(keys[head, place], codes.store.signs) - mean
                    cells = (rotated * DIM**0.5 / rotated.norm()).floor().clamp(-2, 1) + 0.5
                    scale = float((rotated.square().sum() / (cells * rotated).sum()).half())
                    weight += math.exp(step * float((scale * cells + mean) @ query) * context.scaling)
                assert float(scores[head, lane, number]) == pytest.approx(math.log(weight) / context.scaling, abs=1e-3)
