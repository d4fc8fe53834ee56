// The second part of a selection, by the CTA of a task that finished last: the best pages, and the rows they stand for.
#pragma once

#include "plugins/common/block_sort.cuh"
#include "select.cuh"

namespace kvseek {
namespace prkv {

struct ChooseMemory {
    NthMemory<8> nth;
    int scratch[33];
    int appended;
    float normaliser[LANES];  // log2 of what the softmax divides by
    int found[PAGES];         // selected pages, in any order
    int pages[PAGES];         // the same, ascending
    int held[PAGES];          // page in each place of the store
    int free[PAGES];          // places of the store whose page was not selected
    int place[PAGES];         // place of each selected page in the store, or -1
    int hit[PAGES];           // whether its rows are there already
};

// Ranks of the pages that are not static, as nth_largest reads them: page first + i is number i.
struct Ranks {
    const SelectArguments& a;
    const Task& task;
    unsigned* shared;  // null: too many of them, they lie in global memory
    int first;

    __device__ __forceinline__ unsigned& at(int i) const {
        return shared ? shared[i] : a.ranks[task.entry(a, first + i)];
    }
    __device__ __forceinline__ SortKey operator[](int i) const {
        return static_cast<SortKey>(at(i)) << 32 | ~static_cast<unsigned>(first + i);
    }
};

__device__ __forceinline__ void add_normalisers(const SelectArguments& a, const Task& task, ChooseMemory& memory) {
    const int lane = threadIdx.x % 32, chunks = gridDim.x;
    const float2* parts = a.normalisers + static_cast<long long>(task.number) * chunks * LANES;
    for (int query = threadIdx.x / 32; query < LANES; query += WARPS) {
        PowerSum sum;
        for (int i = lane; i < chunks; i += 32) {
            const float2 part = __ldcg(parts + i * LANES + query);
            sum.add(part.x, part.y);
        }
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) sum.add_lane(mask);
        if (lane == 0) memory.normaliser[query] = sum.largest + log2f(sum.sum);
    }
    __syncthreads();
}

// What a page is ranked by: its bound, or the mean or the largest of its softmax weights.
__device__ __forceinline__ unsigned rank_of(const float (&bounds)[LANES], const float* normaliser,
                                            float exponent_scale) {
    if constexpr (REDUCTION == MEAN) return ordered_bits(bounds[0]);
    float value = 0.0f;
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
        const float weight = power_of_two(bounds[lane] * exponent_scale - normaliser[lane]);
        value = REDUCTION == MAX ? fmaxf(value, weight) : value + weight;
    }
    return ordered_bits(value);
}

__device__ __forceinline__ void rank_pages(const SelectArguments& a, const Task& task, const Ranks& ranks, int count,
                                           const ChooseMemory& memory) {
    const float exponent_scale = a.scaling * LOG2_E;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const float* from = a.scores + task.entry(a, ranks.first + i) * LANES;
        float bounds[LANES];
        if constexpr (LANES % 4 == 0) {
#pragma unroll
            for (int q = 0; q < LANES / 4; ++q) {
                const float4 four = __ldcg(reinterpret_cast<const float4*>(from) + q);
                bounds[4 * q] = four.x, bounds[4 * q + 1] = four.y;
                bounds[4 * q + 2] = four.z, bounds[4 * q + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int q = 0; q < LANES; ++q) bounds[q] = __ldcg(from + q);
        }
        ranks.at(i) = rank_of(bounds, memory.normaliser, exponent_scale);
    }
}

// The `wanted` best pages, ascending, into memory.pages; returns how many there are.
__device__ __forceinline__ int best_pages(const Ranks& ranks, int count, int wanted, ChooseMemory& memory) {
    if (threadIdx.x == 0) memory.appended = 0;
    const SortKey last = nth_largest<THREADS, 8, Ranks>(ranks, count, wanted, memory.nth);  // 0: all of them
    for (int i = threadIdx.x; i < count; i += THREADS)
        if (ranks[i] >= last) memory.found[atomicAdd(&memory.appended, 1)] = ranks.first + i;
    __syncthreads();
    const int found = memory.appended;
    if (threadIdx.x < found) {
        const int own = memory.found[threadIdx.x];
        int before = 0;
        for (int i = 0; i < found; ++i) before += memory.found[i] < own;
        memory.pages[before] = own;
    }
    __syncthreads();
    return found;
}

// Find the selected pages that the store holds, and give the others places of pages that were not selected, as far as
// those suffice. A page that was selected before the last step may be found too: its rows have not changed.
__device__ __forceinline__ void assign_places(const SelectArguments& a, const Task& task, int found,
                                              ChooseMemory& memory) {
    const int i = threadIdx.x, room = a.held_pages;
    int* held = a.held + task.list(a) * room;
    if (i < PAGES) memory.place[i] = -1, memory.held[i] = i < room ? held[i] : -1;
    __syncthreads();
    if (i < found) {
        for (int c = 0; c < room; ++c)
            if (memory.held[c] == memory.pages[i]) memory.place[i] = c;
        memory.hit[i] = memory.place[i] >= 0;
        if (memory.hit[i]) memory.held[memory.place[i]] = -2;  // in use: nobody else looks for it
    }
    __syncthreads();
    int free_places, misses;
    const bool is_free = i < room && memory.held[i] != -2, missing = i < found && !memory.hit[i];
    const int number = block_prefix_sum<THREADS>(is_free, memory.scratch, free_places);
    if (is_free) memory.free[number] = i;
    const int rank = block_prefix_sum<THREADS>(missing, memory.scratch, misses);  // its barriers show `free` to all
    if (missing && rank < free_places) {
        memory.place[i] = memory.free[rank];
        held[memory.free[rank]] = memory.pages[i];
    }
    __syncthreads();
}

// Write the rows of the static set and of the selected pages, and where the store holds them or is to keep them.
__device__ __forceinline__ void write_rows(const SelectArguments& a, const Task& task, int static_rows, int found,
                                           const ChooseMemory& memory) {
    const int held = a.static_held ? a.static_held[task.list(a)] : 0;
    const long long list = static_cast<long long>(task.number) * a.top_k;
    for (int entry = threadIdx.x; entry < a.top_k; entry += THREADS) {
        int row = -1, cached = -1, keep = -1;
        if (entry < static_rows) {
            row = entry;
            (entry < held ? cached : keep) = entry;
        } else if ((entry - static_rows) / PAGE < found) {
            const int page = (entry - static_rows) / PAGE, inside = (entry - static_rows) % PAGE;
            const int place = memory.pages[page] * PAGE + inside;
            if (place < task.request.length) {
                row = place;
                const int where = a.held_pages ? memory.place[page] : -1;
                if (where >= 0) (memory.hit[page] ? cached : keep) = a.static_room + where * PAGE + inside;
            }
        }
        a.rows[list + entry] = row;
        if (a.static_held) a.cached[list + entry] = cached, a.keep[list + entry] = keep;
    }
}

__device__ __forceinline__ void choose(const SelectArguments& a, const Task& task, ChooseMemory& memory,
                                       unsigned* shared_ranks) {
    const int static_rows = task.static_rows(a), first = static_rows / PAGE, count = task.pages() - first;
    const Ranks ranks{a, task, count <= SHARED_PAGES ? shared_ranks : nullptr, first};
    if (REDUCTION != MEAN) add_normalisers(a, task, memory);
    rank_pages(a, task, ranks, count, memory);
    const int found = best_pages(ranks, count, a.top_k / PAGE - first, memory);
    if (a.static_held && a.held_pages) assign_places(a, task, found, memory);
    write_rows(a, task, static_rows, found, memory);
    if (a.picked && threadIdx.x < found) a.picked[task.entry(a, memory.pages[threadIdx.x])] += 1;
    __syncthreads();  // static_held has been read
    if (a.static_held && threadIdx.x == 0) a.static_held[task.list(a)] = static_rows;
}

}  // namespace prkv
}  // namespace kvseek
