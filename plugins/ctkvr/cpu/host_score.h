// First part of a step: exact scores of the recalled keys, and what their softmax needs.
#pragma once

#include "host_dot.h"
#include "host_tasks.h"
#include "kernels/cpu/kernel.h"

namespace kvseek {
namespace {

// Read in place of a row whose place is wrong, before the step is reported as failed.
alignas(64) const char NO_ROW[2 * MAX_HOST_DIM * sizeof(float)] = {};

// The extent of a place; negative if the slot has none there.
inline int64_t extent_at(const Job& job, const Task& task, int32_t place) {
    return place >= 0 && place < job.a.max_extents * INDEX_EXTENT ? task.extents[place / INDEX_EXTENT] : -1;
}

template <class T>
inline const T* row_at(const Job& job, const Task& task, int32_t place) {
    const HostStep& a = job.a;
    const int64_t extent = extent_at(job, task, place);
    if (extent < 0) return nullptr;
    const int64_t row = (task.head * INDEX_EXTENT + place % INDEX_EXTENT) * 2 * a.head_dim;
    return static_cast<const T*>(a.rows) + extent * a.extent_stride + row;
}

template <class T>
inline const T* queries_of(const Job& job, const Task& task) {
    const int64_t first = task.request * job.a.heads + task.head * job.group;
    return static_cast<const T*>(job.a.queries) + first * job.a.head_dim;
}

// Queries as float, in the order of load_pair.
template <class T>
void widen_queries(const Job& job, const Task& task, float* wide) {
    const T* queries = queries_of<T>(job, task);
    const int dim = job.a.head_dim;
    for (int q = 0; q < job.group; q++)
        for (int d = 0; d < dim; d++) wide[q * dim + kept_at<T>(d)] = to_float(queries[q * dim + d]);
}

template <class T>
void multiply_unit(const Job& job, const Task& task, const KeyRun<T>& run) {
    alignas(64) float wide[MAX_HOST_GROUP * MAX_HOST_DIM];
    widen_queries<T>(job, task, wide);
    multiply_keys<T>(wide, run);
}

#if KVSEEK_LEVEL == 4
template <>
void multiply_unit<Bfloat16>(const Job& job, const Task& task, const KeyRun<Bfloat16>& run) {
    if (kvseek_processor_extends(KVSEEK_BF16)) return multiply_keys_by_dots(queries_of<Bfloat16>(job, task), run);
    alignas(64) float wide[MAX_HOST_GROUP * MAX_HOST_DIM];
    widen_queries<Bfloat16>(job, task, wide);
    multiply_keys<Bfloat16>(wide, run);
}
#endif

// Where the keys of a unit are; the last is repeated.
template <class T>
struct UnitKeys {
    const T* keys[SCORE_UNIT];
    int count;

    void find(Job& job, const Task& task, int unit) {
        const int first = unit * SCORE_UNIT, left = task.count - first;
        count = left < SCORE_UNIT ? left : SCORE_UNIT;
        for (int i = 0; i < count; i++) {
            keys[i] = row_at<T>(job, task, task.places[first + i]);
            if (keys[i] == nullptr) {
                job.fail(BAD_PLACE);
                keys[i] = reinterpret_cast<const T*>(NO_ROW);
            }
        }
        for (int i = count; i < SCORE_UNIT; i++) keys[i] = keys[count - 1];
    }
};

// Asks for the keys of a unit, a key at a time.
template <class T>
class KeyRequests {
  public:
    KeyRequests(const UnitKeys<T>& unit, int dim, int asked) : unit_(unit), bytes_(dim * sizeof(T)), asked_(asked) {}
    void one() {
        if (asked_ < unit_.count) prefetch(unit_.keys[asked_++], bytes_);
    }
    void all() {
        while (asked_ < unit_.count) one();
    }

  private:
    const UnitKeys<T>& unit_;
    int bytes_, asked_;
};

// Asks for nothing.
struct NoRequests {
    void one() {}
};

// Scale scores [count] of one query; -infinity up to the next vector. Writes the largest and the sum of e^(score - it).
// Meanwhile `requests` may ask for keys.
template <class Requests>
inline void soften(float* scores, int count, float scaling, float* largest, float* total, Requests& requests) {
    const int end = (count + LANES - 1) / LANES * LANES;
    Vec best = splat(-INFINITE), sums = {};
    for (int i = count; i < end; i++) scores[i] = -INFINITE;
    for (int i = 0; i < count; i += LANES) {
        const Vec scaled = load(scores + i) * scaling;
        store(scores + i, scaled);
        best = maximum(best, scaled);
    }
    *largest = maximum(best);
    for (int i = 0; i < count; i += LANES) {
        sums += exponential(load(scores + i) - *largest);
        requests.one();
    }
    *total = sum(sums);
}

// Score the keys of a unit and meanwhile ask for those of the thread's next one: three of four while multiplying, the
// others between the exponentials, so that memory is busy all the time.
template <class T>
void score_unit(const Job& job, const Task& task, int unit, const UnitKeys<T>& keys, const UnitKeys<T>& next) {
    const int padded = (keys.count + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK, dim = job.a.head_dim;
    float* scores = task.scores + unit * SCORE_UNIT;
    multiply_unit<T>(job, task, {keys.keys, next.keys, padded, dim, job.group, scores, task.stride});
    KeyRequests<T> requests(next, dim, padded / KEYS * ASKED);
    float* statistics = task.statistics + int64_t{2} * unit * job.group;
    for (int q = 0; q < job.group; q++)
        soften(scores + q * task.stride, keys.count, job.a.scaling, statistics + q, statistics + job.group + q,
               requests);
    requests.all();
}

}  // namespace
}  // namespace kvseek
