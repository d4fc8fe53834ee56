// The k largest of a block's keys, ties by lowest index. All TOP_THREADS threads of the block call these together.
//
// A histogram of the keys' first 12 bits splits them into those that are in, those that are out, and a few at the
// border, which are ranked by comparing all pairs. Should too many lie at the border, digits are sorted out one after
// another.
#pragma once

#include "warp.cuh"

namespace kvseek {
namespace largest {

constexpr int TOP_THREADS = 1024;
constexpr int TOP_WARPS = TOP_THREADS / WARP;
constexpr int KEYS_EACH = 16;                       // that a thread holds in registers
constexpr int HELD_KEYS = KEYS_EACH * TOP_THREADS;  // with more, a block reads keys again and again
constexpr int DIGITS = 256;
constexpr int BINS = 4 * TOP_THREADS;  // of the first histogram: 12 bits
constexpr int BIN_SHIFT = 20;
constexpr int BORDER_KEYS = 1024;  // that are ranked by comparing all pairs
constexpr int QUICK_TOP_K = 1024;  // larger ones take the slow way
constexpr int TEAM = 4;            // threads that rank one entry

// Entries of a list in shared memory: what a key is, and which.
template <int N>
struct List {
    unsigned keys[N];
    int indexes[N];
};

struct TopMemory {
    alignas(16) int histogram[BINS];
    List<BORDER_KEYS> border;
    List<QUICK_TOP_K> taken;
    int partial[TOP_WARPS];
    int digit, above, last, appended;
};

// Count a digit. Neighbouring keys often agree in their first digits: then one thread adds for the warp.
__device__ __forceinline__ void count_digit(int* histogram, unsigned digit, bool counts) {
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

// Find the digit that the `wanted`-th largest key has, among keys that were counted; all threads get it, and how many
// keys have a larger one.
__device__ __forceinline__ void find_digit(TopMemory& memory, int wanted) {
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
__device__ __forceinline__ void take_by_digits(TopMemory& memory, int count, int wanted, const Key& key,
                                               const Emit& emit) {
    unsigned prefix = 0, mask = 0;
    int left = wanted;  // still to take among keys that begin with `prefix`
    const bool all = count <= wanted;
    for (int shift = 24; shift >= 0 && !all; shift -= 8) {
        for (int i = threadIdx.x; i < DIGITS; i += TOP_THREADS) memory.histogram[i] = 0;
        __syncthreads();
        for (int first = 0; first < count; first += TOP_THREADS) {
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
    for (int first = 0; first < count; first += TOP_THREADS) {
        const int i = first + threadIdx.x;
        const unsigned own = i < count ? key(i) : 0;
        const bool better = i < count && (all || own > prefix), equal = i < count && !all && own == prefix;
        const unsigned betters = __ballot_sync(EVERYONE, better), equals = __ballot_sync(EVERYONE, equal);
        if (lane == 0) memory.partial[warp] = __popc(betters) + (__popc(equals) << 16);
        __syncthreads();
        const unsigned before = (1u << lane) - 1;
        int offset = __popc(betters & before) + (__popc(equals & before) << 16), sum = 0;
#pragma unroll
        for (int w = 0; w < TOP_WARPS; w++) {
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
__device__ __forceinline__ int sum_from_here(TopMemory& memory, int value) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int sum = sum_from_here_on(value, lane);
    if (lane == 0) memory.partial[warp] = sum;
    __syncthreads();
    const int later = lane > warp && lane < TOP_WARPS ? memory.partial[lane] : 0;
    return sum + sum_of_warp(later);
}

// The bin of the histogram that the `wanted`-th largest key lies in, and how many keys lie in higher ones.
__device__ __forceinline__ void find_bin(TopMemory& memory, int wanted) {
    static_assert(BINS == 4 * TOP_THREADS && BINS == 1 << (32 - BIN_SHIFT), "a thread reads its bins at once");
    const int4 bins = reinterpret_cast<const int4*>(memory.histogram)[threadIdx.x];
    const int own[4] = {bins.x + bins.y + bins.z + bins.w, bins.y + bins.z + bins.w, bins.z + bins.w, bins.w};
    const int from_here = sum_from_here(memory, own[0]), above = from_here - own[0];
    if (above < wanted && from_here >= wanted) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (above + own[i] < wanted) continue;
            memory.digit = 4 * threadIdx.x + i;
            memory.above = above + (i < 3 ? own[i + 1] : 0);
        }
    }
    __syncthreads();
}

// Reserve `count` entries of a list for this thread and return the first; the order of the threads is arbitrary.
__device__ __forceinline__ int reserve(int* size, int count) {
    const int lane = threadIdx.x % WARP, sum = sum_up_to_here(count, lane);
    int start = 0;
    if (lane == WARP - 1 && sum != 0) start = atomicAdd(size, sum);
    return __shfl_sync(EVERYONE, start, WARP - 1) + sum - count;
}

// For each of `count` entries the number of entries that come before it, by TEAM threads: act(entry, number).
template <class Before, class Act>
__device__ __forceinline__ void rank_all(int count, const Before& before, const Act& act) {
    const int member = threadIdx.x % TEAM;
    for (int first = 0; first < count; first += TOP_THREADS / TEAM) {  // warps stay whole: they exchange numbers
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
__device__ __forceinline__ bool take_largest(TopMemory& memory, int count, int wanted, const Held& held,
                                             const Emit& emit) {
    reinterpret_cast<int4*>(memory.histogram)[threadIdx.x] = make_int4(0, 0, 0, 0);
    if (threadIdx.x == 0) memory.appended = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < KEYS_EACH; k++)
        if (k * TOP_THREADS + threadIdx.x < count) atomicAdd(&memory.histogram[held.keys[k] >> BIN_SHIFT], 1);
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
        const int bin = k * TOP_THREADS + threadIdx.x < count ? static_cast<int>(held.keys[k] >> BIN_SHIFT) : -2;
        in += bin > border, at_border += bin == border;
    }
    const int firsts = reserve(&memory.appended, in + (at_border << 16));  // two lists, two halves of a word
    int next = firsts & 0xffff, border_next = firsts >> 16;
#pragma unroll
    for (int k = 0; k < KEYS_EACH; k++) {
        const int i = k * TOP_THREADS + threadIdx.x;
        const int bin = i < count ? static_cast<int>(held.keys[k] >> BIN_SHIFT) : -2;
        if (bin > border) memory.taken.keys[next] = held.keys[k], memory.taken.indexes[next++] = i;
        if (bin == border) memory.border.keys[border_next] = held.keys[k], memory.border.indexes[border_next++] = i;
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

}  // namespace largest
}  // namespace kvseek
