// One warp's part of attention for float32 rows, without tensor cores: their products would round to 10 bits.
//
// The lanes share out a row's columns; four rows are in work at once and the next four on their way.
#pragma once

#include "plugins/common/attend_rows.cuh"

namespace kvseek {
namespace attention {

struct ScalarWarp {
    static constexpr int ROWS = 4;
    static constexpr int STEP = ROWS * WARPS;
    static constexpr int COLUMNS = DIM / 32;                                       // of a lane
    static constexpr int WIDTH = COLUMNS % 4 == 0 ? 4 : COLUMNS % 2 == 0 ? 2 : 1;  // neighbouring ones
    static constexpr int REGISTERS = TILE * COLUMNS;

    struct Part {
        float number[ROWS][COLUMNS];
    };

    float queries[TILE][COLUMNS], accumulator[TILE][COLUMNS], maximum[TILE], sum[TILE];
    int lane;

    __device__ __forceinline__ ScalarWarp(const AttendArguments& a, const Place& place) {
        lane = threadIdx.x % 32;
        const long long head = static_cast<long long>(place.request) * a.kv_heads * GROUP + place.query_head();
#pragma unroll
        for (int h = 0; h < TILE; ++h) {
            maximum[h] = minus_infinity(), sum[h] = 0.0f;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const Number* query = a.queries + (head + h) * DIM + column(c);
                queries[h][c] = h < place.heads() ? to_float(*query) * a.scale : 0.0f;
                accumulator[h][c] = 0.0f;
            }
        }
    }

    __device__ __forceinline__ int column(int c) const { return (c / WIDTH * 32 + lane) * WIDTH + c % WIDTH; }

    // Attend to rows begin .. end - 1 of a source: this warp takes every WARPS-th four of them.
    template <class Source>
    __device__ __forceinline__ void stream(const Source& source, int begin, int end, float = 0, Number* = nullptr) {
        int first = begin + static_cast<int>(threadIdx.x) / 32 * ROWS;
        if (first >= end) return;
        Part keys, values;
        load(source, first, end, 0, keys);
        load(source, first, end, DIM, values);
        while (true) {
            float scores[ROWS][TILE];
            multiply_keys(keys, scores);
            const int next = first + STEP;
            if (next < end) load(source, next, end, 0, keys);
            soften(scores, end - first);
            multiply_values(values, scores);
            if (next >= end) return;
            load(source, next, end, DIM, values);
            first = next;
        }
    }

    // Attend to rows that the CTA has staged.
    __device__ __forceinline__ void attend_staged(const Number* staged, int rows, float) {
        stream(StagedRows(staged), 0, rows);
    }

    // Rows past the end repeat the last one: memory there may hold anything, and 0 times NaN is NaN.
    template <class Source>
    __device__ __forceinline__ void load(const Source& source, int first, int end, int offset, Part& part) const {
        const int start = first / 16 * 16;  // a tile starts there; `begin` is a multiple of 16
        const auto tile = source.tile(start);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const Number* from = tile.row(min(first + r, end - 1) - start) + offset;
#pragma unroll
            for (int c = 0; c < COLUMNS; c += WIDTH) {
                float* to = &part.number[r][c];
                if constexpr (WIDTH == 4) {
                    const uint4 bits = Source::load_16(from + column(c));
                    to[0] = __uint_as_float(bits.x), to[1] = __uint_as_float(bits.y);
                    to[2] = __uint_as_float(bits.z), to[3] = __uint_as_float(bits.w);
                } else if constexpr (WIDTH == 2) {
                    const uint2 bits = Source::load_8(from + column(c));
                    to[0] = __uint_as_float(bits.x), to[1] = __uint_as_float(bits.y);
                } else {
                    to[0] = __uint_as_float(Source::load_4(from + column(c)));
                }
            }
        }
    }

    __device__ __forceinline__ void multiply_keys(const Part& keys, float (&scores)[ROWS][TILE]) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int h = 0; h < TILE; ++h) {
                float score = 0.0f;
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) score += keys.number[r][c] * queries[h][c];
#pragma unroll
                for (int distance = 16; distance; distance /= 2) score += __shfl_xor_sync(~0u, score, distance);
                scores[r][h] = score;
            }
    }

    // Online softmax: raise the maximum, scale down what was summed before it rose, turn scores into weights.
    __device__ __forceinline__ void soften(float (&scores)[ROWS][TILE], int valid) {
#pragma unroll
        for (int h = 0; h < TILE; ++h) {
            float highest = maximum[h];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r >= valid) scores[r][h] = minus_infinity();
                highest = fmaxf(highest, scores[r][h]);
            }
            const float factor = power_of_two(maximum[h] - highest);
            maximum[h] = highest;
            sum[h] *= factor;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) accumulator[h][c] *= factor;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                scores[r][h] = power_of_two(scores[r][h] - highest);
                sum[h] += scores[r][h];
            }
        }
    }

    __device__ __forceinline__ void multiply_values(const Part& values, const float (&weights)[ROWS][TILE]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int h = 0; h < TILE; ++h)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) accumulator[h][c] += weights[r][h] * values.number[r][c];
    }

    // Largest score and sum of weights of each head of the tile; every lane has them.
    __device__ __forceinline__ void statistics(float* maxima, float* sums) const {
#pragma unroll
        for (int h = 0; h < TILE; ++h)
            if (lane == 0) maxima[h] = maximum[h], sums[h] = sum[h];
    }

    __device__ __forceinline__ float output(int i) const { return accumulator[i / COLUMNS][i % COLUMNS]; }
    // Head of the tile that output(i) of this lane belongs to, and where (head, column) lies: register and lane.
    __device__ __forceinline__ int output_head(int i) const { return i / COLUMNS; }
    __device__ __forceinline__ static int2 output_place(int head, int column) {
        const int piece = column / (32 * WIDTH), inside = column % (32 * WIDTH);
        return {head * COLUMNS + piece * WIDTH + inside % WIDTH, inside / WIDTH};
    }
};

}  // namespace attention
}  // namespace kvseek
