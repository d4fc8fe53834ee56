"""One matrix for the indexes of all methods, without a model: regions of every size, long growth, other slots."""

from __future__ import annotations

import math

import pytest
import torch
from tests.plugins.cases import CASES, Settings
from tests.plugins.index_cases import select
from tests.plugins.retrieval_region import HEADS, KV_HEADS, Region, topical

from kvseek.core.cpu_library import CpuLibrary
from kvseek.plugins.registry import METHODS, get_method

KEEP = 64  # rows that settings `index` of the cases keep
EVICTED = 40
SIZES = (0, 1, 2, 31, 64, 65, 257, 1023, 1025)
GROWN_KEEP = 256
VARIANTS = [(method, {**cases.index, **more}) for method, cases in CASES.items() for more in ({}, *cases.options)]
TWO_INDEXES = METHODS.keys() - {"full", "flat"}  # methods with a compiled one beside the reference
INDEXES = [
    (*one, name) for one in VARIANTS for name in ("native", "reference") if name == "native" or one[0] in TWO_INDEXES
]
REUSED = [one for one in INDEXES if get_method(one[0]).traits().prefix_reuse == "entries"]


@pytest.fixture
def kernels(index: str, library: CpuLibrary) -> CpuLibrary | None:
    return library if index == "native" else None


@pytest.mark.parametrize(("method", "settings", "index"), INDEXES)
@pytest.mark.parametrize("size", SIZES)
def test_regions_of_every_size_and_their_first_growth(
    method: str, settings: Settings, index: str, size: int, kernels: CpuLibrary | None
) -> None:
    region = Region(method, settings, library=kernels)
    keys, queries = topical(size + 3 * EVICTED, 1)
    region.prefill(0, keys[:, :size], queries[: max(1, size)].transpose(0, 1), 3 * EVICTED)
    for start in range(size, size + 3 * EVICTED, EVICTED):
        if start:
            check_counts(method, region, region.step(queries[start : start + 1], [0])[0])
        region.evict(0, keys[:, start : start + EVICTED])
    check_counts(method, region, region.step(queries[-1:], [0])[0])


def check_counts(method: str, region: Region, tokens: list[torch.Tensor]) -> None:
    n = region.lengths[0]
    if CASES[method].dense or n <= KEEP:
        assert [head.tolist() for head in tokens] == [list(range(n))] * KV_HEADS, "all of a small region"
    for head in tokens:
        assert 1 <= len(head) <= max(KEEP, n if CASES[method].dense else 0)


@pytest.mark.parametrize(("method", "settings", "index"), INDEXES)
def test_selections_do_not_depend_on_company_slots_or_history(
    method: str, settings: Settings, index: str, kernels: CpuLibrary | None
) -> None:
    regions = [Region(method, settings, slots=3, library=kernels) for _ in range(2)]
    prompts = {owner: topical(size, owner) for owner, size in ((0, 700), (1, 333), (2, 1100))}
    places = {0: 2, 1: 0, 2: 1}  # slots of the second region
    regions[1].prefill(0, *(part if i == 0 else part.transpose(0, 1) for i, part in enumerate(topical(900, 9))), 200)
    regions[1].step(topical(1, 9)[1], [0])  # another request had the slot before, and would have gone on
    regions[1].index.append(0, 900, topical(EVICTED, 10)[0])
    for owner, (keys, queries) in prompts.items():
        regions[0].prefill(owner, keys, queries.transpose(0, 1), 200)
    for owner in (2, 0, 1):
        keys, queries = prompts[owner]
        regions[1].prefill(places[owner], keys, queries.transpose(0, 1), 200)
    for step in range(6):
        queries = torch.stack([prompts[owner][1][100 + step] for owner in range(3)])
        alone = [regions[0].step(queries[owner : owner + 1], [owner])[0] for owner in range(3)]
        together = regions[1].step(queries.flip(0), [places[owner] for owner in (2, 1, 0)])[::-1]
        for one, other in zip(alone, together, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for owner in range(3) if step == 3 else ():
            new = topical(EVICTED, 50 + owner)[0]
            regions[0].evict(owner, new)
            regions[1].evict(places[owner], new)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize(("method", "settings", "index"), INDEXES)
def test_a_query_that_is_no_number_hurts_no_other_request(
    method: str, settings: Settings, index: str, value: float, kernels: CpuLibrary | None
) -> None:
    found = []
    for bad in (False, True):
        region = Region(method, settings, slots=2, library=kernels)
        for slot, size in enumerate((700, 900)):
            keys, queries = topical(size, slot)
            region.prefill(slot, keys, queries.transpose(0, 1))
        steps = topical(6, 3)[1].unflatten(0, (3, 2))
        if bad:
            steps[0, 0, :, 3], steps[1, 0, 0, 0] = value, value
        rows = []
        for queries in steps:
            selection = region.index.select(queries, region.batch([0, 1]))
            rows.append(torch.zeros(0) if selection is None else selection.rows[1].clone())
            if selection is not None:
                assert int(selection.rows[0].max()) < 700, "places of the region"
            region.index.refresh([0, 1])
        found.append(rows)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("method", "settings", "index"), INDEXES)
def test_appended_keys_are_invisible_until_they_are_published(
    method: str, settings: Settings, index: str, kernels: CpuLibrary | None
) -> None:
    keys, queries = topical(700 + EVICTED, 6)
    found = []
    for append in (False, True):
        region = Region(method, settings, library=kernels)
        region.prefill(0, keys[:, :700], queries[:700].transpose(0, 1), EVICTED)
        if append:
            region.index.append(0, 700, keys[:, 700:])
        found.append(region.step(queries[-1:], [0])[0])
    assert all(torch.equal(before, after) for before, after in zip(*found, strict=True))


@pytest.mark.parametrize(("method", "settings"), VARIANTS)
def test_growth_over_2000_generated_tokens(method: str, settings: Settings, library: CpuLibrary) -> None:
    """Evictions come as the method asks the engine for them; runs of a topic are as long as a generated cluster."""
    cases = CASES[method]
    evicted = get_method(method).traits().cache_defaults.get("update", EVICTED)
    prompt, total = 300, 300 + 16 * 140
    keys, queries = topical(total, 4, run=80)
    own = {**settings, **({} if cases.dense else {"top_k": GROWN_KEEP})}
    sparse = Region(method, own, slots=1, max_tokens=total + 100, library=library)
    exact = Region("flat", {"top_k": GROWN_KEEP}, slots=1, max_tokens=total + 100)
    whole = Region(method, {**settings, **cases.everything}, slots=1, max_tokens=total + 100, library=library)
    for region in (sparse, exact, whole):
        region.prefill(0, keys[:, :prompt], queries[:prompt].transpose(0, 1), total - prompt)
    ratios = []
    for start in range(prompt, total, evicted):
        query = queries[start : start + 1]
        for region in (sparse, exact, whole):
            region.evict(0, keys[:, start : start + evicted])
        kept = [region.mass(query[0], 0, region.step(query, [0])[0]) for region in (sparse, exact, whole)]
        assert kept[2] == pytest.approx(1.0, abs=1e-5)
        ratios.append(kept[0] / kept[1])
    assert len(ratios) == (total - prompt) // evicted
    late = torch.tensor(ratios[-len(ratios) // 3 :])
    assert late.mean() >= cases.mass, f"{method} keeps {late.mean():.3f} of the mass that exact top-k keeps"


@pytest.mark.parametrize(("method", "settings", "index"), INDEXES)
def test_keeping_everything_is_everything_after_other_requests(
    method: str, settings: Settings, index: str, kernels: CpuLibrary | None
) -> None:
    cases = CASES[method]
    region = Region(method, {**settings, **cases.everything}, slots=2, library=kernels)
    for size in (1500, 40, 777):
        keys, queries = topical(size, size)
        region.prefill(1, keys, queries.transpose(0, 1), EVICTED)
        region.evict(1, topical(EVICTED, 3)[0])
        (tokens,) = region.step(torch.randn(1, HEADS, 32, generator=torch.Generator().manual_seed(size)), [1])
        assert [head.tolist() for head in tokens] == [list(range(size + EVICTED))] * KV_HEADS


@pytest.mark.parametrize(("method", "settings", "index"), REUSED)
def test_an_adopted_prefix_selects_as_the_slot_that_wrote_it(
    method: str, settings: Settings, index: str, kernels: CpuLibrary | None
) -> None:
    """Slot 1 has had another prompt; it shares the first extent of slot 0 and takes in the further keys itself."""
    region = Region(method, settings, library=kernels)
    index, total = region.index, 1104 + 5 * EVICTED
    keys, queries = topical(total, 8)
    region.prefill(1, *(part if i == 0 else part.transpose(0, 1) for i, part in enumerate(topical(900, 9))), 0)
    region.prefill(0, keys[:, :1104], queries[:1104].transpose(0, 1), 5 * EVICTED)
    for start in range(1104, total, EVICTED):
        region.evict(0, keys[:, start : start + EVICTED])
    region.extents.release(1)
    region.extents.reserve(1, total, region.extents.of_slot(0)[:1])
    region.lengths[1] = total
    index.adopt(1, 1024)
    index.append(1, 1024, keys[:, 1024:])
    index.publish(1, 1024, total - 1024)
    written, adopted = (select(index, queries[-3:], [slot] * 3) for slot in (0, 1))
    if written is None or adopted is None:
        assert written is adopted, "attends densely"
    else:
        assert torch.equal(written.rows, adopted.rows)


@pytest.mark.parametrize(("method", "settings", "index"), REUSED)
def test_a_region_that_grew_selects_as_one_that_was_read_whole(
    method: str, settings: Settings, index: str, kernels: CpuLibrary | None
) -> None:
    """From nothing, and from a prompt: entries are a function of the keys, not of when and how they came."""
    total = 2400
    keys, queries = topical(total, 8)
    found = []
    for prompt in (total, 0, 1120):
        region = Region(method, settings, slots=1, library=kernels)
        region.prefill(0, keys[:, :prompt], queries[: max(1, prompt)].transpose(0, 1), total - prompt)
        for start in range(prompt, total, EVICTED):
            region.evict(0, keys[:, start : start + EVICTED])
        found.append(region.step(queries[-3:], [0] * 3))
    for grown in found[1:]:
        for heads, others in zip(found[0], grown, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(heads, others, strict=True))


@pytest.mark.parametrize(
    ("method", "settings"),
    [("prkv", {"top_k": 128, **settings}) for settings in ({}, *CASES["prkv"].options)],
)
def test_a_region_that_grew_finds_as_much_as_one_that_was_read_whole(
    method: str, settings: Settings, library: CpuLibrary
) -> None:
    """Of methods whose selection depends on earlier steps too: recall of the best rows within 1 point, over two updates."""
    prompt, steps = 2000, 160
    keys, queries = topical(prompt + steps, 5, run=16, topics=40, strength=4.0)
    recalls = []
    for grown in (False, True):
        region = Region(method, settings, slots=1, library=library)
        read = 0 if grown else prompt
        region.prefill(0, keys[:, :read], queries[: max(1, read)].transpose(0, 1), prompt - read)
        for start in range(read, prompt, EVICTED):
            region.evict(0, keys[:, start : start + EVICTED])
            for number in range(start, start + EVICTED, 1 if start > prompt // 2 else 8):
                region.step(queries[number : number + 1], [0])
        found = []
        for number in range(prompt, prompt + steps):
            (tokens,) = region.step(queries[number : number + 1], [0])
            scores = queries[number].view(KV_HEADS, -1, keys.shape[2]) @ region.keys[0].transpose(1, 2)
            best = (
                (scores * keys.shape[2] ** -0.5).softmax(dim=-1).mean(dim=1).topk(region.context.config.top_k).indices
            )
            found += [torch.isin(one, other).float().mean() for one, other in zip(best, tokens, strict=True)]
        recalls.append(float(torch.stack(found).mean()))
    assert recalls[1] >= recalls[0] - 0.01, "a point"


@pytest.mark.parametrize(("method", "settings"), VARIANTS)
def test_selections_do_not_depend_on_the_longest_request(method: str, settings: Settings, library: CpuLibrary) -> None:
    """A short prompt grows; the engine's max_seq_len decides how much a slot can hold, and nothing else."""
    keys, queries = topical(1600, 12)
    own = settings | ({"centroids": 2048} if method == "ctkvr" else {})
    found = []
    for most in (2048, 16 * 1024):
        region = Region(method, own, slots=1, max_tokens=most, library=library)
        region.prefill(0, keys[:, :80], queries[:80].transpose(0, 1), 1520)
        selected = []
        for start in range(80, 1600, EVICTED):
            region.evict(0, keys[:, start : start + EVICTED])
            selected += [region.step(queries[t : t + 1], [0])[0] for t in range(start, start + EVICTED, 20)]
        found.append(selected)
    for few, many in zip(*found, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(few, many, strict=True))


@pytest.mark.parametrize(("method", "settings", "index"), INDEXES)
@pytest.mark.parametrize("size", [70, 1100])
def test_a_build_needs_no_more_queries_than_the_traits_say(
    method: str, settings: Settings, index: str, size: int, kernels: CpuLibrary | None
) -> None:
    """Those of a prompt's beginning are unknown if it is reused: Traits.last_queries."""
    needed = get_method(method).traits(get_method(method).configure({**settings})).last_queries(size)
    steps = 8 if needed == 0 else 60 if kernels is None else 200  # through an update of those that follow the queries
    keys, queries = topical(size + steps, 4)
    regions = [Region(method, settings, library=kernels) for _ in range(2)]
    for region, known in zip(regions, (size, needed), strict=True):
        region.prefill(0, keys[:, :size], queries[size - known : size].transpose(0, 1))
    for number in range(size, size + steps):
        one, other = (region.step(queries[number : number + 1], [0])[0] for region in regions)
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
