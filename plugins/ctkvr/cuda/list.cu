// From candidates to bounds and lists: one block a centroid and KV head, grid (centroids, KV heads).
#include "list_search.cuh"

// The bound of a centroid's candidates: the entry of rank `rank` of its samples.
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::LIST_THREADS)
    kvseek_ctkvr_bound(const __grid_constant__ kvseek::ctkvr::ListArguments a) {
    using namespace kvseek::ctkvr;
    __shared__ EntryMemory nth;
    const long long list = static_cast<long long>(blockIdx.y) * a.centroids + blockIdx.x;
    const Entry bound = nth_entry(a.candidates + list * a.capacity, a.samples, a.rank, nth);
    if (threadIdx.x == 0) a.bounds[list] = bound, a.counts[list] = 0;
}

// A centroid's list: the best rho of its candidates.
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::LIST_THREADS)
    kvseek_ctkvr_list(const __grid_constant__ kvseek::ctkvr::ListArguments a) {
    using namespace kvseek::ctkvr;
    __shared__ EntryMemory nth;
    __shared__ SearchShared search;
    const long long number = static_cast<long long>(blockIdx.y) * a.centroids + blockIdx.x;
    Entry* candidates = a.candidates + number * a.capacity;
    int count = a.counts[number];
    if (count < a.rho || count > a.capacity) count = search_keys(a, candidates, search, nth);
    if (threadIdx.x == 0) search.held = 0;
    const Entry bound = nth_entry(candidates, count, a.rho, nth);  // has barriers
    int* list = a.lists + blockIdx.y * a.list_stride + static_cast<long long>(blockIdx.x) * a.rho;
    for (int i = threadIdx.x; i < count; i += LIST_THREADS)
        if (candidates[i] >= bound) list[atomicAdd(&search.held, 1)] = kvseek::sort_key_index(candidates[i]);
}
