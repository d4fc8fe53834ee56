// The second part of a selection, by the CTA of a task that finished last: the rows that the best pages stand for.
#pragma once

#include "best.cuh"

namespace kvseek {
namespace prkv {

// Choose and count pages, and write the static rows, then those of the pages that are not static; -1 fills up.
__device__ __forceinline__ void choose(const SelectArguments& a, const Task& task, const Unit& unit,
                                       BestMemory& memory) {
    const int static_rows = task.static_rows(a), i = threadIdx.x;
    const int taken = best_pages(a, task, unit, a.top_k - static_rows, memory);
    int* rows = a.rows + static_cast<long long>(task.number) * a.top_k;
    for (int entry = i; entry < static_rows; entry += THREADS) rows[entry] = task.statics(a)[entry];
    int entry = static_rows, end = static_rows;
    for (int page = 0; page < taken; ++page) {
        entry += page < i ? memory.rows[page] : 0;
        end += memory.rows[page];
    }
    for (int k = end + i; k < a.top_k; k += THREADS) rows[k] = -1;
    if (i >= taken) return;
    atomicAdd(a.picked + task.entry(a, memory.pages[i]), 1);  // nobody waits for it
#pragma unroll 8
    for (int row = 0; row < PAGE; ++row) {
        const int token = task.token(a, memory.pages[i] * PAGE + row);
        if (token >= 0) rows[entry++] = token;
    }
}

}  // namespace prkv
}  // namespace kvseek
