// What the kernels that recall share: places into `recalled`, then scores of their keys, exact or by codes. If host
// cores score them, the places go to host memory instead.
#pragma once

#include "candidates.cuh"

namespace kvseek {
namespace ctkvr {
namespace decode {

// Write something to pinned host memory: whole warps write neighbouring numbers.
template <class T>
__device__ __forceinline__ void copy_to_host(const T* from, T* to, int begin, int end) {
    for (int i = begin + threadIdx.x; i < end; i += RECALL_THREADS) to[i] = from[i];
}

// How many places host cores are to rerank, and whose: one thread of a task.
__device__ __forceinline__ void tell_count(const StepArguments& a, const Task& task, int count) {
    a.counts[task.number] = count;
    if (!a.host_counts) return;
    a.host_counts[task.number] = count;
    if (task.head == 0) a.host_slots[task.number / a.kv_heads] = task.request.slot;
}

// What host cores read: the block's share of the places, by the first block the queries.
__device__ __forceinline__ void tell_host(const StepArguments& a, const Task& task, int first, int last,
                                          bool is_first) {
    const long long list = static_cast<long long>(task.number) * a.capacity;
    copy_to_host(a.recalled + list, a.host_recalled + list, first, last);
    const Number* queries = task.queries(a.queries);
    if (is_first) copy_to_host(queries, a.host_queries + (queries - a.queries), 0, GROUP * DIM);
}

// A block's share of a task: blocks are shared out by what may be recalled, one to a task at least, which tells that
// there is nothing if so. `prepare(task)` does what a score needs, in all threads, before the wait for the probe;
// `score(task, extents, first, last)` scores the places with ranks first .. first + 15, below `last`, by a whole warp.
template <class Prepare, class Score>
__device__ __forceinline__ void recall(const StepArguments& a, unsigned char* dynamic_memory, RecallMemory& memory,
                                       Prepare prepare, Score score) {
    __shared__ Units units;
    const Unit block = units.divide(
        a.requests, a.batch, gridDim.x, gridDim.x,
        [&](const Request& request) { return request.dense ? 1 : max(1, min(request.length, a.capacity)); },
        blockIdx.x);
    const Task task(a.requests, a.kv_heads, block.request);
    const int tokens = task.request.length;
    const bool idle = !block.exists || task.request.dense || tokens <= 0;
    int* extents = reinterpret_cast<int*>(dynamic_memory);
    const PlaceBits bits(reinterpret_cast<unsigned*>(extents + a.max_extents), tokens);
    if (!idle) {  // the table and the requests were uploaded before the step
        const int* table = a.table + static_cast<long long>(task.request.slot) * a.max_extents;
        for (int i = threadIdx.x; i * EXTENT_TOKENS < tokens; i += RECALL_THREADS) extents[i] = table[i];
        bits.clear();
        prepare(task);
    }
    await_earlier_kernels();
    if (idle) {
        if (block.exists && block.part == 0 && threadIdx.x == 0) tell_count(a, task, 0);
        return;
    }
    allow_later_kernels();
    const int probed = probe_centroids(a, task, memory);
    __syncthreads();
    set_recalled(a, task, bits, probed, memory.probed);
    __syncthreads();
    int count;
    const int rank = bits.ranks(memory.sums, count);
    if (block.part == 0 && threadIdx.x == 0) tell_count(a, task, count);
    // Shares are whole tiles, so what a tile holds does not depend on the grid, nor do the sums over it.
    const int tiles = (count + TILE - 1) / TILE;
    const int share = (tiles + block.parts - 1) / block.parts * TILE;
    const int first = min(block.part * share, count), last = min(first + share, count);
    bits.write(rank, first, last, a.recalled + static_cast<long long>(task.number) * a.capacity);
    __syncthreads();
    if (a.host_recalled) tell_host(a, task, first, last, block.part == 0);
    if (!a.scores) return;
    for (int at = first + threadIdx.x / WARP * TILE; at < last; at += RECALL_THREADS / WARP * TILE)
        score(task, extents, at, last);
}

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek
