// K-means, first half of a round: each key joins the cluster of the nearest direction, a product of matrices and an
// argmax that share registers: the scores [tokens, clusters] never reach memory.
//
// Keys and directions meet as float16 on tensor cores, whatever the engine's number type: counted from the head's
// origin (store_direction) they exceed no range, and float16 is finer than bfloat16 by 8. Sums are float32. A cosine is
// off by less than 2^-11 of what keys and directions differ by.
#pragma once

#include "kmeans.cuh"

namespace kvseek {
namespace clusterkv {
namespace kmeans {

constexpr int STEPS = DIM / 16;            // products along a key
constexpr int TILES = DIM <= 128 ? 2 : 1;  // of 16 keys in a warp's registers
constexpr int WARP_KEYS = 16 * TILES;
constexpr int BLOCK_KEYS = WARPS * WARP_KEYS;
constexpr int LOADED = DIM <= 128 ? 64 : 32;  // directions in one half of shared memory
constexpr int ASSIGN_BYTES = 2 * LOADED * DIRECTION * static_cast<int>(sizeof(__half));

// Keys of one warp as operand a of the product, and the nearest direction of each so far. With g = lane / 4 and
// t = lane % 4 a lane has numbers 2t, 2t+1, 2t+8, 2t+9 of each 16, of keys g and g + 8 of each tile.
struct KeyTiles {
    unsigned numbers[TILES][STEPS][4];
    float best[TILES][2];  // of the directions that this lane has seen
    int nearest[TILES][2];
    unsigned zeros;  // bit 2 * tile + half: that key is all zeros
    int lane, g, t;

    __device__ __forceinline__ KeyTiles() : zeros(0), lane(threadIdx.x % WARP), g(lane / 4), t(lane % 4) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) best[i / 2][i % 2] = -INFINITE, nearest[i / 2][i % 2] = 0;
    }

    // Number of this lane's key `half` of a tile, counted from the warp's first.
    __device__ __forceinline__ int key(int tile, int half) const { return 16 * tile + 8 * half + g; }

    // Take keys first .. first + WARP_KEYS - 1; those that do not exist repeat the last one.
    __device__ __forceinline__ void load(const KMeansArguments& a, int head, int first, int round) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = min(first + key(tile, half), a.tokens - 1);
                const float scale = load_key(key_of(a, head, token), a.origins + head * DIM, tile, half);
                zeros |= (scale == 0.0f ? 1u : 0u) << (2 * tile + half);
                if (round == 0 && t == 0 && first + key(tile, half) < a.tokens)
                    a.scales[static_cast<long long>(head) * a.label_stride + token] = scale;
            }
    }

    // Load a key, make its length 1 and count it from the origin; returns what its length was multiplied by.
    __device__ __forceinline__ float load_key(const Number* row, const float* origin, int tile, int half) {
        float x[STEPS][4], squares = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
            for (int i = 0; i < 2; ++i) load_numbers<2>(row + 16 * s + 8 * i + 2 * t, x[s] + 2 * i);
#pragma unroll
        for (int i = 0; i < 4 * STEPS; ++i) squares += x[i / 4][i % 4] * x[i / 4][i % 4];
        squares += __shfl_xor_sync(EVERYONE, squares, 1);
        squares += __shfl_xor_sync(EVERYONE, squares, 2);
        const float scale = inverse_length(squares);
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* from = origin + 16 * s + 8 * i + 2 * t;
                const __half2 pair =
                    __floats2half2_rn(x[s][2 * i] * scale - from[0], x[s][2 * i + 1] * scale - from[1]);
                numbers[tile][s][half + 2 * i] = *reinterpret_cast<const unsigned*>(&pair);
            }
        return scale;
    }

    // Compare with `count` directions in shared memory, the first of them cluster `first`. Rows past the last
    // direction repeat it up to a multiple of 16: an equal score of a higher number changes nothing.
    __device__ __forceinline__ void compare(const __half* loaded, int first, int count) {
        // This lane's address in the four matrices of a step: directions 0-7 and 8-15, two times 8 columns.
        const __half* corner = loaded + (lane % 8 + lane / 16 * 8) * DIRECTION + lane / 8 % 2 * 8;
#pragma unroll 1
        for (int row = 0; row < count; row += 16, corner += 16 * DIRECTION) {
            float scores[TILES][2][4];  // [tile] [direction + 0 or 8] [key g or g + 8] [direction 2t or 2t + 1]
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int its = row + 8 * (i / 2) + 2 * t + i % 2;
                const float bias = *reinterpret_cast<const float*>(loaded + its * DIRECTION + DIM);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
                    scores[tile][i / 2][i % 2] = scores[tile][i / 2][2 + i % 2] = bias;
            }
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                unsigned b[4];
                load_matrices(b, corner + 16 * s);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                    for (int n = 0; n < 2; ++n)
                        multiply_16x8x16(scores[tile][n], numbers[tile][s][0], numbers[tile][s][1], numbers[tile][s][2],
                                         numbers[tile][s][3], b[2 * n], b[2 * n + 1], __half());
            }
#pragma unroll
            for (int i = 0; i < TILES * 8; ++i) {
                const int tile = i / 8, half = i / 4 % 2, n = i / 2 % 2, j = i % 2;
                const float score = scores[tile][n][2 * half + j];
                if (score > best[tile][half])
                    best[tile][half] = score, nearest[tile][half] = first + row + 8 * n + 2 * t + j;
            }
        }
    }

    // Of the four lanes that share a key: the largest score, of equal ones the first direction.
    __device__ __forceinline__ void agree() {
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i)
#pragma unroll
            for (int mask = 1; mask < 4; mask *= 2) {
                float& score = best[i / 2][i % 2];
                int& cluster = nearest[i / 2][i % 2];
                const float other = __shfl_xor_sync(EVERYONE, score, mask);
                const int its = __shfl_xor_sync(EVERYONE, cluster, mask);
                if (other > score || (other == score && its < cluster)) score = other, cluster = its;
            }
    }
};

// Start to copy directions first .. into shared memory, the last one again where there are no more.
__device__ __forceinline__ void load_directions(const KMeansArguments& a, int head, int first, __half* to) {
    constexpr int PIECES = DIRECTION / 8;  // of 16 bytes
    if (first < a.clusters)
        for (int i = threadIdx.x; i < LOADED * PIECES; i += THREADS) {
            const int row = i / PIECES, offset = i % PIECES * 8;
            copy_async_16(to + row * DIRECTION + offset,
                          direction_of(a, head, min(first + row, a.clusters - 1)) + offset);
        }
    close_copy_group();
}

// Assign keys block * BLOCK_KEYS .., count those of each cluster and those that move. All threads of a block; `shared`
// holds ASSIGN_BYTES.
__device__ __forceinline__ void assign_part(const KMeansArguments& a, int head, int block, int round, __half* shared) {
    const int first = block * BLOCK_KEYS + threadIdx.x / WARP * WARP_KEYS;
    load_directions(a, head, 0, shared);
    KeyTiles keys;
    keys.load(a, head, first, round);
    for (int cluster = 0, half = 0; cluster < a.clusters; cluster += LOADED, half ^= 1) {
        await_copy_groups<0>();
        __syncthreads();  // these directions are there, and nobody reads the ones before them any more
        load_directions(a, head, cluster + LOADED, shared + (half ^ 1) * LOADED * DIRECTION);
        keys.compare(shared + half * LOADED * DIRECTION, cluster, min(LOADED, a.clusters - cluster));
    }
    keys.agree();
    unsigned short* labels = a.labels + static_cast<long long>(head) * a.label_stride;
    int moved = 0;  // a key of zeros is as near to all directions: to the first
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
        const int token = first + keys.key(i / 2, i % 2),
                  cluster = keys.zeros >> i & 1 ? 0 : keys.nearest[i / 2][i % 2];
        const int before = keys.t == 0 && token < a.tokens ? labels[token] : cluster;
        const bool moves = before != cluster;
        if (moves) {
            labels[token] = static_cast<unsigned short>(cluster);
            atomicAdd(a.counts + head * a.clusters + cluster, 1);
            if (before != NO_CLUSTER) atomicAdd(a.counts + head * a.clusters + before, -1);
        }
        moved += __popc(__ballot_sync(EVERYONE, moves));
    }
    if (keys.lane == 0 && moved > 0) atomicAdd(a.changed + round * a.kv_heads + head, moved);
}

}  // namespace kmeans
}  // namespace clusterkv
}  // namespace kvseek
