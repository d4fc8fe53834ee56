"""Competing systems choose what kvpress and sparse-attention-hub choose for the same keys and queries, where those have them.

`make test-bridges` has both. Each test says where a rule of theirs is another one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.plugins.retrieval_region import DIM, GROUP, HEADS, KV_HEADS, Region, topical
from torch import Tensor

from kvseek.bench.bridges.selector import Selector

TOKENS, TOP_K, PAGE = 1200, 64, 16
MODULE = SimpleNamespace(config=SimpleNamespace(num_attention_heads=HEADS), head_dim=DIM)


@pytest.fixture(scope="module")
def kvpress() -> Any:
    return pytest.importorskip("kvpress", reason="kvpress is not installed, as in CI: make test-bridges")


@pytest.fixture(scope="module")
def hub() -> Any:
    reason = "sparse-attention-hub is not installed, as in CI: make test-bridges"
    pytest.importorskip("sparse_attention_hub", reason=reason)
    from sparse_attention_hub.sparse_attention.research_attention import maskers
    from sparse_attention_hub.sparse_attention.research_attention.maskers.fixed import implementations
    from sparse_attention_hub.sparse_attention.research_attention.maskers.sampling.implementations import magic_pig
    from sparse_attention_hub.sparse_attention.utils.mask import Mask

    return SimpleNamespace(
        masker=maskers.base.ResearchMasker.create_masker_from_config, own=implementations, pig=magic_pig, mask=Mask
    )


def region_of(method: str, settings: dict[str, Any], seed: int = 3, centred: bool = False) -> tuple[Region, Tensor]:
    """A region of TOKENS rows, and a step's queries [H, D], the same for the heads that share a KV head."""
    keys, queries = topical(TOKENS + 1, seed)
    keys = keys[:, :TOKENS] - keys[:, :TOKENS].mean(dim=1, keepdim=True) * centred
    region = Region(method, settings, slots=1)
    region.prefill(0, keys, queries[:TOKENS].transpose(0, 1))
    return region, queries[TOKENS].unflatten(0, (KV_HEADS, GROUP))[:, :1].expand(-1, GROUP, -1).flatten(0, 1)


def rows_of(region: Region, queries: Tensor) -> list[set[int]]:
    (found,) = region.step(queries[None], [0])
    return [set(rows.tolist()) for rows in found]


def masked_by(hub: Any, config: Any, region: Region, queries: Tensor, state: dict[str, Any]) -> list[set[int]]:
    """The rows that a masker of the hub adds to an empty mask, of each query head."""
    mask = hub.masker(config).add_mask(
        keys=region.keys[0][None],
        queries=queries[None, :, None],
        values=region.keys[0][None],
        attention_mask=None,
        scaling=DIM**-0.5,
        dropout=0.0,
        sparse_meta_data=state,
        previous_mask=hub.mask.create_empty_mask((1, HEADS, 1, TOKENS), torch.float32, torch.device("cpu")),
        layer_idx=0,
    )
    return [set(row.nonzero()[:, 0].tolist()) for row in mask.get_dense_mask()[0, :, 0]]


@pytest.mark.parametrize("seed", range(3))
def test_quest_is_the_hubs(hub: Any, seed: int) -> None:
    """For one query head a KV head, as in the models of the paper. With more, each head has pages of its own there."""
    region, queries = region_of("quest", {"top_k": TOP_K, "page": PAGE}, seed)
    config = hub.own.QuestTopKMaskerConfig(heavy_size=TOP_K, page_size=PAGE)
    assert masked_by(hub, config, region, queries, {})[::GROUP] == rows_of(region, queries)


@pytest.mark.parametrize("seed", range(3))
def test_exact_top_k_is_the_hubs_oracle(hub: Any, seed: int) -> None:
    """For one query head a KV head. With more, each head has rows of its own there."""
    region, queries = region_of("flat", {"top_k": TOP_K}, seed)
    config = hub.own.OracleTopKConfig(heavy_size=TOP_K)
    assert masked_by(hub, config, region, queries, {})[::GROUP] == rows_of(region, queries)


def test_magicpigs_hashes_are_the_hubs(hub: Any) -> None:
    """With the same planes and keys of mean 0. There one collision is enough; in the paper, and here, two are."""
    bits, tables = 5, 40
    settings = {"top_k": TOKENS - 1, "bits": bits, "tables": tables, "dense_layers": 0}
    region, queries = region_of("magicpig", settings, centred=True)
    index: Any = region.index
    (own,) = index.regions(region.batch([0]))
    values = index.values(queries.unflatten(0, (KV_HEADS, GROUP)), own) / GROUP
    planes = torch.cat([index.planes, torch.zeros(1, bits * tables)])  # none for the channel that makes norms equal
    config = hub.pig.MagicPigConfig(lsh_l=tables, lsh_k=bits)
    theirs = masked_by(hub, config, region, queries, {"projections": {0: planes}})
    planes = index.planes.double().T.unflatten(0, (tables, bits))
    for number, (keys, found) in enumerate(zip(region.keys[0], theirs[::GROUP], strict=True)):
        sides = planes @ queries[number * GROUP].double() > 0
        collisions = torch.stack([((planes @ key.double() > 0) == sides).all(dim=1).sum() for key in keys])
        assert found == set((collisions >= 1).nonzero()[:, 0].tolist())
        assert torch.equal(values[number], torch.where(collisions >= 2, collisions, 0).float())


def test_streamingllm_is_kvpresss(kvpress: Any) -> None:
    """A prompt of 1,199 tokens, and one more: the first, and the latest."""
    cache = {"sink": 4, "local": 100, "update": 8, "full_threshold": 0}
    keys, queries = (part.transpose(0, 1) if part.shape[0] > KV_HEADS else part for part in topical(TOKENS, 3))
    selector = Selector("streamingllm", {"top_k": TOP_K}, cache)
    selector.begin(2, keys[None, :, :-1], queries[None, :, :-1], DIM**-0.5)
    found = selector.choose(2, queries[None, :, -1:], keys[None])[0, ::GROUP, 0]
    kept = int(found[0].sum())
    assert kept < TOKENS // 4
    press = kvpress.StreamingLLMPress(compression_ratio=1 - (kept + 0.5) / TOKENS, n_sink=4)
    assert torch.equal(press.score(MODULE, None, keys[None], keys[None], None, {})[0] > 0, found)


def test_snapkvs_votes_are_kvpresss(kvpress: Any) -> None:
    """Without pooling, and of attention to the region. There it is the mean of 5 neighbours, and the largest of 7 here."""
    window = 32
    region, _ = region_of("snapkv", {"top_k": TOP_K, "window": window, "kernel": 1})
    queries = topical(TOKENS + 1, 3)[1][TOKENS - window : TOKENS].transpose(0, 1)  # [H, window, D]
    scores = queries @ region.keys[0].repeat_interleave(GROUP, dim=0).transpose(1, 2) * DIM**-0.5
    attentions = torch.cat([scores.softmax(dim=-1), torch.zeros(HEADS, window, window)], dim=2)[None]
    keys = torch.zeros(1, KV_HEADS, TOKENS + window, DIM)
    press = kvpress.SnapKVPress(compression_ratio=0.5, window_size=window, kernel_size=1)
    votes = press.score(MODULE, torch.zeros(1, TOKENS + window, 1), keys, keys, attentions, {})[0, :, :TOKENS]
    assert [set(row.tolist()) for row in votes.topk(TOP_K).indices] == rows_of(region, queries[:, -1])


def test_h2os_sums_are_kvpresss(kvpress: Any) -> None:
    """There a key's sum is divided by the queries that see it, which the paper's is not, and no half is the latest rows."""
    keys, queries = topical(TOKENS + 1, 3)
    region, _ = region_of("h2o", {"top_k": TOKENS})
    shared = keys[:, :TOKENS].repeat_interleave(GROUP, dim=0)
    scores = queries[:TOKENS].transpose(0, 1) @ shared.transpose(1, 2) * DIM**-0.5
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    attentions = scores.masked_fill(~causal, -torch.inf).softmax(dim=-1)[None]
    theirs = kvpress.ObservedAttentionPress().score(MODULE, None, keys[None, :, :TOKENS], None, attentions, {})[0]
    index: Any = region.index
    torch.testing.assert_close(theirs * torch.arange(TOKENS, 0, -1), index.received[0, :, :TOKENS])
