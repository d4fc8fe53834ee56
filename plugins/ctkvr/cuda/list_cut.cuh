// The largest of some entries, by a radix search from the top digit down. No entry occurs twice.
//
// An entry is a word: the high half is a value that compares as an unsigned integer, the low half the complement of a
// place. So entries of equal values rank by lowest place, and a cut through them is the same whatever their order.
#pragma once

namespace kvseek {
namespace ctkvr {

using Entry = unsigned long long;

constexpr int WARP = 32;
constexpr unsigned EVERYONE = ~0u;
constexpr int MOST_WARPS = 32;
constexpr int DIGIT_BITS = 11, BINS = 1 << DIGIT_BITS;

// What the threads of a block share while they search.
struct CutShared {
    int bins[BINS];
    int warp_totals[MOST_WARPS];
    Entry ones[MOST_WARPS], some[MOST_WARPS];  // bits that all, and that some entries of a warp's share have
    int digit, above, inside;                  // where the cut goes through: entries of larger digits, and of this one
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

// Bits in which entries differ, and in `common` those that all have. Starts and ends with a wait for the block.
__device__ __forceinline__ Entry differing_bits(const Entry* entries, int count, Entry& common, CutShared& shared) {
    Entry all = ~Entry(0), some = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) all &= entries[i], some |= entries[i];
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2) {
        all &= __shfl_xor_sync(EVERYONE, all, distance);
        some |= __shfl_xor_sync(EVERYONE, some, distance);
    }
    if (threadIdx.x % WARP == 0) shared.ones[threadIdx.x / WARP] = all, shared.some[threadIdx.x / WARP] = some;
    __syncthreads();
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / WARP; ++warp)
        all &= shared.ones[warp], some |= shared.some[warp];
    common = all;
    return all ^ some;
}

// The bound that at least `keep` and at most `keep + slack` of entries[0 .. count) reach; count >= keep >= 1.
//
// Every thread of the block calls it, with the same arguments. What other threads of the block wrote to the entries
// before the call is seen. A digit begins at the first bit in which entries differ, so that it tells them apart.
__device__ __noinline__ Entry find_cut(const Entry* entries, int count, int keep, int slack, CutShared& shared) {
    Entry prefix;  // the bits decided so far
    const Entry differing = differing_bits(entries, count, prefix, shared);
    Entry mask = ~differing;
    int need = keep;
    while (~mask) {
        const int high = 64 - __clzll(static_cast<long long>(~mask)), low = max(high - DIGIT_BITS, 0);
        const int bins = 1 << (high - low);
        for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) shared.bins[bin] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const Entry entry = entries[i];
            if ((entry & mask) == prefix) atomicAdd(&shared.bins[static_cast<int>(entry >> low) & (bins - 1)], 1);
        }
        __syncthreads();
        find_digit(shared, bins, need);
        const Entry digit = static_cast<Entry>(bins - 1) << low;
        prefix = (prefix & ~digit) | static_cast<Entry>(shared.digit) << low;
        mask |= digit;
        need -= shared.above;
        const int inside = shared.inside;
        __syncthreads();  // before the next digit's counts
        if (inside - need <= slack) break;
    }
    return prefix;
}

// Copy the entries that reach `bound` to `kept`, in any order; returns how many. `kept` may be `entries`: what a round
// writes lies before what later rounds read. The caller synchronises before it reads them; what it wrote is seen.
__device__ __noinline__ int keep_entries(const Entry* entries, int count, Entry bound, Entry* kept, CutShared& shared) {
    __syncthreads();
    if (threadIdx.x == 0) shared.kept = 0;
    for (int first = 0; first < count; first += blockDim.x) {
        const int at = first + static_cast<int>(threadIdx.x);
        const Entry own = at < count ? entries[at] : 0;
        const bool wanted = at < count && own >= bound;
        __syncthreads();  // everyone has read this round's entries
        const int up_to_lane = sum_up_to_lane(wanted);
        int next = 0;
        if (threadIdx.x % WARP == WARP - 1 && up_to_lane) next = atomicAdd(&shared.kept, up_to_lane);
        next = __shfl_sync(EVERYONE, next, WARP - 1) + up_to_lane - wanted;
        if (wanted) kept[next] = own;
    }
    __syncthreads();
    return shared.kept;
}

}  // namespace ctkvr
}  // namespace kvseek
