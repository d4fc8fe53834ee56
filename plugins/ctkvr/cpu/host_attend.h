// Second part of a step: attention over the selected rows. Scores are known, so only values are read.
#pragma once

#include "host_score.h"

namespace kvseek {
namespace {

constexpr int VALUE_TILE = 16;  // rows whose values are asked for together
constexpr int VALUE_QUERIES = 4;

// One unit's share of a query's softmax: largest score, sum of weights, weighted sum of values in load_pair's order.
struct Share {
    float* largest;  // [group]
    float* total;    // [group]
    float* values;   // [group, dim]
};

inline Share share_of(const Job& job, const Task& task, int unit) {
    const int dim = job.a.head_dim;
    float* values = task.partials + int64_t{unit} * job.group * (dim + 2);
    return {values + job.group * dim, values + job.group * (dim + 1), values};
}

// Weights [group, ATTEND_UNIT] of the chosen keys [count], relative to the largest.
void weigh(const Job& job, const Task& task, const int32_t* chosen, int count, const Share& share, float* weights) {
    const int end = (count + LANES - 1) / LANES * LANES;
    for (int q = 0; q < job.group; q++, weights += ATTEND_UNIT) {
        const float* scores = task.scores + q * task.stride;
        Vec best = splat(-INFINITE), sums = {};
        for (int i = 0; i < count; i++) weights[i] = scores[chosen[i]];
        for (int i = count; i < end; i++) weights[i] = -INFINITE;
        for (int i = 0; i < count; i += LANES) best = maximum(best, load(weights + i));
        const float largest = maximum(best);
        for (int i = 0; i < count; i += LANES) {
            const Vec weight = exponential(load(weights + i) - largest);
            store(weights + i, weight);
            sums += weight;
        }
        share.largest[q] = largest;
        share.total[q] = sum(sums);
    }
}

// sums [COUNT, dim] += weights [COUNT, ATTEND_UNIT] · values of `count` rows.
template <class T, int COUNT>
inline void add_values(const T* const* values, int count, int dim, const float* weights, float* sums) {
    for (int d = 0; d < dim; d += PAIR) {
        Vec first[COUNT], second[COUNT];
        for (int q = 0; q < COUNT; q++)
            first[q] = load(sums + q * dim + d), second[q] = load(sums + q * dim + d + LANES);
        for (int row = 0; row < count; row++) {
            Vec a, b;
            load_pair(values[row] + d, a, b);
            for (int q = 0; q < COUNT; q++) {
                const float weight = weights[q * ATTEND_UNIT + row];
                first[q] += a * weight;
                second[q] += b * weight;
            }
        }
        for (int q = 0; q < COUNT; q++)
            store(sums + q * dim + d, first[q]), store(sums + q * dim + d + LANES, second[q]);
    }
}

template <class T>
void add_tile(const T* const* values, int count, int dim, int group, const float* weights, float* sums) {
    for (int q = 0; q < group;
         q += VALUE_QUERIES, weights += VALUE_QUERIES * ATTEND_UNIT, sums += VALUE_QUERIES * dim) {
        switch (group - q) {
            case 1:
                add_values<T, 1>(values, count, dim, weights, sums);
                break;
            case 2:
                add_values<T, 2>(values, count, dim, weights, sums);
                break;
            case 3:
                add_values<T, 3>(values, count, dim, weights, sums);
                break;
            default:
                add_values<T, VALUE_QUERIES>(values, count, dim, weights, sums);
        }
    }
}

template <class T>
void attend_unit(const Job& job, Task& task, int unit) {
    const int first = unit * ATTEND_UNIT, left = task.chosen - first;
    const int count = left < ATTEND_UNIT ? left : ATTEND_UNIT, dim = job.a.head_dim;
    const int bytes = dim * static_cast<int>(sizeof(T));
    const int32_t* chosen = task.rows + first;
    const T* values[ATTEND_UNIT];
    for (int i = 0; i < count; i++) {
        const T* row = row_at<T>(job, task, task.places[chosen[i]]);
        values[i] = row == nullptr ? reinterpret_cast<const T*>(NO_ROW) : row + dim;
        if (i < 2 * VALUE_TILE) prefetch(values[i], bytes);
    }
    const Share share = share_of(job, task, unit);
    alignas(64) float weights[MAX_HOST_GROUP * ATTEND_UNIT];
    weigh(job, task, chosen, count, share, weights);
    std::memset(share.values, 0, sizeof(float) * job.group * dim);
    for (int row = 0; row < count; row += VALUE_TILE) {
        for (int i = row + 2 * VALUE_TILE; i < row + 3 * VALUE_TILE && i < count; i++) prefetch(values[i], bytes);
        const int tile = count - row < VALUE_TILE ? count - row : VALUE_TILE;
        add_tile(values + row, tile, dim, job.group, weights + row, share.values);
    }
}

// Write a task's outputs from the shares of its units.
template <class T>
void merge(const Job& job, const Task& task) {
    const int dim = job.a.head_dim;
    for (int q = 0; q < job.group; q++) {
        const int64_t head = task.request * job.a.heads + task.head * job.group + q;
        float* out = job.a.out + head * dim;
        alignas(64) float sums[MAX_HOST_DIM] = {};
        float largest = -INFINITE, total = 0.0f;
        for (int unit = 0; unit < task.attend_units; unit++) {
            const float unit_largest = share_of(job, task, unit).largest[q];
            largest = unit_largest > largest ? unit_largest : largest;
        }
        for (int unit = 0; unit < task.attend_units; unit++) {
            const Share share = share_of(job, task, unit);
            const float factor = exponential(share.largest[q] - largest);
            total += share.total[q] * factor;
            for (int d = 0; d < dim; d += LANES)
                store(sums + d, load(sums + d) + load(share.values + q * dim + d) * factor);
        }
        for (int d = 0; d < dim; d++) out[d] = sums[kept_at<T>(d)] / total;
        job.a.lse[head] = largest + __builtin_logf(total);
    }
}

}  // namespace
}  // namespace kvseek
