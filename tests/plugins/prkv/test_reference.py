"""PRKV's reference: static sets, boxes, pages, updates, and what the contract promises."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tests.plugins.index_cases import KV_HEADS, extend, make_context, random_keys, random_queries, select_rows
from tests.plugins.prkv.settings import BOXES
from torch import Tensor

from kvseek.core.config import ModelConfig
from kvseek.core.errors import ConfigError
from kvseek.plugins.codes.key_codes import encode
from kvseek.plugins.codes.rotation import padded_dim, rotate, rotation_signs
from kvseek.plugins.contract import LayerRows
from kvseek.plugins.prkv.config import PAGE_SCORES, Config
from kvseek.plugins.prkv.costs import costs
from kvseek.plugins.prkv.method import traits
from kvseek.plugins.prkv.reference import ReferenceIndex, update_is_due
from kvseek.plugins.prkv.stages import stages
from kvseek.plugins.prkv.static import (
    automatic_count,
    candidates,
    largest,
    observation_scores,
    pair_exchange,
    static_first,
)
from kvseek.plugins.prkv.summaries import CODE_BITS, Boxes, Codes

GROUP, DIM = 3, 32
SIGNS = {"signs": rotation_signs(0, padded_dim(DIM))}
SMALL = Config(top_k=64, static_share=0.25, page=8, window_queries=4, update_interval=8)
SCORES = pytest.mark.parametrize("page_score", PAGE_SCORES)


class Case:
    """An index over slots with rows in a pool of its own; values are the keys' tokens."""

    def __init__(self, config: Config, lengths: list[int], room: int = 0, reuses_prefixes: bool = False) -> None:
        capacity = sum(-(-(n + room) // 1024) for n in lengths)
        context = make_context(config, DIM, GROUP, list(lengths), max(8, capacity))
        for slot, n in enumerate(lengths):
            context.extents.reserve(slot, n + room)
        self.pool = torch.full((context.extents.capacity, KV_HEADS, 1024, 2, DIM), torch.nan)
        rows = LayerRows(self.pool, self.pool.data_ptr(), self.pool.stride(0))
        self.context = replace(context, rows=rows, codebooks=SIGNS, reuses_prefixes=reuses_prefixes)
        self.index = ReferenceIndex(self.context)

    def rows(self, keys: Tensor, first: int = 0) -> Tensor:
        tokens = torch.arange(first, first + keys.shape[1]).float()
        return torch.stack((keys, tokens[:, None].expand_as(keys)), dim=2)

    def prompt(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        self.context.lengths[slot] = keys.shape[1]
        order = self.index.build(slot, keys, queries).order
        rows = self.rows(keys)
        if order is not None:
            rows = rows.gather(1, order[..., None, None].expand_as(rows))
        self.context.extents.write(self.pool, slot, 0, rows)

    def extend(self, slot: int, keys: Tensor) -> None:
        first = self.context.lengths[slot]
        self.context.extents.write(self.pool, slot, first, self.rows(keys, first))
        extend(self.index, slot, keys)

    def tokens(self, slot: int) -> Tensor:
        """Token of each place, int64 [G, n]."""
        rows = self.context.extents.read(self.pool, slot, self.context.lengths[slot])
        return rows[:, :, 1, 0].long()

    def selected(self, queries: Tensor, slot: int) -> Tensor:
        """Pages that a step selects, int32 [G, entries]."""
        return select_rows(self.index, queries, [slot]).rows[0]

    def check_summaries(self, slot: int) -> None:
        """Boxes enclose the keys of their pages exactly; codes are those of the rows of their places."""
        keys = self.context.extents.read(self.pool, slot, self.context.lengths[slot])[:, :, 0]
        if isinstance(self.index.summaries, Codes):
            store = self.index.summaries.store
            means = store.mean_of(slot, torch.arange(keys.shape[1]))
            high, _, scales = encode(rotate(keys, store.signs) - means, CODE_BITS)
            found = store.read(slot, keys.shape[1])
            assert torch.equal(found.high, high)
            assert torch.equal(found.scales, scales)
            return
        n, page = self.context.lengths[slot], self.index.config.page
        boxes = self.index.by_page(boxes_of(self.index), slot, n)
        for number in range(boxes.shape[1]):
            own = keys[:, number * page : (number + 1) * page]
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
    marked = largest(values, torch.tensor(2), 4)
    assert marked.tolist() == [[True, False, True, False, False], [True, False, False, False, True]]
    assert not largest(values, torch.tensor(0), 4).any()
    assert largest(values, torch.tensor(5), 9).all()


def test_static_tokens_come_first_and_nothing_else_moves() -> None:
    static = torch.tensor([[False, True, False, True, False], [True, False, False, False, True]])
    assert static_first(static).tolist() == [[1, 3, 0, 2, 4], [0, 4, 1, 2, 3]]


def test_a_hand_made_exchange() -> None:
    """Places 0-3 are static; of candidates 0-3, 6, 8, 9 the places 1, 6, 9 and 2 are chosen."""
    places = torch.tensor([[0, 1, 2, 3, 9, 6, 8]])
    chosen = torch.tensor([[False, True, True, False, True, True, False]])
    homes = torch.tensor([[30, 1, 2, 7]])
    leaving, entering = pair_exchange(chosen, places, homes, torch.tensor(4))
    assert leaving.tolist() == [[3, 0, -1, -1]], "by where they come from: 7 before 30"
    assert entering.tolist() == [[6, 9, -1, -1]]


def test_a_static_set_may_grow() -> None:
    places, chosen = torch.arange(12)[None], torch.zeros(1, 12, dtype=torch.bool)
    chosen[0, [0, 3, 5, 11]] = True
    leaving, entering = pair_exchange(chosen, places, torch.arange(6)[None], torch.tensor(4))
    assert leaving.tolist() == [[1, 2, -1, -1, -1, -1]]
    assert entering.tolist() == [[5, 11, -1, -1, -1, -1]]


def test_candidates_are_the_first_places_and_the_pages_picked_most() -> None:
    picked = torch.tensor([[9, 9, 0, 4, 1, 4, 0]], dtype=torch.int32)
    config = Config(top_k=64, static_share=0.25, page=8, update_pages=3)  # 16 static rows: two pages
    places, counts = candidates(config, picked, 56)
    assert places[0, ::8].tolist() == [0, 8, 24, 40, 32]
    assert counts.all()
    places, counts = candidates(Config(top_k=64, static_share=0.25, page=8), picked, 56)
    assert places.shape == (1, 56)
    assert counts[0, ::8].tolist() == [True, True, True, True, True, False, False]
    places, counts = candidates(Config(top_k=64, static_share=0.25, page=8, update_scope="all"), picked, 56)
    assert places[0].sort().values.tolist() == list(range(56))
    assert counts.all()


@SCORES
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("rule", ["fixed", "auto"])
def test_a_prompt_is_only_reordered(share: float, rule: str, page_score: str) -> None:
    config = replace(SMALL, static_share=share, share_rule=rule, page_score=page_score)
    case, n, queries = Case(config, [501]), 501, window()
    keys = random_keys(n, DIM)
    case.prompt(0, keys, queries)
    static = int(case.index.static_rows[0])
    if rule == "fixed":
        assert static == 64 * share
    assert static % 8 == 0
    assert static <= 64
    tokens = case.tokens(0)
    assert torch.equal(tokens.sort(dim=1).values, torch.arange(n).expand(KV_HEADS, -1))
    assert (tokens[:, :static].diff() > 0).all()
    assert (tokens[:, static:].diff() > 0).all()
    scores = observation_scores(queries[:, -4:], keys, case.context.scaling)
    for head in range(KV_HEADS):
        best = scores[head].argsort(descending=True, stable=True)[:static].sort().values
        assert torch.equal(tokens[head, :static], best)
    case.check_summaries(0)


def test_the_automatic_share_is_the_overlap_of_first_and_last_query() -> None:
    """Both queries rank the keys alike: all of the top k is static. Opposite queries share nothing."""
    keys = random_keys(400, DIM)
    same = window(1).expand(-1, 5, -1).contiguous()
    assert automatic_count(same, keys, 0.2, 64, 8) == 64
    opposite = torch.cat((same[:, :4], -same[:, :1]), dim=1)
    assert automatic_count(opposite, keys, 0.2, 64, 8) == 0


@SCORES
def test_the_page_of_a_loud_key_is_selected(page_score: str) -> None:
    config = replace(SMALL, top_k=32, page_score=page_score)
    case = Case(config, [1000])
    keys, queries = 0.1 * random_keys(1000, DIM), random_queries(1, KV_HEADS * GROUP, DIM)
    direction = queries.view(KV_HEADS, GROUP, DIM).mean(dim=1)
    keys[:, 777] = 9 * direction
    case.prompt(0, keys, -window())
    place = (case.tokens(0) == 777).int().argmax(dim=1)
    pages = case.selected(queries, 0)
    assert ((pages == (place // 8)[:, None]).sum(dim=1) == 1).all()
    assert pages.shape == (KV_HEADS, 4)


@SCORES
def test_an_update_is_a_fresh_choice(page_score: str) -> None:
    """Scope "all": the rows that come first are those that a prompt with the same last queries would put there."""
    fields = {"window_queries": 4, "update_interval": 8, "update_scope": "all", "page_score": page_score}
    config = replace(SMALL, **fields)
    case, n = Case(config, [640]), 640
    keys = random_keys(n, DIM)
    case.prompt(0, keys, window())
    before = case.tokens(0)
    queries = random_queries(8, KV_HEADS * GROUP, DIM, seed=9)
    for step in range(8):
        case.selected(queries[step : step + 1], 0)
        case.index.refresh([0])
    after, fresh = case.tokens(0), Case(config, [640])
    fresh.prompt(0, keys, queries[4:].transpose(0, 1))
    assert not torch.equal(before, after)
    assert torch.equal(after[:, :16].sort(dim=1).values, fresh.tokens(0)[:, :16])
    assert torch.equal(after.sort(dim=1).values, before.sort(dim=1).values)
    moved = (before != after).sum(dim=1)
    assert (moved <= 32).all(), "at most two places for each new static row"
    case.check_summaries(0)


@SCORES
def test_a_selected_scope_reads_selected_pages_alone(page_score: str) -> None:
    case = Case(replace(SMALL, page_score=page_score), [640])
    case.prompt(0, random_keys(640, DIM), window())
    before, picked = case.tokens(0), torch.zeros(KV_HEADS, 80, dtype=torch.bool)
    for step in range(8):
        pages = case.selected(random_queries(1, KV_HEADS * GROUP, DIM, seed=step), 0).long()
        picked.scatter_(1, pages, True)
        case.index.refresh([0])
    moved = before != case.tokens(0)
    assert moved.any()
    assert not moved[~picked.repeat_interleave(8, dim=1)].any()
    assert not case.index.by_page(case.index.picked, 0, 640).any(), "counted anew"
    case.check_summaries(0)


@SCORES
@pytest.mark.parametrize("evicted", [2, 5, 40])
def test_appended_keys_become_visible_when_they_are_published(evicted: int, page_score: str) -> None:
    """Pages that steps see, one of them begun, score as they did until then, even if a key is loud that joins it."""
    case = Case(replace(SMALL, page_score=page_score), [501])
    keys, queries = random_keys(501 + evicted, DIM), random_queries(1, KV_HEADS * GROUP, DIM)
    keys[:, 501:] *= 20
    case.prompt(0, keys[:, :501], window())
    before = case.selected(queries, 0)
    boxes = None if page_score == "codes" else case.index.by_page(boxes_of(case.index), 0, 501)
    case.context.extents.write(case.pool, 0, 501, case.rows(keys[:, 501:], 501))
    case.index.append(0, 501, keys[:, 501:])
    assert torch.equal(case.selected(queries, 0), before)
    if boxes is not None:
        assert torch.equal(case.index.by_page(boxes_of(case.index), 0, 501), boxes)
    case.context.lengths[0] += evicted
    case.index.publish(0, 501, evicted)
    case.check_summaries(0)


@SCORES
def test_growth_with_updates(page_score: str) -> None:
    """From a prompt without a single page to 5,000 tokens: places only grow, summaries stay those of their rows."""
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
    assert int(case.index.static_rows[0]) == 16
    tokens = case.tokens(0)
    assert torch.equal(tokens.sort(dim=1).values, torch.arange(5105).expand(KV_HEADS, -1))
    found = case.context.extents.read(case.pool, 0, 5105)[:, :, 0]
    assert torch.equal(found, keys.gather(1, tokens[..., None].expand_as(keys)))
    case.check_summaries(0)


def test_updates_of_layers_take_turns() -> None:
    config = Config()
    for layer in (0, 1, 31, 79):
        due = [step for step in range(1, 600) if update_is_due(config, layer, step)]
        assert due[0] >= 64
        assert all(b - a == 128 for a, b in itertools.pairwise(due))
    assert update_is_due(config, 0, 128)
    assert not update_is_due(config, 1, 128)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 44}, r"top_k = 44: must be a positive multiple of page = 8"),
        ({"page": 24}, r"page = 24: must be one of \(8, 16, 32, 64, 128\)"),
        ({"page_score": "key"}, r"page_score = 'key': must be one of \('box', 'codes'\)"),
        ({"static_share": 1.5}, r"static_share = 1.5: must be in \[0, 1\]"),
        ({"share_rule": "half"}, "share_rule = 'half'"),
        ({"box_radius": -0.1}, r"box_radius = -0.1: must be in \[0, 1\]"),
        ({"update_interval": 63}, "update_interval = 63: must be >= window_queries = 64"),
        ({"update_scope": "none"}, "update_scope = 'none'"),
        ({"update_pages": 0}, "update_pages = 0"),
        ({"cache_steps": 9}, "cache_steps = 9: must be between 0 and 8"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**fields)  # type: ignore[arg-type]


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
    assert (found.rows, found.neighbours) == (1024, 8)
    assert found.index_bytes == (131_072 - 512) / 8 * 512
    assert costs(Config(), model, 1000, 2).rows == 1000
    for keeps, tokens in ((False, 0), (True, 4)):
        index = ReferenceIndex(replace(make_context(boxes, 128, 4, [10]), reuses_prefixes=keeps))
        assert index.bytes_per_token == KV_HEADS * ((2 * 128 * 4 + 4) / 8 + tokens)
    for page in (8, 128):
        codes = Config(page=page, page_score="codes")
        assert costs(codes, model, 131_072, 2).index_bytes == (131_072 - 512) * (34 + 260 / 256)
        context = replace(make_context(codes, 128, 4, [10]), codebooks={"signs": rotation_signs(0, 128)})
        assert ReferenceIndex(context).bytes_per_token == KV_HEADS * (34 + 260 / 256 + 4 / page)


@pytest.mark.parametrize(("page_score", "last"), [("box", "boxes"), ("codes", "codes")])
def test_the_last_stage_is_what_ranks_pages(page_score: str, last: str) -> None:
    case = Case(replace(SMALL, page_score=page_score), [640])
    case.prompt(0, random_keys(640, DIM), window())
    found = stages(case.index, random_queries(1, KV_HEADS * GROUP, DIM)[0], 0)
    assert found.names == ("pages", last)
    assert (found.stages[0].kept.sum(dim=1) == SMALL.top_k).all()


def test_rows_are_sorted_and_those_in_place_are_not_copied() -> None:
    """Without a static set none is written, with one they are, and when they are sorted none is again."""
    case = Case(SMALL, [0, 0], room=2000, reuses_prefixes=True)
    few, many = random_keys(SMALL.page - 1, DIM, seed=1), random_keys(1500, DIM, seed=2)
    case.prompt(0, few, random_queries(KV_HEADS * GROUP, 4, DIM, seed=3))
    case.extend(0, random_keys(1100, DIM, seed=4))
    case.prompt(1, many, random_queries(KV_HEADS * GROUP, 4, DIM, seed=5))
    for slot, first, copies in ((0, 0, False), (1, 1024, True)):
        before, version = case.tokens(slot), case.pool._version
        case.index.sort_rows(slot, first)
        assert (case.pool._version > version) == copies
        n = before.shape[1]
        assert torch.equal(case.tokens(slot)[:, first:], torch.arange(first, n).expand(KV_HEADS, -1))
        assert torch.equal(case.tokens(slot)[:, :first], before[:, :first])
