// Sums of powers of two that are the same to the bit in whatever order, and by however many blocks, they are added.
//
// What a softmax divides by is such a sum. Added up as floats, its last bits would depend on how the blocks of a launch
// share the work, which depends on the batch. So powers are added as integers, in units of 2^-46 of a power of 2^32
// that is no less than any of them; powers below the next lower one, of which 100,000 would not matter, are left out.
#pragma once

#include "instructions.cuh"
#include "numbers.cuh"
#include "warp.cuh"

namespace kvseek {

struct PowerSum {
    static constexpr int RANGE = 32;        // of exponents that share a bin
    static constexpr float LARGEST = 1e8f;  // of an exponent, and of its opposite; others count as these
    static constexpr int UNIT = 46;         // a power that equals its bin's largest counts 2^46; 131,072 of them fit

    unsigned long long high = 0, low = 0;  // of the highest bin, and of the next lower one
    int bin = -0x1000000;                  // the highest: exponents from above RANGE (bin - 1) to RANGE bin

    // Add 2^exponent.
    __device__ __forceinline__ void add(float exponent) {
        if (!(exponent > -INFINITE)) return;
        exponent = fminf(fmaxf(exponent, -LARGEST), LARGEST);
        const int own = static_cast<int>(ceilf(exponent * (1.0f / RANGE)));
        const float power = power_of_two(exponent - static_cast<float>(RANGE * own));
        add(own, __float2ull_rn(power * 0x1p46f), 0);
    }
    __device__ __forceinline__ void add(const PowerSum& other) { add(other.bin, other.high, other.low); }
    // Add those of the threads of the warp whose numbers differ in the bits of `mask`, which all threads with such
    // numbers call: each of them ends with the sum.
    __device__ __forceinline__ void add_lanes(int mask) {
        int highest = bin;
#pragma unroll
        for (int bit = 1; bit < WARP; bit *= 2)
            if (mask & bit) highest = max(highest, __shfl_xor_sync(EVERYONE, highest, bit));
        raise(highest);
#pragma unroll
        for (int bit = 1; bit < WARP; bit *= 2) {
            if (!(mask & bit)) continue;
            high += __shfl_xor_sync(EVERYONE, high, bit);
            low += __shfl_xor_sync(EVERYONE, low, bit);
        }
    }
    // The sum of COUNT of them: `part(i)` is one.
    template <int COUNT, class Part>
    __device__ __forceinline__ static PowerSum of(const Part& part) {
        PowerSum sum;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sum.bin = max(sum.bin, part(i).bin);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            PowerSum own = part(i);
            own.raise(sum.bin);
            sum.high += own.high, sum.low += own.low;
        }
        return sum;
    }
    // What another block has written, past the L1 cache.
    __device__ __forceinline__ static PowerSum read(const PowerSum* from) {
        PowerSum sum;
        sum.high = __ldcg(&from->high), sum.low = __ldcg(&from->low), sum.bin = __ldcg(&from->bin);
        return sum;
    }
    __device__ __forceinline__ float logarithm() const {  // to base 2
        const float sum = static_cast<float>(high) + static_cast<float>(low) * 0x1p-32f;
        return static_cast<float>(RANGE * bin - UNIT) + log2f(sum);
    }

  private:
    // Count in a bin that is no lower.
    __device__ __forceinline__ void raise(int to) {
        if (to == bin) return;
        low = to == bin + 1 ? high : 0, high = 0, bin = to;
    }
    __device__ __forceinline__ void add(int other, unsigned long long other_high, unsigned long long other_low) {
        if (other > bin) raise(other);
        if (other == bin) high += other_high, low += other_low;
        if (other == bin - 1) low += other_high;
    }
};
static_assert(sizeof(PowerSum) == 24, "arguments.py allocates POWER_SUM_BYTES");

}  // namespace kvseek
