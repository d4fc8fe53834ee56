// From the scores of a group's query heads to the top rows.
#pragma once

#include "simd.h"

namespace kvseek {
namespace {

// Replace scores float [count] by their softmax after multiplication by `scaling`. Readable and writable up to the
// next multiple of LANES.
inline void softmax(float* scores, int64_t count, float scaling) {
    for (int64_t i = count; i % LANES != 0; i++) scores[i] = -INFINITE;
    Vec best = splat(-INFINITE), total = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Vec scaled = load(scores + i) * scaling;
        store(scores + i, scaled);
        best = maximum(best, scaled);
    }
    const float highest = maximum(best);
    for (int64_t i = 0; i < count; i += LANES) {
        const Vec weight = exponential(load(scores + i) - highest);
        store(scores + i, weight);
        total += weight;
    }
    const float share = 1.0f / sum(total);
    for (int64_t i = 0; i < count; i += LANES) store(scores + i, load(scores + i) * share);
}

// Sum lanes [lanes, stride] up into the first; sums rank as means do.
inline void fold(float* scores, int lanes, int64_t stride, int64_t count) {
    for (int lane = 1; lane < lanes; lane++) {
        const float* other = scores + lane * stride;
        for (int64_t i = 0; i < count; i += LANES) store(scores + i, load(scores + i) + load(other + i));
    }
}

// Integers that order as the floats do (NaN at the ends).
inline IntVec rank_of(Vec values) {
    const IntVec bits = (IntVec)(values + 0.0f);  // -0 becomes +0, so that they tie
    return bits ^ ((bits >> 31) & INT32_MAX);
}

// The float of a rank.
inline float of_rank(int32_t rank) {
    const int32_t bits = rank ^ ((rank >> 31) & INT32_MAX);
    return load_as<float>(&bits);
}

// Ranks of values [count], and the lowest rank up to the next multiple of LANES.
void rank_values(const float* values, int64_t count, int32_t* ranks) {
    for (int64_t i = 0; i < count; i += LANES) store(ranks + i, rank_of(load(values + i)));
    for (int64_t i = count; i % LANES != 0; i++) ranks[i] = INT32_MIN;
}

struct Cut {
    int32_t rank;  // of the last value taken
    int64_t ties;  // how many of that rank are taken at most
};

// Where the `wanted` <= count largest of `ranks` (as rank_values leaves them) end. Bisection, a bit of the rank a pass:
// a pass over some hundred ranks in the cache costs less than the scatter of a histogram.
Cut find_cut(const int32_t* ranks, int64_t count, int64_t wanted) {
    int32_t rank = INT32_MIN;
    int64_t above = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        const int32_t least = static_cast<int32_t>(static_cast<uint32_t>(rank) + bit);
        IntVec reaching = {};
        for (int64_t i = 0; i < count; i += LANES) reaching -= load(ranks + i) >= least;
        const int64_t reached = sum(reaching);
        if (reached == wanted) return {least, wanted};
        if (reached > wanted)
            rank = least;
        else
            above = reached;
    }
    return {rank, wanted - above};
}

// places[i] of the `wanted` <= count largest ranks[i], ties cut by lowest i, in order of i. Ranks are as rank_values
// leaves them, and places readable up to the next multiple of LANES.
void take_largest(const int32_t* ranks, const int32_t* places, int64_t count, int64_t wanted, int32_t* rows) {
    Cut cut = find_cut(ranks, count, wanted);
    int64_t i = 0;
#if defined(__AVX512F__)
    for (int64_t taken = 0; taken < wanted; i += LANES) {
        const __m512i some = (__m512i)load(ranks + i), last = _mm512_set1_epi32(cut.rank);
        const uint64_t tied = lowest_bits(_mm512_cmpeq_epi32_mask(some, last), cut.ties);
        cut.ties -= __builtin_popcountll(tied);
        const uint64_t kept = _mm512_cmpgt_epi32_mask(some, last) | tied;
        taken += append(load(places + i), kept, rows + taken);
    }
#else
    for (int64_t taken = 0; taken < wanted; i++) {  // without branches, for which ranks are taken is chance
        const bool tied = (ranks[i] == cut.rank) & (cut.ties > 0);
        rows[taken] = places[i];
        taken += (ranks[i] > cut.rank) | tied;
        cut.ties -= tied;
    }
#endif
}

}  // namespace
}  // namespace kvseek
