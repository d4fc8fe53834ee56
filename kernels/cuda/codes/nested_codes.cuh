// Nested key codes as kernels see them (docs/nested_codes.md): 4 bits a channel, of which the highest two are a coarser
// code of the same key, or 2 bits alone. They lie in planes of DIM / 4 bytes a key, of 2 bits each: byte b holds in
// bits 2f and 2f + 1 the bits of channel f * FIELD + b.
#pragma once

#include "rotate.cuh"

namespace kvseek {
namespace codes {

constexpr int FIELDS = 4;            // of a byte
constexpr int FIELD = DIM / FIELDS;  // channels of a field; also bytes of a key in a plane
constexpr float LARGEST_HALF = 65504.0f;
constexpr float LARGEST_OF_MEAN = 127 * 256 + 127;
constexpr int LEAST_BLOCK = 64;  // neighbouring keys that share a mean at least

// The means that codes leave out. Arguments of kernels have these three fields, too.
struct Means {
    const signed char* means;  // [extents, kv_heads, 1024 >> block_bits, 2, DIM]: 256 times the first plus the second
    const float* mean_steps;   // [extents, kv_heads, 1024 >> block_bits] what an integer is worth
    int block_bits;

    template <class Arguments>
    __device__ __forceinline__ explicit Means(const Arguments& a)
        : means(a.means), mean_steps(a.mean_steps), block_bits(a.block_bits) {}
    __device__ __forceinline__ const signed char* of_row(unsigned row) const {
        return means + static_cast<size_t>(row >> block_bits) * (2 * DIM);
    }
    __device__ __forceinline__ float step_of_row(unsigned row) const { return mean_steps[row >> block_bits]; }

    // Take the mean of a row's block off a rotated vector that a warp holds.
    __device__ __forceinline__ void subtract(unsigned row, float (&y)[EACH]) const {
        const signed char* mean = of_row(row) + threadIdx.x % WARP * EACH;
        const float step = step_of_row(row);
#pragma unroll
        for (int i = 0; i < EACH; i++) y[i] -= __fmul_rn(static_cast<float>(256 * mean[i] + mean[DIM + i]), step);
    }
};

// A code of 2 or 4 bits.
template <int BITS>
struct Code {
    static_assert(BITS == 2 || BITS == 4, "codes have 2 or 4 bits");
    static constexpr int LEVELS = 1 << BITS;
    static constexpr float STEP = BITS == 4 ? 0.32f : 1.0f;  // width of a cell, as key_codes.STEPS
};

// A field of four bytes of the planes, as four codes.
template <int BITS>
__device__ __forceinline__ unsigned four_codes(unsigned high, unsigned low, int field) {
    const unsigned leading = high >> 2 * field & 0x03030303u;
    return BITS == 2 ? leading : leading << 2 | (low >> 2 * field & 0x03030303u);
}

// Encode a rotated vector that a warp holds, and store it as row `row` of the planes and of the scales. With 2 bits
// there is no low plane.
template <int BITS>
__device__ __forceinline__ void store_codes(const float (&y)[EACH], unsigned char* high, unsigned char* low,
                                            __half* scales, long long row) {
    constexpr int LEVELS = Code<BITS>::LEVELS;
    constexpr float STEP = Code<BITS>::STEP;
    const int lane = threadIdx.x % WARP;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) squares += y[i] * y[i];
    const float square = sum_of_warp(squares);
    const float cells = square > 0.0f ? __fdiv_rn(1.0f / SCALE, __fmul_rn(STEP, __fsqrt_rn(square))) : 0.0f;
    unsigned codes[EACH];
    float product = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int code = static_cast<int>(floorf(__fmul_rn(y[i], cells))) + LEVELS / 2;
        codes[i] = min(max(code, 0), LEVELS - 1);
        product += (static_cast<float>(codes[i]) - (LEVELS - 1) / 2.0f) * y[i];
    }
    product = STEP * sum_of_warp(product);
    // Eight lanes hold a field. Lane l and the lanes l + 8, l + 16, l + 24 hold the same bytes' fields.
    constexpr int WORDS = (EACH + 3) / 4, FIELD_LANES = FIELD / EACH;
    static_assert(FIELD_LANES == 8, "a warp holds four fields");
    const int field = lane / FIELD_LANES, member = lane % FIELD_LANES;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        unsigned planes[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 4 && 4 * w + i < EACH; i++) {
            planes[0] |= codes[4 * w + i] >> (BITS - 2) << (8 * i + 2 * field);
            if (BITS == 4) planes[1] |= (codes[4 * w + i] & 3) << (8 * i + 2 * field);
        }
#pragma unroll
        for (int plane = 0; plane < BITS / 2; plane++) {
            planes[plane] |= __shfl_xor_sync(EVERYONE, planes[plane], 8);
            planes[plane] |= __shfl_xor_sync(EVERYONE, planes[plane], 16);
            if (field != plane) continue;  // one group of lanes stores each plane
            unsigned char* to = (plane == 0 ? high : low) + row * FIELD + member * EACH + 4 * w;
            if constexpr (EACH == 2)
                *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(planes[plane]);
            else
                *reinterpret_cast<unsigned*>(to) = planes[plane];
        }
    }
    if (lane == 0)
        scales[row] = __float2half_rn(product > 0.0f ? fminf(__fdiv_rn(square, product), LARGEST_HALF) : 0.0f);
}

}  // namespace codes
}  // namespace kvseek
