// ClusterKV: the kernels of a clustering, in the order of their launches; kmeans.cuh says how they work together.
#include "kmeans_assign.cuh"
#include "kmeans_order.cuh"
#include "kmeans_sum.cuh"

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
    if (is_settled(a, blockIdx.y, a.round)) return;
    assign_part(a, blockIdx.y, blockIdx.x, a.round, reinterpret_cast<__half*>(shared));
}

// grid: clusters / OWN (rounded up), kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::clusterkv::kmeans::THREADS)
    kvseek_clusterkv_sum(const __grid_constant__ kvseek::clusterkv::kmeans::KMeansArguments a) {
    using namespace kvseek::clusterkv::kmeans;
    __shared__ SumSpace space;
    if (moved_keys(a, blockIdx.y, a.round) > 0) sum_part<true>(a, blockIdx.y, blockIdx.x * OWN, space);
}

// grid: as sum
extern "C" __global__ void __launch_bounds__(kvseek::clusterkv::kmeans::THREADS)
    kvseek_clusterkv_mean(const __grid_constant__ kvseek::clusterkv::kmeans::KMeansArguments a) {
    using namespace kvseek::clusterkv::kmeans;
    __shared__ SumSpace space;
    sum_part<false>(a, blockIdx.y, blockIdx.x * OWN, space);
}

// grid: as sum
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
        SumSpace sums;
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
        for (int first = 0; first < a.clusters; first += OWN) {
            sum_part<true>(a, head, first, shared.sums);
            __syncthreads();
        }
    }
    for (int first = 0; first < a.clusters; first += OWN) {
        sum_part<false>(a, head, first, shared.sums);
        __syncthreads();
    }
    for (int first = 0; first < a.clusters; first += OWN) {
        order_part(a, head, first, shared.order);
        __syncthreads();
    }
}
