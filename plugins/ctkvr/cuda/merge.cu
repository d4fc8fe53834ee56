// CTkvr with host cores: merge what they attended to with what the GPU did, and take the new centroid that they chose
// (paper, algorithm 2, line 11 and part d).
#include "ring.cuh"

namespace kvseek {
namespace ctkvr {
namespace decode {

// The host's arrays lie in pinned memory.
struct MergeArguments {
    const Number* queries;    // [batch, kv_heads * GROUP, DIM]
    const Request* requests;  // [batch]
    Number* out;              // [batch, kv_heads * GROUP, DIM] the GPU's part, then the result
    const float* lse;         // [batch, kv_heads * GROUP] of the GPU's part: log-sum-exp, natural logarithm
    const float* host_out;    // [batch, kv_heads * GROUP, DIM]
    const float* host_lse;    // [batch, kv_heads * GROUP]
    const int* host_best;     // [batch, kv_heads, width] places of the new centroid; null: there is none
    Number* centroids;        // as in StepArguments
    const float* means;
    float* offsets;
    int* lists;
    int* written;
    int kv_heads, ring, width, top_k;
};

constexpr int MERGE_THREADS = 256;

// Each head's output as the mean of both parts, weighted by the sums of their softmax weights.
__device__ __forceinline__ void merge_outputs(const MergeArguments& a, const Task& task) {
    const long long first = static_cast<long long>(task.number) * GROUP;
    for (int i = threadIdx.x; i < GROUP * DIM; i += MERGE_THREADS) {
        const float own = a.lse[first + i / DIM], other = __ldcv(a.host_lse + first + i / DIM);
        if (other == -INFINITE) continue;                       // nothing to add
        const float share = 1.0f / (1.0f + expf(own - other));  // of the host
        const long long at = first * DIM + i;
        a.out[at] = from_float<Number>((1.0f - share) * to_float(a.out[at]) + share * __ldcv(a.host_out + at));
    }
}

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek

// grid: 1, kv_heads, requests. Launched without overlap: it follows a host function too.
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::decode::MERGE_THREADS)
    kvseek_ctkvr_merge(const __grid_constant__ kvseek::ctkvr::decode::MergeArguments a) {
    using namespace kvseek;
    using namespace kvseek::ctkvr::decode;
    const Task task(a.requests, a.kv_heads, blockIdx.z);
    if (task.request.dense) return;
    merge_outputs(a, task);
    if (!a.host_best || task.request.length <= a.top_k) return;
    const RingEntry ring(a, task);
    const int* best = a.host_best + static_cast<long long>(task.number) * a.width;
    for (int i = threadIdx.x; i < a.width; i += MERGE_THREADS) ring.list[i] = __ldcv(best + i);
    __syncthreads();
    ring.write_centroids(task.queries(a.queries));
}
