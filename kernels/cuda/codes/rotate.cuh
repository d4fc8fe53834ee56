// The randomised Hadamard transform of a vector that a warp holds, EACH neighbouring coordinates a lane.
#pragma once

#include "sizes.cuh"

namespace kvseek {
namespace codes {

static_assert(DIM <= 256, "head_dim must be at most 256");
constexpr float SCALE = DIM == 64 ? 0.125f : DIM == 128 ? 0.08838834764831845f : 0.0625f;  // 1 / sqrt(DIM)

// Additions come in the order of rotation.walsh_hadamard, so the result is the reference's to the bit.
__device__ __forceinline__ void rotate(float (&x)[EACH], const float* __restrict__ signs) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] *= signs[lane * EACH + i];
#pragma unroll
    for (int stride = 1; stride < EACH; stride *= 2) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (i & stride) continue;
            const float low = x[i], high = x[i + stride];
            x[i] = low + high;
            x[i + stride] = low - high;
        }
    }
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float other = __shfl_xor_sync(EVERYONE, x[i], mask);
            x[i] = lane & mask ? other - x[i] : x[i] + other;
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] *= SCALE;
}

// A vector of HEAD_DIM numbers, zeros beyond.
__device__ __forceinline__ void load_vector(const Number* __restrict__ from, float (&x)[EACH]) {
    const int first = threadIdx.x % WARP * EACH;
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = first + i < HEAD_DIM ? to_float(from[first + i]) : 0.0f;
}

// Query `lane` of a KV head's queries [GROUP, HEAD_DIM], rotated; their mean if it is the only one that ranks.
template <bool IS_MEAN>
__device__ __forceinline__ void load_query(const Number* __restrict__ queries, int lane,
                                           const float* __restrict__ signs, float (&x)[EACH]) {
    load_vector(queries + (IS_MEAN ? 0 : lane * HEAD_DIM), x);
    if constexpr (IS_MEAN) {
        for (int q = 1; q < GROUP; q++) {
            float other[EACH];
            load_vector(queries + q * HEAD_DIM, other);
#pragma unroll
            for (int i = 0; i < EACH; i++) x[i] += other[i];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = __fdiv_rn(x[i], static_cast<float>(GROUP));
    }
    rotate(x, signs);
}

}  // namespace codes
}  // namespace kvseek
