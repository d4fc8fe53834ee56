// Between the two parts of a step: which keys are worth attending to, and which enter the centroid's list.
//
// A key's value is the largest softmax weight that a head of the group gives it. Its logarithm, the largest of
// score - log-sum-exp, ranks alike and does not run out of small numbers. Ties are cut by lowest place.
#pragma once

#include "host_tasks.h"

namespace kvseek {
namespace {

// Logarithm of the sum of e^score over all recalled keys of a query.
inline float log_sum(const Task& task, int group, int q) {
    float largest = -INFINITE, total = 0.0f;
    for (int unit = 0; unit < task.score_units; unit++) {
        const float unit_largest = task.statistics[int64_t{2} * unit * group + q];
        largest = unit_largest > largest ? unit_largest : largest;
    }
    for (int unit = 0; unit < task.score_units; unit++) {
        const float* statistics = task.statistics + int64_t{2} * unit * group;
        total += statistics[group + q] * exponential(statistics[q] - largest);
    }
    return largest + __builtin_logf(total);
}

void evaluate(const Job& job, Task& task) {
    float sums[MAX_HOST_GROUP];
    for (int q = 0; q < job.group; q++) sums[q] = log_sum(task, job.group, q);
    for (int i = 0; i < task.count; i += LANES) {
        Vec value = load(task.scores + i) - sums[0];
        for (int q = 1; q < job.group; q++) value = maximum(value, load(task.scores + q * task.stride + i) - sums[q]);
        store(task.values + i, value);
    }
}

// Indices of the `wanted` best keys, ascending, into `rows` [stride]; returns their number.
int take_best(const Task& task, int wanted, int32_t* rows) {
    if (wanted < task.count) {
        take_candidates(task.values, task.count, wanted, task.lists, rows);
        return wanted;
    }
    for (int i = 0; i < task.count; i++) rows[i] = i;
    return task.count;
}

// Places of chosen keys, -1 behind them.
inline void write_places(const Task& task, const int32_t* rows, int count, int room, int32_t* to) {
    for (int i = 0; i < room; i++) to[i] = i < count ? task.places[rows[i]] : -1;
}

void rank(const Job& job, Task& task) {
    const HostStep& a = job.a;
    if (task.count > task.chosen || (a.best != nullptr && task.count > a.rho)) evaluate(job, task);
    task.chosen = take_best(task, task.chosen, task.rows);
    if (a.selected != nullptr)
        write_places(task, task.rows, task.chosen, a.top_k,
                     a.selected + (task.request * a.kv_heads + task.head) * a.top_k);
}

// The list of the query as a centroid. Its scratch is rank's, which is done, but for the rows, which are read
// meanwhile.
void list_best(const Job& job, const Task& task) {
    const HostStep& a = job.a;
    const int64_t pair = task.request * a.kv_heads + task.head;
    const int count = take_best(task, task.count < a.rho ? task.count : a.rho, task.best_rows);
    write_places(task, task.best_rows, count, a.rho, a.best + pair * a.rho);
}

}  // namespace
}  // namespace kvseek
