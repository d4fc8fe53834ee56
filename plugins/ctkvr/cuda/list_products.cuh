// Products of the queries of some centroids with all keys of a KV head, or with a sample of them, on tensor cores.
//
// A warp holds its queries in registers; the block's warps share tiles of keys in shared memory. A product lives in the
// registers of one lane, as long as its key's tile does: scores are never stored. The queries of a group take such rows
// of the product that a lane has as many heads of a centroid as possible, for maxima over the group.
#pragma once

#include "kernels/cuda/block_sort.cuh"
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/warp.cuh"

namespace kvseek {
namespace ctkvr {

using kvseek::EVERYONE, kvseek::WARP;
using Entry = SortKey;  // of a key: its value and its place

// Arguments of all kernels that build lists: those of a band of centroids, of all KV heads.
struct ListArguments {
    const void* queries;             // [KV heads x GROUP, centroids, DIM]: 16-bit numbers (Operand)
    const void* keys;                // [KV heads, tokens, DIM] of the same
    const float* factors;            // [KV heads x GROUP], > 0: product times this = a weight's log2, up to the sum's
    float* sums;                     // [parts, KV heads x GROUP, centroids, 2]: largest logarithm, sum relative to it
    unsigned long long* candidates;  // [KV heads, centroids, capacity]: entries
    int* counts;                     // [KV heads, centroids]: of candidates that were found; 0 at first
    unsigned long long* bounds;      // [KV heads, centroids]: entries that candidates reach
    int* lists;                      // [KV heads, centroids, rho]
    long long query_stride;          // from a query head to the next
    long long head_stride;           // of keys, from a KV head to the next
    long long key_stride;            // from a key to the next
    long long list_stride;           // from a KV head's lists to the next
    int centroids, tokens, rho;      // tokens > rho
    int capacity;                    // >= samples, and >= rho + threads of kvseek_ctkvr_list
    int stride, samples;             // one key of each `stride` is sampled; samples = tokens / stride
    int rank;                        // of the sampled entry that is the bound
    int parts;                       // of the keys, that blocks of kvseek_ctkvr_sum share
};

#if KVSEEK_DTYPE == 1
using Operand = __nv_bfloat16;
#else
using Operand = __half;  // of float32, what device_build.py scaled
#endif

constexpr int GROUP = KVSEEK_GROUP, DIM = KVSEEK_HEAD_DIM;
static_assert(DIM % 32 == 0 && DIM <= 256, "KVSEEK_HEAD_DIM must be a multiple of 32 up to 256");
static_assert(GROUP >= 1 && GROUP <= 16, "KVSEEK_GROUP must be 1 to 16");

constexpr int PRODUCT_WARPS = 4, PRODUCT_THREADS = PRODUCT_WARPS * WARP;
constexpr int MATRICES = DIM <= 128 ? 2 : 1;  // of 16 queries, that a warp holds
constexpr int STEPS = DIM / 16;
constexpr int TILE_KEYS = 64, PART_KEYS = 32, KEY_TILES = PART_KEYS / 8;
constexpr int STAGES = DIM <= 128 ? 3 : 2;  // tiles of keys in shared memory
constexpr int PITCH = DIM + 8;              // of a key there: eight keys lie in different banks

// Rows of the product: a lane has LANE_ROWS of them.
constexpr int PADDED_GROUP = GROUP > 8 ? 16 : GROUP > 4 ? 8 : GROUP > 2 ? 4 : GROUP;
constexpr int LANE_ROWS = 2 * MATRICES;
constexpr int LANE_HEADS = PADDED_GROUP < LANE_ROWS ? PADDED_GROUP : LANE_ROWS;
constexpr int LANE_CENTROIDS = LANE_ROWS / LANE_HEADS;
constexpr int HEAD_LANES = PADDED_GROUP / LANE_HEADS;  // lines of lanes that share a centroid
constexpr int WARP_CENTROIDS = 16 * MATRICES / PADDED_GROUP;

__device__ __forceinline__ int lane_line() {
    return threadIdx.x % WARP / 4;
}
// Centroid, in the block, and query head, in the group, of this lane's row; heads from GROUP on are padding.
__device__ __forceinline__ int row_centroid(int row) {
    const int warp = threadIdx.x / WARP;
    return warp * WARP_CENTROIDS + lane_line() / HEAD_LANES * LANE_CENTROIDS + row / LANE_HEADS;
}
__device__ __forceinline__ int row_head(int row) {
    return lane_line() % HEAD_LANES * LANE_HEADS + row % LANE_HEADS;
}
__device__ __forceinline__ int first_centroid() {
    return static_cast<int>(blockIdx.x) * PRODUCT_WARPS * WARP_CENTROIDS;
}
__device__ __forceinline__ bool row_exists(const ListArguments& a, int row) {
    return row_head(row) < GROUP && first_centroid() + row_centroid(row) < a.centroids;
}
// Where a row stands among the sums of one part.
__device__ __forceinline__ long long row_number(const ListArguments& a, int row) {
    const long long head = static_cast<long long>(blockIdx.y) * GROUP + row_head(row);
    return head * a.centroids + first_centroid() + row_centroid(row);
}

// Place of a sampled key: one of each `stride`, now here, now there among them, for a text may repeat itself.
__device__ __forceinline__ int sampled_place(const ListArguments& a, int sample) {
    if (a.stride == 1) return sample;
    const unsigned mixed = (static_cast<unsigned>(sample) + 1u) * 2654435769u >> 16;  // 2^32 / golden ratio
    return sample * a.stride + static_cast<int>(mixed % static_cast<unsigned>(a.stride));
}

// Products of a lane: [i / 2][j][2 * (i % 2) + e] is that of its row i with key 8 j + 2 (lane % 4) + e of a part.
using Products = float[MATRICES][KEY_TILES][4];

__device__ __forceinline__ float& product(Products& products, int row, int column) {
    return products[row / 2][column / 2][2 * (row % 2) + column % 2];
}
constexpr int LANE_KEYS = 2 * KEY_TILES;  // columns of a lane
__device__ __forceinline__ int column_key(int column) {
    return 8 * (column / 2) + 2 * (threadIdx.x % 4) + column % 2;
}

// The queries of a warp, as the left operand.
struct Queries {
    unsigned numbers[MATRICES][STEPS][4];

    __device__ __forceinline__ void load(const ListArguments& a) {
#pragma unroll
        for (int row = 0; row < LANE_ROWS; ++row) {
            const bool exists = row_exists(a, row);
            const long long head = static_cast<long long>(blockIdx.y) * GROUP + row_head(row);
            const Operand* query = static_cast<const Operand*>(a.queries) + head * a.query_stride +
                                   static_cast<long long>(first_centroid() + row_centroid(row)) * DIM +
                                   2 * (threadIdx.x % 4);
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    numbers[row / 2][step][row % 2 + 2 * half] =
                        exists ? *reinterpret_cast<const unsigned*>(query + 16 * step + 8 * half) : 0u;
        }
    }

    // Multiply with PART_KEYS keys in shared memory.
    __device__ __forceinline__ void multiply(const Operand* keys, Products& products) const {
        const int lane = threadIdx.x % WARP;
        const Operand* row = keys + lane % 8 * PITCH + lane / 8 * 8;
#pragma unroll
        for (int i = 0; i < MATRICES * KEY_TILES * 4; ++i)
            products[i / (KEY_TILES * 4)][i / 4 % KEY_TILES][i % 4] = 0.0f;
#pragma unroll
        for (int pair = 0; pair < STEPS / 2; ++pair) {
            unsigned columns[KEY_TILES][4];
#pragma unroll
            for (int j = 0; j < KEY_TILES; ++j) load_matrices(columns[j], row + 8 * j * PITCH + 32 * pair);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
                    for (int i = 0; i < MATRICES; ++i) {
                        const unsigned (&left)[4] = numbers[i][2 * pair + half];
                        multiply_16x8x16(products[i][j], left[0], left[1], left[2], left[3], columns[j][2 * half],
                                         columns[j][2 * half + 1], Operand());
                    }
        }
    }
};

// Start to copy a tile of keys, all or SAMPLED ones; zeros stand for those behind the last.
template <bool SAMPLED>
__device__ __forceinline__ void copy_tile(const ListArguments& a, int tile, Operand* to) {
    constexpr int PIECES = DIM / 8;  // of 16 bytes
    const Operand* keys = static_cast<const Operand*>(a.keys) + blockIdx.y * a.head_stride;
#pragma unroll
    for (int i = 0; i < TILE_KEYS * PIECES / PRODUCT_THREADS; ++i) {
        const int piece = i * PRODUCT_THREADS + static_cast<int>(threadIdx.x), key = piece / PIECES;
        const int sample = tile * TILE_KEYS + key, number = piece % PIECES * 8;
        const bool exists = sample < a.samples;
        const int place = !exists ? 0 : SAMPLED ? sampled_place(a, sample) : sample;
        copy_async_16_or_zeros(to + key * PITCH + number, keys + place * a.key_stride + number, exists);
    }
}

// Multiply the block's queries with its share of the keys: every gridDim.z-th tile. `visit(products, first)` gets those
// with samples first .. first + PART_KEYS - 1; those behind the last sample are 0. All threads call it.
template <bool SAMPLED, class Visit>
__device__ __forceinline__ void multiply_keys(const ListArguments& a, Operand* stages, Visit visit) {
    constexpr int STAGE = TILE_KEYS * PITCH;
    const int tiles = (a.samples + TILE_KEYS - 1) / TILE_KEYS, step = gridDim.z;
    int coming = blockIdx.z, stage = 0;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i, coming += step) {
        if (coming < tiles) copy_tile<SAMPLED>(a, coming, stages + i * STAGE);
        close_copy_group();
    }
    Queries queries;
    queries.load(a);
    for (int tile = blockIdx.z; tile < tiles; tile += step, coming += step) {
        await_copy_groups<STAGES - 2>();
        __syncthreads();  // all copies of this tile have arrived, and the last one has been read
        const int free = stage == 0 ? STAGES - 1 : stage - 1;
        if (coming < tiles) copy_tile<SAMPLED>(a, coming, stages + free * STAGE);
        close_copy_group();
#pragma unroll
        for (int part = 0; part < TILE_KEYS; part += PART_KEYS) {
            Products products;
            queries.multiply(stages + stage * STAGE + part * PITCH, products);
            visit(products, tile * TILE_KEYS + part);
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

}  // namespace ctkvr
}  // namespace kvseek
