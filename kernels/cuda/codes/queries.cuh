// Rotated queries as 8-bit integers, as both passes over nested codes multiply them (key_codes.round_lanes).
#pragma once

#include "rotate.cuh"

namespace kvseek {
namespace codes {

constexpr float QUERY_LARGEST = 127.0f;  // largest integer of a query

// In shared memory. LANES queries rank on their own: one, which is the mean of the group, or all heads of the group.
template <int LANES>
struct Queries {
    alignas(16) signed char integers[LANES][DIM];
    int sums[LANES];        // of the integers
    float steps[LANES];     // what an integer is worth
    float inverses[LANES];  // 1 / length of the integers; 0 for a query of zeros

    // Four integers from a channel on, a multiple of 4.
    __device__ __forceinline__ int four(int lane, int channel) const {
        return *reinterpret_cast<const int*>(&integers[lane][channel]);
    }

    // Rotate and round the queries [GROUP, HEAD_DIM] of a KV head; a warp takes one lane. All threads call it.
    __device__ __forceinline__ void prepare(const Number* queries, const float* signs) {
        for (int lane = threadIdx.x / WARP; lane < LANES; lane += blockDim.x / WARP) prepare_lane(queries, lane, signs);
        __syncthreads();
    }

    // The same of one lane, by a warp; a barrier must follow.
    __device__ __forceinline__ void prepare_lane(const Number* queries, int lane, const float* signs) {
        static_assert(LANES == 1 || LANES == GROUP, "the mean of the group, or each of its heads");
        const int thread = threadIdx.x % WARP;
        float x[EACH];
        load_query<(LANES < GROUP)>(queries, lane, signs, x);
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) largest = fmaxf(largest, fabsf(x[i]));
        largest = largest_of_warp(largest);
        const float factor = largest > 0.0f ? __fdiv_rn(QUERY_LARGEST, largest) : 0.0f;
        int sum = 0, squares = 0;
        unsigned packed[(EACH + 3) / 4] = {};
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int number = __float2int_rn(__fmul_rn(x[i], factor));
            packed[i / 4] |= (number & 255) << 8 * (i % 4);
            sum += number, squares += number * number;
        }
        sum = sum_of_warp(sum), squares = sum_of_warp(squares);
        signed char* own = &integers[lane][thread * EACH];
        if constexpr (EACH == 2) {
            *reinterpret_cast<unsigned short*>(own) = static_cast<unsigned short>(packed[0]);
        } else {
#pragma unroll
            for (int w = 0; w < EACH / 4; w++) reinterpret_cast<unsigned*>(own)[w] = packed[w];
        }
        if (thread == 0) {
            sums[lane] = sum;
            steps[lane] = __fdiv_rn(largest, QUERY_LARGEST);
            inverses[lane] = squares > 0 ? __frcp_rn(__fsqrt_rn(static_cast<float>(squares))) : 0.0f;
        }
    }
};

}  // namespace codes
}  // namespace kvseek
