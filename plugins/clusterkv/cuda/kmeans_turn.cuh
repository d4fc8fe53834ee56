// K-means, second half of a round: lists of keys by cluster, and from them the new directions.
//
// A key finds its number in the list of its cluster by an atomic counter, so lists have no fixed order. Sums do not
// depend on it: they are integers, of unit keys counted in steps of 1 / ONE. That makes work easy to share out. A warp
// has CHUNK entries of the list, whatever clusters they are of, and hands in a sum for each; the warp that brings a
// cluster's last key turns its direction. So a cluster of half of all keys costs what others do, and every row is read
// once.
#pragma once

#include "kernels/cuda/block_sort.cuh"
#include "kmeans.cuh"

namespace kvseek {
namespace clusterkv {
namespace kmeans {

constexpr int CHUNK = 64;                       // list entries of a warp
constexpr int IN_FLIGHT = 8;                    // rows on their way to a warp
constexpr int TURN_BLOCKS = EACH <= 4 ? 4 : 2;  // of a multiprocessor: 64 or 128 registers a thread
constexpr float ONE = 1 << 21;                  // of a unit key, the number 1
constexpr float BIAS = 3 << 22;                 // 1.5 * 2^23: added to |x| <= 2^22 it rounds x
static_assert(CHUNK % WARP == 0 && WARP % IN_FLIGHT == 0, "rows come in whole groups");

// Before lists are filled: where each cluster's begins. All threads of a block, once no count changes any more.
__device__ __forceinline__ void start_lists(const KMeansArguments& a, int head, int* scratch) {
    const int* counts = a.counts + head * a.clusters;
    const int each = (a.clusters + THREADS - 1) / THREADS, begin = threadIdx.x * each;
    const int end = min(begin + each, a.clusters);
    int sum = 0, total;
    for (int cluster = begin; cluster < end; ++cluster) sum += __ldcg(counts + cluster);
    int next = block_prefix_sum<THREADS>(sum, scratch, total);
    for (int cluster = begin; cluster < end; ++cluster) {
        a.cursors[head * a.clusters + cluster] = next;
        next += __ldcg(counts + cluster);
    }
}

// Put a key on the list of its cluster.
__device__ __forceinline__ void place_key(const KMeansArguments& a, int head, int token) {
    const long long row = static_cast<long long>(head) * a.label_stride;
    const int cluster = a.labels[row + token];
    const int number = atomicAdd(a.cursors + head * a.clusters + cluster, 1);
    a.list[row + number] = make_uint2(token, cluster);
}

// Sum of unit keys of one cluster, in a warp.
struct UnitSum {
    unsigned numbers[EACH];  // with the bits of BIAS, once for each key
    int keys;

    __device__ __forceinline__ void clear() {
        keys = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) numbers[i] = 0;
    }
    // `scale` makes the key's length ONE.
    __device__ __forceinline__ void add(const float (&key)[EACH], float scale) {
        ++keys;
#pragma unroll
        for (int i = 0; i < EACH; ++i) numbers[i] += __float_as_uint(__fmaf_rn(key[i], scale, BIAS));
    }
    __device__ __forceinline__ long long number(int i) const {
        return static_cast<int>(numbers[i] - keys * __float_as_uint(BIAS));
    }
};

// The cluster's sum is there: its direction, and nothing again where the next round adds.
__device__ __forceinline__ void turn(const KMeansArguments& a, int head, int cluster) {
    const int lane = threadIdx.x % WARP, row = head * a.clusters + cluster;
    float x[EACH], origin[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        long long* number = a.sums + static_cast<long long>(row) * DIM + column_of(i, lane);
        x[i] = static_cast<float>(__ldcg(number)) * (1.0f / ONE);
        *number = 0;
        origin[i] = a.origins[head * DIM + column_of(i, lane)];
    }
    if (lane == 0) a.summed[row] = 0;
    store_direction(a, head, cluster, x, origin);
}

// Add a warp's sum to its cluster, and turn that if no key is missing.
__device__ __forceinline__ void hand_in(const KMeansArguments& a, int head, int cluster, const UnitSum& sum) {
    const int lane = threadIdx.x % WARP, row = head * a.clusters + cluster;
    long long* sums = a.sums + static_cast<long long>(row) * DIM;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        atomicAdd(reinterpret_cast<unsigned long long*>(sums + column_of(i, lane)),
                  static_cast<unsigned long long>(sum.number(i)));
    __threadfence();  // whoever sees the count below sees the sums
    __syncwarp();
    bool complete = false;
    if (lane == 0) complete = atomicAdd(a.summed + row, sum.keys) + sum.keys == __ldcg(a.counts + row);
    if (!__any_sync(EVERYONE, complete)) return;
    __threadfence();
    turn(a, head, cluster);
}

// Entries chunk * CHUNK .. of the list. All lanes of a warp.
__device__ __forceinline__ void sum_chunk(const KMeansArguments& a, int head, int chunk) {
    const int lane = threadIdx.x % WARP, begin = chunk * CHUNK, end = min(begin + CHUNK, a.tokens);
    if (begin >= end) return;
    const long long row = static_cast<long long>(head) * a.label_stride;
    UnitSum sum;
    sum.clear();
    unsigned cluster = 0;
#pragma unroll 1
    for (int first = begin; first < end; first += WARP) {
        const uint2 entry = a.list[row + min(first + lane, end - 1)];
        const float scale = a.scales[row + entry.x] * ONE;
#pragma unroll 1
        for (int i = 0; i < WARP && first + i < end; i += IN_FLIGHT) {
            float keys[IN_FLIGHT][EACH];
#pragma unroll
            for (int j = 0; j < IN_FLIGHT; ++j)
                load_row(key_of(a, head, __shfl_sync(EVERYONE, entry.x, i + j)), lane, keys[j]);
            const int count = min(IN_FLIGHT, end - first - i);
#pragma unroll 1
            for (int start = 0, stop; start < count; start = stop) {  // a run of one cluster
                const unsigned its = __shfl_sync(EVERYONE, entry.y, i + start);
                if (its != cluster) {
                    if (sum.keys) hand_in(a, head, cluster, sum);
                    sum.clear();
                    cluster = its;
                }
                const unsigned run = __ballot_sync(EVERYONE, entry.y == its) >> i >> start;
                stop = min(count, start + __popc(run));
#pragma unroll
                for (int j = 0; j < IN_FLIGHT; ++j) {
                    const float its_scale = __shfl_sync(EVERYONE, scale, i + j);
                    if (j >= start && j < stop) sum.add(keys[j], its_scale);
                }
            }
        }
    }
    hand_in(a, head, cluster, sum);
}

}  // namespace kmeans
}  // namespace clusterkv
}  // namespace kvseek
