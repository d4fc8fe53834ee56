// CTkvr, second kernel of a selection: recall places (candidates.cuh) and score their keys exactly (paper, algorithm 2,
// parts b and c). If host cores score them, the places go to host memory instead.
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
__device__ __forceinline__ void tell_host(const StepArguments& a, const Task& task, int first, int last) {
    const long long list = static_cast<long long>(task.number) * a.capacity;
    copy_to_host(a.recalled + list, a.host_recalled + list, first, last);
    const Number* queries = task.queries(a.queries);
    if (blockIdx.x == 0) copy_to_host(queries, a.host_queries + (queries - a.queries), 0, GROUP * DIM);
}

// Largest exponent of a tile's keys and sum of the powers relative to it, of one head; the same in all lanes that
// differ in their line alone. -infinity stands for a key that is not there; the tile has at least one.
__device__ __forceinline__ float2 sum_powers(float first, float second) {
    float largest = fmaxf(first, second);
#pragma unroll
    for (int mask = 4; mask < WARP; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(EVERYONE, largest, mask));
    float sum = power_of_two(first - largest) + power_of_two(second - largest);
#pragma unroll
    for (int mask = 4; mask < WARP; mask *= 2) sum += __shfl_xor_sync(EVERYONE, sum, mask);
    return make_float2(largest, sum);
}

// Score the recalled places with ranks first .. first + 15, below `count`, for all heads of the group.
__device__ __forceinline__ void score_tile(const StepArguments& a, const Task& task, const int* extents, int first,
                                           int count) {
    const long long list = static_cast<long long>(task.number) * a.capacity;
    const int ranks[2] = {first + line_of_lane(), first + line_of_lane() + 8};
    const Number* keys[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // ranks that are not there repeat the last one
        const int place = a.recalled[list + min(ranks[i], count - 1)];
        const long long inside = static_cast<long long>(task.head) * EXTENT_TOKENS + place % EXTENT_TOKENS;
        keys[i] = a.rows + extents[place / EXTENT_TOKENS] * a.extent_stride + inside * (2 * DIM);
    }
    RowTile tile;
    tile.load(keys[0], keys[1]);
    float products[HALVES][4];
    tile.multiply_group(task.queries(a.queries), products);
    const long long tiles = (a.capacity + TILE - 1) / TILE;
    float2* statistics = a.statistics + (task.number * tiles + first / TILE) * GROUP;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = 8 * half + 2 * part_of_lane() + i;
            const bool exists = head < GROUP;
            float exponents[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const float score = products[half][2 * row + i];
                exponents[row] = ranks[row] < count && exists ? score * a.scale : -INFINITE;
                if (ranks[row] < count && exists) a.scores[(list + ranks[row]) * GROUP + head] = score;
            }
            const float2 powers = sum_powers(exponents[0], exponents[1]);
            if (line_of_lane() == 0 && exists) statistics[head] = powers;
        }
    }
}

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek

// grid: blocks that share the places of a task, tasks. Dynamic shared memory: max_extents * (4 + 128) bytes
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::decode::RECALL_THREADS, 1)
    kvseek_ctkvr_recall(const __grid_constant__ kvseek::ctkvr::decode::StepArguments a) {
    using namespace kvseek;
    using namespace kvseek::ctkvr::decode;
    extern __shared__ __align__(16) unsigned char dynamic_memory[];
    __shared__ RecallMemory memory;
    const Task task(a.requests, a.kv_heads);
    const int tokens = task.request.length;
    const bool idle = task.request.dense || tokens <= 0;
    int* extents = reinterpret_cast<int*>(dynamic_memory);
    const PlaceBits bits(reinterpret_cast<unsigned*>(extents + a.max_extents), tokens);
    if (!idle) {  // the table and the requests were uploaded before the step
        const int* table = a.table + static_cast<long long>(task.request.slot) * a.max_extents;
        for (int i = threadIdx.x; i * EXTENT_TOKENS < tokens; i += RECALL_THREADS) extents[i] = table[i];
        bits.clear();
    }
    await_earlier_kernels();
    if (idle) {
        if (blockIdx.x == 0 && threadIdx.x == 0) tell_count(a, task, 0);
        return;
    }
    allow_later_kernels();
    const int probed = probe_centroids(a, task, memory);
    __syncthreads();
    set_recalled(a, task, bits, probed, memory.probed);
    __syncthreads();
    int count;
    const int rank = bits.ranks(memory.sums, count);
    if (blockIdx.x == 0 && threadIdx.x == 0) tell_count(a, task, count);
    // Shares are whole tiles, so what a tile holds does not depend on the grid, nor do the sums over it.
    const int tiles = (count + TILE - 1) / TILE;
    const int share = (tiles + gridDim.x - 1) / gridDim.x * TILE;
    const int first = min(static_cast<int>(blockIdx.x) * share, count), last = min(first + share, count);
    bits.write(rank, first, last, a.recalled + static_cast<long long>(task.number) * a.capacity);
    __syncthreads();
    if (a.host_recalled) tell_host(a, task, first, last);
    if (!a.scores) return;
    for (int at = first + threadIdx.x / WARP * TILE; at < last; at += RECALL_THREADS / WARP * TILE)
        score_tile(a, task, extents, at, last);
}
