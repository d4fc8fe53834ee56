// What the two kernels of a ClusterKV selection share: sizes fixed when they are compiled, arguments, where clusters
// lie.
#pragma once

#include "kernels/cuda/batch.cuh"
#include "kernels/cuda/block_sort.cuh"
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/task.cuh"
#include "kernels/cuda/units.cuh"

namespace kvseek {
namespace clusterkv {

constexpr int EXTENT_CLUSTERS =
    CLUSTERKV_CLUSTERS_PER_EXTENT;         // clusters that an extent has room for (Config.clusters_per_extent)
constexpr bool SPREAD = CLUSTERKV_SPREAD;  // whether spreads of clusters count
constexpr int GROUP_HEADS = KVSEEK_GROUP;
constexpr int QUERY_LANES = GROUP_HEADS;  // queries, each of which scores on its own
constexpr int KEY_DIM = KVSEEK_HEAD_DIM;
static_assert(GROUP_HEADS <= 16, "at most 16 query heads share a KV head");
static_assert(KEY_DIM % 32 == 0 && KEY_DIM <= 256, "head_dim must be a multiple of 32 up to 256");

constexpr int UNIT = 32;  // clusters that are scored together, whatever the batch: sums do not depend on the grid

// A "task" is a request and a KV head: request * kv_heads + head.
struct SelectArguments {
    const Number* queries;    // [batch, kv_heads * GROUP_HEADS, KEY_DIM]
    const Request* requests;  // [batch]
    const int* table;         // [slots, max_extents]
    const int* clusters;      // [slots] of each slot that may be selected
    const Number* centroids;  // [extents, kv_heads, EXTENT_CLUSTERS, KEY_DIM]
    const int* sizes;         // [extents, kv_heads, EXTENT_CLUSTERS]
    const int* starts;        // [extents, kv_heads, EXTENT_CLUSTERS] first entry of a cluster in the slot's places
    const int* places;        // [extents, kv_heads, 1024] places of the pool, sorted by cluster
    float* scores;            // [slots, kv_heads, units, UNIT, QUERY_LANES] of each cluster, as powers of two
    float2* statistics;       // [slots, kv_heads, units, QUERY_LANES] largest score, sum of the powers relative to it
    int* rows;                // [batch, kv_heads, top_k] places, -1 at the end
    int batch, kv_heads, max_extents, units;
    int top_k;
    float scale;  // softmax scale times log2(e)
    // Last, so that kernels of clusters without spreads are the same whether these fields exist or not.
    float spread_weight;
    const float* spreads;  // [extents, kv_heads, EXTENT_CLUSTERS]; not read unless SPREAD
};

struct SelectTask : TaskOf<SelectArguments> {
    using TaskOf::TaskOf;

    __device__ __forceinline__ int clusters(const SelectArguments& a) const { return a.clusters[request.slot]; }
    // Where a cluster lies in arrays [extents, kv_heads, EXTENT_CLUSTERS, ...], counted in clusters.
    __device__ __forceinline__ long long cluster_entry(const SelectArguments& a, int cluster) const {
        return (static_cast<long long>(table[cluster / EXTENT_CLUSTERS]) * a.kv_heads + head) * EXTENT_CLUSTERS +
               cluster % EXTENT_CLUSTERS;
    }
    // Where the work space of this slot and head begins, counted in units.
    __device__ __forceinline__ long long first_unit(const SelectArguments& a) const {
        return (static_cast<long long>(request.slot) * a.kv_heads + head) * a.units;
    }
};

}  // namespace clusterkv
}  // namespace kvseek
