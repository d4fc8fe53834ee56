// Scores of pages (page_scores in reference.py) by their boxes of 16-bit numbers, on tensor cores, by one warp.
//
// A score is the sum over the channels of max(q near, q far) times the largest number and min(q near, q far) times the
// smallest. Products of 16-bit numbers are exact in float32. Any order of the channels will do as long as boxes and
// queries agree: a lane takes eight neighbouring ones, so that its 16 bytes are four registers of the product as they
// are.
#pragma once

#include "select.cuh"

namespace kvseek {
namespace prkv {

#if KVSEEK_DTYPE == 1
using Pair = __nv_bfloat162;
#else
using Pair = __half2;
#endif

// What two channels of a query count times the largest and times the smallest numbers of a box.
struct Factors {
    Pair near, far;
    __device__ __forceinline__ explicit Factors(const SelectArguments& a)
        : near{from_float<Number>(a.near), from_float<Number>(a.near)},
          far{from_float<Number>(a.far), from_float<Number>(a.far)} {}
    __device__ __forceinline__ unsigned on_largest(unsigned two) const {
        const Pair q = *reinterpret_cast<const Pair*>(&two), numbers = __hmax2(__hmul2(q, near), __hmul2(q, far));
        return *reinterpret_cast<const unsigned*>(&numbers);
    }
    __device__ __forceinline__ unsigned on_smallest(unsigned two) const {
        const Pair q = *reinterpret_cast<const Pair*>(&two), numbers = __hmin2(__hmul2(q, near), __hmul2(q, far));
        return *reinterpret_cast<const unsigned*>(&numbers);
    }
};

// With g = lane / 4 and t = lane % 4, this lane has pages g and g + 8 of a tile and channels 32 s + 8 t .. + 7 of
// step s.
class Bounds {
    static constexpr int STEPS = DIM / 32;
    static constexpr int COLUMN_TILES = (LANES + 7) / 8;  // columns of the product are query heads
    uint4 boxes[2][STEPS][2];                             // [smallest, largest][step][page g or g + 8]
    uint4 queries[COLUMN_TILES][STEPS];
    Factors factors;
    PowerSum sums[COLUMN_TILES][2];  // of columns 8 i + 2 t and 8 i + 2 t + 1
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  public:
    __device__ __forceinline__ explicit Bounds(const SelectArguments& a) : factors(a) {}

    // Start to load the boxes of TILE neighbouring pages. Those past the region's end hold anything; only their own
    // bounds depend on them.
    __device__ __forceinline__ void load(const SelectArguments& a, const Task& task, int first_page) {
        const Number* first = a.boxes + task.entry(a, first_page) * BOX;
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
                queries[i][s] = make_uint4(0, 0, 0, 0);
                if (8 * i + g < LANES)
                    queries[i][s] = *reinterpret_cast<const uint4*>(from + (8 * i + g) * DIM + 32 * s);
            }
    }

    // Score the loaded pages: store(page of the tile, lane, bound), if `valid(page of the tile)`. `load_next` may load
    // other pages: it is called when these are no longer needed.
    template <class Valid, class Store, class Next>
    __device__ __forceinline__ void score(const SelectArguments& a, const Valid& valid, const Store& store,
                                          const Next& load_next) {
        const float exponent_scale = a.scaling * LOG2_E;
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; ++i) {
            float bound[4] = {};
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const uint4 q = queries[i][s];
                multiply(bound, boxes[0][s], factors.on_smallest(q.x), factors.on_smallest(q.y),
                         factors.on_smallest(q.z), factors.on_smallest(q.w));
                multiply(bound, boxes[1][s], factors.on_largest(q.x), factors.on_largest(q.y), factors.on_largest(q.z),
                         factors.on_largest(q.w));
            }
#pragma unroll
            for (int j = 0; j < (TILE == 8 ? 2 : 4); ++j) {
                const int page = g + j / 2 * 8, column = 8 * i + 2 * t + j % 2;
                if (column >= LANES || !valid(page)) continue;
                store(page, column, bound[j]);
                sums[i][j % 2].add(bound[j] * exponent_scale);
            }
        }
        load_next();
    }

    // What the softmax of each lane divides by, over all pages that this warp has scored: store(lane, sum).
    template <class Store>
    __device__ __forceinline__ void finish(const Store& store) {
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                sums[i][j].add_lanes(4 + 8 + 16);
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
};

}  // namespace prkv
}  // namespace kvseek
