// Inner products of a few queries with a few rows that lie anywhere.
#pragma once

#include "half.h"

namespace kvseek {
namespace {

constexpr int MULTIPLIED_ROWS = 4;

// products [COUNT, stride] of queries [COUNT, dim] with MULTIPLIED_ROWS rows [dim].
template <int COUNT, class T>
inline void multiply_queries(const float* queries, const T* const* rows, int64_t dim, float* products, int64_t stride) {
    Vec sums[COUNT][MULTIPLIED_ROWS] = {};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        Vec numbers[MULTIPLIED_ROWS];
        for (int i = 0; i < MULTIPLIED_ROWS; i++) numbers[i] = load(rows[i] + d);
        for (int q = 0; q < COUNT; q++) {
            const Vec some = load(queries + q * dim + d);
            for (int i = 0; i < MULTIPLIED_ROWS; i++) sums[q][i] += some * numbers[i];
        }
    }
    for (int q = 0; q < COUNT; q++) {
        float* to = products + q * stride;
        sum4(sums[q][0], sums[q][1], sums[q][2], sums[q][3], to);
        for (int64_t left = d; left < dim; left++)
            for (int i = 0; i < MULTIPLIED_ROWS; i++) to[i] += queries[q * dim + left] * to_float(rows[i][left]);
    }
}

// The same of `count` queries, as many at a time as registers have room for the sums of.
template <class T>
inline void multiply_rows(const float* queries, int64_t count, const T* const* rows, int64_t dim, float* products,
                          int64_t stride) {
    int64_t q = 0;
    if (LANES == 16)
        for (; q + 4 <= count; q += 4) multiply_queries<4>(queries + q * dim, rows, dim, products + q * stride, stride);
    for (; q + 2 <= count; q += 2) multiply_queries<2>(queries + q * dim, rows, dim, products + q * stride, stride);
    if (q < count) multiply_queries<1>(queries + q * dim, rows, dim, products + q * stride, stride);
}

}  // namespace
}  // namespace kvseek
