// Order within one block: sort 64-bit keys, sum over threads, find the n-th largest key without sorting.
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

__device__ constexpr bool is_power_of_two(int number) {
    return number > 0 && (number & (number - 1)) == 0;
}

__device__ __forceinline__ SortKey larger_of(SortKey a, SortKey b) {
    return a > b ? a : b;
}
__device__ __forceinline__ SortKey smaller_of(SortKey a, SortKey b) {
    return a > b ? b : a;
}

// The steps of a bitonic network on keys of which a thread holds ITEMS neighbouring ones: key `first + i`. Runs of
// `size` keys descend where the key's number has no bit `size`, and ascend elsewhere; partners differ in bit `stride`.
template <int THREADS, int ITEMS>
struct Network {
    SortKey own[ITEMS];
    int first = static_cast<int>(threadIdx.x) * ITEMS;

    // Whether a key is to be the larger one of its pair.
    __device__ __forceinline__ static bool takes_larger(int number, int size, int stride) {
        return ((number & size) == 0) == ((number & stride) == 0);
    }

    // Partners of other warps, through shared memory: key i of thread t passes through word i * THREADS + t, so that
    // neighbouring threads meet neighbouring banks.
    __device__ __forceinline__ void exchange_in_block(SortKey* keys, int size, int stride) {
        const int partner = threadIdx.x ^ (stride / ITEMS);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) keys[i * THREADS + threadIdx.x] = own[i];
        __syncthreads();
        const bool larger = takes_larger(first, size, stride);  // both bits are of the thread's number
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const SortKey other = keys[i * THREADS + partner];
            own[i] = larger ? larger_of(own[i], other) : smaller_of(own[i], other);
        }
        __syncthreads();  // before the words are written again
    }

    __device__ __forceinline__ void exchange_in_warp(int size, int stride) {
        const bool larger = takes_larger(first, size, stride);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const SortKey other = __shfl_xor_sync(ALL_LANES, own[i], stride / ITEMS);
            own[i] = larger ? larger_of(own[i], other) : smaller_of(own[i], other);
        }
    }

    template <int STRIDE>
    __device__ __forceinline__ void exchange_in_thread(int size) {
        if (STRIDE < size) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (i & STRIDE) continue;
                const SortKey low = own[i], high = own[i | STRIDE];
                const bool descends = ((first + i) & size) == 0;
                own[i] = descends == (low > high) ? low : high;
                own[i | STRIDE] = descends == (low > high) ? high : low;
            }
        }
        if constexpr (STRIDE > 1) exchange_in_thread<STRIDE / 2>(size);
    }
};

}  // namespace sorting

// Sort the block's keys, largest first.
//
// keys: shared memory, THREADS * ITEMS of them (both powers of two, ITEMS at most 16), aligned to 8 bytes; fill up with
// zeros, which end up last. Barriers before and after: the caller needs none.
// Cost: L = log2(THREADS * ITEMS) gives L (L + 1) / 2 steps of ITEMS keys, about 8 instructions a key in a warp's or
// the block's step and 4 in a thread's; with W = log2(THREADS / 32), W (W + 1) / 2 steps have two barriers each.
// Example: 256 x 4 keys: 55 steps, 6 of them with barriers, about 1,500 instructions; 1,024 x 8: 91 steps, 15, about
// 5,000. Registers: 2 * ITEMS for the keys and about 20.
template <int THREADS, int ITEMS>
__device__ void sort_descending(SortKey* keys) {
    using namespace sorting;
    static_assert(is_power_of_two(THREADS) && THREADS >= LANES && THREADS <= 1024, "whole warps, a power of two");
    static_assert(is_power_of_two(ITEMS) && ITEMS <= 16, "the keys of a thread lie in registers");
    Network<THREADS, ITEMS> network;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) network.own[i] = keys[i * THREADS + threadIdx.x];  // any order will do
    __syncthreads();
#pragma unroll 1
    for (int size = 2; size <= THREADS * ITEMS; size *= 2) {
        int stride = size / 2;
#pragma unroll 1
        for (; stride >= LANES * ITEMS; stride /= 2) network.exchange_in_block(keys, size, stride);
#pragma unroll 1
        for (; stride >= ITEMS; stride /= 2) network.exchange_in_warp(size, stride);
        if constexpr (ITEMS > 1) network.template exchange_in_thread<ITEMS / 2>(size);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) keys[network.first + i] = network.own[i];
    __syncthreads();
}

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
