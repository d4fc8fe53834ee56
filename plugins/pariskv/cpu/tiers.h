// ParisKV, first step of a query: give each centroid of each block its votes (paper, section 4).
#pragma once

#include "kernels/cpu/simd.h"
#include "layout.h"

namespace kvseek {
namespace {

constexpr int TIERS = 6;                                           // the best centroids earn 6 votes
constexpr int64_t TIER_PERCENT[TIERS] = {5, 15, 30, 50, 75, 100};  // of the budget, by preceding keys
constexpr int BUCKETS = 256;

// Scores of all sign patterns of a block: coordinate 0 added or subtracted first, then 1, ..., as the reference does.
void score_centroids(const float* block, float* scores) {
    int size = 1, coordinate = 0;
    Vec first = {};
    for (; size < LANES; size *= 2, coordinate++)  // patterns of a vector
        first = (lane_numbers() & size) != 0 ? first - block[coordinate] : first + block[coordinate];
    store(scores, first);
    for (; coordinate < BLOCK; size *= 2, coordinate++) {
        for (int i = 0; i < size; i += LANES) {
            const Vec score = load(scores + i);
            store(scores + i, score + block[coordinate]);
            store(scores + size + i, score - block[coordinate]);
        }
    }
}

// Preceding counts below limits[t] earn at least TIERS - t votes: ceil(percent * budget / 100).
struct Limits {
    int32_t of[TIERS];
    explicit Limits(int64_t budget) {
        for (int t = 0; t < TIERS; t++) of[t] = static_cast<int32_t>((TIER_PERCENT[t] * budget + 99) / 100);
    }
    uint8_t votes(int32_t preceding) const {
        int below = 0;
        for (int t = 0; t < TIERS; t++) below += preceding < of[t];
        return static_cast<uint8_t>(below);
    }
};

// Where a bucket's number of keys is kept: a vector lane has ROWS buckets that follow each other, so that vectors are
// added up without shuffles.
constexpr int ROWS = BUCKETS / LANES;
template <class T>
inline T cell_of(T bucket) {
    return bucket % ROWS * LANES + bucket / ROWS;
}

// Buckets of scores, best first, and their cells. Rounding is monotonic, so a better score is never in a later bucket.
void bucket_scores(const float* scores, uint8_t* buckets, uint8_t* cells) {
    Vec best = load(scores);
    for (int i = LANES; i < CENTROIDS; i += LANES) best = maximum(best, load(scores + i));
    const float highest = maximum(best);
    const float scale = highest > 1e-30f ? 127.99f / highest : 0.0f;  // scores lie in [-highest, highest]
    for (int i = 0; i < CENTROIDS; i += LANES) {
        const IntVec bucket = __builtin_convertvector((highest - load(scores + i)) * scale, IntVec) & (BUCKETS - 1);
        const ByteVec bytes = __builtin_convertvector(bucket, ByteVec);
        const ByteVec places = __builtin_convertvector(cell_of((WordVec)bucket), ByteVec);
        std::memcpy(buckets + i, &bytes, sizeof(bytes));
        std::memcpy(cells + i, &places, sizeof(places));
    }
}

// Keys in the buckets before each and with it, int32 [256] at cell_of(bucket).
void add_up(const int32_t* keys, int32_t* before, int32_t* after) {
    IntVec column = {}, start;
    for (int row = 0; row < ROWS; row++) column += load(keys + row * LANES);
    for (int32_t lane = 0, sum = 0; lane < LANES; sum += column[lane++]) start[lane] = sum;
    for (int row = 0; row < ROWS; row++) {
        store(before + row * LANES, start);
        start += load(keys + row * LANES);
        store(after + row * LANES, start);
    }
}

// Votes of the centroids of one bucket, where a limit falls inside it: walked by score, ties by id.
void split_bucket(const float* scores, const uint8_t* buckets, int bucket, const int32_t* counts, int32_t preceding,
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
    for (int i = 0; i < size; i++) {
        votes[ids[i]] = limits.votes(preceding);
        preceding += counts[ids[i]];
    }
}

// Votes uint8 [256] of a block's centroids, for a rotated query's block and the counts of keys per centroid.
//
// Only which centroids lie between two limits matters, so buckets stand in for sorting; centroids without keys may get
// any votes, as no key reads them.
void vote_block(const float* block, const int32_t* counts, const Limits& limits, uint8_t* votes) {
    alignas(64) float scores[CENTROIDS];
    alignas(64) int32_t keys[BUCKETS] = {}, before[BUCKETS], after[BUCKETS];
    alignas(64) uint8_t buckets[CENTROIDS], cells[CENTROIDS];
    score_centroids(block, scores);
    bucket_scores(scores, buckets, cells);
    for (int id = 0; id < CENTROIDS; id++) keys[cells[id]] += counts[id];
    add_up(keys, before, after);

    IntVec behind[TIERS] = {};  // numbers of buckets that a limit lies behind
    for (int i = 0; i < BUCKETS; i += LANES)
        for (int t = 0; t < TIERS; t++) behind[t] -= load(after + i) <= limits.of[t];
    int split[TIERS];
    uint8_t below[TIERS], any[TIERS];  // the last bucket whose centroids are below the limit, if there is any
    for (int t = 0; t < TIERS; t++) {
        const int bucket = sum(behind[t]);
        const bool inside = bucket < BUCKETS && before[cell_of(bucket)] < limits.of[t];
        split[t] = inside ? bucket : -1;
        any[t] = bucket + inside > 0;
        below[t] = static_cast<uint8_t>(bucket + inside - any[t]);
    }
    for (int id = 0; id < CENTROIDS; id++) {
        uint8_t earned = 0;
        for (int t = 0; t < TIERS; t++) earned += static_cast<uint8_t>(buckets[id] <= below[t]) & any[t];
        votes[id] = earned;
    }
    for (int t = 0; t < TIERS; t++)
        if (split[t] >= 0 && (t == 0 || split[t] != split[t - 1]))
            split_bucket(scores, buckets, split[t], counts, before[cell_of(split[t])], limits, votes);
}

}  // namespace
}  // namespace kvseek
