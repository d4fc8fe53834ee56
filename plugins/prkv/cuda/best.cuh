// The best pages of a task, by the CTA that finished last.
//
// Ranking all pages a few times over, as a radix select does, costs one CTA more than scoring them costs all others. So
// each thread ranks its share once and keeps the largest key. The n-th largest of those maxima is a limit that at least
// n keys reach, and few more: only what threads with such a maximum ranked is looked at again.
#pragma once

#include "kernels/cuda/block_sort.cuh"
#include "select.cuh"

namespace kvseek {
namespace prkv {

constexpr int GROUPS = PAGES <= 32 ? 128 : THREADS;  // of threads: the more, the fewer keys reach the limit
constexpr int TEAM = THREADS / GROUPS;               // threads of a group, and threads that rank a maximum
constexpr int AT_ONCE = LANES <= 4 ? 8 : (32 + LANES - 1) / LANES;  // pages whose scores a thread loads at a time
constexpr int NOT_TAKEN = 0x7fffffff;                               // beyond all pages
constexpr int CANDIDATES = 1024;                                    // keys that may reach the limit; PAGES at least

struct BestMemory {
    NthMemory<8> nth;
    float normaliser[LANES];  // log2 of what the softmax divides by
    SortKey maxima[THREADS];  // of each thread's keys
    SortKey groups[GROUPS];   // of each group's keys
    SortKey limit;
    int owners[THREADS];  // threads whose maximum reaches the limit
    int owner_count, candidate_count;
    SortKey candidates[CANDIDATES];
    int found[PAGES];  // the best pages, the best one first
    int free[PAGES];   // rows of these that are not static
    int taken[PAGES];  // those of `found` whose rows have room, or NOT_TAKEN
    int pages[PAGES];  // selected pages, ascending
    int rows[PAGES];   // their rows that are not static
};

__device__ __forceinline__ void add_normalisers(const PowerSum* parts, int count, BestMemory& memory) {
    const int lane = threadIdx.x % 32;
    for (int query = threadIdx.x / 32; query < LANES; query += WARPS) {
        PowerSum sum;
        for (int i = lane; i < count; i += 32) sum.add(PowerSum::read(parts + i * LANES + query));
        sum.add_lanes(WARP - 1);
        if (lane == 0) memory.normaliser[query] = sum.logarithm();
    }
    __syncthreads();
}

// Scores of a page for each lane, as other CTAs wrote them.
struct Scores {
    float of[LANES];

    __device__ __forceinline__ void load(const float* from) {
        if constexpr (LANES % 4 == 0) {
#pragma unroll
            for (int q = 0; q < LANES / 4; ++q) {
                const float4 four = __ldcg(reinterpret_cast<const float4*>(from) + q);
                of[4 * q] = four.x, of[4 * q + 1] = four.y, of[4 * q + 2] = four.z, of[4 * q + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int q = 0; q < LANES; ++q) of[q] = __ldcg(from + q);
        }
    }

    // What a page is ranked by: the sum of its softmax weights. The same bits each time.
    __device__ __forceinline__ SortKey key(int page, const float* normaliser, float exponent_scale) const {
        float value = 0.0f;
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane)
            value += power_of_two(__fmaf_rn(of[lane], exponent_scale, -normaliser[lane]));
        return sort_key(value, page);
    }
};

// Keys of the pages from `first` to `last` - 1; a thread has each THREADS-th one from `base` on.
struct Ranking {
    const SelectArguments& a;
    const Task& task;
    const float* normaliser;
    int first, last, base;

    __device__ __forceinline__ int count() const { return last - first; }
    __device__ __forceinline__ SortKey key_of(int page) const {
        Scores scores;
        scores.load(a.scores + task.entry(a, page) * LANES);
        return scores.key(page, normaliser, a.scaling * LOG2_E);
    }
    // As nth_largest reads them.
    __device__ __forceinline__ SortKey operator[](int i) const { return key_of(first + i); }

    // The scores of AT_ONCE pages of a thread; past the end the last page's again.
    __device__ __forceinline__ void load(Scores (&scores)[AT_ONCE], int page) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            scores[i].load(a.scores + task.entry(a, min(page + i * THREADS, last - 1)) * LANES);
    }

    // The largest key of this thread; 0 if it has no page. `scores` are those of its first pages.
    __device__ __forceinline__ SortKey largest_own(Scores (&scores)[AT_ONCE]) const {
        SortKey best = 0;
        for (int page = base + static_cast<int>(threadIdx.x); page < last; page += AT_ONCE * THREADS) {
            Scores next[AT_ONCE];
            load(next, page + AT_ONCE * THREADS);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int own = page + i * THREADS;
                const SortKey key = scores[i].key(own, normaliser, a.scaling * LOG2_E);
                if (own >= first && own < last && key > best) best = key;
                scores[i] = next[i];
            }
        }
        return best;
    }
};

// A key that `wanted` keys or more reach: the wanted-th largest maximum of a group of threads. There are more pages.
__device__ __forceinline__ SortKey limit_of(SortKey best, int wanted, BestMemory& memory) {
    if constexpr (GROUPS == THREADS) return nth_largest<THREADS>(memory.maxima, THREADS, wanted, memory.nth);
    if (threadIdx.x < GROUPS) {
        SortKey largest = best;
#pragma unroll
        for (int i = 1; i < TEAM; ++i) {
            const SortKey other = memory.maxima[i * GROUPS + threadIdx.x];
            largest = other > largest ? other : largest;
        }
        memory.groups[threadIdx.x] = largest;
    }
    __syncthreads();
    const SortKey own = memory.groups[threadIdx.x / TEAM];
    int larger = 0;
#pragma unroll 8
    for (int i = threadIdx.x % TEAM; i < GROUPS; i += TEAM) larger += memory.groups[i] > own;
#pragma unroll
    for (int mask = 1; mask < TEAM; mask *= 2) larger += __shfl_xor_sync(EVERYONE, larger, mask);
    if (larger == wanted - 1) memory.limit = own;  // the whole team writes the same
    __syncthreads();
    return memory.limit;
}

// Collect the keys that reach `limit`, in any order; returns how many there are, of which CANDIDATES at most are kept.
__device__ __forceinline__ int collect(const Ranking& ranking, SortKey best, SortKey limit, BestMemory& memory) {
    if (threadIdx.x == 0) memory.owner_count = memory.candidate_count = 0;
    __syncthreads();
    if (best >= limit && best != 0) memory.owners[atomicAdd(&memory.owner_count, 1)] = threadIdx.x;
    __syncthreads();
    const int owners = memory.owner_count, each = (ranking.last - ranking.base + THREADS - 1) / THREADS;
#pragma unroll 2
    for (int i = threadIdx.x; i < owners * each; i += THREADS) {
        const int page = ranking.base + memory.owners[i / each] + i % each * THREADS;
        if (page < ranking.first || page >= ranking.last) continue;
        const SortKey key = ranking.key_of(page);
        if (key < limit) continue;
        const int number = atomicAdd(&memory.candidate_count, 1);
        if (number < CANDIDATES) memory.candidates[number] = key;
    }
    __syncthreads();
    return memory.candidate_count;
}

// The `wanted` best pages into memory.found, the best one first, and their rows that are not static into memory.free;
// returns how many there are. `best` is the largest key of this thread.
__device__ __forceinline__ int rank_pages(const Ranking& ranking, SortKey best, int wanted, BestMemory& memory) {
    SortKey limit = ranking.count() > wanted ? limit_of(best, wanted, memory) : 0;
    int reached = collect(ranking, best, limit, memory);
    if (reached > CANDIDATES) {  // pages that one thread ranks resemble each other
        limit = nth_largest<THREADS, 8, Ranking>(ranking, ranking.count(), wanted, memory.nth);
        reached = collect(ranking, best, limit, memory);
    }
    for (int i = threadIdx.x; i < reached; i += THREADS) {
        int larger = 0;
        for (int other = 0; other < reached; ++other) larger += memory.candidates[other] > memory.candidates[i];
        if (larger < wanted) memory.found[larger] = sort_key_index(memory.candidates[i]);
    }
    __syncthreads();
    const int found = min(reached, wanted);
    if (threadIdx.x < found) {
        int free = 0;
#pragma unroll 8
        for (int row = 0; row < PAGE; ++row)
            free += ranking.task.token(ranking.a, memory.found[threadIdx.x] * PAGE + row) >= 0;
        memory.free[threadIdx.x] = free;
    }
    __syncthreads();
    return found;
}

// The pages that are taken: the best ones whose rows that are not static are at most `room`. Ascending, into
// memory.pages and memory.rows; returns how many there are.
__device__ __forceinline__ int best_pages(const SelectArguments& a, const Task& task, const Unit& unit, int room,
                                          BestMemory& memory) {
    if (room < 1) return 0;  // all rows are static
    const int first = task.first_page(a), most = a.top_k / PAGE, i = threadIdx.x;
    const Ranking ranking{a, task, memory.normaliser, first, task.pages(), first & ~31};
    Scores scores[AT_ONCE];  // asked for together with the normalisers
    ranking.load(scores, ranking.base + threadIdx.x);
    add_normalisers(a.normalisers + (blockIdx.y * gridDim.x + unit.first) * LANES, unit.parts, memory);
    const SortKey best = ranking.largest_own(scores);
    memory.maxima[threadIdx.x] = best;
    __syncthreads();
    int found, upto, wanted = min(most, room / PAGE * 4 / 3 + 1);  // enough, unless many of their rows are static
    for (;; wanted = most) {
        found = rank_pages(ranking, best, wanted, memory);
        int all = 0;
        upto = 0;  // rows of the pages up to this thread's
        for (int other = 0; other < found; ++other) {
            all += memory.free[other];
            upto += other <= i ? memory.free[other] : 0;
        }
        if (all > room || found < wanted || wanted == most) break;  // the same for all threads
    }
    if (i < found) memory.taken[i] = upto <= room && memory.free[i] > 0 ? memory.found[i] : NOT_TAKEN;
    __syncthreads();
    int taken = 0, before = 0;
    for (int other = 0; other < found; ++other) {
        taken += memory.taken[other] != NOT_TAKEN;
        before += i < found && memory.taken[other] < memory.taken[i];
    }
    if (i < found && memory.taken[i] != NOT_TAKEN)
        memory.pages[before] = memory.taken[i], memory.rows[before] = memory.free[i];
    __syncthreads();
    return taken;
}

}  // namespace prkv
}  // namespace kvseek
