// Attention of a few queries to a tile of rows: scores, weights, weighted sums of values.
#pragma once

#include <type_traits>

#include "kernels/cpu/half.h"
#include "rows.h"

namespace kvseek {
namespace {

constexpr int TILE = 32;  // rows whose scores are turned into weights at once
constexpr int MAX_GROUP = 16;
constexpr int MAX_DIM = 256;
constexpr int QUERIES = 4;  // queries that share the registers of one pass over a tile

// float [TILE] for each query: scores, then weights.
struct Weights {
    alignas(64) float of[MAX_GROUP][TILE];
};

typedef int8_t IntByteVec __attribute__((vector_size(LANES)));
typedef int16_t IntHalfVec __attribute__((vector_size(LANES * 2)));

// Two vectors of a row. In engines of bfloat16 these are the even and the odd channels, whose numbers are the halves of
// a word.
struct Pair {
    Vec first, second;
};
template <class T>
inline Pair load_pair(const T* from) {
    return {load(from), load(from + LANES)};
}
inline Pair load_pair(const Bfloat16* from) {
    const WordVec both = load_as<WordVec>(from);
    return {(Vec)(both << 16), (Vec)(both & 0xffff0000u)};
}
inline Pair load_pair(const Rounded<float>* from) {
    return {__builtin_convertvector(load_as<IntByteVec>(from), Vec),
            __builtin_convertvector(load_as<IntByteVec>(from + LANES), Vec)};
}
inline Pair load_pair(const Rounded<Bfloat16>* from) {
    const IntHalfVec both = load_as<IntHalfVec>(from);
    return {__builtin_convertvector((IntHalfVec)(both << 8) >> 8, Vec), __builtin_convertvector(both >> 8, Vec)};
}

// Where a channel lies in queries and values, so that they match load_pair.
template <class T>
constexpr int place_of(int channel) {
    const int inside = channel % (2 * LANES);
    constexpr bool PAIRED = std::is_same_v<T, Bfloat16> || std::is_same_v<T, Rounded<Bfloat16>>;
    return PAIRED ? channel - inside + inside % 2 * LANES + inside / 2 : channel;
}

// Scores of COUNT queries [COUNT, DIM] (scaled) for the rows of a tile, 4 rows at a time; asks for the next tile's rows
// meanwhile.
template <class T, int DIM, int COUNT>
inline void score(const float* queries, const T* const* rows, int count, const T* const* next, int next_count,
                  float (*scores)[TILE]) {
    for (int row = 0; row < count; row += 4) {
        const T* four[4];
        for (int i = 0; i < 4; i++) {
            four[i] = rows[row + i < count ? row + i : count - 1];
            if (row + i < next_count) prefetch(next[row + i], DIM * sizeof(T));
        }
        Vec sums[COUNT][4] = {};
        for (int d = 0; d < DIM; d += 2 * LANES) {
            for (int i = 0; i < 4; i++) {
                const Pair key = load_pair(four[i] + d);
                for (int q = 0; q < COUNT; q++) {
                    sums[q][i] += key.first * load(queries + q * DIM + d);
                    sums[q][i] += key.second * load(queries + q * DIM + d + LANES);
                }
            }
        }
        for (int q = 0; q < COUNT; q++) sum4(sums[q][0], sums[q][1], sums[q][2], sums[q][3], scores[q] + row);
    }
}

// Turn one query's scores of a tile into weights; returns the factor that earlier sums shrink by.
inline float soften(float* scores, int count, float& highest, float& total) {
    for (int row = count; row < TILE; row++) scores[row] = -INFINITE;
    Vec best = splat(-INFINITE);
    for (int row = 0; row < TILE; row += LANES) best = maximum(best, load(scores + row));
    const float tile_highest = maximum(best);
    const float before = highest;
    highest = tile_highest > before ? tile_highest : before;
    Vec weights = {};
    for (int row = 0; row < TILE; row += LANES) {
        const Vec weight = exponential(load(scores + row) - highest);
        store(scores + row, weight);
        weights += weight;
    }
    const float shrink = exponential(before - highest);
    total = total * shrink + sum(weights);
    return shrink;
}

// values [COUNT, DIM] = values * shrink + weights · the value halves of the rows.
template <class T, int DIM, int COUNT>
inline void accumulate(const T* const* rows, int count, const T* const* next, int next_count,
                       const float (*weights)[TILE], const float* shrink, float* values) {
    constexpr int MOST = LANES == 16 ? 24 / COUNT : 8 / COUNT;  // vectors of a row whose sums stay in registers
    constexpr int VECTORS = DIM / LANES;
    constexpr int WIDTH = VECTORS <= MOST ? VECTORS : VECTORS % 4 == 0 && MOST >= 4 ? 4 : 2;
    for (int d = 0; d < DIM; d += WIDTH * LANES) {
        Vec sums[COUNT][WIDTH];
        for (int q = 0; q < COUNT; q++)
            for (int w = 0; w < WIDTH; w++) sums[q][w] = load(values + q * DIM + d + w * LANES) * shrink[q];
        for (int row = 0; row < count; row++) {
            if (row < next_count) prefetch(next[row] + DIM + d, WIDTH * LANES * sizeof(T));
            for (int w = 0; w < WIDTH; w += 2) {
                const Pair value = load_pair(rows[row] + DIM + d + w * LANES);
                for (int q = 0; q < COUNT; q++) {
                    sums[q][w] += value.first * weights[q][row];
                    sums[q][w + 1] += value.second * weights[q][row];
                }
            }
        }
        for (int q = 0; q < COUNT; q++)
            for (int w = 0; w < WIDTH; w++) store(values + q * DIM + d + w * LANES, sums[q][w]);
    }
}

// Multiply what a query has of a tile's rows with scales of theirs.
inline void multiply(float* numbers, const float* scales, int count) {
    for (int row = 0; row < count; row++) numbers[row] *= scales[row];
}

// `scales` are those of keys, and of values, if rows are rounded: scores and weights are multiplied with them, so that
// rows need not be.
template <class T, int DIM, int COUNT>
inline void attend_tile(const float* queries, const T* const* rows, const float (*scales)[TILE], int count,
                        const T* const* next, int next_count, float (*weights)[TILE], float* highest, float* total,
                        float* values) {
    float shrink[COUNT];
    score<T, DIM, COUNT>(queries, rows, count, next, next_count, weights);
    for (int q = 0; q < COUNT; q++) {
        if constexpr (is_rounded<T>) multiply(weights[q], scales[0], count);
        shrink[q] = soften(weights[q], count, highest[q], total[q]);
        if constexpr (is_rounded<T>) multiply(weights[q], scales[1], count);
    }
    accumulate<T, DIM, COUNT>(rows, count, next, next_count, weights, shrink, values);
}

}  // namespace
}  // namespace kvseek
