// One warp's part of attention for float32 rows, without tensor cores: their products would round to 10 bits.
//
// The lanes share out a row's columns; four rows are in work at once and the next four on their way.
#pragma once

#include "kernels/cuda/attention/selected_rows.cuh"

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
            soften(scores, end - first < ROWS ? (1u << (end - first)) - 1 : (1u << ROWS) - 1);
            multiply_values(values, scores);
            if (next >= end) return;
            load(source, next, end, DIM, values);
            first = next;
        }
    }

    // Attend to selected rows begin .. end - 1: as `stream`, but each row has a place of its own.
    __device__ __forceinline__ void gather(const SelectedRows& source, int begin, int end, float = 0,
                                           Number* = nullptr) {
        int first = begin + static_cast<int>(threadIdx.x) / 32 * ROWS;
        if (first >= end) return;
        FoundRows rows = source.find<ROWS>(source.read<ROWS>(first, end), first);
        Part keys, values;
        load_found(rows, 0, keys);
        load_found(rows, DIM, values);
        while (true) {
            const int next = first + STEP;
            const unsigned valid = __ballot_sync(ALL_LANES, rows.from != nullptr) & ((1u << ROWS) - 1);
            const FoundRows following = source.find<ROWS>(source.read<ROWS>(next, end), next);
            float scores[ROWS][TILE];
            keep_part(source.hot.rows, rows, 0, keys);
            multiply_keys(keys, scores);
            load_found(following, 0, keys);
            keep_part(source.hot.rows, rows, DIM, values);
            if (valid) {
                soften(scores, valid);
                multiply_values(values, scores);
            }
            if (next >= end) return;
            load_found(following, DIM, values);
            rows = following, first = next;
        }
    }

    // Load the keys (offset 0) or the values (offset D) of rows; missing ones become zeros, for memory may hold NaN.
    __device__ __forceinline__ void load_found(const FoundRows& rows, int offset, Part& part) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const Number* from = rows.row(r);
            if (from) {
                load_row(from + offset, part.number[r]);
            } else {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) part.number[r][c] = 0.0f;
            }
        }
    }

    __device__ __forceinline__ void keep_part(Number* kept, const FoundRows& rows, int offset, const Part& part) const {
        if (!__any_sync(ALL_LANES, rows.keep >= 0)) return;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int at = rows.keep_of(r);
            if (at < 0) continue;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
                kept[static_cast<long long>(at) * ROW + offset + column(c)] = part.number[r][c];
        }
    }

    // Rows past the end repeat the last one: memory there may hold anything, and 0 times NaN is NaN.
    template <class Source>
    __device__ __forceinline__ void load(const Source& source, int first, int end, int offset, Part& part) const {
        const int start = first / 16 * 16;  // a tile starts there; `begin` is a multiple of 16
        const auto tile = source.tile(start);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) load_row(tile.row(min(first + r, end - 1) - start) + offset, part.number[r]);
    }

    // This lane's columns of a key or a value.
    __device__ __forceinline__ void load_row(const Number* from, float (&to)[COLUMNS]) const {
#pragma unroll
        for (int c = 0; c < COLUMNS; c += WIDTH) {
            if constexpr (WIDTH == 4) {
                const uint4 bits = load_once_16(from + column(c));
                to[c] = __uint_as_float(bits.x), to[c + 1] = __uint_as_float(bits.y);
                to[c + 2] = __uint_as_float(bits.z), to[c + 3] = __uint_as_float(bits.w);
            } else if constexpr (WIDTH == 2) {
                const uint2 bits = load_once_8(from + column(c));
                to[c] = __uint_as_float(bits.x), to[c + 1] = __uint_as_float(bits.y);
            } else {
                to[c] = __uint_as_float(load_once_4(from + column(c)));
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
                for (int distance = 16; distance; distance /= 2) score += __shfl_xor_sync(ALL_LANES, score, distance);
                scores[r][h] = score;
            }
    }

    // Rows in `valid`, a bit each, at least one, count.
    // Online softmax: raise the maximum, scale down what was summed before it rose, turn scores into weights.
    __device__ __forceinline__ void soften(float (&scores)[ROWS][TILE], unsigned valid) {
#pragma unroll
        for (int h = 0; h < TILE; ++h) {
            float highest = maximum[h];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (!(valid >> r & 1)) scores[r][h] = minus_infinity();
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

    __device__ __forceinline__ bool has_rows() const { return maximum[0] > minus_infinity(); }

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
