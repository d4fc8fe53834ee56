// Encode keys as nested key codes: a block of threads encodes a block of keys that share a mean, a warp a key.
#pragma once

#include "nested_codes.cuh"

namespace kvseek {
namespace codes {

struct EncodeArguments {
    const Number* keys;  // [kv_heads, tokens, HEAD_DIM], rows contiguous
    signed char* means;  // as in Means
    float* mean_steps;
    unsigned char* high;    // [extents, kv_heads, 1024, FIELD]
    unsigned char* low;     // the same; not written if codes have 2 bits
    __half* scales;         // [extents, kv_heads, 1024]
    const int* table;       // extents of the slot
    const float* signs;     // [DIM]
    long long head_stride;  // of keys, in numbers
    long long token_stride;
    int kv_heads, tokens;
    int first;  // place of the first key
    int block_bits;
};

constexpr int ENCODE_WARPS = 16;

struct EncodeMemory {
    float sums[ENCODE_WARPS][DIM];
};

// Write the mean of `count` keys as that of a block: the sum over the warps' sums, in order, so that it depends on
// nothing but the keys. All threads of a block call it.
__device__ __forceinline__ void store_mean(const EncodeArguments& a, const Number* keys, int count, unsigned row,
                                           EncodeMemory& memory) {
    const int warp = threadIdx.x / WARP, first_channel = threadIdx.x % WARP * EACH;
    float sum[EACH] = {};
    for (int key = warp; key < count; key += ENCODE_WARPS) {
        float x[EACH];
        load_vector(keys + key * a.token_stride, x);
#pragma unroll
        for (int i = 0; i < EACH; i++) sum[i] += x[i];
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) memory.sums[warp][first_channel + i] = sum[i];
    __syncthreads();
    if (warp == 0) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            sum[i] = 0.0f;
            for (int w = 0; w < ENCODE_WARPS; w++) sum[i] += memory.sums[w][first_channel + i];
            sum[i] = __fdiv_rn(sum[i], static_cast<float>(count));
        }
        rotate(sum, a.signs);
#pragma unroll
        for (int i = 0; i < EACH; i++) largest = fmaxf(largest, fabsf(sum[i]));
        largest = largest_of_warp(largest);
        const float factor = largest > 0.0f ? __fdiv_rn(LARGEST_OF_MEAN, largest) : 0.0f;
        signed char* mean = a.means + static_cast<size_t>(row >> a.block_bits) * (2 * DIM) + first_channel;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int integer = __float2int_rn(__fmul_rn(sum[i], factor)), first = (integer + 128) >> 8;
            mean[i] = static_cast<signed char>(first);
            mean[DIM + i] = static_cast<signed char>(integer - 256 * first);
        }
        if (threadIdx.x == 0) a.mean_steps[row >> a.block_bits] = __fdiv_rn(largest, LARGEST_OF_MEAN);
    }
    __syncthreads();
}

// What a method's kernel kvseek_codes_encode does. Grid: blocks of keys, kv_heads; ENCODE_WARPS warps.
template <int BITS>
__device__ __forceinline__ void encode_keys(const EncodeArguments& a) {
    __shared__ EncodeMemory memory;
    const int head = blockIdx.y, start = ((a.first >> a.block_bits) + static_cast<int>(blockIdx.x)) << a.block_bits;
    const int first = max(start, a.first), last = min(start + (1 << a.block_bits), a.first + a.tokens);
    const Number* keys = a.keys + head * a.head_stride + (first - a.first) * a.token_stride;
    // A block lies in one extent. Keys that earlier ones have begun a block for have its mean.
    const unsigned row = static_cast<unsigned>(extent_row(a.table, a.kv_heads, head, first));
    if (first == start) store_mean(a, keys, last - first, row, memory);
    const Means means(a);
    for (int key = threadIdx.x / WARP; key < last - first; key += ENCODE_WARPS) {
        float y[EACH];
        load_vector(keys + key * a.token_stride, y);
        rotate(y, a.signs);
        means.subtract(row, y);
        store_codes<BITS>(y, a.high, a.low, a.scales, row + key);
    }
}

}  // namespace codes
}  // namespace kvseek
