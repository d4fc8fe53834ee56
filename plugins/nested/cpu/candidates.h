// Candidates: the places of the best scores of a whole region.
#pragma once

#include "../../shared/top.h"

namespace kvseek {
namespace {

constexpr int64_t SAMPLE = 512;  // scores that tell about how large a candidate's score is

// A score that more than `wanted` of scores [n] are likely to reach, but few more: from a sample of every n / 512-th
// one.
float likely_floor(const float* scores, int64_t n, int64_t wanted) {
    const int64_t expected = wanted * SAMPLE / n, deeper = expected + expected / 4 + 16;
    if (n < 4 * SAMPLE || deeper >= SAMPLE) return -INFINITE;
    uint32_t ranks[SAMPLE];
    for (int64_t i = 0; i < SAMPLE; i++) ranks[i] = rank_of(scores[i * n / SAMPLE]);
    return of_rank(find_cut(ranks, SAMPLE, deeper).rank);
}

// The scores [n] that are at least `floor` and their places, in order; returns their number. Writes up to n.
int64_t list_reaching(const float* scores, int64_t n, float floor, float* values, int32_t* places) {
    int64_t count = 0, i = 0;
#if defined(__AVX512F__)
    const __m512i steps = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + LANES <= n; i += LANES) {
        const __m512 some = (__m512)load(scores + i);
        const __mmask16 reaching = _mm512_cmp_ps_mask(some, _mm512_set1_ps(floor), _CMP_GE_OQ);
        _mm512_mask_compressstoreu_ps(values + count, reaching, some);
        const __m512i numbers = _mm512_add_epi32(steps, _mm512_set1_epi32(static_cast<int>(i)));
        _mm512_mask_compressstoreu_epi32(places + count, reaching, numbers);
        count += __builtin_popcount(reaching);
    }
#endif
    for (; i < n; i++) {
        values[count] = scores[i], places[count] = static_cast<int32_t>(i);
        count += scores[i] >= floor;
    }
    return count;
}

// Memory that take_candidates works in, for regions of n keys.
struct CandidateLists {
    float* values;    // [n]
    int32_t* places;  // [n]
    uint32_t* ranks;  // [n]
};

// Places of the `wanted` <= n largest scores [n], ties cut by lowest place; ascending.
void take_candidates(const float* scores, int64_t n, int64_t wanted, const CandidateLists& lists, int32_t* places) {
    const float floor = likely_floor(scores, n, wanted);
    const int64_t count = list_reaching(scores, n, floor, lists.values, lists.places);
    if (count >= wanted) return take_largest(lists.values, lists.places, count, wanted, lists.ranks, places);
    for (int64_t i = 0; i < n; i++) lists.places[i] = static_cast<int32_t>(i);  // the sample misled, or scores are NaN
    take_largest(scores, lists.places, n, wanted, lists.ranks, places);
}

}  // namespace
}  // namespace kvseek
