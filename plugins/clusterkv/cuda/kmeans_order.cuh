// K-means, the end: places sorted by cluster, and where each cluster begins.
#pragma once

#include "kmeans_mean.cuh"

namespace kvseek {
namespace clusterkv {
namespace kmeans {

struct OrderSpace {
    unsigned found[WARPS][LISTED];
    int counts[WARPS][WARP];  // of lane k: keys of the block's k-th cluster
    int before[WARPS];
};

// Keys of all clusters before `first`, of this clustering. All threads of a block.
__device__ __forceinline__ int keys_before(const KMeansArguments& a, int head, int first, OrderSpace& space) {
    int sum = 0;
    for (int cluster = threadIdx.x; cluster < first; cluster += THREADS)
        sum += a.sizes[cluster_entry(a, head, cluster)];
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) sum += __shfl_xor_sync(EVERYONE, sum, mask);
    if (threadIdx.x % WARP == 0) space.before[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = 0;
    for (int warp = 0; warp < WARPS; ++warp) sum += space.before[warp];
    return sum;
}

// Places of the keys of clusters first .. first + OWN - 1, which ascend inside a cluster: a warp has neighbouring
// labels, counts its keys of each cluster, and writes them after those of the warps before it. All threads of a block;
// the caller lets them meet before the space is used again.
__device__ __forceinline__ void order_part(const KMeansArguments& a, int head, int first, OrderSpace& space) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, passes = label_passes(a);
    const int each = (passes + WARPS - 1) / WARPS, begin = warp * each, end = min(begin + each, passes);
    unsigned* found = space.found[warp];
    int count = 0;  // of cluster `lane`
    look_through(a, head, first, begin, end, 1, found,
                 [&](int listed) { count = number_keys(found, listed, count, [](int, int) {}); });
    space.counts[warp][lane] = count;
    int next = a.first_place + keys_before(a, head, first, space);
    int all = 0, earlier = 0;  // keys of cluster `lane`, and of those the keys of the warps before this one
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) earlier += space.counts[w][lane];
        all += space.counts[w][lane];
    }
    int clusters_before = all;
#pragma unroll
    for (int step = 1; step < OWN; step *= 2) {
        const int other = __shfl_up_sync(EVERYONE, clusters_before, step);
        if (lane >= step) clusters_before += other;
    }
    next += clusters_before - all;
    if (warp == 0 && lane < OWN && first + lane < a.clusters) a.starts[cluster_entry(a, head, first + lane)] = next;
    next += earlier;
    look_through(a, head, first, begin, end, 1, found, [&](int listed) {
        next = number_keys(found, listed, next, [&](int number, int key) {
            a.places[extent_row(a.table, a.kv_heads, head, number)] = a.first_place + key;
        });
    });
}

}  // namespace kmeans
}  // namespace clusterkv
}  // namespace kvseek
