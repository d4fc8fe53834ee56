"""CTkvr's ring of centroids: how it follows the queries, and tokens that no prompt list holds."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.plugins.ctkvr.bench import DIM, GROUP, SMALL, Bench, centroids_of, exact_rows, make, one_query
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.plugins.index_cases import KV_HEADS, random_keys, random_queries, select_rows
from torch import Tensor

from kvseek.plugins.ctkvr.config import Config

# The ring.


def test_queries_enter_the_ring_after_the_step_and_replace_the_oldest() -> None:
    config = Config(top_k=8, recent=8, centroids=6, probes=2, **BY_KEYS)
    bench = make(config, [400])
    index = bench.index
    assert (index.ring, index.written[0]) == (6, 6)
    lists, centroids, means = (array[0].clone() for array in (index.lists, index.centroids, index.means))
    for step in range(8):
        query = one_query(step)
        recalled = index.recall(query, 0)
        _, best = index.rerank(query, 0, recalled)
        select_rows(index, query[None], [0])
        assert torch.equal(index.lists[0], lists), "not before refresh"
        index.refresh([0])
        lists[:, step % 6] = best
        centroids[:, step % 6] = centroids_of(query[:, None], index.means[0])[:, 0]
        assert torch.equal(index.lists[0], lists)
        torch.testing.assert_close(index.centroids[0], centroids)
        torch.testing.assert_close(index.offsets[0], (centroids * index.means[0, :, None]).sum(dim=-1))
        assert torch.equal(index.means[0], means), "the prompt's"
        assert index.written[0] == 7 + step
    index.refresh([0])
    assert index.written[0] == 14, "a query enters once"


def test_a_ring_with_room_keeps_the_prompts_centroids() -> None:
    bench = make(SMALL, [100])
    assert (bench.index.ring, bench.index.written[0]) == (2048, 7), "a centroid for 16 tokens"
    first = bench.index.lists[0, :, :7].clone()
    for step in range(5):
        bench.step(random_queries(1, KV_HEADS * GROUP, DIM, seed=step)[0])
    assert bench.index.written[0] == 12
    assert torch.equal(bench.index.lists[0, :, :7], first)


def test_the_last_selection_before_refresh_counts() -> None:
    bench = make(SMALL, [777, 900])
    queries = random_queries(2, KV_HEADS * GROUP, DIM)
    select_rows(bench.index, queries, [0, 1])
    select_rows(bench.index, queries[1:], [0])
    bench.index.refresh([0])
    assert bench.index.written == [50, 57]
    expected = centroids_of(queries[1][:, None], bench.index.means[0])
    torch.testing.assert_close(bench.index.centroids[0, :, 49:50], expected)
    bench.index.refresh([0, 1])
    assert bench.index.written == [50, 58]


def test_another_prompt_drops_what_is_pending() -> None:
    bench = make(SMALL, [777])
    select_rows(bench.index, random_queries(1, KV_HEADS * GROUP, DIM), [0])
    bench.build(0, random_queries(KV_HEADS * GROUP, 300, DIM))
    bench.index.refresh([0])
    assert bench.index.written == [49]


def test_without_update_nothing_changes() -> None:
    bench = make(replace(SMALL, update=False), [777])
    lists = bench.index.lists[0, :, :49].clone()
    for step in range(3):
        bench.step(random_queries(1, KV_HEADS * GROUP, DIM, seed=step)[0])
    assert bench.index.written == [49]
    assert torch.equal(bench.index.lists[0, :, :49], lists)


# Tokens that the prompt's lists do not hold.


def test_recent_tokens_are_recalled() -> None:
    bench = make(SMALL, [777], room=100)
    bench.grow(0, random_keys(100, DIM, seed=3))
    recalled = bench.index.recall(random_queries(1, KV_HEADS * GROUP, DIM)[0], 0)
    assert recalled.shape == (KV_HEADS, bench.index.capacity)
    for head in range(KV_HEADS):
        places = recalled[head][recalled[head] >= 0]
        assert (places.diff() > 0).all()
        assert places[-24:].tolist() == list(range(853, 877))
        assert not ((places >= 777) & (places < 853)).any()
        assert (recalled[head][len(places) :] == -1).all()


def topical(topics: Tensor, weights: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Vectors [heads, w, D] around sums of topics [heads, T, D] with weights [w, T]."""
    mean = torch.einsum("wt,htd->hwd", weights, topics)
    return mean + noise * torch.randn(mean.shape, generator=generator)


def rounds_of_topics(update: bool, **fields: float) -> list[float]:
    """Recall by round: the prompt's last queries are of topic 0 with some of all others, round r asks about topic r."""
    generator = torch.Generator().manual_seed(0)
    topics = torch.nn.functional.normalize(torch.randn(KV_HEADS, 8, DIM, generator=generator), dim=-1)
    own = torch.eye(8)[torch.randint(0, 8, (4000,), generator=generator)]
    bench = Bench(
        replace(Config(top_k=64, recent=64, probes=8, update=update, **BY_KEYS), **fields),
        [topical(3 * topics, own, 1.0, generator)],
        group=2,
    )
    asked = 3 * topics.repeat_interleave(2, dim=0)
    prompt = torch.rand(256, 8, generator=generator)
    prompt[:, 0] += 1
    bench.build(0, topical(asked, prompt, 0.6, generator))
    recall = []
    for topic in range(4):
        found, steps = 0, 32
        for query in topical(asked, torch.eye(8)[[topic] * steps], 0.6, generator).unbind(dim=1):
            rows, best = bench.step(query), exact_rows(query, bench.keys(0), 64)
            found += sum(len({*a} & {*b}) for a, b in zip(rows.tolist(), best.tolist(), strict=True))
        recall.append(found / (steps * 64 * KV_HEADS))
    return recall


def test_the_update_follows_changing_topics() -> None:
    # CTkvr paper, table 5: alike in the first round, better from the second on.
    paper = {"probes": 4, "centred": False, "keep_prompt": False}
    off, on = rounds_of_topics(False, **paper), rounds_of_topics(True, **paper)
    assert abs(on[0] - off[0]) < 0.03, (off, on)
    assert all(better > worse + 0.03 for better, worse in zip(on[1:], off[1:], strict=True)), (off, on)


def test_probes_kept_for_the_prompt_let_the_update_help_with_centring_too() -> None:
    off, on, locked_in = (
        rounds_of_topics(update, recall_factor=1.25, keep_prompt=keep)
        for update, keep in ((False, True), (True, True), (True, False))
    )
    assert sum(on[1:]) > sum(off[1:]) + 0.03, (off, on)
    assert all(worse < better - 0.05 for better, worse in zip(off[1:], locked_in[1:], strict=True)), (off, locked_in)


def test_tokens_that_were_generated_long_ago_are_still_found() -> None:
    # 5,000 tokens after a prompt of 500, 1,024 of them recent: most can be found through updated lists alone.
    generator = torch.Generator().manual_seed(0)
    topics = torch.nn.functional.normalize(torch.randn(KV_HEADS, 4, DIM, generator=generator), dim=-1)
    asked = 3 * topics.repeat_interleave(2, dim=0)

    def keys(count: int) -> Tensor:
        own = torch.eye(4)[torch.randint(0, 4, (count,), generator=generator)]
        return topical(3 * topics, own, 1.0, generator)

    bench = Bench(Config(top_k=64, recent=1024, probes=8, **BY_KEYS), [keys(500)], room=5000, group=2)
    bench.build(0, topical(asked, torch.eye(4)[torch.arange(64) % 4], 0.3, generator))
    found = total = 0
    for burst in range(20):
        bench.grow(0, keys(250))
        weights = torch.eye(4)[torch.randint(0, 4, (16,), generator=generator)]
        for query in topical(asked, weights, 0.3, generator).unbind(dim=1):
            rows = bench.step(query)
            if burst >= 12:
                best = exact_rows(query, bench.keys(0), 64)
                found += sum(len({*a} & {*b}) for a, b in zip(rows.tolist(), best.tolist(), strict=True))
                total += best.numel()
    assert found / total > 0.85, found / total
