// One (request, KV head), as the blocks of a selection's kernels see it.
#pragma once

#include "batch.cuh"

namespace kvseek {

// Arguments have `requests`, `table`, `kv_heads` and `max_extents`.
template <class Arguments>
struct TaskOf {
    int number;  // request * kv_heads + head
    int head;
    const Request& request;
    const int* table;  // the slot's extents

    // The KV head is blockIdx.y.
    __device__ __forceinline__ TaskOf(const Arguments& a, int owner)
        : number(owner * a.kv_heads + static_cast<int>(blockIdx.y)),
          head(blockIdx.y),
          request(a.requests[owner]),
          table(a.table + static_cast<long long>(request.slot) * a.max_extents) {}

    // Whether the request attends to everything, so that nothing is selected for it.
    __device__ __forceinline__ bool idle() const { return request.dense != 0; }
    __device__ __forceinline__ int length() const { return request.length; }
    // Row of a place, counted in places: less than 2^32 of them fit a GPU (require_numbered_rows of arguments.py), and
    // a product with the bytes of a row is then one instruction.
    __device__ __forceinline__ unsigned extent(const Arguments& a, int number) const {
        return static_cast<unsigned>(table[number]) * a.kv_heads + head;
    }
    __device__ __forceinline__ unsigned row(const Arguments& a, int place) const {
        const unsigned number = place;  // none is negative, which saves instructions
        return extent(a, number / EXTENT_TOKENS) * EXTENT_TOKENS + number % EXTENT_TOKENS;
    }
    // The same in arrays [scratch extents, kv_heads, 1024, ...] of intermediate results. Each request of the batch has
    // extents of its own there, as requests may share those of their slots.
    __device__ __forceinline__ unsigned scratch_extent(const Arguments& a, int number) const {
        return static_cast<unsigned>(request.scratch + number) * a.kv_heads + head;
    }
    __device__ __forceinline__ unsigned scratch_row(const Arguments& a, int place) const {
        const unsigned number = place;
        return scratch_extent(a, number / EXTENT_TOKENS) * EXTENT_TOKENS + number % EXTENT_TOKENS;
    }
};

}  // namespace kvseek
