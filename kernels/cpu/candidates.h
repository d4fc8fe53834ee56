// Candidates: the places of the best scores of a whole region.
#pragma once

#include "top.h"

namespace kvseek {
namespace {

constexpr int64_t SAMPLE = 512;  // scores that tell about how large a candidate's score is

// A score that more than `wanted` of scores [n] are likely to reach, but few more: from a sample of every n / 512-th
// one.
float likely_floor(const float* scores, int64_t n, int64_t wanted) {
    const int64_t expected = wanted * SAMPLE / n, deeper = expected + expected / 4 + 16;
    if (n < 4 * SAMPLE || deeper >= SAMPLE) return -INFINITE;
    float sample[SAMPLE];
    int32_t ranks[SAMPLE];
    for (int64_t i = 0; i < SAMPLE; i++) sample[i] = scores[i * n / SAMPLE];
    rank_values(sample, SAMPLE, ranks);
    return of_rank(find_cut(ranks, SAMPLE, deeper).rank);
}

// Scores of a region that may be among the best: as ranks, with their places.
struct CandidateLists {
    int32_t* ranks;   // [n rounded up to LANES]
    int32_t* places;  // the same
};

// List the scores [n] that are at least `floor`, in order; returns their number.
int64_t list_reaching(const float* scores, int64_t n, float floor, const CandidateLists& lists) {
    int64_t count = 0, i = 0;
#if defined(__AVX512F__)
    for (; i + LANES <= n; i += LANES) {
        const Vec some = load(scores + i);
        const uint64_t reaching = _mm512_cmp_ps_mask((__m512)some, _mm512_set1_ps(floor), _CMP_GE_OQ);
        append(lane_numbers() + static_cast<int>(i), reaching, lists.places + count);
        count += append(rank_of(some), reaching, lists.ranks + count);
    }
#endif
    for (; i < n; i++) {
        lists.ranks[count] = rank_of(splat(scores[i]))[0], lists.places[count] = static_cast<int32_t>(i);
        count += scores[i] >= floor;
    }
    for (i = count; i % LANES != 0; i++) lists.ranks[i] = INT32_MIN;
    return count;
}

// Places of the `wanted` <= n largest scores [n], ties cut by lowest place; ascending.
void take_candidates(const float* scores, int64_t n, int64_t wanted, const CandidateLists& lists, int32_t* places) {
    const float floor = likely_floor(scores, n, wanted);
    int64_t count = list_reaching(scores, n, floor, lists);
    if (count < wanted) {  // the sample misled, or scores are NaN
        for (int64_t i = 0; i < n; i++) lists.places[i] = static_cast<int32_t>(i);
        rank_values(scores, n, lists.ranks);
        count = n;
    }
    take_largest(lists.ranks, lists.places, count, wanted, places);
}

}  // namespace
}  // namespace kvseek
