// ClusterKV: the kernels of a clustering, in the order of their launches; kmeans.cuh says how they work together.
#include "kmeans_assign.cuh"
#include "kmeans_mean.cuh"
#include "kmeans_order.cuh"
#include "kmeans_turn.cuh"

namespace kvseek {
namespace clusterkv {
namespace kmeans {

// A round has nothing to do once the one before it moved no key.
__device__ __forceinline__ bool is_settled(const KMeansArguments& a, int head, int round) {
    return round > 0 && moved_keys(a, head, round - 1) == 0;
}

constexpr int ASSIGN_BLOCKS = sizeof(Number) == 2 && DIM <= 128 ? 2 : 1;  // of a multiprocessor: 128 registers a thread

}  // namespace kmeans
}  // namespace clusterkv
}  // namespace kvseek

// grid: any number of blocks, kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::clusterkv::kmeans::THREADS)
    kvseek_clusterkv_seed(const __grid_constant__ kvseek::clusterkv::kmeans::KMeansArguments a) {
    using namespace kvseek::clusterkv::kmeans;
    __shared__ float space[WARPS][DIM];
    seed_part(a, blockIdx.y, blockIdx.x, gridDim.x, space);
}

// grid: tokens / BLOCK_KEYS (rounded up), kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::clusterkv::kmeans::THREADS,
                                             kvseek::clusterkv::kmeans::ASSIGN_BLOCKS)
    kvseek_clusterkv_assign(const __grid_constant__ kvseek::clusterkv::kmeans::KMeansArguments a) {
    using namespace kvseek::clusterkv::kmeans;
    __shared__ __align__(16) unsigned char shared[ASSIGN_BYTES];
    __shared__ int scratch[WARPS];
    if (is_settled(a, blockIdx.y, a.round)) return;
    assign_part(a, blockIdx.y, blockIdx.x, a.round, reinterpret_cast<__half*>(shared));
    if (kvseek::arrive_last(a.arrivals + blockIdx.y, gridDim.x)) start_lists(a, blockIdx.y, scratch);
}

// grid: tokens / THREADS (rounded up), kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::clusterkv::kmeans::THREADS)
    kvseek_clusterkv_place(const __grid_constant__ kvseek::clusterkv::kmeans::KMeansArguments a) {
    using namespace kvseek::clusterkv::kmeans;
    const int token = blockIdx.x * THREADS + threadIdx.x;
    if (token < a.tokens && moved_keys(a, blockIdx.y, a.round) > 0) place_key(a, blockIdx.y, token);
}

// grid: tokens / (WARPS * CHUNK) (rounded up), kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::clusterkv::kmeans::THREADS, kvseek::clusterkv::kmeans::TURN_BLOCKS)
    kvseek_clusterkv_turn(const __grid_constant__ kvseek::clusterkv::kmeans::KMeansArguments a) {
    using namespace kvseek::clusterkv::kmeans;
    if (moved_keys(a, blockIdx.y, a.round) > 0) sum_chunk(a, blockIdx.y, blockIdx.x * WARPS + threadIdx.x / WARP);
}

// grid: clusters / OWN (rounded up), kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::clusterkv::kmeans::THREADS)
    kvseek_clusterkv_mean(const __grid_constant__ kvseek::clusterkv::kmeans::KMeansArguments a) {
    using namespace kvseek::clusterkv::kmeans;
    __shared__ MeanSpace space;
    mean_part(a, blockIdx.y, blockIdx.x * OWN, space);
}

// grid: as mean
extern "C" __global__ void __launch_bounds__(kvseek::clusterkv::kmeans::THREADS)
    kvseek_clusterkv_order(const __grid_constant__ kvseek::clusterkv::kmeans::KMeansArguments a) {
    using namespace kvseek::clusterkv::kmeans;
    __shared__ OrderSpace space;
    order_part(a, blockIdx.y, blockIdx.x * OWN, space);
}

// All of a clustering of few keys. grid: 1, kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::clusterkv::kmeans::THREADS)
    kvseek_clusterkv_cluster(const __grid_constant__ kvseek::clusterkv::kmeans::KMeansArguments a) {
    using namespace kvseek::clusterkv::kmeans;
    __shared__ __align__(16) union {
        float origin[WARPS][DIM];
        unsigned char directions[ASSIGN_BYTES];
        MeanSpace means;
        int scratch[WARPS];
        OrderSpace order;
    } shared;
    const int head = blockIdx.y;
    seed_part(a, head, 0, 1, shared.origin);
    for (int round = 0; round < a.rounds; ++round) {
        __syncthreads();  // what the block has written is there for all of it, and shared memory is free
        for (int block = 0; block * BLOCK_KEYS < a.tokens; ++block) {
            assign_part(a, head, block, round, reinterpret_cast<__half*>(shared.directions));
            __syncthreads();
        }
        if (moved_keys(a, head, round) == 0 || round + 1 == a.rounds) break;
        start_lists(a, head, shared.scratch);
        __syncthreads();
        for (int token = threadIdx.x; token < a.tokens; token += THREADS) place_key(a, head, token);
        __syncthreads();
        for (int chunk = threadIdx.x / WARP; chunk * CHUNK < a.tokens; chunk += WARPS) sum_chunk(a, head, chunk);
    }
    for (int first = 0; first < a.clusters; first += OWN) {
        mean_part(a, head, first, shared.means);
        __syncthreads();
    }
    for (int first = 0; first < a.clusters; first += OWN) {
        order_part(a, head, first, shared.order);
        __syncthreads();
    }
}
