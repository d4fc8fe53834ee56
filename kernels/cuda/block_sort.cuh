// Order within one block: sum over threads, find the n-th largest of 64-bit keys without sorting.
//
// All threads of a one-dimensional block of THREADS threads (a multiple of 32, at most 1,024) call these together; a
// template argument other than the block's size is an error that nothing reports. Costs are instructions that one
// thread issues, counted from the source; barriers come on top, about 30 cycles each.
//
// A key made as `ordered_bits(score) << 32 | ~index` makes every order definite: largest score first, ties by lowest
// index.
#pragma once

#include "kernels/cuda/numbers.cuh"

namespace kvseek {

using SortKey = unsigned long long;

__device__ __forceinline__ SortKey sort_key(float score, int index) {
    return static_cast<SortKey>(ordered_bits(score)) << 32 | ~static_cast<unsigned>(index);
}
__device__ __forceinline__ int sort_key_index(SortKey key) {
    return static_cast<int>(~static_cast<unsigned>(key));
}

namespace sorting {

constexpr int LANES = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

}  // namespace sorting

// Sum of `value` over the threads before this one; `total` receives the sum over all threads.
//
// scratch: THREADS / 32 ints in shared memory (33 suffice for every block); it may be that of the call before. Two
// barriers; what other threads wrote to shared memory before the call is visible after it. Cost: about 45 instructions.
template <int THREADS>
__device__ int block_prefix_sum(int value, int* scratch, int& total) {
    using namespace sorting;
    constexpr int WARPS = THREADS / LANES;
    static_assert(THREADS % LANES == 0 && WARPS >= 1 && WARPS <= LANES, "whole warps, at most 32 of them");
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    int here = value;  // sum over this lane and those before it
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, here, distance);
        if (lane >= distance) here += other;
    }
    __syncthreads();  // before sums of an earlier call are replaced
    if (lane == LANES - 1) scratch[warp] = here;
    __syncthreads();
    int warps = lane < WARPS ? scratch[lane] : 0;  // every warp sums the warps up: cheaper than a third barrier
#pragma unroll
    for (int distance = 1; distance < WARPS; distance *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, warps, distance);
        if (lane >= distance) warps += other;
    }
    total = __shfl_sync(ALL_LANES, warps, WARPS - 1);
    const int before = __shfl_sync(ALL_LANES, warps, max(warp - 1, 0));
    return here - value + (warp ? before : 0);
}

// What nth_largest needs in shared memory: 4 * 2^DIGIT_BITS + 160 bytes.
template <int DIGIT_BITS>
struct NthMemory {
    int histogram[1 << DIGIT_BITS];
    int sums[sorting::LANES];
    unsigned differing[2];  // low and high half of the bits in which keys differ
    int digit, above, alive;
    SortKey found;
};

namespace sorting {

// Count the digits `key >> shift` (of `width` bits) of the keys that agree with `prefix` in the bits of `mask`.
template <int THREADS, class Keys>
__device__ __forceinline__ void count_digits(const Keys& keys, int count, SortKey prefix, SortKey mask, int shift,
                                             int width, int* histogram) {
    for (int base = 0; base < count; base += THREADS) {  // warps stay whole: they vote
        const int i = base + static_cast<int>(threadIdx.x);
        const SortKey key = i < count ? keys[i] : 0;
        const bool counts = i < count && (key & mask) == prefix;
        const int digit = static_cast<int>(key >> shift) & ((1 << width) - 1);
        const unsigned counting = __ballot_sync(ALL_LANES, counts);
        if (counting == 0) continue;
        const int leader = __ffs(static_cast<int>(counting)) - 1;
        const int common = __shfl_sync(ALL_LANES, digit, leader);
        // Neighbouring keys often agree in their first digits: then one lane adds for the warp.
        if (__all_sync(ALL_LANES, !counts || digit == common)) {
            if (static_cast<int>(threadIdx.x) % LANES == leader) atomicAdd(&histogram[common], __popc(counting));
        } else if (counts) {
            atomicAdd(&histogram[digit], 1);
        }
    }
}

// The digit that the n-th largest counted key has, into memory.digit, with the number of keys above and of that digit.
template <int THREADS, int DIGIT_BITS>
__device__ __forceinline__ void find_digit(NthMemory<DIGIT_BITS>& memory, int n) {
    constexpr int BINS = 1 << DIGIT_BITS, EACH = (BINS + THREADS - 1) / THREADS;
    const int highest = BINS - 1 - static_cast<int>(threadIdx.x) * EACH;  // of this thread's bins; they descend
    int own[EACH], sum = 0, total;
    __syncthreads();  // after the counting
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += own[i] = highest - i >= 0 ? memory.histogram[highest - i] : 0;
    int above = block_prefix_sum<THREADS>(sum, memory.sums, total);
    if (above < n && n <= above + sum) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (above < n && n <= above + own[i])
                memory.digit = highest - i, memory.above = above, memory.alive = own[i];
            above += own[i];
        }
    }
    __syncthreads();
}

// The highest bit in which any two keys differ, and 1 more; 0 if all are equal.
template <int THREADS, class Keys>
__device__ __forceinline__ int differing_bits(const Keys& keys, int count, unsigned* differing) {
    const SortKey sample = keys[0];
    SortKey differs = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) differs |= keys[i] ^ sample;
    if (threadIdx.x < 2) differing[threadIdx.x] = 0;
    __syncthreads();
    const unsigned low = __reduce_or_sync(ALL_LANES, static_cast<unsigned>(differs));
    const unsigned high = __reduce_or_sync(ALL_LANES, static_cast<unsigned>(differs >> 32));
    if (threadIdx.x % LANES == 0) atomicOr(&differing[0], low), atomicOr(&differing[1], high);
    __syncthreads();
    const unsigned all_low = differing[0], all_high = differing[1];
    return all_high ? 64 - __clz(static_cast<int>(all_high)) : all_low ? 32 - __clz(static_cast<int>(all_low)) : 0;
}

}  // namespace sorting

// The n-th largest of `count` keys, n from 1 on, by radix select; every thread gets it. 0 if n > count, so that
// `key >= result` takes min(n, count) keys as long as no two are equal.
//
// keys: shared or global memory, or anything whose operator[](int) gives a SortKey; read about four times, neighbouring
// threads reading neighbouring keys. memory: shared; it may be that of the call before. Barriers before and after.
// Cost: one pass of about 6 instructions a key of this thread for the bits that all keys share, then passes of about
// 20, each of which settles DIGIT_BITS bits (8 to 11) and has 5 barriers and 80 + 3 * 2^DIGIT_BITS / THREADS further
// instructions, until one key is left: two or three passes for distinct scores, plus one that finds the key. Example:
// 8,192 keys, 512 threads, 8 bits: 16 keys a thread, about 1,600 instructions.
template <int THREADS, int DIGIT_BITS, class Keys>
__device__ SortKey nth_largest(const Keys& keys, int count, int n, NthMemory<DIGIT_BITS>& memory) {
    using namespace sorting;
    static_assert(DIGIT_BITS >= 4 && DIGIT_BITS <= 12, "a histogram in shared memory");
    __syncthreads();  // before the memory of an earlier call is written, and after the caller's own writes of keys
    if (n > count || n < 1) return n < 1 ? ~0ull : 0ull;
    int unknown = differing_bits<THREADS>(keys, count, memory.differing);  // lowest bits of the answer
    SortKey mask = unknown < 64 ? ~0ull << unknown : 0;
    SortKey prefix = keys[0] & mask;
    while (unknown > 0) {
        const int width = min(DIGIT_BITS, unknown), shift = unknown - width;
        for (int i = threadIdx.x; i < 1 << DIGIT_BITS; i += THREADS) memory.histogram[i] = 0;
        __syncthreads();
        count_digits<THREADS>(keys, count, prefix, mask, shift, width, memory.histogram);
        find_digit<THREADS>(memory, n);
        prefix |= static_cast<SortKey>(memory.digit) << shift;
        mask = ~0ull << shift, unknown = shift, n -= memory.above;
        if (memory.alive > 1) continue;  // `alive` and `digit` are written again only after two barriers
        for (int i = threadIdx.x; i < count; i += THREADS)
            if ((keys[i] & mask) == prefix) memory.found = keys[i];
        __syncthreads();
        prefix = memory.found;
        break;
    }
    __syncthreads();
    return prefix;
}

// The same over an array, with digits of 8 bits.
template <int THREADS>
__device__ __forceinline__ SortKey nth_largest(const SortKey* keys, int count, int n, NthMemory<8>& memory) {
    return nth_largest<THREADS, 8, const SortKey*>(keys, count, n, memory);
}

}  // namespace kvseek
