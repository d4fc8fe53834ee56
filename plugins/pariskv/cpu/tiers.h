// ParisKV, first step of a query: give each centroid of each block its votes (paper, section 4).
#pragma once

#include "../../shared/simd.h"
#include "layout.h"

namespace kvseek {
namespace {

constexpr int TIERS = 6;                                           // the best centroids earn 6 votes
constexpr int64_t TIER_PERCENT[TIERS] = {5, 15, 30, 50, 75, 100};  // of the budget, by preceding keys
constexpr int BUCKETS = 256;

// Scores of all sign patterns of a block: coordinate 0 added or subtracted first, then 1, ..., as the reference does.
void score_centroids(const float* block, float* scores) {
    scores[0] = 0.0f;
    for (int j = 0; j < BLOCK; j++) {
        const int half = 1 << j;
        const float coordinate = block[j];
        int i = 0;
        for (; i + LANES <= half; i += LANES) {
            const Vec score = load(scores + i);
            store(scores + i, score + coordinate);
            store(scores + half + i, score - coordinate);
        }
        for (; i < half; i++) {
            const float score = scores[i];
            scores[i] = score + coordinate;
            scores[half + i] = score - coordinate;
        }
    }
}

// Preceding counts below limits[t] earn at least TIERS - t votes: ceil(percent * budget / 100).
struct Limits {
    int64_t of[TIERS];
    explicit Limits(int64_t budget) {
        for (int t = 0; t < TIERS; t++) of[t] = (TIER_PERCENT[t] * budget + 99) / 100;
    }
    int pass(int64_t preceding, int tier) const {  // first limit, from `tier` on, that `preceding` is below
        while (tier < TIERS && preceding >= of[tier]) tier++;
        return tier;
    }
};

// Buckets of scores, best first. Rounding is monotonic, so a better score is never in a later bucket.
void bucket_scores(const float* scores, uint8_t* buckets) {
    Vec best = load(scores);
    for (int i = LANES; i < CENTROIDS; i += LANES) best = maximum(best, load(scores + i));
    const float highest = maximum(best);
    const float scale = highest > 1e-30f ? 127.99f / highest : 0.0f;  // scores lie in [-highest, highest]
    for (int i = 0; i < CENTROIDS; i += LANES) {
        const IntVec bucket = __builtin_convertvector((highest - load(scores + i)) * scale, IntVec);
        const ByteVec bytes = __builtin_convertvector(bucket & (BUCKETS - 1), ByteVec);
        std::memcpy(buckets + i, &bytes, sizeof(bytes));
    }
}

// Votes of the centroids of one bucket, where a limit falls inside it: walked by score, ties by id.
void split_bucket(const float* scores, const uint8_t* buckets, int bucket, const int32_t* counts, int64_t preceding,
                  const Limits& limits, uint8_t* votes) {
    int ids[CENTROIDS], size = 0;
    for (int first = 0; first < CENTROIDS; first += 64)
        for (uint64_t bits = equal64(buckets + first, static_cast<uint8_t>(bucket)); bits != 0; bits &= bits - 1)
            ids[size++] = first + __builtin_ctzll(bits);
    for (int i = 1; i < size; i++) {  // stable, so equal scores stay in order of ids
        const int id = ids[i];
        int at = i;
        for (; at > 0 && scores[ids[at - 1]] < scores[id]; at--) ids[at] = ids[at - 1];
        ids[at] = id;
    }
    int tier = 0;
    for (int i = 0; i < size; i++) {
        tier = limits.pass(preceding, tier);
        votes[ids[i]] = static_cast<uint8_t>(TIERS - tier);
        preceding += counts[ids[i]];
    }
}

// Votes uint8 [256] of a block's centroids, for a rotated query's block and the counts of keys per centroid.
//
// Only which centroids lie between two limits matters, so buckets stand in for sorting; centroids without keys may get
// any votes, as no key reads them.
void vote_block(const float* block, const int32_t* counts, const Limits& limits, uint8_t* votes) {
    alignas(64) float scores[CENTROIDS];
    uint8_t buckets[CENTROIDS], bucket_votes[BUCKETS] = {};
    int32_t keys[BUCKETS] = {};
    score_centroids(block, scores);
    bucket_scores(scores, buckets);
    for (int id = 0; id < CENTROIDS; id++) keys[buckets[id]] += counts[id];

    int64_t preceding = 0, split_preceding[TIERS];
    int tier = 0, splits = 0, split[TIERS];
    for (int bucket = 0; bucket < BUCKETS && tier < TIERS; bucket++) {
        bucket_votes[bucket] = static_cast<uint8_t>(TIERS - tier);
        const int64_t after = preceding + keys[bucket];
        if (after > limits.of[tier]) {
            split[splits] = bucket;
            split_preceding[splits++] = preceding;
        }
        preceding = after;
        tier = limits.pass(preceding, tier);
    }
    for (int id = 0; id < CENTROIDS; id++) votes[id] = bucket_votes[buckets[id]];
    for (int i = 0; i < splits; i++) split_bucket(scores, buckets, split[i], counts, split_preceding[i], limits, votes);
}

}  // namespace
}  // namespace kvseek
