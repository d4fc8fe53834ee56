// CTkvr, first kernel of a selection: cosines of the queries with the centroids of their own heads, the largest of the
// group (paper, algorithm 2, part b, lines 1 and 2). It reads every centroid once: the bytes decide.
#include "step.cuh"

namespace kvseek {
namespace ctkvr {
namespace decode {

constexpr int PROBE_THREADS = 512;
constexpr int PROBE_WARPS = PROBE_THREADS / WARP;
constexpr int PROBE_CENTROIDS = 64;                          // of a block, for all heads of the group
constexpr int PROBE_ITEMS = PROBE_CENTROIDS / TILE * GROUP;  // tiles of 16 centroids of one head
constexpr int PROBE_BLOCKS = DIM <= 128 ? 2 : 1;             // that a multiprocessor is to hold

// Rows of 16 centroids of one head. Those that do not exist repeat the last one.
__device__ __forceinline__ void load_centroids(const StepArguments& a, const Task& task, int item, int valid,
                                               RowTile& tile) {
    const Number* head = a.centroids + (task.list(a.kv_heads) * GROUP + item % GROUP) * a.ring * DIM;
    const int centroid = blockIdx.x * PROBE_CENTROIDS + item / GROUP * TILE + line_of_lane();
    tile.load(head + static_cast<long long>(min(centroid, valid - 1)) * DIM,
              head + static_cast<long long>(min(centroid + 8, valid - 1)) * DIM);
}

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek

// grid: blocks of 64 centroids, tasks
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::decode::PROBE_THREADS, kvseek::ctkvr::decode::PROBE_BLOCKS)
    kvseek_ctkvr_probe(const __grid_constant__ kvseek::ctkvr::decode::StepArguments a) {
    using namespace kvseek;
    using namespace kvseek::ctkvr::decode;
    __shared__ float cosines[GROUP][PROBE_CENTROIDS];
    const Task task(a.requests, a.kv_heads);
    const int warp = threadIdx.x / WARP, first = blockIdx.x * PROBE_CENTROIDS;
    const int valid = min(a.written[task.list(a.kv_heads)], a.ring);
    const bool idle = task.request.dense || first >= valid;
    // Only the queries come from the kernel before this one. Centroids change at the end of a step, and the upload of
    // the requests lies between.
    RowTile tile;
    if (!idle && warp < PROBE_ITEMS) load_centroids(a, task, warp, valid, tile);
    await_earlier_kernels();
    if (idle) return;
    allow_later_kernels();
    for (int item = warp; item < PROBE_ITEMS; item += PROBE_WARPS) {
        if (item != warp) load_centroids(a, task, item, valid, tile);
        const int head = item % GROUP, place = item / GROUP * TILE + line_of_lane();
        const Number* query = task.queries(a.queries) + head * DIM;
        const float norm = positive_norm(query);
        float products[2];
        tile.multiply_one(query, products);
        if (part_of_lane() == 0)
            cosines[head][place] = products[0] / norm, cosines[head][place + 8] = products[1] / norm;
    }
    __syncthreads();
    const int centroid = first + threadIdx.x;
    if (threadIdx.x >= PROBE_CENTROIDS || centroid >= valid) return;
    float largest = cosines[0][threadIdx.x];
#pragma unroll
    for (int head = 1; head < GROUP; ++head) largest = fmaxf(largest, cosines[head][threadIdx.x]);
    a.cosines[static_cast<long long>(task.number) * a.ring + centroid] = largest;
}
