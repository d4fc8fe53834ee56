// Dynamic centroid update (CTkvr paper, algorithm 2, part d): a step's query and its best places replace the oldest
// centroid of the slot. The step has read the ring by then, so the new one is first seen by the next step.
#pragma once

#include "step.cuh"

namespace kvseek {
namespace ctkvr {
namespace decode {

// Where a KV head's next centroid goes.
struct RingPlace {
    int* written;      // of the slot and KV head
    int before;        // centroids that it has received until now
    int* list;         // [width]
    Number* centroid;  // of the group's first head; the next head's is `head_stride` numbers on
    long long head_stride;

    __device__ __forceinline__ RingPlace(Number* centroids, int* lists, int* counts, const Task& task, int kv_heads,
                                         int ring, int width) {
        const long long row = task.list(kv_heads);
        written = counts + row;
        before = *written;
        const int place = before % ring;
        list = lists + (row * ring + place) * width;
        head_stride = static_cast<long long>(ring) * DIM;
        centroid = centroids + row * GROUP * head_stride + static_cast<long long>(place) * DIM;
    }

    // Write the centroids of all heads, by whole warps, and count them. A barrier must lie between the construction in
    // all threads and this.
    __device__ __forceinline__ void write_centroids(const Number* queries) const {
        const int warps = blockDim.x / WARP;
        for (int h = threadIdx.x / WARP; h < GROUP; h += warps) {
            const Number* query = queries + h * DIM;
            const float norm = positive_norm(query);
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const int number = threadIdx.x % WARP + WARP * i;
                centroid[h * head_stride + number] = from_float<Number>(to_float(query[number]) / norm);
            }
        }
        if (threadIdx.x == 0) *written = before + 1;
    }
};

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek
