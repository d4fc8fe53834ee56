// First part of a step with codes: the scores of the recalled keys are estimates from nested key codes
// (kernels/reference/codes/key_codes.py).
#pragma once

#include "host_score.h"
#include "kernels/cpu/codes/estimate.h"

namespace kvseek {
namespace {

static_assert(MAX_HOST_GROUP <= MAX_QUERIES && MAX_HOST_DIM <= MAX_PADDED_DIM, "estimate.h has room for a group");

// Rows of the codes of keys first .. first + count - 1; row 0 for a place that is wrong, and the step has failed.
void find_codes(Job& job, const Task& task, int first, int count, int64_t* rows) {
    const int row = job.a.padded_dim / FIELDS;
    for (int i = 0; i < count; i++) {
        const int32_t place = task.places[first + i];
        const int64_t extent = extent_at(job, task, place);
        if (extent < 0) job.fail(BAD_PLACE);
        rows[i] = extent < 0 ? 0 : (extent * job.a.kv_heads + task.head) * TABLE_EXTENT + place % TABLE_EXTENT;
        prefetch(job.a.high + rows[i] * row, row);
        if (job.a.bits == 4) prefetch(job.a.low + rows[i] * row, row);
    }
}

// Score the keys of a unit.
template <class T>
void estimate_unit(Job& job, const Task& task, int unit) {
    alignas(64) uint8_t high[SCORE_UNIT * MAX_ROW], low[SCORE_UNIT * MAX_ROW];
    alignas(64) int32_t sums[MAX_HOST_GROUP * SCORE_UNIT];
    alignas(64) float offsets[SCORE_UNIT];
    RoundedQuery queries[MAX_HOST_GROUP];
    uint16_t scales[SCORE_UNIT];
    int64_t rows[SCORE_UNIT];
    const HostStep& a = job.a;
    const int first = unit * SCORE_UNIT, left = task.count - first, count = left < SCORE_UNIT ? left : SCORE_UNIT;
    const int row = a.padded_dim / FIELDS;
    find_codes(job, task, first, count, rows);
    round_lanes(queries_of<T>(job, task), job.group, a.head_dim, a.signs, a.padded_dim, queries);
    gather_rows(a.high, row, rows, count, high);
    if (a.bits == 4) gather_rows(a.low, row, rows, count, low);
    plane_sums({high, a.bits == 4 ? low : nullptr, 0}, row, count, queries, job.group, sums, SCORE_UNIT);
    for (int i = 0; i < count; i++) scales[i] = a.scales[rows[i]];
    NoRequests nothing;
    float* statistics = task.statistics + int64_t{2} * unit * job.group;
    for (int q = 0; q < job.group; q++) {
        float* scores = task.scores + q * task.stride + first;
        const float worth = queries[q].step * (a.code_step / 2);
        means_of(a).products(static_cast<const int64_t*>(rows), count, queries[q], queries[q].step, offsets);
        for (int key = 0; key < count; key += LANES) {
            const int32_t* of_query = sums + q * SCORE_UNIT + key;
            const Vec of_keys = load_half(scales + key);
            store(scores + key, scale_sums(of_query, of_keys, a.bits, queries[q].sum, worth, offsets + key));
        }
        soften(scores, count, a.scaling, statistics + q, statistics + job.group + q, nothing);
    }
}

}  // namespace
}  // namespace kvseek
