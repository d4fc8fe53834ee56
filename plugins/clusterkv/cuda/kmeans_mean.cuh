// K-means, the end: mean and size of each cluster.
//
// A block has a few clusters of a head. Its warps look through all labels for keys of theirs, which they list in shared
// memory and then read, a row at a time. So nothing is sorted and no sum is shared between blocks: every sum has one
// order, the same in every run, and needs no atomics on floats. Labels are 16 bits, 256 in a load of a warp.
#pragma once

#include "kmeans.cuh"

namespace kvseek {
namespace clusterkv {
namespace kmeans {

constexpr int OWN = DIM <= 128 ? 8 : 4;  // clusters of a block; their sums are OWN * EACH registers of a lane
constexpr int LISTED = 512;              // keys that a warp lists before it reads them
constexpr int PASS = WARP * LABELS;      // labels that a warp looks at together
constexpr int TOGETHER = sizeof(Number) * EACH <= 8 ? 8 : 4;  // rows on their way to a warp
static_assert(LISTED >= 2 * PASS, "a list has room for what one more look may find");

// Shared memory of a block: lists, and then the sums of its warps.
struct MeanSpace {
    union {
        struct {
            unsigned found[WARPS][LISTED];   // key * OWN + cluster
            unsigned sorted[WARPS][LISTED];  // keys
        };
        float sums[WARPS][OWN][DIM];
    };
    int counts[WARPS][WARP];  // of lane k: keys of the block's k-th cluster
#if CLUSTERKV_SPREAD
    float squares[WARPS][OWN];  // sums of the squares of these keys' numbers
#endif
};

// List the keys of PASS labels from `from` on that belong to clusters first .. first + OWN - 1; returns the new length.
__device__ __forceinline__ int list_keys(const unsigned short* labels, int label_stride, int from, int first,
                                         unsigned* found, int listed) {
    const int lane = threadIdx.x % WARP, key = from + lane * LABELS;
    uint4 eight = {EVERYONE, EVERYONE, EVERYONE, EVERYONE};
    if (key < label_stride) eight = *reinterpret_cast<const uint4*>(labels + key);
    const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
    unsigned wanted = 0;
#pragma unroll
    for (int i = 0; i < LABELS; ++i) {
        const unsigned own = (words[i / 2] >> 16 * (i % 2) & 0xffff) - first;
        wanted |= (own < OWN ? 1u : 0u) << i;
    }
    if (!__any_sync(EVERYONE, wanted != 0)) return listed;
    const int count = __popc(wanted);
    int next = count;  // number in the list behind that of the last key of this lane, after the scan
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(EVERYONE, next, step);
        if (lane >= step) next += other;
    }
    const int total = __shfl_sync(EVERYONE, next, WARP - 1);
    next += listed - count;
#pragma unroll
    for (int i = 0; i < LABELS; ++i)
        if (wanted >> i & 1) {
            const unsigned own = (words[i / 2] >> 16 * (i % 2) & 0xffff) - first;
            found[next++] = static_cast<unsigned>(key + i) * OWN + own;
        }
    return listed + total;
}

// Number the listed keys of each cluster, lane k's `next` being the first number of cluster k, and call
// visit(number, key) for each key. Returns the number after the last of cluster k in lane k.
template <class Visit>
__device__ __forceinline__ int number_keys(const unsigned* found, int listed, int next, const Visit& visit) {
    const int lane = threadIdx.x % WARP;
    for (int base = 0; base < listed; base += WARP) {
        const bool valid = base + lane < listed;
        const unsigned entry = valid ? found[base + lane] : 0;
        int number = 0;
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
            const bool mine = valid && entry % OWN == own;
            const unsigned together = __ballot_sync(EVERYONE, mine);
            const int before = __shfl_sync(EVERYONE, next, own);
            if (mine) number = before + __popc(together & ((1u << lane) - 1));
            if (lane == own) next += __popc(together);
        }
        if (valid) visit(number, static_cast<int>(entry / OWN));
    }
    return next;
}

// Look through labels of passes begin, begin + step, .. < end for the clusters of this block. Calls use(listed)
// whenever the warp's list is full, and at the end.
template <class Use>
__device__ __forceinline__ void look_through(const KMeansArguments& a, int head, int first, int begin, int end,
                                             int step, unsigned* found, const Use& use) {
    const unsigned short* labels = a.labels + static_cast<long long>(head) * a.label_stride;
    int listed = 0;
    for (int pass = begin; pass < end; pass += step) {
        listed = list_keys(labels, a.label_stride, pass * PASS, first, found, listed);
        if (listed <= LISTED - PASS && pass + step < end) continue;
        __syncwarp();  // the list is written
        use(listed);
        __syncwarp();  // and read
        listed = 0;
    }
}

__device__ __forceinline__ int label_passes(const KMeansArguments& a) {
    return (a.tokens + PASS - 1) / PASS;
}

// Add rows `begin` .. `end` - 1 of a list of keys to a sum, in order; and with SPREAD their squares to `squares`.
__device__ __forceinline__ void add_rows(const KMeansArguments& a, int head, const unsigned* keys, int begin, int end,
                                         float (&sum)[EACH], float& squares) {
    const int lane = threadIdx.x % WARP;
    for (int i = begin; i < end; i += TOGETHER) {
        float rows[TOGETHER][EACH];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j)
            load_row(key_of(a, head, static_cast<int>(keys[min(i + j, end - 1)])), lane, rows[j]);
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j)
            if (i + j < end)
#pragma unroll
                for (int e = 0; e < EACH; ++e) {
                    sum[e] += rows[j][e];
                    if constexpr (SPREAD) squares += rows[j][e] * rows[j][e];
                }
    }
}

// Sums of the keys of clusters first .. first + OWN - 1 that this warp finds: it looks at every WARPS-th pass.
__device__ __forceinline__ void sum_own_keys(const KMeansArguments& a, int head, int first, MeanSpace& space,
                                             float (&sums)[OWN][EACH], float (&squares)[OWN], int& size) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    unsigned *found = space.found[warp], *sorted = space.sorted[warp];
    look_through(a, head, first, warp, label_passes(a), WARPS, found, [&](int listed) {
        const int count = number_keys(found, listed, 0, [](int, int) {});  // of cluster `lane`
        int end = count;
#pragma unroll
        for (int step = 1; step < OWN; step *= 2) {
            const int other = __shfl_up_sync(EVERYONE, end, step);
            if (lane >= step) end += other;
        }
        number_keys(found, listed, end - count, [&](int number, int key) { sorted[number] = key; });
        __syncwarp();
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
            const int stop = __shfl_sync(EVERYONE, end, own), begin = stop - __shfl_sync(EVERYONE, count, own);
            add_rows(a, head, sorted, begin, stop, sums[own], squares[own]);
        }
        size += count;
    });
}

// A warp's sums of squares of each cluster of the block, to shared memory.
__device__ __forceinline__ void note_squares(MeanSpace& space, const float (&squares)[OWN]) {
#if CLUSTERKV_SPREAD
#pragma unroll
    for (int own = 0; own < OWN; ++own) {
        const float all = sum_of_warp(squares[own]);
        if (threadIdx.x % WARP == own) space.squares[threadIdx.x / WARP][own] = all;
    }
#endif
}

// Spread of the block's cluster `own`, whose keys' sum a warp holds: mean square less square of the mean. What rounding
// leaves of a difference near zero may be negative. One key has no spread at all.
__device__ __forceinline__ void store_spread(const KMeansArguments& a, long long entry, const MeanSpace& space, int own,
                                             const float (&sum)[EACH], int keys) {
#if CLUSTERKV_SPREAD
    float squares = 0.0f, mean_squares = 0.0f;
    for (int w = 0; w < WARPS; ++w) squares += space.squares[w][own];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const float mean = keys > 0 ? sum[i] / keys : 0.0f;
        mean_squares += mean * mean;
    }
    const float difference = keys > 1 ? squares / keys - sum_of_warp(mean_squares) : 0.0f;
    if (threadIdx.x % WARP == 0) a.spreads[entry] = sqrtf(fmaxf(difference, 0.0f) / DIM);
#endif
}

// Means, sizes and spreads of clusters first .. first + OWN - 1. All threads of a block; the caller lets them meet
// before the space is used again.
__device__ __forceinline__ void mean_part(const KMeansArguments& a, int head, int first, MeanSpace& space) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float sums[OWN][EACH] = {}, squares[OWN] = {};
    int size = 0;
    sum_own_keys(a, head, first, space, sums, squares, size);
    __syncthreads();  // lists become sums
#pragma unroll
    for (int own = 0; own < OWN; ++own)
#pragma unroll
        for (int i = 0; i < EACH; ++i) space.sums[warp][own][column_of(i, lane)] = sums[own][i];
    space.counts[warp][lane] = size;
    if constexpr (SPREAD) note_squares(space, squares);
    __syncthreads();
    if (warp >= OWN || first + warp >= a.clusters) return;
    const int cluster = first + warp;
    float sum[EACH] = {};
    int keys = 0;
    for (int w = 0; w < WARPS; ++w) {
        keys += space.counts[w][warp];
#pragma unroll
        for (int i = 0; i < EACH; ++i) sum[i] += space.sums[w][warp][column_of(i, lane)];
    }
    const long long entry = cluster_entry(a, head, cluster);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        a.centroids[entry * DIM + column_of(i, lane)] = from_float<Number>(keys > 0 ? sum[i] / keys : 0.0f);
    if (lane == 0) a.sizes[entry] = keys;
    if constexpr (SPREAD) store_spread(a, entry, space, warp, sum, keys);
}

}  // namespace kmeans
}  // namespace clusterkv
}  // namespace kvseek
