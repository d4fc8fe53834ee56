// Products of the observation window's queries with blocks of keys: 16-bit numbers on tensor cores, float32 without.
#pragma once

#include "layout.cuh"

namespace kvseek {
namespace prkv {

constexpr int OBSERVE_THREADS = 256;
constexpr int OBSERVE_WARPS = OBSERVE_THREADS / 32;
constexpr int ROW_TILES = DIM <= 128 ? 2 : 1;          // of 16 rows: a thread holds their numbers
constexpr int WARP_ROWS = 16 * ROW_TILES;              // queries that a warp holds
constexpr int BLOCK_ROWS = OBSERVE_WARPS * WARP_ROWS;  // queries that a block holds
constexpr int KEY_BYTES = DIM * static_cast<int>(sizeof(Number));
constexpr int KEYS = KEY_BYTES <= 256 ? 64 : KEY_BYTES <= 512 ? 32 : 16;  // of a block: two of them fit into 48 KiB
constexpr int KEY_STRIDE = KEY_BYTES + (KEY_BYTES % 128 ? 0 : 64);        // bytes: neighbouring keys in other banks

// Keys in shared memory; those that do not exist are zeros.
struct KeyBlock {
    __align__(16) unsigned char bytes[KEYS * KEY_STRIDE];

    // Start to copy keys `first` to `last` - 1, KEYS of them at most.
    __device__ __forceinline__ void load(const Number* keys, long long stride, int first, int last) {
        constexpr int PIECES = KEY_BYTES / 16;
        for (int i = threadIdx.x; i < KEYS * PIECES; i += OBSERVE_THREADS) {
            const int key = first + i / PIECES, offset = i % PIECES * 16;
            const char* from = reinterpret_cast<const char*>(keys + min(key, last - 1) * stride) + offset;
            copy_async_16_or_zeros(bytes + i / PIECES * KEY_STRIDE + offset, from, key < last);
        }
    }
    __device__ __forceinline__ const Number* key(int i) const {
        return reinterpret_cast<const Number*>(bytes + i * KEY_STRIDE);
    }
};

// The queries of a warp. With g = lane / 4 and t = lane % 4, a thread's products are those of rows g and g + 8 of each
// tile with keys 2t and 2t + 1 of each eight: products[tile][2 * (row is g + 8) + (key is 2t + 1)].
class WindowRows {
    static constexpr int STEPS = DIM / 32;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#if KVSEEK_DTYPE == 0
    const Number* rows[ROW_TILES][2];  // null: zeros
#else
    uint4 rows[ROW_TILES][2][STEPS];  // channels 32 s + 8 t .. + 7, as in bounds_tensor.cuh
#endif

  public:
    // Of the block's rows, the number of this thread's row of a tile.
    __device__ __forceinline__ static int row(int tile, int second) {
        return static_cast<int>(threadIdx.x) / 32 * WARP_ROWS + 16 * tile + 8 * second +
               static_cast<int>(threadIdx.x) % 32 / 4;
    }

    // Rows from `first` on, of `count`; `queries` are those of the group's first head.
    __device__ __forceinline__ WindowRows(const Number* queries, long long head_stride, long long stride, int window,
                                          int first, int count) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
            for (int second = 0; second < 2; ++second) {
                const int number = first + row(tile, second);
                const Number* from = queries + number / window * head_stride + number % window * stride;
#if KVSEEK_DTYPE == 0
                rows[tile][second] = number < count ? from : nullptr;
#else
#pragma unroll
                for (int s = 0; s < STEPS; ++s)
                    rows[tile][second][s] = number < count ? *reinterpret_cast<const uint4*>(from + 32 * s + 8 * t)
                                                           : make_uint4(0, 0, 0, 0);
#endif
            }
    }

    // Add the products with eight neighbouring keys of a block.
    __device__ __forceinline__ void multiply(float (&products)[ROW_TILES][4], const KeyBlock& block, int eight) const {
#if KVSEEK_DTYPE == 0
#pragma unroll 1
        for (int channel = 0; channel < DIM; ++channel)
#pragma unroll
            for (int i = 0; i < 4 * ROW_TILES; ++i) {
                const Number* own = rows[i / 4][i % 4 / 2];
                if (own) products[i / 4][i % 4] += own[channel] * block.key(8 * eight + 2 * t + i % 2)[channel];
            }
#else
        const Number* key = block.key(8 * eight + g) + 8 * t;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const uint4 piece = *reinterpret_cast<const uint4*>(key + 32 * s);
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                const uint4 one = rows[tile][0][s], two = rows[tile][1][s];
                multiply_16x8x16(products[tile], one.x, two.x, one.y, two.y, piece.x, piece.y, Number());
                multiply_16x8x16(products[tile], one.z, two.z, one.w, two.w, piece.z, piece.w, Number());
            }
        }
#endif
    }
};

}  // namespace prkv
}  // namespace kvseek
