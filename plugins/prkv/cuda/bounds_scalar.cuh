// Scores of pages (page_scores in reference.py) by their boxes of float32 numbers, by one warp: a lane has each 32nd
// channel. Tensor cores would round the numbers. The same interface as bounds_tensor.cuh.
#pragma once

#include "select.cuh"

namespace kvseek {
namespace prkv {

class Bounds {
    static constexpr int STEPS = DIM / 32;
    const Number* boxes = nullptr;
    const Number* queries = nullptr;
    float near, far;
    PowerSum sums[LANES];
    int lane = threadIdx.x % 32;

  public:
    __device__ __forceinline__ explicit Bounds(const SelectArguments& a) : near(a.near), far(a.far) {}
    __device__ __forceinline__ void load(const SelectArguments& a, const Task& task, int first_page) {
        boxes = a.boxes + task.entry(a, first_page) * BOX;
    }
    __device__ __forceinline__ void load_queries(const SelectArguments& a, const Task& task) {
        queries = task.queries(a);
    }

    template <class Valid, class Store, class Next>
    __device__ __forceinline__ void score(const SelectArguments& a, const Valid& valid, const Store& store,
                                          const Next& load_next) {
        const float exponent_scale = a.scaling * LOG2_E;
        for (int page = 0; page < TILE; ++page) {
            if (!valid(page)) continue;  // the same for the whole warp
            float low[STEPS], high[STEPS];
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                low[s] = boxes[page * BOX + lane + 32 * s];
                high[s] = boxes[page * BOX + DIM + lane + 32 * s];
            }
#pragma unroll
            for (int column = 0; column < LANES; ++column) {
                float bound = 0.0f;
#pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    const float q = queries[column * DIM + lane + 32 * s];
                    bound += fmaxf(q * near, q * far) * high[s] + fminf(q * near, q * far) * low[s];
                }
#pragma unroll
                for (int mask = 16; mask; mask /= 2) bound += __shfl_xor_sync(EVERYONE, bound, mask);
                if (lane == 0) store(page, column, bound);
                sums[column].add(bound * exponent_scale);
            }
        }
        load_next();
    }

    template <class Store>
    __device__ __forceinline__ void finish(const Store& store) {
#pragma unroll
        for (int column = 0; column < LANES; ++column)
            if (lane == 0) store(column, sums[column]);
    }
};

}  // namespace prkv
}  // namespace kvseek
