// Estimates of q·k of keys at given rows from nested key codes (key_codes.estimate_at).
#pragma once

#include "kernels/cuda/instructions.cuh"
#include "nested_codes.cuh"
#include "queries.cuh"

namespace kvseek {
namespace codes {

constexpr int MEMBERS = DIM / 32;  // neighbouring threads that estimate one key, 32 channels each

// <codes, integers> of the key at `row` and every query, in all MEMBERS threads of the key. Warps call it whole.
template <int BITS, int LANES>
__device__ __forceinline__ void multiply_row(const unsigned char* high_plane, const unsigned char* low_plane,
                                             unsigned row, const Queries<LANES>& queries, int (&sums)[LANES]) {
    const int member = threadIdx.x % MEMBERS;
    const size_t from = static_cast<size_t>(row) * FIELD + 8 * member;
    const uint2 high = load_once_8(high_plane + from);
    const uint2 low = BITS == 4 ? load_once_8(low_plane + from) : make_uint2(0, 0);
#pragma unroll
    for (int lane = 0; lane < LANES; lane++) sums[lane] = 0;
#pragma unroll
    for (int field = 0; field < FIELDS; field++) {
        const int channel = field * FIELD + 8 * member;
        const int front = four_codes<BITS>(high.x, low.x, field), back = four_codes<BITS>(high.y, low.y, field);
#pragma unroll
        for (int lane = 0; lane < LANES; lane++) {
            const int2 query = *reinterpret_cast<const int2*>(&queries.integers[lane][channel]);
            sums[lane] = __dp4a(back, query.y, __dp4a(front, query.x, sums[lane]));
        }
    }
#pragma unroll
    for (int lane = 0; lane < LANES; lane++) {
#pragma unroll
        for (int mask = 1; mask < MEMBERS; mask *= 2) sums[lane] += __shfl_xor_sync(EVERYONE, sums[lane], mask);
    }
}

// <M, integers> of the block of the key at `row` and every query, times the mean's step; in all MEMBERS threads of the
// key. Warps call it whole.
template <int LANES>
__device__ __forceinline__ void multiply_mean(const Means& means, unsigned row, const Queries<LANES>& queries,
                                              float (&products)[LANES]) {
    const int member = threadIdx.x % MEMBERS;
    const signed char* mean = means.of_row(row);
    int sums[LANES] = {}, seconds[LANES] = {};
#pragma unroll
    for (int field = 0; field < FIELDS; field++) {
        const int channel = field * FIELD + 8 * member;
        const int2 first = *reinterpret_cast<const int2*>(mean + channel);
        const int2 second = *reinterpret_cast<const int2*>(mean + DIM + channel);
#pragma unroll
        for (int lane = 0; lane < LANES; lane++) {
            const int2 query = *reinterpret_cast<const int2*>(&queries.integers[lane][channel]);
            sums[lane] = __dp4a(first.y, query.y, __dp4a(first.x, query.x, sums[lane]));
            seconds[lane] = __dp4a(second.y, query.y, __dp4a(second.x, query.x, seconds[lane]));
        }
    }
    const float step = means.step_of_row(row);
#pragma unroll
    for (int lane = 0; lane < LANES; lane++) {
        int sum = 256 * sums[lane] + seconds[lane];
#pragma unroll
        for (int mask = 1; mask < MEMBERS; mask *= 2) sum += __shfl_xor_sync(EVERYONE, sum, mask);
        products[lane] = static_cast<float>(sum) * step;
    }
}

// q·k from the results of multiply_row and multiply_mean.
template <int BITS, int LANES>
__device__ __forceinline__ float estimate_of(int sum, float scale, float mean, const Queries<LANES>& queries,
                                             int lane) {
    const int twice = 2 * sum - (Code<BITS>::LEVELS - 1) * queries.sums[lane];
    return (static_cast<float>(twice) * scale * (Code<BITS>::STEP / 2) + mean) * queries.steps[lane];
}

}  // namespace codes
}  // namespace kvseek
