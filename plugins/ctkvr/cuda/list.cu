// From candidates to bounds and lists: one block a centroid and KV head, grid (centroids, KV heads).
#include "list_search.cuh"

// The bound of a centroid's candidates: the entry of rank `rank` of its samples.
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::LIST_THREADS)
    kvseek_ctkvr_bound(const __grid_constant__ kvseek::ctkvr::ListArguments a) {
    using namespace kvseek::ctkvr;
    __shared__ CutShared shared;
    const long long list = static_cast<long long>(blockIdx.y) * a.centroids + blockIdx.x;
    const Entry bound = find_cut(a.candidates + list * a.capacity, a.samples, a.rank, 0, shared);
    if (threadIdx.x == 0) a.bounds[list] = bound, a.counts[list] = 0;
}

// A centroid's list: the best rho of its candidates.
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::LIST_THREADS)
    kvseek_ctkvr_list(const __grid_constant__ kvseek::ctkvr::ListArguments a) {
    using namespace kvseek::ctkvr;
    __shared__ CutShared shared;
    __shared__ SearchShared search;
    const long long number = static_cast<long long>(blockIdx.y) * a.centroids + blockIdx.x;
    Entry* candidates = a.candidates + number * a.capacity;
    int count = a.counts[number];
    if (count < a.rho || count > a.capacity) count = search_keys(a, candidates, search, shared);
    const Entry bound = find_cut(candidates, count, a.rho, 0, shared);
    int* list = a.lists + blockIdx.y * a.list_stride + static_cast<long long>(blockIdx.x) * a.rho;
    if (threadIdx.x == 0) shared.kept = 0;
    __syncthreads();
    for (int first = 0; first < count; first += blockDim.x) {
        const int at = first + static_cast<int>(threadIdx.x);
        const Entry entry = at < count ? candidates[at] : 0;
        const bool listed = at < count && entry >= bound;
        const int up_to_lane = sum_up_to_lane(listed);
        int next = 0;
        if (threadIdx.x % WARP == WARP - 1 && up_to_lane) next = atomicAdd(&shared.kept, up_to_lane);
        next = __shfl_sync(EVERYONE, next, WARP - 1) + up_to_lane - listed;
        if (listed) list[next] = place_of(entry);
    }
}
