// ClusterKV: k-means of the keys of a (layer, KV head) with cosine distance (paper, section 3.B): what its parts share.
//
// A clustering is a chain of kernels without a word from the host: seed, then rounds of assign (kmeans_assign.cuh),
// place and turn (kmeans_turn.cuh), then mean (kmeans_mean.cuh) and order. A round that finds that the round before it
// changed no key's cluster returns at once. Few keys take one kernel, a block per head, that runs the same parts one
// after the other.
#pragma once

#include "kernels/cuda/batch.cuh"
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/units.cuh"
#include "kernels/cuda/warp.cuh"

namespace kvseek {
namespace clusterkv {
namespace kmeans {

struct KMeansArguments {
    const Number* keys;      // [kv_heads, tokens, HEAD_DIM], rows contiguous
    const int* seeds;        // [clusters] keys that are the first centroids
    unsigned short* labels;  // [kv_heads, label_stride] cluster of each key
    __half* directions;      // [kv_heads, clusters, DIRECTION] centroids of length 1, as store_direction keeps them
    float* origins;          // [kv_heads, HEAD_DIM] what keys and directions are counted from
    float* scales;           // [kv_heads, label_stride] 1 / length of each key; 0 for a key of zeros
    int* changed;            // [rounds, kv_heads] keys that a round has moved to another cluster
    int* counts;             // [kv_heads, clusters] keys of each cluster
    int* cursors;            // the same shape: the list entry that the cluster's next key takes
    uint2* list;             // [kv_heads, label_stride] key and cluster, those of a cluster together
    long long* sums;         // [kv_heads, clusters, HEAD_DIM] of unit keys, in steps of 1 / ONE
    int* summed;             // [kv_heads, clusters] keys in these sums
    int* arrivals;           // [kv_heads] blocks of an assign kernel that are done
    const int* table;        // extents of the slot
    Number* centroids;       // [extents, kv_heads, clusters_per_extent, HEAD_DIM] means of keys
    int* sizes;              // [extents, kv_heads, clusters_per_extent]
    int* starts;             // the same shape: where a cluster begins in the slot's places
    int* places;             // [extents, kv_heads, 1024] ordered by cluster and then by place
    long long head_stride;   // of keys, in numbers
    long long token_stride;
    int kv_heads, tokens, clusters, rounds;
    int round;         // of this launch
    int label_stride;  // a multiple of 8; labels past the last key belong to no cluster
    int first_place, first_cluster;
    int clusters_per_extent;
    float* spreads;  // [extents, kv_heads, clusters_per_extent]; not written unless SPREAD. Last, as in select.cuh
};

constexpr int DIM = KVSEEK_HEAD_DIM;
constexpr bool SPREAD = CLUSTERKV_SPREAD;  // whether spreads of clusters are kept
static_assert(DIM % 32 == 0 && DIM <= 256, "a warp holds a key in its 32 lanes, a tile of keys in its registers");
using kvseek::WARP;
constexpr int WARPS = 8, THREADS = WARP * WARPS;
constexpr int NO_CLUSTER = 0xffff;
constexpr int LABELS = 8;  // of one 16-byte load
// Halves of a stored direction: the last eight begin with its bias, a float, and let eight rows at one column lie in
// different banks of shared memory.
constexpr int DIRECTION = DIM + 8;
constexpr int SAMPLES = 64;  // of the first directions, that the origin is the mean of

// Numbers of a key that one lane holds: WIDTH neighbours, and WIDTH more each 32 * WIDTH columns on.
constexpr int EACH = DIM / WARP;
constexpr int WIDTH = EACH % 4 == 0 ? 4 : EACH % 2 == 0 ? 2 : 1;

__device__ __forceinline__ int column_of(int i, int lane) {
    return i / WIDTH * (WARP * WIDTH) + lane * WIDTH + i % WIDTH;
}

// COUNT neighbouring numbers in one load; the address is a multiple of their size.
template <int COUNT>
__device__ __forceinline__ void load_numbers(const Number* from, float* to) {
    constexpr int BYTES = COUNT * static_cast<int>(sizeof(Number));
    static_assert(BYTES == 2 || BYTES == 4 || BYTES == 8 || BYTES == 16, "sizes of one load");
    alignas(16) unsigned char bits[BYTES];
    if constexpr (BYTES == 16) *reinterpret_cast<uint4*>(bits) = *reinterpret_cast<const uint4*>(from);
    if constexpr (BYTES == 8) *reinterpret_cast<uint2*>(bits) = *reinterpret_cast<const uint2*>(from);
    if constexpr (BYTES == 4) *reinterpret_cast<unsigned*>(bits) = *reinterpret_cast<const unsigned*>(from);
    if constexpr (BYTES == 2) *reinterpret_cast<unsigned short*>(bits) = *reinterpret_cast<const unsigned short*>(from);
    const Number* numbers = reinterpret_cast<const Number*>(bits);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = to_float(numbers[i]);
}

__device__ __forceinline__ void load_row(const Number* row, int lane, float (&x)[EACH]) {
#pragma unroll
    for (int i = 0; i < EACH; i += WIDTH) load_numbers<WIDTH>(row + column_of(i, lane), x + i);
}

__device__ __forceinline__ const Number* key_of(const KMeansArguments& a, int head, int token) {
    return a.keys + head * a.head_stride + token * a.token_stride;
}

// Entry of a cluster of this clustering in arrays [extents, kv_heads, clusters_per_extent, ...].
__device__ __forceinline__ long long cluster_entry(const KMeansArguments& a, int head, int cluster) {
    const int number = a.first_cluster + cluster;
    const long long extent = a.table[number / a.clusters_per_extent];
    return (extent * a.kv_heads + head) * a.clusters_per_extent + number % a.clusters_per_extent;
}

__device__ __forceinline__ __half* direction_of(const KMeansArguments& a, int head, int cluster) {
    return a.directions + (static_cast<long long>(head) * a.clusters + cluster) * DIRECTION;
}

__device__ __forceinline__ float inverse_length(float squares) {
    return squares > 0.0f ? 1.0f / sqrtf(squares) : 0.0f;
}

// What makes the length of a vector that a warp holds 1; 0 for zeros.
__device__ __forceinline__ float unit_scale(const float (&x)[EACH]) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) squares += x[i] * x[i];
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) squares += __shfl_xor_sync(EVERYONE, squares, mask);
    return inverse_length(squares);
}

// Store the direction of a vector that a warp holds. With an origin o, a key k and a direction d, both of length 1,
// k d = (k - o) (d - o) + o (d - o) + k o. The last term is the same for all directions and is left out, and the one
// before it is the direction's bias. Keys have much in common: differences from their mean are what tells them apart,
// and float16 holds these with a relative precision that it would waste on what they share.
__device__ __forceinline__ void store_direction(const KMeansArguments& a, int head, int cluster, const float (&x)[EACH],
                                                const float (&origin)[EACH]) {
    const int lane = threadIdx.x % WARP;
    const float scale = unit_scale(x);
    __half* direction = direction_of(a, head, cluster);
    float bias = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const float difference = x[i] * scale - origin[i];
        bias += origin[i] * difference;
        direction[column_of(i, lane)] = __float2half_rn(difference);
    }
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) bias += __shfl_xor_sync(EVERYONE, bias, mask);
    if (lane == 0) *reinterpret_cast<float*>(direction + DIM) = bias;
}

// Keys that a round has moved. Past the L1 cache: other blocks count too, and a line may hold an older round's.
__device__ __forceinline__ int moved_keys(const KMeansArguments& a, int head, int round) {
    return __ldcg(a.changed + round * a.kv_heads + head);
}

// Mean of the first directions, or of SAMPLES of them: the origin of a head. All threads of a block.
__device__ __forceinline__ void find_origin(const KMeansArguments& a, int head, float (&space)[WARPS][DIM],
                                            float (&origin)[EACH]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, samples = min(a.clusters, SAMPLES);
    float sum[EACH] = {};
    for (int sample = warp; sample < samples; sample += WARPS) {
        float x[EACH];
        load_row(key_of(a, head, a.seeds[sample * a.clusters / samples]), lane, x);
        const float scale = unit_scale(x);
#pragma unroll
        for (int i = 0; i < EACH; ++i) sum[i] += x[i] * scale;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) space[warp][column_of(i, lane)] = sum[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        origin[i] = 0.0f;
        for (int w = 0; w < WARPS; ++w) origin[i] += space[w][column_of(i, lane)];
        origin[i] /= samples;
    }
}

// The first directions, no key in any cluster or sum, no key moved: the share of block `part` of `parts`.
__device__ __forceinline__ void seed_part(const KMeansArguments& a, int head, int part, int parts,
                                          float (&space)[WARPS][DIM]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float origin[EACH];
    find_origin(a, head, space, origin);
    if (part == 0 && warp == 0)
#pragma unroll
        for (int i = 0; i < EACH; ++i) a.origins[head * DIM + column_of(i, lane)] = origin[i];
    for (int cluster = part * WARPS + warp; cluster < a.clusters; cluster += parts * WARPS) {
        float x[EACH];
        load_row(key_of(a, head, a.seeds[cluster]), lane, x);
        store_direction(a, head, cluster, x, origin);
        const int row = head * a.clusters + cluster;
        if (lane == 0) a.counts[row] = a.summed[row] = 0;
        for (int i = lane; i < DIM; i += WARP) a.sums[static_cast<long long>(row) * DIM + i] = 0;
    }
    if (part == 0 && threadIdx.x == 0) a.arrivals[head] = 0;
    unsigned short* labels = a.labels + static_cast<long long>(head) * a.label_stride;
    for (int i = part * THREADS + threadIdx.x; i < a.label_stride; i += parts * THREADS) labels[i] = NO_CLUSTER;
    for (int i = part * THREADS + threadIdx.x; i < a.rounds; i += parts * THREADS) a.changed[i * a.kv_heads + head] = 0;
}

}  // namespace kmeans
}  // namespace clusterkv
}  // namespace kvseek
