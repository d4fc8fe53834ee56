// What selections share that rank keys by the estimates of their codes: of keys that lie one after another, or of
// candidates, keys at given places.
//
// `Arguments` are a selection's: high, low (null if codes have 2 bits), scales, means, mean_steps, block, kv_heads,
// padded_dim, step. `Task` is
// what a selection keeps of a (request, KV head): head, extents, places [candidate_count], stride, queries [lanes],
// estimates [lanes, stride].
#pragma once

#include "estimate.h"

namespace kvseek {
namespace {

constexpr int64_t ESTIMATE_KEYS = 256;  // candidates of a unit of work
constexpr int ALL_BITS = 4;

// Bits of the codes that a selection is given.
template <class Arguments>
inline int bits_of(const Arguments& a) {
    return a.low == nullptr ? 2 : ALL_BITS;
}

// Units of work of a task's candidates; at least one, as phases have.
template <class Task>
inline int64_t candidate_units(const Task& task) {
    return task.candidate_count > 0 ? (task.candidate_count + ESTIMATE_KEYS - 1) / ESTIMATE_KEYS : 1;
}

// Estimates by all bits of at most INDEX_EXTENT keys whose sums [lanes, sums_stride] are known: of `rows`, the first of
// neighbours or a list. `scales` [count] is readable in whole vectors.
template <class Arguments, class Task, class Rows>
void estimate_keys(const Arguments& a, const Task& task, int lanes, Rows rows, const uint16_t* scales, int count,
                   const int32_t* sums, int64_t sums_stride, float* estimates) {
    const int bits = bits_of(a);
    alignas(64) float offsets[INDEX_EXTENT];
    for (int lane = 0; lane < lanes; lane++) {
        const RoundedQuery& query = task.queries[lane];
        const float worth = query.step * static_cast<float>(a.step / 2);
        means_of(a).products(rows, count, query, query.step, offsets);
        for (int key = 0; key < count; key += LANES) {
            const int32_t* of_lane = sums + lane * sums_stride + key;
            const Vec values = scale_sums(of_lane, load_half(scales + key), bits, query.sum, worth, offsets + key);
            store(estimates + lane * task.stride + key, values);
        }
    }
}

// Estimates by all bits of a unit of a task's candidates.
template <class Arguments, class Task>
void estimate_candidates(const Arguments& a, const Task& task, int lanes, int64_t unit) {
    const int64_t first = unit * ESTIMATE_KEYS, left = task.candidate_count - first;
    const int count = static_cast<int>(left < ESTIMATE_KEYS ? left : ESTIMATE_KEYS);
    const int row = static_cast<int>(a.padded_dim / FIELDS);
    alignas(64) uint8_t high[ESTIMATE_KEYS * MAX_ROW], low[ESTIMATE_KEYS * MAX_ROW];
    alignas(64) int32_t sums[MAX_QUERIES * ESTIMATE_KEYS];
    uint16_t scales[ESTIMATE_KEYS];
    int64_t rows[ESTIMATE_KEYS];
    for (int i = 0; i < count; i++) {
        rows[i] = row_of(task.extents, a.kv_heads, task.head, task.places[first + i]);
        __builtin_prefetch(a.high + rows[i] * row);
        if (a.low != nullptr) __builtin_prefetch(a.low + rows[i] * row);
        __builtin_prefetch(a.scales + rows[i]);
    }
    for (int i = 0; i < count; i++) scales[i] = a.scales[rows[i]];
    gather_rows(a.high, row, rows, count, high);
    if (a.low != nullptr) gather_rows(a.low, row, rows, count, low);
    plane_sums({high, a.low == nullptr ? nullptr : low, 0}, row, count, task.queries, lanes, sums, ESTIMATE_KEYS);
    estimate_keys(a, task, lanes, static_cast<const int64_t*>(rows), scales, count, sums, ESTIMATE_KEYS,
                  task.estimates + first);
}

}  // namespace
}  // namespace kvseek
