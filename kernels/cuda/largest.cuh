// The k largest of a block's keys, ties by lowest index.
//
// A histogram of the keys splits them into those that are in, those that are out, and a few at the
// border, which are ranked by comparing all pairs. Should too many lie at the border, digits are sorted out one after
// another.
#pragma once

#include "warp.cuh"

namespace kvseek {
namespace largest {

constexpr int DIGITS = 256;
constexpr int BINS = 4096;         // of the first histogram: 12 bits
constexpr int QUICK_TOP_K = 1024;  // larger ones take the slow way
constexpr int TEAM = 4;            // threads that rank one entry

// Entries of a list in shared memory: what a key is, and which.
template <int N>
struct List {
    unsigned keys[N];
    int indexes[N];
};

// The bin of a key, by its first bits.
struct FirstBits {
    __device__ __forceinline__ static int of(unsigned key) { return static_cast<int>(key >> 20); }
};

// The same for keys made of softmax weights, or sums of up to 16 of them, by `ordered_bits`: 64 bins for each power of
// two from 2^-56 on, so that few keys lie at the border. Smaller weights share a bin. So do those from 2^8 on, which no
// weight is, and NaN, which weights are if a query is infinite: a bin outside of the histogram would end all requests.
struct WeightBits {
    __device__ __forceinline__ static int of(unsigned key) {
        constexpr unsigned LEAST = 0xa3800000u;  // ordered_bits(2^-56)
        return static_cast<int>(min(max(key, LEAST) - LEAST >> 17, static_cast<unsigned>(BINS - 1)));
    }
};

// For blocks of THREADS threads, all of which call these functions together. A thread may hold KEYS_EACH keys. Up to
// BORDER_KEYS keys at the border are ranked by comparing all pairs.
template <int THREADS, int KEYS_EACH, class Bin = FirstBits, int BORDER_KEYS = 1024>
struct Largest {
    static constexpr int WARPS = THREADS / WARP;
    static constexpr int HELD_KEYS = KEYS_EACH * THREADS;  // with more, a block reads keys again and again

    struct Memory {
        alignas(16) int histogram[BINS];
        List<BORDER_KEYS> border;
        List<QUICK_TOP_K> taken;
        int partial[WARPS];
        int digit, above, last, appended;
    };

    // Count a digit. Neighbouring keys often agree in their first digits: then one thread adds for the warp.
    __device__ __forceinline__ static void count_digit(int* histogram, unsigned digit, bool counts) {
        const unsigned counting = __ballot_sync(EVERYONE, counts);
        if (counting == 0) return;
        const int leader = __ffs(counting) - 1;
        const unsigned common = __shfl_sync(EVERYONE, digit, leader);
        if (__all_sync(EVERYONE, !counts || digit == common)) {
            if (threadIdx.x % WARP == leader) atomicAdd(&histogram[common], __popc(counting));
        } else if (counts) {
            atomicAdd(&histogram[digit], 1);
        }
    }

    // Find the digit that the `wanted`-th largest key has, among keys that were counted; all threads get it, and how
    // many keys have a larger one.
    __device__ __forceinline__ static void find_digit(Memory& memory, int wanted) {
        if (threadIdx.x < WARP) {  // lane l holds digits 8 l .. 8 l + 7
            int sums[DIGITS / WARP], total = 0;
#pragma unroll
            for (int i = DIGITS / WARP - 1; i >= 0; i--) {
                total += memory.histogram[threadIdx.x * (DIGITS / WARP) + i];
                sums[i] = total;  // of this lane's digits from i on
            }
            const int from_here = sum_from_here_on(total, threadIdx.x % WARP);
            const int above = from_here - total;  // keys of later lanes' digits
            if (above < wanted && from_here >= wanted) {
                int found = 0, larger = above;
#pragma unroll
                for (int i = 0; i < DIGITS / WARP; i++) {
                    if (above + sums[i] < wanted) continue;
                    found = i;
                    larger = above + (i + 1 < DIGITS / WARP ? sums[i + 1] : 0);
                }
                memory.digit = threadIdx.x * (DIGITS / WARP) + found;
                memory.above = larger;
            }
        }
        __syncthreads();
    }

    // What take_largest does, for any keys: find the digits of the `wanted`-th largest one after another.
    template <class Key, class Emit>
    __device__ __forceinline__ static void take_by_digits(Memory& memory, int count, int wanted, const Key& key,
                                                          const Emit& emit) {
        unsigned prefix = 0, mask = 0;
        int left = wanted;  // still to take among keys that begin with `prefix`
        const bool all = count <= wanted;
        for (int shift = 24; shift >= 0 && !all; shift -= 8) {
            for (int i = threadIdx.x; i < DIGITS; i += THREADS) memory.histogram[i] = 0;
            __syncthreads();
            for (int first = 0; first < count; first += THREADS) {
                const int i = first + threadIdx.x;
                const unsigned own = i < count ? key(i) : 0;
                count_digit(memory.histogram, own >> shift & 255, i < count && (own & mask) == prefix);
            }
            __syncthreads();
            find_digit(memory, left);
            prefix |= static_cast<unsigned>(memory.digit) << shift;
            mask |= 255u << shift;
            left -= memory.above;
            __syncthreads();
        }
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        int taken = 0, ties = 0;
        for (int first = 0; first < count; first += THREADS) {
            const int i = first + threadIdx.x;
            const unsigned own = i < count ? key(i) : 0;
            const bool better = i < count && (all || own > prefix), equal = i < count && !all && own == prefix;
            const unsigned betters = __ballot_sync(EVERYONE, better), equals = __ballot_sync(EVERYONE, equal);
            if (lane == 0) memory.partial[warp] = __popc(betters) + (__popc(equals) << 16);
            __syncthreads();
            const unsigned before = (1u << lane) - 1;
            int offset = __popc(betters & before) + (__popc(equals & before) << 16), sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                if (w < warp) offset += memory.partial[w];
                sum += memory.partial[w];
            }
            const int ties_here = ties + (offset >> 16);
            if (better || (equal && ties_here < left)) emit(taken + (offset & 0xffff) + min(ties_here, left), i, own);
            taken += sum & 0xffff, ties += sum >> 16;
            __syncthreads();
        }
    }

    // Sum over this thread and all later ones; all threads of the block call it.
    __device__ __forceinline__ static int sum_from_here(Memory& memory, int value) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const int sum = sum_from_here_on(value, lane);
        if (lane == 0) memory.partial[warp] = sum;
        __syncthreads();
        const int later = lane > warp && lane < WARPS ? memory.partial[lane] : 0;
        return sum + sum_of_warp(later);
    }

    // The bin of the histogram that the `wanted`-th largest key lies in, and how many keys lie in higher ones.
    __device__ __forceinline__ static void find_bin(Memory& memory, int wanted) {
        constexpr int EACH = BINS / THREADS;  // neighbouring bins of a thread
        static_assert(EACH % 4 == 0, "a thread reads four bins at once");
        int own[EACH + 1] = {};  // keys of the thread's bins from i on
#pragma unroll
        for (int i = EACH - 4; i >= 0; i -= 4) {
            const int4 bins = reinterpret_cast<const int4*>(memory.histogram)[(threadIdx.x * EACH + i) / 4];
            own[i + 3] = own[i + 4] + bins.w, own[i + 2] = own[i + 3] + bins.z;
            own[i + 1] = own[i + 2] + bins.y, own[i] = own[i + 1] + bins.x;
        }
        const int from_here = sum_from_here(memory, own[0]), above = from_here - own[0];
        if (above < wanted && from_here >= wanted) {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (above + own[i] < wanted) continue;
                memory.digit = threadIdx.x * EACH + i;
                memory.above = above + own[i + 1];
            }
        }
        __syncthreads();
    }

    // Reserve `count` entries of a list for this thread and return the first; the order of the threads is arbitrary.
    __device__ __forceinline__ static int reserve(int* size, int count) {
        const int lane = threadIdx.x % WARP, sum = sum_up_to_here(count, lane);
        int start = 0;
        if (lane == WARP - 1 && sum != 0) start = atomicAdd(size, sum);
        return __shfl_sync(EVERYONE, start, WARP - 1) + sum - count;
    }

    // For each of `count` entries the number of entries that come before it, by TEAM threads: act(entry, number).
    template <class Before, class Act>
    __device__ __forceinline__ static void rank_all(int count, const Before& before, const Act& act) {
        const int member = threadIdx.x % TEAM;
        for (int first = 0; first < count; first += THREADS / TEAM) {  // warps stay whole: they exchange numbers
            const int entry = first + threadIdx.x / TEAM;
            int number = 0;
            if (entry < count) {
#pragma unroll 4
                for (int other = member; other < count; other += TEAM) number += before(other, entry);
            }
#pragma unroll
            for (int mask = 1; mask < TEAM; mask *= 2) number += __shfl_xor_sync(EVERYONE, number, mask);
            if (entry < count && member == 0) act(entry, number);
        }
    }

    // Emit (rank, index, key) of the `wanted` largest of `count` held keys, ties by lowest index; ranks ascend with the
    // index. False, and nothing emitted, if too many keys lie at the border or are wanted.
    template <class Held, class Emit>
    __device__ __forceinline__ static bool take_largest(Memory& memory, int count, int wanted, const Held& held,
                                                        const Emit& emit) {
        for (int i = threadIdx.x; i < BINS / 4; i += THREADS)
            reinterpret_cast<int4*>(memory.histogram)[i] = make_int4(0, 0, 0, 0);
        if (threadIdx.x == 0) memory.appended = 0;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < KEYS_EACH; k++)
            if (k * THREADS + threadIdx.x < count) atomicAdd(&memory.histogram[Bin::of(held(k))], 1);
        __syncthreads();
        int border = -1, left = 0;  // all are in
        if (count > wanted) {
            find_bin(memory, wanted);
            border = memory.digit, left = wanted - memory.above;
        }
        const bool many = wanted > QUICK_TOP_K || (border >= 0 && memory.histogram[border] > BORDER_KEYS);
        __syncthreads();
        if (many) return false;
        int in = 0, at_border = 0;
#pragma unroll
        for (int k = 0; k < KEYS_EACH; k++) {
            const int bin = k * THREADS + threadIdx.x < count ? Bin::of(held(k)) : -2;
            in += bin > border, at_border += bin == border;
        }
        const int firsts = reserve(&memory.appended, in + (at_border << 16));  // two lists, two halves of a word
        int next = firsts & 0xffff, border_next = firsts >> 16;
#pragma unroll
        for (int k = 0; k < KEYS_EACH; k++) {
            const int i = k * THREADS + threadIdx.x;
            const int bin = i < count ? Bin::of(held(k)) : -2;
            if (bin > border) memory.taken.keys[next] = held(k), memory.taken.indexes[next++] = i;
            if (bin == border) memory.border.keys[border_next] = held(k), memory.border.indexes[border_next++] = i;
        }
        __syncthreads();
        const int sure = memory.appended & 0xffff;
        rank_all(
            memory.appended >> 16,
            [&](int other, int entry) {
                const unsigned theirs = memory.border.keys[other], ours = memory.border.keys[entry];
                return theirs > ours || (theirs == ours && memory.border.indexes[other] < memory.border.indexes[entry]);
            },
            [&](int entry, int better) {
                if (better >= left) return;
                memory.taken.keys[sure + better] = memory.border.keys[entry];
                memory.taken.indexes[sure + better] = memory.border.indexes[entry];
            });
        __syncthreads();
        rank_all(
            min(count, wanted),
            [&](int other, int entry) { return memory.taken.indexes[other] < memory.taken.indexes[entry]; },
            [&](int entry, int rank) { emit(rank, memory.taken.indexes[entry], memory.taken.keys[entry]); });
        __syncthreads();
        return true;
    }
};

}  // namespace largest
}  // namespace kvseek
