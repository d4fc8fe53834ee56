// One warp's part of attention for bfloat16 and float16 rows, on tensor cores.
//
// A warp copies tiles of 16 rows into a ring of its own in shared memory, neighbouring lanes copying neighbouring
// bytes, and multiplies a tile while the next ones are on their way; no warp waits for another. Scores come out of the
// product with the keys as operand b of the product with the values needs the weights: lane (g, t), g = lane / 4 and t
// = lane % 4, has head g and rows 2t, 2t+1, 2t+8, 2t+9. The latter product gives out^T [D, heads].
//
// Rows that are rounded become numbers of 16 bits, which hold integers of 8 bits exactly, on their way to shared
// memory; scores and weights are multiplied with their scales.
#pragma once

#include "kernels/cuda/attention/selected_rows.cuh"

namespace kvseek {
namespace attention {

struct TensorWarp {
    static constexpr int ROWS = TILE_ROWS;
    static constexpr int HALVES = TILE / 8;  // tiles of 8 heads
    static constexpr int STEPS = DIM / 16;   // products along a key, and along the columns of a value
    static constexpr int REGISTERS = HALVES * STEPS * 4;
    static constexpr int PIECES = ROW / 8;  // 16-byte pieces of a row
    static constexpr int TILE_NUMBERS = ROWS * ROW_STRIDE;
    // What an integer of 1 is. Float16 has no small numbers: values there are below 1, so that weights times scales are
    // not much smaller than weights.
    static constexpr float ONE = KVSEEK_DTYPE == 2 ? 1.0f / 128 : 1.0f;

    unsigned queries[HALVES][STEPS][2];  // head g: numbers 2t, 2t+1 and 2t+8, 2t+9 of each 16
    float accumulator[HALVES][STEPS][4];
    float maximum[HALVES], sum[HALVES];  // of head g; the sum is over this lane's rows
    int lane, g, t;

    __device__ __forceinline__ TensorWarp(const AttendArguments& a, const Place& place) {
        lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const long long head = static_cast<long long>(place.request) * a.kv_heads * GROUP + place.query_head();
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            maximum[h] = minus_infinity(), sum[h] = 0.0f;
            const bool exists = 8 * h + g < place.heads();
            const Number* query = a.queries + (head + 8 * h + g) * DIM + 2 * t;
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                queries[h][s][0] = exists ? *reinterpret_cast<const unsigned*>(query + 16 * s) : 0;
                queries[h][s][1] = exists ? *reinterpret_cast<const unsigned*>(query + 16 * s + 8) : 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) accumulator[h][s][i] = 0.0f;
            }
        }
    }

    // Attend to rows begin .. end - 1 of a source: this warp takes every WARPS-th tile.
    template <class Source>
    __device__ __forceinline__ void stream(const Source& source, int begin, int end, float scale, Number* rings) {
        __shared__ unsigned scales[WARPS][STAGES][ROWS];  // of the rows of a tile in the ring, if they are rounded
        const int warp = threadIdx.x / 32;
        Number* ring = rings + warp * STAGES * TILE_NUMBERS;
        int first = begin + warp * ROWS;
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage)
            copy_tile(source, first + stage * PASS, end, ring + stage * TILE_NUMBERS, scales[warp][stage]);
        for (int stage = 0; first < end; first += PASS, stage = (stage + 1) % STAGES) {
            Number* tile = ring + stage * TILE_NUMBERS;
            await_copy_groups<STAGES - 1>();
            __syncwarp();  // each lane waits for its own copies only
            attend_tile<Source::SCALED>(tile, first_rows(end - first), scale, scales[warp][stage]);
            __syncwarp();  // before new rows replace these
            copy_tile(source, first + STAGES * PASS, end, tile, scales[warp][stage]);
        }
    }

    // Attend to selected rows begin .. end - 1: as `stream`, but each row has a place of its own.
    __device__ __forceinline__ void gather(const SelectedRows& source, int begin, int end, float scale, Number* rings) {
        __shared__ int keeps[WARPS][STAGES][ROWS];  // frames of the rows of a tile in the ring
        __shared__ unsigned scales[WARPS][STAGES][ROWS];
        const int warp = threadIdx.x / 32;
        Number* ring = rings + warp * STAGES * TILE_NUMBERS;
        int first = begin + warp * ROWS;
        int next = source.read<ROWS>(first, end);
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage)
            next = copy_found(source, next, first + stage * PASS, end, ring + stage * TILE_NUMBERS, keeps[warp][stage],
                              scales[warp][stage]);
        for (int stage = 0; first < end; first += PASS, stage = (stage + 1) % STAGES) {
            Number* tile = ring + stage * TILE_NUMBERS;
            await_copy_groups<STAGES - 1>();
            __syncwarp();  // each lane waits for its own copies only
            const int keep = keeps[warp][stage][lane % ROWS];
            if constexpr (!ROUNDED)
                if (__any_sync(ALL_LANES, keep >= 0)) keep_rows(source.hot.rows, tile, keep);
            const unsigned valid = __ballot_sync(ALL_LANES, keep != NO_ROW) & ALL_ROWS;
            if (valid) attend_tile<ROUNDED>(tile, valid, scale, scales[warp][stage]);
            __syncwarp();  // before new rows replace these
            next = copy_found(source, next, first + STAGES * PASS, end, tile, keeps[warp][stage], scales[warp][stage]);
        }
    }

    // Start to copy the rows of a tile's entries, if there are any; returns the places of the warp's next tile.
    // Missing rows become zeros: they are multiplied by 0, and memory may hold NaN.
    __device__ __forceinline__ int copy_found(const SelectedRows& source, int place, int first, int end, Number* to,
                                              int* keeps, unsigned* scales) const {
        const int next = source.read<ROWS>(first + PASS, end);
        if (first < end) {
            const FoundRows rows = source.find<ROWS>(place, first);
            if (lane < ROWS) keeps[lane] = rows.keep;
            if (__any_sync(ALL_LANES, rows.from != nullptr)) {
                if constexpr (ROUNDED)
                    copy_rounded_found(source.hot, rows, to, scales);
                else if (source.on_host)
                    copy_through_registers(rows, to);
                else
                    copy_past_registers(rows, source.pool.rows, to);
            }
        }
        close_copy_group();  // an empty one too: groups are counted
        return next;
    }

    // Start to copy the found rows of a tile; `somewhere` is any address that may be read.
    __device__ __forceinline__ void copy_past_registers(const FoundRows& rows, const RowNumber* somewhere,
                                                        Number* to) const {
#pragma unroll
        for (int i = 0; i < ROWS * PIECES / 32; ++i) {
            const int piece = lane + 32 * i, row = piece / PIECES, offset = piece % PIECES * 8;
            const RowNumber* from = rows.row(row);
            copy_once_16_or_zeros(to + row * ROW_STRIDE + offset, (from ? from : somewhere) + offset, from != nullptr);
        }
    }

    // Copy the found rows of a tile and wait for them, some at a time. Loads to registers cross PCIe in larger pieces
    // than asynchronous copies, and the warps together have far more of them under way than PCIe carries.
    __device__ __forceinline__ void copy_through_registers(const FoundRows& rows, Number* to) const {
        constexpr int TOTAL = ROWS * PIECES / 32, AT_ONCE = TOTAL % 8 == 0 ? 8 : 4;
        static_assert(TOTAL % AT_ONCE == 0, "more would be written behind the tile");
#pragma unroll
        for (int start = 0; start < TOTAL; start += AT_ONCE) {
            uint4 held[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int piece = lane + 32 * (start + i);
                const RowNumber* from = rows.row(piece / PIECES);
                held[i] = from ? load_once_16(from + piece % PIECES * 8) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int piece = lane + 32 * (start + i);
                *reinterpret_cast<uint4*>(to + piece / PIECES * ROW_STRIDE + piece % PIECES * 8) = held[i];
            }
        }
    }

    // Copy integers of a tile's rows as numbers of 16 bits, and wait for them, some at a time; `row_of` gives the
    // address of a row, or null for zeros. `keep` is shown 16 integers of each, with their row and the number of the
    // first.
    template <class RowOf, class Keep>
    __device__ __forceinline__ void copy_rounded(const RowOf& row_of, const Keep& keep, Number* to) const {
        constexpr int EACH = 16, OF_ROW = ROW / EACH, TOTAL = ROWS * OF_ROW / 32;
        constexpr int AT_ONCE = TOTAL <= 8 ? TOTAL : TOTAL % 8 == 0 ? 8 : TOTAL % 7 == 0 ? 7 : TOTAL % 6 == 0 ? 6 : 5;
        static_assert(TOTAL % AT_ONCE == 0, "more would be written behind the tile");
#pragma unroll
        for (int start = 0; start < TOTAL; start += AT_ONCE) {
            uint4 held[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int piece = lane + 32 * (start + i);
                const auto* from = row_of(piece / OF_ROW);
                held[i] = from ? load_once_16(from + piece % OF_ROW * EACH) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int piece = lane + 32 * (start + i), row = piece / OF_ROW, offset = piece % OF_ROW * EACH;
                keep(row, offset, held[i]);
                uint4* target = reinterpret_cast<uint4*>(to + row * ROW_STRIDE + offset);
                target[0] = widened(held[i].x, held[i].y), target[1] = widened(held[i].z, held[i].w);
            }
        }
    }

    __device__ __forceinline__ void copy_rounded_found(const HotRows& hot, const FoundRows& rows, Number* to,
                                                       unsigned* scales) const {
        copy_rounded([&](int row) { return rows.row(row); },
                     [&](int row, int offset, const uint4& bits) {
                         const int frame = rows.keep_of(row);
                         if (frame >= 0) *reinterpret_cast<uint4*>(hot.row(frame) + offset) = bits;
                     },
                     to);
        if (lane >= ROWS) return;
        scales[lane] = rows.scales;
        if (rows.keep >= 0) hot.scales[rows.keep] = rows.scales;
    }

    // Eight integers as numbers.
    __device__ __forceinline__ static uint4 widened(unsigned first, unsigned second) {
        return make_uint4(widened_pair(first), widened_pair(first >> 16), widened_pair(second),
                          widened_pair(second >> 16));
    }
    __device__ __forceinline__ static unsigned widened_pair(unsigned bits) {
        const float low = static_cast<signed char>(bits & 0xff), high = static_cast<signed char>(bits >> 8 & 0xff);
        // A bfloat16 is the upper half of a float32, and the lower half of such an integer is zero.
        if constexpr (KVSEEK_DTYPE == 1) return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
        return pack(low * ONE, high * ONE);
    }

    // Copy rows of a tile to their frames: lane l knows the frame of row l % ROWS.
    __device__ __forceinline__ void keep_rows(RowNumber* kept, const Number* tile, int keep) const {
#pragma unroll
        for (int i = 0; i < ROWS * PIECES / 32; ++i) {
            const int piece = lane + 32 * i, row = piece / PIECES, offset = piece % PIECES * 8;
            const int at = __shfl_sync(ALL_LANES, keep, row);
            if (at >= 0)
                *reinterpret_cast<uint4*>(kept + static_cast<long long>(at) * ROW + offset) =
                    *reinterpret_cast<const uint4*>(tile + row * ROW_STRIDE + offset);
        }
    }

    static constexpr unsigned ALL_ROWS = (1u << ROWS) - 1;
    __device__ __forceinline__ static unsigned first_rows(int rows) {
        return rows < ROWS ? (1u << rows) - 1 : ALL_ROWS;
    }

    // Start to copy a tile, if there is one. Rows past the end repeat the last one: memory there may hold anything, and
    // 0 times NaN is NaN.
    template <class Source>
    __device__ __forceinline__ void copy_tile(const Source& source, int first, int end, Number* to,
                                              unsigned* scales) const {
        if (first < end) {
            const auto tile = source.tile(first);
            const int last = end - first - 1;
            if constexpr (Source::SCALED) {
                const int own = first + min(lane % ROWS, last);
                const unsigned of_row = source.scales(source.extent(own), own);
                copy_rounded([&](int row) { return tile.row(min(row, last)); }, [](int, int, const uint4&) {}, to);
                if (lane < ROWS) scales[lane] = of_row;
                return close_copy_group();
            }
#pragma unroll
            for (int i = 0; i < ROWS * PIECES / 32; ++i) {
                const int piece = lane + 32 * i, row = piece / PIECES, offset = piece % PIECES * 8;
                copy_once_16_or_zeros(to + row * ROW_STRIDE + offset, tile.row(min(row, last)) + offset, true);
            }
        }
        close_copy_group();  // an empty one too: groups are counted
    }

    // 16 rows in shared memory, of which those in `valid`, a bit each, at least one, count; the others hold numbers,
    // whichever. `scales` are those of the rows, if they are SCALED.
    template <bool SCALED>
    __device__ __forceinline__ void attend_tile(const Number* tile, unsigned valid, float scale,
                                                const unsigned* scales) {
        // This lane's address in the four matrices of a step: rows 0-7 and 8-15, two times 8 columns.
        const Number* corner = tile + (lane % 8 + lane / 16 * 8) * ROW_STRIDE + lane / 8 % 2 * 8;
        float scores[2][4] = {};          // [n] [head g or g + 8][row 8n + 2t or + 1]
        constexpr int HIGH = HALVES - 1;  // zeros stand in for the heads that a tile of 8 lacks
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const unsigned high0 = HIGH ? queries[HIGH][s][0] : 0, high1 = HIGH ? queries[HIGH][s][1] : 0;
            unsigned key[4];
            load_matrices(key, corner + 16 * s);
#pragma unroll
            for (int n = 0; n < 2; ++n)
                multiply_16x8x16(scores[n], queries[0][s][0], high0, queries[0][s][1], high1, key[2 * n],
                                 key[2 * n + 1], Number());
        }
        unsigned weights[HALVES][2];
        soften<SCALED>(scores, valid, scale, scales, weights);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            unsigned value[4];
            load_matrices_transposed(value, corner + DIM + 16 * s);
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
                multiply_16x8x16(accumulator[h][s], value[0], value[1], value[2], value[3], weights[h][0],
                                 weights[h][1], Number());
        }
    }

    // The row that this lane's j-th score belongs to.
    __device__ __forceinline__ int score_row(int j) const { return 2 * t + j % 2 + j / 2 * 8; }

    // Online softmax: raise the maximum, scale down what was summed before it rose, turn scores into weights.
    template <bool SCALED>
    __device__ __forceinline__ void soften(const float (&scores)[2][4], unsigned valid, float scale,
                                           const unsigned* scales, unsigned (&weights)[HALVES][2]) {
        float of_keys[4], of_values[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned both = SCALED ? scales[score_row(j)] : 0;
            of_keys[j] = SCALED ? __uint_as_float(both << 16) * (scale / ONE) : scale;
            of_values[j] = SCALED ? __uint_as_float(both & 0xffff0000u) * (1 / ONE) : 1.0f;
        }
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            float score[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                score[j] = valid >> score_row(j) & 1 ? scores[j / 2][2 * h + j % 2] * of_keys[j] : minus_infinity();
            float highest = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
            highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 2));
            if (__any_sync(ALL_LANES, highest > maximum[h])) rescale(h, fmaxf(highest, maximum[h]));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                score[j] = power_of_two(score[j] - maximum[h]);
                sum[h] += score[j];
            }
            if constexpr (SCALED) {
#pragma unroll
                for (int j = 0; j < 4; ++j) score[j] *= of_values[j];
            }
            weights[h][0] = pack(score[0], score[1]);
            weights[h][1] = pack(score[2], score[3]);
        }
    }

    __device__ __forceinline__ void rescale(int h, float highest) {
        const float factor = power_of_two(maximum[h] - highest);
        maximum[h] = highest;
        sum[h] *= factor;
        const float even = __shfl_sync(ALL_LANES, factor, 8 * t), odd = __shfl_sync(ALL_LANES, factor, 8 * t + 4);
#pragma unroll
        for (int c = 0; c < STEPS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) accumulator[h][c][i] *= i % 2 ? odd : even;
    }

    __device__ __forceinline__ static unsigned pack(float low, float high) {
        const Number pair[2] = {from_float<Number>(low), from_float<Number>(high)};
        return *reinterpret_cast<const unsigned short*>(&pair[0]) |
               static_cast<unsigned>(*reinterpret_cast<const unsigned short*>(&pair[1])) << 16;
    }

    __device__ __forceinline__ bool has_rows() const { return maximum[0] > minus_infinity(); }

    // Largest score and sum of weights of each head of the tile.
    __device__ __forceinline__ void statistics(float* maxima, float* sums) const {
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            float total = sum[h];
            total += __shfl_xor_sync(ALL_LANES, total, 1);
            total += __shfl_xor_sync(ALL_LANES, total, 2);
            if (t == 0) maxima[8 * h + g] = maximum[h], sums[8 * h + g] = total;
        }
    }

    __device__ __forceinline__ float output(int i) const { return accumulator[i / (STEPS * 4)][i / 4 % STEPS][i % 4]; }
    // Head of the tile that output(i) of this lane belongs to, and where (head, column) lies: register and lane.
    __device__ __forceinline__ int output_head(int i) const { return i / (STEPS * 4) * 8 + 2 * t + i % 2; }
    __device__ __forceinline__ static int2 output_place(int head, int column) {
        const int element = head % 2 + column % 16 / 8 * 2;
        return {(head / 8 * STEPS + column / 16) * 4 + element, column % 8 * 4 + head % 8 / 2};
    }
};

}  // namespace attention
}  // namespace kvseek
