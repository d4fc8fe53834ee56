// Rank keys at given rows by estimates of q·k from nested key codes. The blocks of a task share its candidates: each
// estimates its own, and the last one to finish ranks all of them by the softmax weights of each query over all
// candidates, averaged over the queries (plugins/ranking.py).
#pragma once

#include "estimate.cuh"
#include "kernels/cuda/power_sum.cuh"

namespace kvseek {
namespace codes {

// For blocks of THREADS threads and LANES queries.
template <int BITS, int LANES, int THREADS>
struct Ranking {
    static constexpr int WARPS = THREADS / WARP;
    static constexpr int LANES_EACH = (LANES + MEMBERS - 1) / MEMBERS;  // lanes whose estimates a member writes

    // Estimate q·k of the block's candidates 0 .. count - 1, and normalise. `row_of` tells a candidate's row in the
    // planes; `exponent` makes a power of two of an estimate. partial: shared memory. estimates: [count, LANES] of the
    // block; normalisers: [LANES] of the block.
    template <class RowOf>
    __device__ __forceinline__ static void estimate(const unsigned char* high, const unsigned char* low,
                                                    const __half* scales, const Means& means,
                                                    const Queries<LANES>& queries, int count, const RowOf& row_of,
                                                    float exponent, PowerSum (&partial)[WARPS][LANES], float* estimates,
                                                    PowerSum* normalisers) {
        const int member = threadIdx.x % MEMBERS, warp = threadIdx.x / WARP;
        PowerSum own[LANES_EACH];
        for (int first = 0; first < count; first += THREADS / MEMBERS) {  // warps stay whole: they exchange sums
            const int i = first + static_cast<int>(threadIdx.x) / MEMBERS, entry = min(i, count - 1);
            const unsigned row = row_of(entry);
            const float scale = __half2float(scales[row]);
            int sums[LANES];
            float products[LANES];
            multiply_row<BITS>(high, low, row, queries, sums);
            multiply_mean(means, row, queries, products);
#pragma unroll
            for (int lane = 0; lane < LANES; lane++) {
                if (member != lane % MEMBERS || i >= count) continue;
                const float found = estimate_of<BITS>(sums[lane], scale, products[lane], queries, lane);
                estimates[static_cast<size_t>(i) * LANES + lane] = found;
                own[lane / MEMBERS].add(found * exponent);
            }
        }
#pragma unroll
        for (int i = 0; i < LANES_EACH; i++) {
            own[i].add_lanes(WARP - MEMBERS);
            const int lane = i * MEMBERS + member;
            if (threadIdx.x % WARP < MEMBERS && lane < LANES) partial[warp][lane] = own[i];
        }
        __syncthreads();
        if (threadIdx.x >= LANES) return;
        normalisers[threadIdx.x] = PowerSum::of<WARPS>([&](int w) { return partial[w][threadIdx.x]; });
    }

    // Write log2 of the sum of a lane's powers over all candidates, from the normalisers [blocks, LANES] of at most
    // WARP blocks. A warp calls it whole.
    __device__ __forceinline__ static void normalise(const PowerSum* normalisers, int blocks, int lane,
                                                     float& logarithm) {
        const int thread = threadIdx.x % WARP;
        PowerSum own;
        if (thread < blocks) own = PowerSum::read(normalisers + thread * LANES + lane);
        own.add_lanes(WARP - 1);
        if (thread == 0) logarithm = own.logarithm();
    }

    // What a candidate is ranked by, larger is better: the sum of its softmax weights.
    __device__ __forceinline__ static unsigned key_of(const float* estimates, const float (&normaliser)[LANES],
                                                      float exponent) {
        float value = 0.0f, own[LANES];
        load(estimates, own);
#pragma unroll
        for (int lane = 0; lane < LANES; lane++) {
            value += power_of_two(own[lane] * exponent - normaliser[lane]);
        }
        return ordered_bits(value);
    }

  private:
    __device__ __forceinline__ static void load(const float* from, float (&own)[LANES]) {
        if constexpr (LANES % 4 == 0) {
#pragma unroll
            for (int i = 0; i < LANES / 4; i++) {
                const float4 four = __ldcg(reinterpret_cast<const float4*>(from) + i);
                own[4 * i] = four.x, own[4 * i + 1] = four.y, own[4 * i + 2] = four.z, own[4 * i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < LANES; i++) own[i] = __ldcg(from + i);
        }
    }
};

}  // namespace codes
}  // namespace kvseek
