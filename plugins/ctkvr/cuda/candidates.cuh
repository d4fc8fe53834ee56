// What a query recalls: the lists of the nearest centroids and the newest places, each place once, in ascending order.
//
// One bit in shared memory stands for each place of the region. Setting bits removes what several lists share, and
// counting them gives every place its rank without a sort. All blocks of a task do this, each for the ranks that it
// scores: the lists come from the L2 cache, and one kernel less waits for another.
#pragma once

#include "kernels/cuda/block_sort.cuh"
#include "step.cuh"

namespace kvseek {
namespace ctkvr {
namespace decode {

constexpr int RECALL_THREADS = 512;
constexpr int RECALL_WARPS = RECALL_THREADS / WARP;
constexpr int MOST_CENTROIDS = 2048;  // config.py
constexpr int COSINES_EACH = MOST_CENTROIDS / RECALL_THREADS;
constexpr int PLACES_AT_ONCE = 10;  // of lists, that a thread has on their way: 5,120 of a block

struct RecallMemory {
    SortKey largest[2][RECALL_WARPS];
    int probed[MOST_CENTROIDS];
    int sums[RECALL_WARPS];
};

// Bits of a region of `tokens` places, and of which warp counts which of them.
struct PlaceBits {
    unsigned* words;
    int tokens, count;  // of words
    int begin, end;     // words of this thread's warp

    __device__ __forceinline__ PlaceBits(unsigned* words, int tokens) : words(words), tokens(tokens) {
        constexpr int STEP = RECALL_WARPS * WARP;
        count = (tokens + 31) / 32;
        const int share = (count + STEP - 1) / STEP * WARP;
        begin = min(static_cast<int>(threadIdx.x / WARP) * share, count);
        end = min(begin + share, count);
    }

    __device__ __forceinline__ void clear() const {
        for (int i = threadIdx.x; i < count; i += RECALL_THREADS) words[i] = 0;
    }
    __device__ __forceinline__ void set(int place) const {  // nothing for -1
        if (static_cast<unsigned>(place) < static_cast<unsigned>(tokens))
            atomicOr(words + place / 32, 1u << place % 32);
    }
    // All places from `first` on.
    __device__ __forceinline__ void set_from(int first) const {
        if (first >= tokens) return;
        for (int i = first / 32 + threadIdx.x; i < count; i += RECALL_THREADS) {
            unsigned bits = ~0u;
            if (i == first / 32) bits <<= first % 32;
            if (i == count - 1) bits &= ~0u >> (31 - (tokens - 1) % 32);
            atomicOr(words + i, bits);
        }
    }

    // Set bits before those of this warp, and all of them. Barriers must lie before this and after it.
    __device__ __forceinline__ int ranks(int* sums, int& all) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        int own = 0;
        for (int i = begin + lane; i < end; i += WARP) own += __popc(words[i]);
        own = __reduce_add_sync(EVERYONE, own);
        if (lane == 0) sums[warp] = own;
        __syncthreads();
        const int other = lane < RECALL_WARPS ? sums[lane] : 0;
        all = __reduce_add_sync(EVERYONE, other);
        return __reduce_add_sync(EVERYONE, lane < warp ? other : 0);
    }

    // Write the places with ranks first .. last - 1 to places[rank]; `rank` is that of this warp's first place.
    __device__ __forceinline__ void write(int rank, int first, int last, int* places) const {
        const int lane = threadIdx.x % WARP;
        for (int i = begin; i < end && rank < last; i += WARP) {  // the same for all lanes
            unsigned word = i + lane < end ? words[i + lane] : 0;
            int sum = __popc(word);  // of this lane and those before it
            const int own = sum;
#pragma unroll
            for (int distance = 1; distance < WARP; distance *= 2) {
                const int other = __shfl_up_sync(EVERYONE, sum, distance);
                if (lane >= distance) sum += other;
            }
            for (int at = rank + sum - own; word != 0; word &= word - 1, ++at)
                if (at >= first && at < last) places[at] = (i + lane) * 32 + __ffs(static_cast<int>(word)) - 1;
            rank += __shfl_sync(EVERYONE, sum, WARP - 1);
        }
    }
};

// The largest key of the block, in every thread. `turn` differs from that of the call before by one.
__device__ __forceinline__ SortKey largest_of_block(SortKey key, int turn, RecallMemory& memory) {
    const int lane = threadIdx.x % WARP;
    auto reduce = [&] {
#pragma unroll
        for (int mask = 1; mask < WARP; mask *= 2) {
            const SortKey other = __shfl_xor_sync(EVERYONE, key, mask);
            key = other > key ? other : key;
        }
    };
    reduce();
    SortKey* largest = memory.largest[turn % 2];
    if (lane == 0) largest[threadIdx.x / WARP] = key;
    __syncthreads();  // one is enough: the call after the next writes here, after the next one's barrier
    key = lane < RECALL_WARPS ? largest[lane] : 0;
    reduce();
    return key;
}

// The nearest centroids into memory.probed, ties by lowest, first as many as are kept for those of the prompt; returns
// how many. A barrier must follow.
__device__ __forceinline__ int probe_centroids(const StepArguments& a, const Task& task, RecallMemory& memory) {
    const int written = a.written[task.list(a.kv_heads)], valid = min(written, a.ring), wanted = min(a.probes, valid);
    if (wanted == valid) {  // all of them, in any order
        for (int i = threadIdx.x; i < valid; i += RECALL_THREADS) memory.probed[i] = i;
        return wanted;
    }
    const float* cosines = a.cosines + static_cast<long long>(task.number) * a.ring;
    // Those of the prompt that the ring still holds are `oldest` .. `prompted` - 1.
    const int oldest = max(0, written - a.ring), prompted = a.prompted[task.request.slot];
    const int kept = min(a.prompt_probes, max(0, prompted - oldest));
    SortKey own[COSINES_EACH];
#pragma unroll
    for (int i = 0; i < COSINES_EACH; ++i) {
        const int centroid = threadIdx.x + i * RECALL_THREADS;
        own[i] = centroid < valid ? sort_key(cosines[centroid], centroid) : 0;
    }
    for (int turn = 0; turn < wanted; ++turn) {
        SortKey best = 0;
#pragma unroll
        for (int i = 0; i < COSINES_EACH; ++i) {
            const int centroid = threadIdx.x + i * RECALL_THREADS;
            const bool eligible = turn >= kept || (centroid >= oldest && centroid < prompted);
            if (eligible && own[i] > best) best = own[i];
        }
        const SortKey found = largest_of_block(best, turn, memory);
        if (threadIdx.x == 0) memory.probed[turn] = sort_key_index(found);
#pragma unroll
        for (int i = 0; i < COSINES_EACH; ++i) own[i] = own[i] == found ? 0 : own[i];
    }
    return wanted;
}

// Set the bits of all that the query recalls (ReferenceIndex.recall); of a small region, all bits. Barriers must lie
// before this and after it.
__device__ __forceinline__ void set_recalled(const StepArguments& a, const Task& task, const PlaceBits& bits,
                                             int probed, const int* centroids) {
    const int tokens = bits.tokens;
    const int* lists = a.lists + task.list(a.kv_heads) * a.ring * a.width;
    const int total = probed * a.width;
    for (int base = 0; base < total; base += RECALL_THREADS * PLACES_AT_ONCE) {
        int places[PLACES_AT_ONCE];
#pragma unroll
        for (int j = 0; j < PLACES_AT_ONCE; ++j) {
            const int i = base + j * RECALL_THREADS + threadIdx.x, list = i / a.width;
            places[j] = i < total ? lists[centroids[list] * a.width + i - list * a.width] : -1;
        }
#pragma unroll
        for (int j = 0; j < PLACES_AT_ONCE; ++j) bits.set(places[j]);
    }
    bits.set_from(tokens <= a.top_k ? 0 : max(a.listed[task.request.slot], tokens - a.recent));
}

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek
