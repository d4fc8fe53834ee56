// The second part of a selection, by the CTA of a task that finished last: the rows that the best pages stand for, and
// where the store holds them.
#pragma once

#include "best.cuh"

namespace kvseek {
namespace prkv {

struct ChooseMemory {
    BestMemory best;
    int held[PAGES];   // page in each frame of the store
    int free[PAGES];   // frames whose page was not selected
    int frame[PAGES];  // frame of each selected page, or -1
    int hit[PAGES];    // whether its rows are there already
};

// Find the selected pages that the store holds, and give the others frames of pages that were not selected, as far as
// those suffice. A page that was selected before the last step may be found too: its rows have not changed.
__device__ __forceinline__ void assign_frames(const SelectArguments& a, const Task& task, int found,
                                              ChooseMemory& memory) {
    const int i = threadIdx.x, room = a.held_pages;
    int* held = a.held + task.list(a) * room;
    if (i < found) {
        for (int c = 0; c < room; ++c)
            if (memory.held[c] == memory.best.pages[i]) memory.frame[i] = c;
        memory.hit[i] = memory.frame[i] >= 0;
        if (memory.hit[i]) memory.held[memory.frame[i]] = -2;  // in use: nobody else looks for it
    }
    __syncthreads();
    int free_frames, misses;
    const bool is_free = i < room && memory.held[i] != -2, missing = i < found && !memory.hit[i];
    const int number = block_prefix_sum<THREADS>(is_free, memory.best.scratch, free_frames);
    if (is_free) memory.free[number] = i;
    const int rank =
        block_prefix_sum<THREADS>(missing, memory.best.scratch, misses);  // its barriers show `free` to all
    if (missing && rank < free_frames) {
        memory.frame[i] = memory.free[rank];
        held[memory.free[rank]] = memory.best.pages[i];
    }
    __syncthreads();
}

// Write the rows of the static set and of the selected pages, and where the store holds them or is to keep them.
__device__ __forceinline__ void write_rows(const SelectArguments& a, const Task& task, int static_rows, int held,
                                           int found, const ChooseMemory& memory) {
    const long long list = static_cast<long long>(task.number) * a.top_k;
    for (int entry = threadIdx.x; entry < a.top_k; entry += THREADS) {
        int chosen = -1, cached = -1, keep = -1;
        if (entry < static_rows) {
            chosen = entry;
            (entry < held ? cached : keep) = entry;
        } else if ((entry - static_rows) / PAGE < found) {
            const int page = (entry - static_rows) / PAGE, inside = (entry - static_rows) % PAGE;
            const int place = memory.best.pages[page] * PAGE + inside;
            if (place < task.request.length) {
                chosen = place;
                const int where = a.held_pages ? memory.frame[page] : -1;
                if (where >= 0) (memory.hit[page] ? cached : keep) = a.static_room + where * PAGE + inside;
            }
        }
        a.rows[list + entry] = chosen;
        if (a.static_held) a.cached[list + entry] = cached, a.keep[list + entry] = keep;
    }
}

__device__ __forceinline__ void choose(const SelectArguments& a, const Task& task, ChooseMemory& memory) {
    const int static_rows = task.static_rows(a), first = static_rows / PAGE, i = threadIdx.x;
    // What the store holds is asked for before the pages are ranked: nobody waits for it then.
    const int held = a.static_held ? a.static_held[task.list(a)] : 0;
    if (i < PAGES)
        memory.frame[i] = -1, memory.held[i] = i < a.held_pages ? a.held[task.list(a) * a.held_pages + i] : -1;
    const int found = best_pages(a, task, first, a.top_k / PAGE - first, memory.best);
    if (i < found) atomicAdd(a.picked + task.entry(a, memory.best.pages[i]), 1);  // nobody waits for it
    if (a.static_held && a.held_pages) assign_frames(a, task, found, memory);
    write_rows(a, task, static_rows, held, found, memory);
    __syncthreads();  // every thread has read what the store held
    if (a.static_held && i == 0) a.static_held[task.list(a)] = static_rows;
}

}  // namespace prkv
}  // namespace kvseek
