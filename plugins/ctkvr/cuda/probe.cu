// CTkvr, first kernel of a selection: cosines of the queries, less the mean, with the centroids of their own heads, the
// largest of the group (paper, algorithm 2, part b, lines 1 and 2). It reads every centroid once: the bytes decide.
#include "step.cuh"

namespace kvseek {
namespace ctkvr {
namespace decode {

constexpr int PROBE_THREADS = 512;
constexpr int PROBE_WARPS = PROBE_THREADS / WARP;
constexpr int PROBE_CENTROIDS = 64;                          // of a block, for all heads of the group
constexpr int PROBE_ITEMS = PROBE_CENTROIDS / TILE * GROUP;  // tiles of 16 centroids of one head
constexpr int PROBE_BLOCKS = DIM <= 128 ? 2 : 1;             // that a multiprocessor is to hold

// 16 centroids of one head. Those that do not exist repeat the last one.
struct CentroidTile {
    RowTile rows;
    float offsets[2];  // of rows `line` and `line + 8`

    __device__ __forceinline__ void load(const StepArguments& a, const Task& task, int item, int valid) {
        const long long head = (task.list(a.kv_heads) * GROUP + item % GROUP) * a.ring;
        const int centroid = blockIdx.x * PROBE_CENTROIDS + item / GROUP * TILE + line_of_lane();
        const long long first = head + min(centroid, valid - 1), second = head + min(centroid + 8, valid - 1);
        rows.load(a.centroids + first * DIM, a.centroids + second * DIM);
        offsets[0] = a.offsets[first], offsets[1] = a.offsets[second];
    }
};

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek

// grid: blocks of 64 centroids, kv_heads, requests
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::decode::PROBE_THREADS, kvseek::ctkvr::decode::PROBE_BLOCKS)
    kvseek_ctkvr_probe(const __grid_constant__ kvseek::ctkvr::decode::StepArguments a) {
    using namespace kvseek;
    using namespace kvseek::ctkvr::decode;
    __shared__ float cosines[GROUP][PROBE_CENTROIDS];
    const Task task(a.requests, a.kv_heads, blockIdx.z);
    const int warp = threadIdx.x / WARP, first = blockIdx.x * PROBE_CENTROIDS;
    const int valid = min(a.written[task.list(a.kv_heads)], a.ring);
    const bool idle = task.request.dense || first >= valid;
    // Only the queries come from the kernel before this one. Centroids and offsets change at the end of a step, and the
    // upload of the requests lies between; means change between steps.
    CentroidTile tile;
    const float* means = task.means(a.means, a.kv_heads);
    if (!idle && warp < PROBE_ITEMS) tile.load(a, task, warp, valid);
    if (!idle && threadIdx.x < GROUP * PARTS) prefetch_line(means + WARP * threadIdx.x);
    await_earlier_kernels();
    if (idle) return;
    allow_later_kernels();
    for (int item = warp; item < PROBE_ITEMS; item += PROBE_WARPS) {
        if (item != warp) tile.load(a, task, item, valid);
        const int head = item % GROUP, line = item / GROUP * TILE + line_of_lane();
        const Number* query = task.queries(a.queries) + head * DIM;
        const float norm = Difference(query, means + head * DIM).positive_norm();
        float products[2];
        tile.rows.multiply_one(query, products);
        if (part_of_lane() == 0) {
            cosines[head][line] = (products[0] - tile.offsets[0]) / norm;
            cosines[head][line + 8] = (products[1] - tile.offsets[1]) / norm;
        }
    }
    __syncthreads();
    const int centroid = first + threadIdx.x;
    if (threadIdx.x >= PROBE_CENTROIDS || centroid >= valid) return;
    float largest = cosines[0][threadIdx.x];
#pragma unroll
    for (int head = 1; head < GROUP; ++head) largest = fmaxf(largest, cosines[head][threadIdx.x]);
    a.cosines[static_cast<long long>(task.number) * a.ring + centroid] = largest;
}
