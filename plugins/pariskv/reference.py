"""ParisKV in PyTorch, on any device: the definition of correct for the native and GPU kernels.

A key is encoded once. A query votes for keys block by block with one byte of each key's code (collision), then the scores of
the keys with the most votes are estimated from 4-bit codes (rerank), and the top k are kept. ParisKV paper, section 4.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.index_context import IndexContext
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.plugins.contract import Budget
from kvseek.plugins.ranking import ScanIndex, best_positions

from .codebook import BLOCK, dequantise, pack_bits, pack_nibbles, split_blocks
from .config import Config

CENTROIDS = 256  # sign patterns of a block
TIERS = ((5, 6), (15, 5), (30, 4), (50, 3), (75, 2), (100, 1))  # (per cent of T, score), paper section 4
ENCODE_TOKENS = 8 * EXTENT_TOKENS  # keys encoded at a time, which bounds temporary memory


class ReferenceIndex(ScanIndex):
    """One layer's codes, in extents of 1,024 tokens.

    With E extents, G KV heads, P the padded head size and B = P/8 blocks:

    Attributes
    ----------
    ids : Tensor, uint8 [E, G, 1024, B]
        Centroid of each block; bit j is set if coordinate j is negative.
    codes : Tensor, uint8 [E, G, 1024, P/2]
        Nibble of coordinate 2i in the low half of byte i, of 2i+1 in the high half: level in bits 0-2, sign in bit 3.
    weights : Tensor, float16 [E, G, 1024, B]
        w_b = ‖k‖ r_b / α_b.
    counts : Tensor, int32 [slots, G, B, 256]
        Number of keys of each slot per centroid.
    """

    config: Config

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self._of_mean = self.config.group_reduce == "mean"
        books = {name: book.to(context.device) for name, book in context.codebooks.items()}
        self.levels, self.thresholds, self.signs = books["levels"], books["thresholds"], books["signs"]
        self.padded_dim = self.signs.shape[0]
        self.blocks = self.padded_dim // BLOCK
        rows = (context.extents.capacity, context.num_kv_heads, EXTENT_TOKENS)
        device = context.device
        self.ids = torch.empty((*rows, self.blocks), dtype=torch.uint8, device=device)
        self.codes = torch.empty((*rows, self.padded_dim // 2), dtype=torch.uint8, device=device)
        self.weights = torch.empty((*rows, self.blocks), dtype=torch.float16, device=device)
        count_shape = (context.extents.slots, context.num_kv_heads, self.blocks, CENTROIDS)
        self.counts = torch.zeros(count_shape, dtype=torch.int32, device=device)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of ids, codes and weights of all KV heads; the counts do not grow with the tokens."""
        return self.context.num_kv_heads * (self.blocks + self.padded_dim // 2 + 2 * self.blocks)

    def encode(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode keys [G, n, D]: ids uint8 [G, n, B], codes uint8 [G, n, P/2], weights float16 [G, n, B].

        The key is rotated without dividing it by ‖k‖ first, because multiplying the radius by ‖k‖ later would undo that.
        A level is the number of thresholds below the magnitude. Weights beyond float16 become its largest number.
        """
        blocks = split_blocks(rotate(keys, self.signs))
        radius = block_sum(blocks.square()).sqrt()[..., None]
        magnitude = blocks.abs() / torch.where(radius > 0, radius, 1.0)
        negative = blocks < 0
        level = torch.bucketize(magnitude, self.thresholds)
        nibbles = (level + 8 * negative).to(torch.uint8)
        weight, alpha = radius[..., 0], block_sum(self.levels[level] * magnitude)  # v and u of α have the same signs
        weight = torch.where(weight > 0, weight / alpha, 0.0).clamp(max=torch.finfo(torch.float16).max)
        return pack_bits(negative), pack_nibbles(nibbles.flatten(-2)), weight.half()

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; the queries are not used."""
        self.counts[slot].zero_()
        self.append(slot, 0, keys)
        self.publish(slot, 0, keys.shape[1])

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append. Writes ids, codes and weights, which no selection reads beyond a region's length."""
        for offset in range(0, keys.shape[1], ENCODE_TOKENS):
            encoded = self.encode(keys[:, offset : offset + ENCODE_TOKENS])
            for array, values in zip((self.ids, self.codes, self.weights), encoded, strict=True):
                self.context.extents.write(array, slot, start + offset, values)

    def publish(self, slot: int, start: int, count: int) -> None:
        """See Index.publish. Adds to the counts of centroids, which every selection reads whole."""
        for extent, inside, _ in self.context.extents.spans(slot, start, start + count):
            by_block = self.ids[extent, :, inside].transpose(1, 2).long()
            self.counts[slot].scatter_add_(-1, by_block, torch.ones_like(by_block, dtype=torch.int32))

    def adopt(self, slot: int, length: int) -> None:
        """See Index.adopt. Counts the keys of each centroid from their ids."""
        self.counts[slot].zero_()
        self.publish(slot, 0, length)

    def budget(self, length: int) -> Budget:
        """See Index.budget. The rows are the top k; the fields are the keys with a tier in a block, and the reranked keys."""
        rho, _ = self.config.schedule(length)
        fields = (math.ceil(rho * length), self.config.candidates(length))
        return Budget(min(self.config.top_k, length), fields)

    def lanes(self, queries: Tensor) -> Tensor:
        """See ScanIndex.lanes. Rotates queries: float32 [G, lanes, P]."""
        queries = queries.float()
        return rotate(queries.mean(dim=1, keepdim=True) if self._of_mean else queries, self.signs)

    def candidates(self, lanes: Tensor, slot: int, length: int) -> Tensor:
        """See ScanIndex.candidates. They are the places with the most votes."""
        budget, count = self.budget(length).method_fields
        tiers = tier_table(lanes, self.counts[slot], budget)
        votes = collision_scores(tiers, self.context.extents.read(self.ids, slot, length))
        return best_positions(votes, count)

    def estimates(self, lanes: Tensor, candidates: Tensor, slot: int, length: int) -> Tensor:
        extents = self.context.extents
        codes = take_rows(extents.read(self.codes, slot, length), candidates)
        weights = take_rows(extents.read(self.weights, slot, length), candidates)
        return estimate_scores(lanes, codes, weights, self.levels)

    def values(self, estimates: Tensor) -> Tensor:
        """See ScanIndex.values. The mean of the queries ranks by its estimates themselves."""
        return estimates[:, 0] if self._of_mean else super().values(estimates)


def block_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension (8) by adding neighbours, then neighbouring sums, an order that kernels can follow."""
    while values.shape[-1] > 1:
        values = values[..., ::2] + values[..., 1::2]
    return values[..., 0]


def take_rows(array: Tensor, places: Tensor) -> Tensor:
    """Take the rows of array [G, n, width] at places [G, c]: [G, c, width]."""
    return array.gather(1, places[..., None].expand(-1, -1, array.shape[-1]))


def centroid_scores(lanes: Tensor) -> Tensor:
    """Score all sign patterns of each block: rotated queries [G, lanes, P] to float32 [G, lanes, B, 256].

    Adds or subtracts coordinate 0, then 1, … 7, so that another implementation can reproduce it to the bit. The length
    1/√8 that all centroids share is left out: only their order matters.
    """
    blocks = split_blocks(lanes)
    scores = torch.zeros_like(blocks[..., :1])
    for j in range(BLOCK):
        coordinate = blocks[..., j : j + 1]
        scores = torch.cat((scores + coordinate, scores - coordinate), dim=-1)
    return scores


def tier_table(lanes: Tensor, counts: Tensor, budget: int) -> Tensor:
    """Compute the votes of each centroid: rotated queries [G, lanes, P] and counts [G, B, 256] to uint8 [G, lanes, B, 256].

    Centroids are walked by descending score (ties: ascending id). A centroid with less than 5/15/30/50/75/100 % of
    `budget` = ceil(ρ n) keys before it earns 6/5/4/3/2/1 votes, any other centroid none.
    """
    order = centroid_scores(lanes).argsort(dim=-1, descending=True, stable=True)
    ranked = counts[:, None].expand(order.shape).long().gather(-1, order)
    preceding = ranked.cumsum(dim=-1) - ranked
    tiers = torch.zeros_like(order, dtype=torch.uint8)
    for percent, tier in reversed(TIERS):
        tiers[preceding * 100 < percent * budget] = tier
    return torch.zeros_like(tiers).scatter_(-1, order, tiers)


def collision_scores(tiers: Tensor, ids: Tensor) -> Tensor:
    """Count the votes for each key: tiers uint8 [G, lanes, B, 256] and ids uint8 [G, n, B] to int32 [G, n].

    Votes are summed over the blocks for each lane, and a key gets the largest of these sums.
    """
    by_block = ids.transpose(1, 2).long()[:, None].expand(-1, tiers.shape[1], -1, -1)
    return tiers.gather(-1, by_block).sum(dim=2, dtype=torch.int32).amax(dim=1)


def estimate_scores(lanes: Tensor, codes: Tensor, weights: Tensor, levels: Tensor) -> Tensor:
    """Estimate q·k as Σ_b w_b <v_b, (R q)_b>: float32 [G, lanes, c].

    Parameters
    ----------
    lanes : Tensor, float32 [G, lanes, P]
        Rotated queries, not normalised, so that they contain ‖q‖.
    codes : Tensor, uint8 [G, c, P/2]
    weights : Tensor, float16 [G, c, B]
    levels : Tensor, float32 [8]
    """
    directions = split_blocks(dequantise(codes, levels))
    keys = (directions * weights.float()[..., None]).flatten(-2)
    return lanes @ keys.transpose(1, 2)
