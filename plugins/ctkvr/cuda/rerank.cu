// CTkvr, last kernel of a selection: the best of the recalled places by softmax weight, largest of the group (paper,
// algorithm 2, part c), and the oldest centroid's replacement (part d).
//
// Block 0 of a task selects the rows to attend to, block 1 beside it the longer list of the new centroid.
#include "kernels/cuda/block_sort.cuh"
#include "ring.cuh"

namespace kvseek {
namespace ctkvr {
namespace decode {

constexpr int RERANK_THREADS = 1024;
constexpr int RERANK_WARPS = RERANK_THREADS / WARP;
static_assert(GROUP <= RERANK_WARPS, "a warp sums the powers of a head up");

struct RerankMemory {
    NthMemory<8> nth;
    int sums[RERANK_WARPS + 1];
    float normalisers[GROUP];  // log2 of the sum of the powers
};

// What candidate i is ranked by: ties are cut by its number, and so by its place.
struct RankedKeys {
    const unsigned* values;
    __device__ __forceinline__ SortKey operator[](int i) const {
        return static_cast<SortKey>(values[i]) << 32 | ~static_cast<unsigned>(i);
    }
};

// Each head's softmax over all candidates, from the sums of the tiles. A barrier must follow.
__device__ __forceinline__ void normalise(const StepArguments& a, const Task& task, int count, float* normalisers) {
    const int head = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (head >= GROUP) return;
    const long long tiles = (a.capacity + TILE - 1) / TILE;
    const float2* statistics = a.statistics + task.number * tiles * GROUP + head;
    float largest = -1e30f, sum = 0.0f;  // finite: infinity less infinity is NaN
#pragma unroll 4
    for (int tile = lane; tile * TILE < count; tile += WARP) {
        const float2 part = statistics[tile * GROUP];
        const float both = fmaxf(largest, part.x);
        sum = sum * power_of_two(largest - both) + part.y * power_of_two(part.x - both);
        largest = both;
    }
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) {
        const float other = __shfl_xor_sync(EVERYONE, largest, mask);
        const float other_sum = __shfl_xor_sync(EVERYONE, sum, mask), both = fmaxf(largest, other);
        sum = sum * power_of_two(largest - both) + other_sum * power_of_two(other - both);
        largest = both;
    }
    if (lane == 0) normalisers[head] = largest + log2f(sum);
}

// A candidate's largest weight in the group, as a logarithm: small weights would vanish and could not be told apart.
__device__ __forceinline__ unsigned rank_value(const StepArguments& a, const float* scores, const float* normalisers) {
    float products[GROUP];
    if constexpr (GROUP % 4 == 0) {
#pragma unroll
        for (int i = 0; i < GROUP / 4; ++i) {
            const float4 four = reinterpret_cast<const float4*>(scores)[i];
            products[4 * i] = four.x, products[4 * i + 1] = four.y;
            products[4 * i + 2] = four.z, products[4 * i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) products[i] = scores[i];
    }
    float value = -INFINITE;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) value = fmaxf(value, products[i] * a.scale - normalisers[i]);
    return ordered_bits(value);
}

// Write the places of the `wanted` best of `count` candidates to `places`, in the candidates' order, -1 behind them.
__device__ __forceinline__ void take_best(const RankedKeys& keys, int count, int wanted, const int* recalled,
                                          int* places, RerankMemory& memory) {
    const SortKey border = nth_largest<RERANK_THREADS, 8, RankedKeys>(keys, count, wanted, memory.nth);
    const int each = (count + RERANK_THREADS - 1) / RERANK_THREADS;
    const int begin = min(static_cast<int>(threadIdx.x) * each, count), end = min(begin + each, count);
    int own = 0, all;
    for (int i = begin; i < end; ++i) own += keys[i] >= border;
    int at = block_prefix_sum<RERANK_THREADS>(own, memory.sums, all);
    for (int i = begin; i < end; ++i)
        if (keys[i] >= border) places[at++] = recalled[i];
    for (int i = all + threadIdx.x; i < wanted; i += RERANK_THREADS) places[i] = -1;
}

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek

// grid: 1, or 2 if centroids are updated; kv_heads, requests. Dynamic shared memory: 4 bytes for each of `capacity`, or
// none with a.keys
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::decode::RERANK_THREADS, 1)
    kvseek_ctkvr_rerank(const __grid_constant__ kvseek::ctkvr::decode::StepArguments a) {
    using namespace kvseek;
    using namespace kvseek::ctkvr::decode;
    extern __shared__ __align__(16) unsigned char dynamic_memory[];
    __shared__ RerankMemory memory;
    const Task task(a.requests, a.kv_heads, blockIdx.z);
    const bool updates = blockIdx.x == 1;
    // The queries of regions that are selected whole become no centroids.
    const bool idle = task.request.dense || (updates && task.request.length <= a.top_k);
    await_earlier_kernels();
    if (idle) return;
    allow_later_kernels();
    const int count = a.counts[task.number];
    const long long list = static_cast<long long>(task.number) * a.capacity;
    normalise(a, task, count, memory.normalisers);
    __syncthreads();
    unsigned* values =
        a.keys ? a.keys + 2 * list + blockIdx.x * a.capacity : reinterpret_cast<unsigned*>(dynamic_memory);
    for (int i = threadIdx.x; i < count; i += RERANK_THREADS)
        values[i] = rank_value(a, a.scores + (list + i) * GROUP, memory.normalisers);
    const RankedKeys keys{values};
    const int* recalled = a.recalled + list;
    if (updates) {
        const RingEntry ring(a, task);
        take_best(keys, count, a.width, recalled, ring.list, memory);  // has barriers
        ring.write_centroids(task.queries(a.queries));
    } else {
        take_best(keys, count, a.top_k, recalled, a.selected + static_cast<long long>(task.number) * a.top_k, memory);
    }
}
