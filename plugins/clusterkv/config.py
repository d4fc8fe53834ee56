"""Fields of the ClusterKV method, as they stand in `method_config` of an engine directory, and the counts they imply."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import require

# Generated tokens that leave the window together and are clustered by themselves (paper, section III-B).
GENERATED_TOKENS = 320
CLUSTER_STEP = 16  # the clusters that an extent has room for are a multiple of this
MOST_ROWS = 65_535  # limit of the rows that clusters are taken for: kernels keep cluster sizes, cut at it, in 16 bits

# What the paper sets. Of its budgets of 256 to 2048 rows, 1024 is that of its perplexities and of its latencies beside Quest's
# (sections V-B and V-C). It clusters until no key moves: here at most 60 rounds, of which the last move 0.0 % (README).
PAPER = {
    "top_k": 1024,
    "tokens_per_cluster": 80,  # section III-B, as all numbers of clusters
    "clusters_per_update": 4,
    "iterations": 60,
    "dense_layers": 2,  # section V-A
    "cache_steps": 1,  # section IV-D
    "spread_weight": 0.0,
    "rerank_bits": 0,
    "cache.sink": 16,  # section III-B
    "cache.update": GENERATED_TOKENS,
}


@dataclass(frozen=True)
class Config:
    """How keys are clustered and how many rows are retrieved.

    Attributes
    ----------
    top_k : int
        Rows retrieved per KV head. The paper calls it the budget. With codes they are the best rows of the best clusters;
        without, clusters are taken whole, and the last one is cut to fit.
    tokens_per_cluster : int
        Prompt tokens per cluster. The paper has 80; half of that loses far fewer answers (README).
    clusters_per_update : int
        Clusters per 320 generated tokens.
    iterations : int
        Most rounds of k-means. The paper goes on until no key moves; 8 rounds retrieve as well (README).
    seed : int
        Seed of the choice of the first centroids, and of the signs of the rotation that key codes need.
    dense_layers : int
        First layers that attend to all rows and have no index.
    cache_steps : int
        Decode steps whose selected rows stay on the device, in layers whose rows lie in host memory; 0: none.
        `R` of the paper.
    spread_weight : float
        What the spread of a cluster's keys adds to its score, so that a cluster with one very good key ranks above its mean:
        score = q·centroid + spread_weight ‖q‖ σ / √D, where σ is the root mean square distance of the keys from their mean.
        0 ranks by the centroid alone, as the paper does.
    rerank_bits : int
        Bits of the key codes by which rows of the best clusters are ranked one by one: 2. 0 keeps no codes and
        takes clusters whole, as the paper does.
    candidates : int
        Rows of the best clusters that codes rank, for each row that is retrieved. Of no effect with rerank_bits 0.
    """

    top_k: int = 512
    tokens_per_cluster: int = 40
    clusters_per_update: int = 4
    iterations: int = 8
    seed: int = 0
    dense_layers: int = 2
    cache_steps: int = 1
    spread_weight: float = 3.0
    rerank_bits: int = 2
    candidates: int = 8

    def __post_init__(self) -> None:
        require(1 <= self.top_k <= MOST_ROWS, "top_k", self.top_k, f"between 1 and {MOST_ROWS}", "512 is the default")
        limit, tokens = f"between 1 and {EXTENT_TOKENS}", self.tokens_per_cluster
        require(1 <= tokens <= EXTENT_TOKENS, "tokens_per_cluster", tokens, limit, "40 is the default")
        limit, count = f"between 1 and {GENERATED_TOKENS}", self.clusters_per_update
        require(1 <= count <= GENERATED_TOKENS, "clusters_per_update", count, limit, "4 is the default")
        require(self.iterations >= 1, "iterations", self.iterations, ">= 1", "8 is the default")
        require(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2**63)", "any such number will do")
        require(self.dense_layers >= 0, "dense_layers", self.dense_layers, ">= 0", "2 is the default")
        require(0 <= self.cache_steps <= 8, "cache_steps", self.cache_steps, "between 0 and 8", "1 is the default")
        in_range = 0 <= self.spread_weight < math.inf
        require(in_range, "spread_weight", self.spread_weight, "finite and >= 0", "0 ranks as the paper does")
        in_range = self.rerank_bits in (0, 2)
        require(in_range, "rerank_bits", self.rerank_bits, "0 or 2", "0 takes clusters whole, as the paper does")
        require(self.candidates >= 1, "candidates", self.candidates, ">= 1", "8 is the default")
        limit = f"at most {MOST_ROWS} with top_k = {self.top_k}"
        most = self.rows_of_clusters <= MOST_ROWS
        require(most, "candidates x top_k", self.rows_of_clusters, limit, "lower candidates or top_k")

    @property
    def rows_of_clusters(self) -> int:
        """Rows that the best clusters are taken for: candidates of the codes, or the rows that are retrieved."""
        return self.top_k * (self.candidates if self.rerank_bits else 1)

    @property
    def clusters_per_extent(self) -> int:
        """Clusters that an extent has room for: those of 1,024 tokens at the larger of both rates, and 2 for rounding up."""
        prompt = -(-EXTENT_TOKENS // self.tokens_per_cluster)
        generated = -(-EXTENT_TOKENS * self.clusters_per_update // GENERATED_TOKENS)
        return -(-(max(prompt, generated) + 2) // CLUSTER_STEP) * CLUSTER_STEP

    def prompt_clusters(self, tokens: int) -> int:
        """Return the clusters of `tokens` retrieval tokens of a prompt: tokens / tokens_per_cluster rounded down, at least 1."""
        return max(1, tokens // self.tokens_per_cluster) if tokens else 0

    def generated_clusters(self, tokens: int) -> int:
        """Return the clusters of the first `tokens` generated tokens that were evicted, rounded to nearest, at least 1."""
        rounded = (2 * tokens * self.clusters_per_update + GENERATED_TOKENS) // (2 * GENERATED_TOKENS)
        return max(1, rounded) if tokens else 0

    def most_clusters(self, tokens: int) -> int:
        """Return the most clusters that a region of `tokens` tokens can have, for every division into prompt and evictions."""
        prompt, generated = tokens // self.tokens_per_cluster, tokens * self.clusters_per_update // GENERATED_TOKENS
        return max(prompt, generated) + 2
