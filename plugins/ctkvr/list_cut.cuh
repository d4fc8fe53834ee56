// The largest entries of an array in shared memory, by a radix search from the top digit down. No entry occurs twice.
//
// An entry is a word: bits 32.. are a value that compares as an unsigned integer, the low half is the complement of a
// place. So entries of equal values rank by lowest place, and a cut through them is the same whatever their order.
#pragma once

namespace kvseek {
namespace ctkvr {

using Entry = unsigned long long;

constexpr int WARP = 32;
constexpr unsigned EVERYONE = ~0u;
constexpr int MOST_THREADS = 512;
constexpr int DIGIT_BITS = 11, BINS = 1 << DIGIT_BITS;
constexpr Entry NO_ENTRY = 0;  // no entry is 0: places are less than 2^32 - 1

// What the threads of a block share while they search.
struct CutShared {
    int bins[BINS];
    int warp_totals[MOST_THREADS / WARP];
    int digit, above, inside;  // where the cut goes through: entries of larger digits, and of this one
    int kept;
};

__device__ __forceinline__ Entry make_entry(unsigned value, int place) {
    return static_cast<Entry>(value) << 32 | ~static_cast<unsigned>(place);
}
__device__ __forceinline__ int place_of(Entry entry) {
    return static_cast<int>(~static_cast<unsigned>(entry));
}

// Sum over this lane and those below it.
__device__ __forceinline__ int sum_up_to_lane(int count) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const int below = __shfl_up_sync(EVERYONE, count, distance);
        if (lane >= distance) count += below;
    }
    return count;
}

// Find the digit among `bins` counted ones such that fewer than `need` entries have larger digits, and at least `need`
// have it or a larger one. There are at least `need` entries.
__device__ __forceinline__ void find_digit(CutShared& shared, int bins, int need) {
    const int threads = blockDim.x, per_thread = (bins + threads - 1) / threads;
    const int first = bins - 1 - static_cast<int>(threadIdx.x) * per_thread;  // this thread's largest digit
    int own = 0;
    for (int i = 0; i < per_thread && first - i >= 0; ++i) own += shared.bins[first - i];
    const int up_to_lane = sum_up_to_lane(own);
    if (threadIdx.x % WARP == WARP - 1) shared.warp_totals[threadIdx.x / WARP] = up_to_lane;
    __syncthreads();
    int above = up_to_lane - own;
    for (int warp = 0; warp < static_cast<int>(threadIdx.x) / WARP; ++warp) above += shared.warp_totals[warp];
    if (above < need && above + own >= need) {  // in one thread
        int digit = first;
        while (above + shared.bins[digit] < need) above += shared.bins[digit--];
        shared.digit = digit;
        shared.above = above;
        shared.inside = shared.bins[digit];
    }
    __syncthreads();
}

// The bound that at least `keep` and at most `keep + slack` of entries[0 .. count) reach; NO_ENTRYs do not count.
//
// Every thread of the block calls it, with the same arguments; there are at least `keep` >= 1 entries. Their bits from
// `top` on are zero and the complements of their places differ in the low `place_bits` bits only, at least 1. What
// other threads wrote to the entries before the call is seen.
__device__ __noinline__ Entry find_cut(const Entry* entries, int count, int keep, int slack, int top, int place_bits,
                                       CutShared& shared) {
    Entry prefix = 0, mask = 0;  // the bits decided so far
    int need = keep, high = top;
    while (true) {
        if (high == 32) {  // values are equal: on to the places, past the bits that are ones in all of them
            const Entry ones = (Entry(1) << 32) - (Entry(1) << place_bits);
            prefix |= ones;
            mask |= ones;
            high = place_bits;
        }
        const int low = max(high - DIGIT_BITS, high > 32 ? 32 : 0), bins = 1 << (high - low);
        __syncthreads();  // the last round, or the caller, may still read what is cleared
        for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) shared.bins[bin] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const Entry entry = entries[i];
            if (entry != NO_ENTRY && (entry & mask) == prefix)
                atomicAdd(&shared.bins[static_cast<int>(entry >> low) & (bins - 1)], 1);
        }
        __syncthreads();
        find_digit(shared, bins, need);
        prefix |= static_cast<Entry>(shared.digit) << low;
        mask |= static_cast<Entry>(bins - 1) << low;
        need -= shared.above;
        if (shared.inside - need <= slack || low == 0) return prefix;
        high = low;
    }
}

// Copy the entries that reach `bound` to `kept`, in any order; returns how many. `kept` may be `entries`: what a round
// writes lies before what later rounds read. The caller synchronises before it reads them; what it wrote is seen.
__device__ __noinline__ int keep_entries(const Entry* entries, int count, Entry bound, Entry* kept, CutShared& shared) {
    constexpr int EACH = 4;  // entries of a thread in a round
    const int threads = blockDim.x;
    __syncthreads();
    if (threadIdx.x == 0) shared.kept = 0;
    for (int first = 0; first < count; first += EACH * threads) {
        Entry own[EACH];
        int wanted = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = first + i * threads + static_cast<int>(threadIdx.x);
            own[i] = at < count ? entries[at] : NO_ENTRY;
            if (own[i] < bound) own[i] = NO_ENTRY;
            wanted += own[i] != NO_ENTRY;
        }
        __syncthreads();  // everyone has read this round's entries
        const int up_to_lane = sum_up_to_lane(wanted);
        int place = 0;
        if (threadIdx.x % WARP == WARP - 1 && up_to_lane) place = atomicAdd(&shared.kept, up_to_lane);
        place = __shfl_sync(EVERYONE, place, WARP - 1) + up_to_lane - wanted;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (own[i] != NO_ENTRY) kept[place++] = own[i];
    }
    __syncthreads();
    return shared.kept;
}

}  // namespace ctkvr
}  // namespace kvseek
