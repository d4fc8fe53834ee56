// What selections on the CPU share that choose rows of a region: the heads that need one, their memory, and the choice
// among candidates that have estimates.
//
// `Arguments` are a selection's: requests, rows, table, batch, kv_heads, max_extents, top_k, scaling. `Task`
// is what a selection keeps of a (request, KV head): request, head, length, candidate_count, stride, extents, places,
// estimates, ranks.
#pragma once

#include "extent_rows.h"
#include "kernels/request.h"
#include "phases.h"
#include "simd.h"
#include "top.h"

namespace kvseek {
namespace {

// Of numbers that are handled several at once: with room for whole vectors.
inline int64_t rounded_up(int64_t count) {
    return (count + LANES - 1) / LANES * LANES;
}

// Describe the heads that need retrieval, and return how many they are; short regions are selected whole, at once.
// candidates_of(request) is the number of its candidates.
template <class Arguments, class Task, class Candidates>
int64_t describe_tasks(const Arguments& a, Task* tasks, const Candidates& candidates_of) {
    int64_t count = 0;
    for (int64_t i = 0; i < a.batch * a.kv_heads; i++) {
        const Request& request = a.requests[i / a.kv_heads];
        const int64_t length = request.length;
        if (length <= a.top_k) {
            for (int64_t k = 0; k < a.top_k; k++) a.rows[i * a.top_k + k] = k < length ? static_cast<int32_t>(k) : -1;
            continue;
        }
        Task& task = tasks[count++];
        task = {};
        task.request = i / a.kv_heads, task.head = i % a.kv_heads, task.length = length;
        task.candidate_count = candidates_of(request), task.stride = rounded_up(task.candidate_count);
        task.extents = a.table + request.slot * a.max_extents;
    }
    return count;
}

// Ranks of `count` keys or clusters by the sums of the heads' softmax weights, which take the place of their scores
// [lanes, stride].
template <class Arguments>
void rank_scores(const Arguments& a, float* scores, int lanes, int64_t stride, int64_t count, int32_t* ranks) {
    for (int lane = 0; lane < lanes; lane++) softmax(scores + lane * stride, count, static_cast<float>(a.scaling));
    fold(scores, lanes, stride, count);
    rank_values(scores, count, ranks);
}

// Write the top k of a task's candidates: by their softmax weights, or, of one query, by the estimates themselves.
template <class Arguments, class Task>
void choose_rows(const Arguments& a, const Task& task, int lanes, bool by_estimates = false) {
    int32_t* rows = a.rows + (task.request * a.kv_heads + task.head) * a.top_k;
    if (by_estimates)
        rank_values(task.estimates, task.candidate_count, task.ranks);
    else
        rank_scores(a, task.estimates, lanes, task.stride, task.candidate_count, task.ranks);
    take_largest(task.ranks, task.places, task.candidate_count, a.top_k, rows);
}

// Extents that hold a task's region.
template <class Task>
int64_t extents_of(const Task& task) {
    return (task.length + INDEX_EXTENT - 1) / INDEX_EXTENT;
}

}  // namespace
}  // namespace kvseek
