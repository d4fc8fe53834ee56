// First part of a step with codes: the scores of the recalled keys are estimates from nested key codes
// (kernels/reference/codes/key_codes.py).
#pragma once

#include "host_score.h"
#include "kernels/cpu/codes/rerank.h"

namespace kvseek {
namespace {

static_assert(MAX_HOST_GROUP <= MAX_QUERIES && MAX_HOST_DIM <= MAX_PADDED_DIM, "estimate.h has room for a group");
static_assert(SCORE_UNIT == ESTIMATE_KEYS, "a unit of scores is one of estimates");

// A task as estimate_candidates knows it.
struct Recalled {
    int64_t head, candidate_count, stride;
    const int32_t *extents, *places;
    const RoundedQuery* queries;  // [group]
    float* estimates;             // [group, stride]
};

// Score the keys of a unit; none if one of their places is wrong, and the step has failed.
template <class T>
void estimate_unit(Job& job, const Task& task, int unit) {
    const int first = unit * SCORE_UNIT, left = task.count - first, count = left < SCORE_UNIT ? left : SCORE_UNIT;
    for (int i = first; i < first + count; i++)
        if (extent_at(job, task, task.places[i]) < 0) return job.fail(BAD_PLACE);
    RoundedQuery queries[MAX_HOST_GROUP];
    round_lanes(queries_of<T>(job, task), job.group, job.a.head_dim, job.a.signs, job.a.padded_dim, queries);
    const Recalled recalled = {task.head, task.count, task.stride, task.extents, task.places, queries, task.scores};
    estimate_candidates(job.a, recalled, job.group, unit);
    NoRequests nothing;
    float* statistics = task.statistics + int64_t{2} * unit * job.group;
    for (int q = 0; q < job.group; q++)
        soften(task.scores + q * task.stride + first, count, job.a.scaling, statistics + q, statistics + job.group + q,
               nothing);
}

}  // namespace
}  // namespace kvseek
