// The second part of a selection, by the CTA of a task that finished last: the rows that the best pages stand for.
#pragma once

#include "best.cuh"

namespace kvseek {
namespace prkv {

// Write the places of the static set and of the selected pages.
__device__ __forceinline__ void write_rows(const SelectArguments& a, const Task& task, int static_rows, int found,
                                           const BestMemory& best) {
    const long long list = static_cast<long long>(task.number) * a.top_k;
    for (int entry = threadIdx.x; entry < a.top_k; entry += THREADS) {
        int chosen = -1;
        if (entry < static_rows) {
            chosen = entry;
        } else if ((entry - static_rows) / PAGE < found) {
            const int place = best.pages[(entry - static_rows) / PAGE] * PAGE + (entry - static_rows) % PAGE;
            if (place < task.request.length) chosen = place;
        }
        a.rows[list + entry] = chosen;
    }
}

__device__ __forceinline__ void choose(const SelectArguments& a, const Task& task, BestMemory& memory) {
    const int static_rows = task.static_rows(a), first = static_rows / PAGE, i = threadIdx.x;
    const int found = best_pages(a, task, first, a.top_k / PAGE - first, memory);
    if (i < found) atomicAdd(a.picked + task.entry(a, memory.pages[i]), 1);  // nobody waits for it
    write_rows(a, task, static_rows, found, memory);
}

}  // namespace prkv
}  // namespace kvseek
