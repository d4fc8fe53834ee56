// Upper bounds of q·k over the boxes of pages of 16-bit numbers, on tensor cores, by one warp.
//
// A bound is the sum of max(q, 0) times the largest number of each channel and min(q, 0) times the smallest. Products
// of 16-bit numbers are exact in float32. Any order of the channels will do as long as boxes and queries agree: a lane
// takes eight neighbouring ones, so that its 16 bytes are four registers of the product as they are.
#pragma once

#include "select.cuh"

namespace kvseek {
namespace prkv {

#if KVSEEK_DTYPE == 1
using Pair = __nv_bfloat162;
#else
using Pair = __half2;
#endif

// Of an averaged query the parts are apart already: what rounding left has the sign of neither.
__device__ __forceinline__ unsigned positive_part(unsigned two) {
    if (REDUCTION == MEAN) return two;
    const Pair numbers = __hmax2(*reinterpret_cast<const Pair*>(&two), Pair{Number(0.0f), Number(0.0f)});
    return *reinterpret_cast<const unsigned*>(&numbers);
}
__device__ __forceinline__ unsigned negative_part(unsigned two) {
    if (REDUCTION == MEAN) return two;
    const Pair numbers = __hmin2(*reinterpret_cast<const Pair*>(&two), Pair{Number(0.0f), Number(0.0f)});
    return *reinterpret_cast<const unsigned*>(&numbers);
}

// With g = lane / 4 and t = lane % 4, this lane has pages g and g + 8 of a tile and channels 32 s + 8 t .. + 7 of
// step s.
class Bounds {
    static constexpr int STEPS = DIM / 32;
    // Columns of the product: query heads; of an averaged query its 16-bit number and what that leaves.
    static constexpr int COLUMNS = REDUCTION == MEAN ? 2 : LANES;
    static constexpr int COLUMN_TILES = (COLUMNS + 7) / 8;
    uint4 boxes[2][STEPS][2];  // [smallest, largest][step][page g or g + 8]
    uint4 queries[REDUCTION == MEAN ? 2 : 1][COLUMN_TILES][STEPS];  // [negative and positive part], or both in one
    PowerSum sums[COLUMN_TILES][2];  // of columns 8 i + 2 t and 8 i + 2 t + 1
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  public:
    // Start to load the boxes of TILE neighbouring pages. Those past the region's end hold anything; only their own
    // bounds depend on them.
    __device__ __forceinline__ void load(const Number* first) {
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int s = 0; s < STEPS; ++s)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int page = TILE == 8 ? g : g + 8 * half;  // a tile of 8 has each page twice
                    boxes[part][s][half] = load_once_16(first + page * BOX + part * DIM + 32 * s + 8 * t);
                }
    }

    __device__ __forceinline__ void load_queries(const SelectArguments& a, const Task& task) {
        const Number* from = task.queries(a) + 8 * t;
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; ++i)
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                if (REDUCTION == MEAN) {
                    average(from + 32 * s, queries[0][i][s], queries[1][i][s]);
                } else {
                    queries[0][i][s] = make_uint4(0, 0, 0, 0);
                    if (8 * i + g < LANES)
                        queries[0][i][s] = *reinterpret_cast<const uint4*>(from + (8 * i + g) * DIM + 32 * s);
                }
            }
    }

    // Score the loaded pages: store(page of the tile, lane, bound), if `valid(page of the tile)`.
    template <class Valid, class Store>
    __device__ __forceinline__ void score(float exponent_scale, const Valid& valid, const Store& store) {
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; ++i) {
            float bound[4] = {};
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const uint4 low = queries[0][i][s], high = queries[REDUCTION == MEAN ? 1 : 0][i][s];
                multiply(bound, boxes[0][s], negative_part(low.x), negative_part(low.y), negative_part(low.z),
                         negative_part(low.w));
                multiply(bound, boxes[1][s], positive_part(high.x), positive_part(high.y), positive_part(high.z),
                         positive_part(high.w));
            }
            if (REDUCTION == MEAN) bound[0] += bound[1], bound[2] += bound[3];
#pragma unroll
            for (int j = 0; j < (TILE == 8 ? 2 : 4); ++j) {
                const int page = g + j / 2 * 8, column = 8 * i + 2 * t + j % 2;
                if (column >= LANES || !valid(page)) continue;
                store(page, column, bound[j]);
                if (REDUCTION != MEAN) sums[i][j % 2].add(bound[j] * exponent_scale, 1.0f);
            }
        }
    }

    // What the softmax of each lane divides by, over all pages that this warp has scored: store(lane, sum).
    template <class Store>
    __device__ __forceinline__ void finish(const Store& store) {
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                sums[i][j].add_lane(4), sums[i][j].add_lane(8), sums[i][j].add_lane(16);
                const int column = 8 * i + 2 * t + j;
                if (g == 0 && column < LANES) store(column, sums[i][j]);
            }
    }

  private:
    __device__ __forceinline__ static void multiply(float (&bound)[4], const uint4 (&box)[2], unsigned x, unsigned y,
                                                    unsigned z, unsigned w) {
        multiply_16x8x16(bound, box[0].x, box[1].x, box[0].y, box[1].y, x, y, Number());
        multiply_16x8x16(bound, box[0].z, box[1].z, box[0].w, box[1].w, z, w, Number());
    }

    // Eight channels of the group's mean query, those that are negative and those that are positive: column 0 has them
    // rounded, column 1 what rounding took away.
    __device__ __forceinline__ void average(const Number* from, uint4& negative, uint4& positive) const {
        float mean[8] = {};
        for (int head = 0; head < GROUP; ++head) {
            Eight<Number> eight;
            eight.load(from + head * DIM);
#pragma unroll
            for (int c = 0; c < 8; ++c) mean[c] += eight[c];
        }
        Number* parts[2] = {reinterpret_cast<Number*>(&negative), reinterpret_cast<Number*>(&positive)};
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            mean[c] /= GROUP;
            Number number = from_float<Number>(mean[c]);
            if (g == 1) number = from_float<Number>(mean[c] - to_float(number));
            const bool used = g < 2;
            parts[0][c] = used && mean[c] < 0.0f ? number : Number(0.0f);
            parts[1][c] = used && mean[c] > 0.0f ? number : Number(0.0f);
        }
    }
};

}  // namespace prkv
}  // namespace kvseek
