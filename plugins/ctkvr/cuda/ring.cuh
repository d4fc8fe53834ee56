// Dynamic centroid update (CTkvr paper, algorithm 2, part d): a step's query and its best places replace the oldest
// centroid of the slot. The step has read the ring by then, so the new one is first seen by the next step.
#pragma once

#include "step.cuh"

namespace kvseek {
namespace ctkvr {
namespace decode {

// Where a KV head's next centroid goes.
struct RingEntry {
    int* written;      // of the slot and KV head
    int before;        // centroids that it has received until now
    int* list;         // [width]
    Number* centroid;  // of the group's first head; the next head's is `ring` centroids on
    float* offset;     // likewise
    const float* means;
    int ring;

    // `a`: StepArguments or MergeArguments.
    template <class Arguments>
    __device__ __forceinline__ RingEntry(const Arguments& a, const Task& task) {
        const long long row = task.list(a.kv_heads);
        written = a.written + row;
        before = *written;
        ring = a.ring;
        const int oldest = before % ring;
        list = a.lists + (row * ring + oldest) * a.width;
        offset = a.offsets + row * GROUP * ring + oldest;
        centroid = a.centroids + (row * GROUP * ring + oldest) * DIM;
        means = task.means(a.means, a.kv_heads);
    }

    // Write the centroids of all heads, by whole warps, and count them. A barrier must lie between the construction in
    // all threads and this.
    __device__ __forceinline__ void write_centroids(const Number* queries) const {
        const int warps = blockDim.x / WARP;
        for (int h = threadIdx.x / WARP; h < GROUP; h += warps) {
            const Difference difference(queries + h * DIM, means + h * DIM);
            const float norm = difference.positive_norm();
            float product = 0.0f;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const int number = threadIdx.x % WARP + WARP * i;
                const Number rounded = from_float<Number>(difference.numbers[i] / norm);
                centroid[static_cast<long long>(h) * ring * DIM + number] = rounded;
                product += to_float(rounded) * means[h * DIM + number];
            }
            product = sum_of_warp(product);
            if (threadIdx.x % WARP == 0) offset[h * ring] = product;
        }
        if (threadIdx.x == 0) *written = before + 1;
    }
};

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek
