// Estimates of q·k of keys at given rows from nested key codes (key_codes.estimate_at).
#pragma once

#include "nested_codes.cuh"
#include "plugins/shared/instructions.cuh"
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

// q·k but for q·mean, which is the same for all keys of a query, from the sum of multiply_row.
template <int BITS, int LANES>
__device__ __forceinline__ float estimate_of(int sum, float scale, const Queries<LANES>& queries, int lane) {
    const int twice = 2 * sum - (Code<BITS>::LEVELS - 1) * queries.sums[lane];
    return static_cast<float>(twice) * scale * (queries.steps[lane] * (Code<BITS>::STEP / 2));
}

}  // namespace codes
}  // namespace kvseek
