// Scores of pages from estimates of their rows: what the rows weigh together in a softmax.
#pragma once

#include "kernels/cpu/simd.h"

namespace kvseek {
namespace {

constexpr int64_t MOST_ROWS = 1024;  // that are scored at once: whole pages, of 128 rows at most

// a[0] + a[1], a[2] + a[3], ..., then the same of b.
inline Vec add_neighbours(Vec a, Vec b) {
#if defined(__AVX512F__)
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    return (Vec)_mm512_permutex2var_ps((__m512)a, even, (__m512)b) +
           (Vec)_mm512_permutex2var_ps((__m512)a, odd, (__m512)b);
#elif defined(__AVX2__)
    const __m256d sums = _mm256_castps_pd(_mm256_hadd_ps((__m256)a, (__m256)b));  // pairs of sums: a, b, a, b
    return (Vec)_mm256_castpd_ps(_mm256_permute4x64_pd(sums, 0xd8));
#else
    Vec sums;
    for (int i = 0; i < LANES / 2; i++)
        sums[i] = a[2 * i] + a[2 * i + 1], sums[LANES / 2 + i] = b[2 * i] + b[2 * i + 1];
    return sums;
#endif
}

// log Σ e^x over exponents x [count], the largest taken out first.
inline float log_sum(const float* x, int64_t count) {
    float largest = -INFINITE, total = 0.0f;
    for (int64_t i = 0; i < count; i++) largest = x[i] > largest ? x[i] : largest;
    if (largest == -INFINITE) return largest;
    for (int64_t i = 0; i < count; i++) total += exponential(x[i] - largest);
    return largest + logarithm(splat(total))[0];
}

// log Σ e^x over the rows of each page, from the exponents of rows [count], behind which whole vectors are filled up
// with -infinity; the last page may have fewer rows than `page`. Returns the number of pages. `scores` has room for
// whole vectors.
//
// The largest exponent of all rows is taken out of the sums, not that of each page, which takes fewer passes. A page so
// far below it that its sum may have lost digits is done again by itself.
inline int64_t score_pages(const float* exponents, int64_t count, int64_t page, float* scores) {
    constexpr float LEAST = 1e-25f;  // e^x is 0 below e^-87
    const int64_t pages = (count + page - 1) / page;
    alignas(64) float sums[MOST_ROWS + 2 * LANES] = {};  // folding reads up to two vectors beyond the last page
    Vec best = splat(-INFINITE);
    for (int64_t i = 0; i < count; i += LANES) best = maximum(best, load(exponents + i));
    const float highest = maximum(best), largest = highest == -INFINITE ? 0.0f : highest;
    for (int64_t i = 0; i < count; i += LANES) store(sums + i, exponential(load(exponents + i) - largest));
    for (int64_t size = page, left = pages * page / 2; size > 1; size /= 2, left /= 2) {
        for (int64_t i = 0; i < left; i += LANES)
            store(sums + i, add_neighbours(load(sums + 2 * i), load(sums + 2 * i + LANES)));
    }
    for (int64_t i = 0; i < pages; i += LANES) store(scores + i, largest + logarithm(load(sums + i)));
    for (int64_t i = 0; i < pages; i++) {
        const int64_t first = i * page, rows = count - first < page ? count - first : page;
        if (sums[i] < LEAST) scores[i] = log_sum(exponents + first, rows);
    }
    return pages;
}

}  // namespace
}  // namespace kvseek
