// From scores to rows: one block of a task takes clusters, best first, until the budget of rows is filled.
//
// It does not sort. The last cluster taken is found digit by digit, as in a radix select, but with rows in the bins of
// the histogram instead of clusters: it makes no difference whether 13 clusters fill the budget or 1,000.
#pragma once

#include "select.cuh"

namespace kvseek {
namespace clusterkv {

constexpr int CHOOSE_THREADS = 1024;
constexpr int CHOOSE_WARPS = CHOOSE_THREADS / 32;
constexpr int DIGIT = 11, BINS = 1 << DIGIT;
constexpr int BINS_EACH = BINS / CHOOSE_THREADS;
constexpr int FINALISTS =
    CHOOSE_THREADS / 4;  // clusters that share a bin and are compared one with another, by 4 threads

// The order of clusters: best score first, then lowest number. No two are equal.
using ClusterKey = SortKey;

struct Cut {
    ClusterKey key;  // the last cluster taken
    int rows;        // of that one
};

struct ChooseMemory {
    int histogram[BINS];
    ClusterKey finalists[FINALISTS];
    int finalist_rows[FINALISTS];
    int sums[33];
    int finalist_count;
    int digit, above;  // of the bin that holds the last cluster: its number, and the rows of better bins
    Cut cut;
    float largest[QUERY_LANES], factor[QUERY_LANES];  // of each lane: weight = factor * 2^(score - largest)
    int warp_counts[CHOOSE_WARPS];
};

// Arrays in dynamic shared memory, whose lengths depend on the engine; device.py counts their bytes.
struct ChooseArrays {
    unsigned* bits;        // [units * UNIT] of a cluster: its value, in an order that integers share
    int *list, *first;     // [top_k] clusters taken, and the first of its rows among those of the selection
    int* begin;            // [top_k] first entry of a taken cluster in `places`
    int* table;            // [max_extents]
    unsigned short* rows;  // [units * UNIT] keys of a cluster, top_k if there are more

    __device__ __forceinline__ ChooseArrays(const SelectArguments& a, void* memory) {
        bits = static_cast<unsigned*>(memory);
        list = reinterpret_cast<int*>(bits + a.units * UNIT);
        first = list + a.top_k, begin = first + a.top_k;
        table = begin + a.top_k;
        rows = reinterpret_cast<unsigned short*>(table + a.max_extents);
    }
    __device__ __forceinline__ ClusterKey key(int cluster) const {
        return static_cast<ClusterKey>(bits[cluster]) << 32 | ~static_cast<unsigned>(cluster);
    }
    __device__ __forceinline__ bool taken(int cluster, int clusters, const Cut& cut) const {
        return cluster < clusters && rows[cluster] && key(cluster) >= cut.key;
    }
};

// What the step can know before the scores are there.
__device__ __forceinline__ void load_sizes(const SelectArguments& a, const SelectTask& task, int clusters,
                                           const ChooseArrays& arrays, ChooseMemory& memory) {
    const int extents = (task.request.length + EXTENT_TOKENS - 1) / EXTENT_TOKENS;
    for (int i = threadIdx.x; i < extents; i += CHOOSE_THREADS) arrays.table[i] = task.table[i];
    for (int c = threadIdx.x; c < clusters; c += CHOOSE_THREADS)
        arrays.rows[c] = static_cast<unsigned short>(min(a.sizes[task.cluster_entry(a, c)], a.top_k));
    for (int i = threadIdx.x; i < BINS; i += CHOOSE_THREADS) memory.histogram[i] = 0;
}

// The softmax of each lane over all clusters: a warp merges the statistics of its units, in their order.
__device__ __forceinline__ void merge_statistics(const SelectArguments& a, const SelectTask& task, int clusters,
                                                 ChooseMemory& memory) {
    const int lane = threadIdx.x / 32;
    if (lane >= QUERY_LANES) return;
    const float2* units = a.statistics + task.first_unit(a) * QUERY_LANES + lane;
    float largest = -INFINITE, sum = 0.0f;
    for (int unit = threadIdx.x % 32; unit * UNIT < clusters; unit += 32) {
        const float2 own = units[unit * QUERY_LANES];
        const float higher = fmaxf(largest, own.x);
        if (own.x > -INFINITE) sum = sum * power_of_two(largest - higher) + own.y * power_of_two(own.x - higher);
        largest = higher;
    }
    float all = largest;
#pragma unroll
    for (int distance = 16; distance; distance /= 2) all = fmaxf(all, __shfl_xor_sync(~0u, all, distance));
    if (largest > -INFINITE) sum *= power_of_two(largest - all);
#pragma unroll
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (threadIdx.x % 32 == 0) memory.largest[lane] = all, memory.factor[lane] = 1.0f / sum;
}

// A cluster's value: the sum of its softmax weights over the heads of the group.
__device__ __forceinline__ float reduce_lanes(const float* scores, const ChooseMemory& memory) {
    float value = 0.0f;
#pragma unroll
    for (int lane = 0; lane < QUERY_LANES; ++lane) {
        const float weight = memory.factor[lane] * power_of_two(scores[lane] - memory.largest[lane]);
        value = value + weight;
    }
    return value;
}

// Values of all clusters, and the rows of each bin of their first digit.
__device__ __forceinline__ void value_clusters(const SelectArguments& a, const SelectTask& task, int clusters,
                                               const ChooseArrays& arrays, ChooseMemory& memory) {
    const float* scores = a.scores + task.first_unit(a) * UNIT * QUERY_LANES;
    for (int c = threadIdx.x; c < clusters; c += CHOOSE_THREADS) {
        float own[QUERY_LANES];
        if constexpr (QUERY_LANES % 4 == 0) {
#pragma unroll
            for (int i = 0; i < QUERY_LANES; i += 4)
                *reinterpret_cast<float4*>(own + i) = *reinterpret_cast<const float4*>(scores + c * QUERY_LANES + i);
        } else {
#pragma unroll
            for (int i = 0; i < QUERY_LANES; ++i) own[i] = scores[c * QUERY_LANES + i];
        }
        const unsigned bits = ordered_bits(reduce_lanes(own, memory));
        arrays.bits[c] = bits;
        if (arrays.rows[c]) atomicAdd(&memory.histogram[bits >> (32 - DIGIT)], arrays.rows[c]);
    }
}

// The bin that holds the last of `wanted` rows, best bins first, into memory.digit and .above. False: there are no more
// than `wanted` rows in all.
__device__ __forceinline__ bool find_bin(ChooseMemory& memory, int wanted) {
    const int highest = BINS - 1 - static_cast<int>(threadIdx.x) * BINS_EACH;
    int own[BINS_EACH], sum = 0, total;
    __syncthreads();  // after the counting
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) sum += own[i] = memory.histogram[highest - i];
    int above = block_prefix_sum<CHOOSE_THREADS>(sum, memory.sums, total);
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) {
        if (above < wanted && wanted <= above + own[i]) memory.digit = highest - i, memory.above = above;
        above += own[i];
    }
    __syncthreads();
    return total > wanted;
}

// Which of the finalists is the last one taken: the one before which fewer than `wanted` rows come, and not after.
__device__ __forceinline__ void compare_finalists(ChooseMemory& memory, int count, int wanted) {
    const int own = threadIdx.x / 4;
    const ClusterKey key = own < count ? memory.finalists[own] : 0;
    int before = 0;
    for (int i = threadIdx.x % 4; i < count; i += 4) before += memory.finalists[i] > key ? memory.finalist_rows[i] : 0;
    before += __shfl_xor_sync(~0u, before, 1);
    before += __shfl_xor_sync(~0u, before, 2);
    if (own < count && threadIdx.x % 4 == 0) {
        const int rows = memory.finalist_rows[own];
        if (before < wanted && wanted <= before + rows) memory.cut = {key, wanted - before};
    }
    __syncthreads();
}

// The last cluster to take for top_k rows. Every pass fixes a digit of its key; two of them nearly always do.
__device__ __forceinline__ Cut find_cut(const SelectArguments& a, int clusters, const ChooseArrays& arrays,
                                        ChooseMemory& memory) {
    int wanted = a.top_k;
    if (!find_bin(memory, wanted)) return {0, 0};  // everything is taken, and whole
    int shift = 64 - DIGIT;
    ClusterKey prefix = memory.digit;  // the highest 64 - shift bits of the key
    for (;;) {
        wanted -= memory.above;
        const int next = max(shift - DIGIT, 0);
        for (int i = threadIdx.x; i < BINS; i += CHOOSE_THREADS) memory.histogram[i] = 0;
        if (threadIdx.x == 0) memory.finalist_count = 0;
        __syncthreads();
        for (int c = threadIdx.x; c < clusters; c += CHOOSE_THREADS) {
            const ClusterKey key = arrays.key(c);
            if (key >> shift != prefix || !arrays.rows[c]) continue;
            atomicAdd(&memory.histogram[(key >> next) & (BINS - 1)], arrays.rows[c]);
            const int number = atomicAdd(&memory.finalist_count, 1);
            if (number < FINALISTS) memory.finalists[number] = key, memory.finalist_rows[number] = arrays.rows[c];
        }
        __syncthreads();
        const int count = memory.finalist_count;
        if (count <= FINALISTS) {  // in any order: their keys decide
            compare_finalists(memory, count, wanted);
            return memory.cut;
        }
        find_bin(memory, wanted);
        const int fixed = shift - next;  // the last digit overlaps with the one before it
        prefix = prefix << fixed | (memory.digit & ((1 << fixed) - 1));
        shift = next;
    }
}

// Write the clusters taken into arrays.list, in the order of their numbers; returns how many.
__device__ __forceinline__ int list_taken(const Cut& cut, int clusters, const ChooseArrays& arrays,
                                          ChooseMemory& memory) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int each = (clusters + CHOOSE_THREADS - 1) / CHOOSE_THREADS * 32;  // clusters of a warp, neighbours
    int own = 0;
    for (int c = warp * each; c < (warp + 1) * each; c += 32)
        own += __popc(__ballot_sync(~0u, arrays.taken(c + lane, clusters, cut)));
    if (lane == 0) memory.warp_counts[warp] = own;
    __syncthreads();
    int next = 0, all = 0;
#pragma unroll
    for (int w = 0; w < CHOOSE_WARPS; ++w) {
        next += w < warp ? memory.warp_counts[w] : 0;
        all += memory.warp_counts[w];
    }
    for (int c = warp * each; c < (warp + 1) * each; c += 32) {
        const bool taken = arrays.taken(c + lane, clusters, cut);
        const unsigned votes = __ballot_sync(~0u, taken);
        if (taken) arrays.list[next + __popc(votes & ((1u << lane) - 1))] = c + lane;
        next += __popc(votes);
    }
    __syncthreads();
    return all;
}

// Where each taken cluster's rows are and go: in `places`, and among the rows of the selection. Returns the rows of the
// selection.
__device__ __forceinline__ int place_taken(const SelectArguments& a, const SelectTask& task, const Cut& cut, int count,
                                           const ChooseArrays& arrays, ChooseMemory& memory) {
    int selected = 0;
    for (int base = 0; base < count; base += CHOOSE_THREADS) {
        const int i = base + threadIdx.x;
        const int cluster = i < count ? arrays.list[i] : 0;
        int rows = 0, total;
        if (i < count) rows = arrays.key(cluster) == cut.key ? cut.rows : arrays.rows[cluster];
        const int first = selected + block_prefix_sum<CHOOSE_THREADS>(rows, memory.sums, total);
        selected += total;
        if (i >= count) continue;
        arrays.first[i] = first;
        arrays.begin[i] = a.starts[task.cluster_entry(a, cluster)];
    }
    __syncthreads();
    return selected;
}

// One entry of the selection a thread.
__device__ __forceinline__ void write_rows(const SelectArguments& a, const SelectTask& task, int count, int selected,
                                           const ChooseArrays& arrays) {
    const long long out = static_cast<long long>(task.number) * a.top_k;
    for (int entry = threadIdx.x; entry < a.top_k; entry += CHOOSE_THREADS) {
        int place = -1;
        if (entry < selected) {
            int low = 0, high = count;  // the last cluster that begins at `entry` or before it is `low`
            while (high - low > 1) {
                const int middle = (low + high) / 2;
                (arrays.first[middle] <= entry ? low : high) = middle;
            }
            const int inside = entry - arrays.first[low];
            place = a.places[extent_row(arrays.table, a.kv_heads, task.head, arrays.begin[low] + inside)];
        }
        a.rows[out + entry] = place;
    }
}

}  // namespace clusterkv
}  // namespace kvseek
