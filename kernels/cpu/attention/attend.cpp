// Attention of one decode step over window rows and selected retrieval rows, read where they lie.
//
// The rows of each (request, KV head) are cut into units; threads take units, keep a running softmax over tiles of rows
// (flash-decoding), and when the last unit of a head is finished, one of them merges its partial results by
// log-sum-exp. How rows are cut depends on the head's own row count only, so a request's output does not depend on its
// batch or on threads.
#include "kernels/cpu/phases.h"
#include "rows.h"
#include "tile.h"

namespace kvseek {
namespace {

constexpr int UNITS = 8;  // units of a head, if that leaves each between these numbers of rows
constexpr int64_t MIN_UNIT_ROWS = 128, MAX_UNIT_ROWS = 1024;

// One (request, KV head), and how far its units are.
struct Task {
    Progress<2> progress;
    int64_t request, head;
    int64_t rows, unit_rows, units;
    float* partials;  // [units, group, DIM + 2]
};

// Running softmax of one unit: per query the largest score, the sum of weights, the weighted sum of values.
struct Partial {
    float* highest;  // [group]
    float* total;    // [group]
    float* values;   // [group, DIM]
};

// One tile for all queries of the group, a few at a time.
template <class T, int DIM>
void attend_tile(const float* queries, int group, const T* const* rows, const float (*scales)[TILE], int count,
                 const T* const* next, int next_count, Weights& weights, const Partial& partial) {
    for (int q = 0; q < group; q += QUERIES) {
        const float* chunk = queries + q * DIM;
        float (*scores)[TILE] = weights.of + q;
        float *highest = partial.highest + q, *total = partial.total + q, *values = partial.values + q * DIM;
        const int ahead = q == 0 ? next_count : 0;
        switch (group - q) {
            case 1:
                attend_tile<T, DIM, 1>(chunk, rows, scales, count, next, ahead, scores, highest, total, values);
                break;
            case 2:
                attend_tile<T, DIM, 2>(chunk, rows, scales, count, next, ahead, scores, highest, total, values);
                break;
            case 3:
                attend_tile<T, DIM, 3>(chunk, rows, scales, count, next, ahead, scores, highest, total, values);
                break;
            default:
                attend_tile<T, DIM, 4>(chunk, rows, scales, count, next, ahead, scores, highest, total, values);
        }
    }
}

template <class T>
float number(T value, float) {
    return to_float(value);
}
template <class T>
float number(Rounded<T> value, float scale) {
    return static_cast<float>(value.number) * scale;
}

// Copy rows of a head size that has no kernel of its own into float rows [K(DIM) | V(DIM)], padded with zeros, channels
// at place_of().
template <class T, int DIM>
void widen(const T* const* rows, const float (*scales)[TILE], int count, int dim, float* copies) {
    for (int row = 0; row < count; row++) {
        float* copy = copies + row * 2 * DIM;
        for (int d = 0; d < DIM; d++) {
            copy[place_of<T>(d)] = d < dim ? number(rows[row][d], scales[0][row]) : 0.0f;
            copy[DIM + place_of<T>(d)] = d < dim ? number(rows[row][dim + d], scales[1][row]) : 0.0f;
        }
    }
}

template <class T, int DIM>
void attend_padded_tile(const float* queries, int group, int dim, const T* const* rows, const float (*scales)[TILE],
                        int count, Weights& weights, const Partial& partial) {
    alignas(64) float copies[TILE * 2 * DIM];
    const float* padded[TILE];
    widen<T, DIM>(rows, scales, count, dim, copies);
    for (int row = 0; row < count; row++) padded[row] = copies + row * 2 * DIM;
    attend_tile<float, DIM>(queries, group, padded, nullptr, count, padded, 0, weights, partial);
}

template <int DIM>
Partial partial_of(const Task& task, int64_t unit, int64_t group) {
    float* values = task.partials + unit * group * (DIM + 2);
    return {values + group * DIM, values + group * (DIM + 1), values};
}

// Queries of one task as float [group, DIM], scaled, padded with zeros, channels at place_of().
template <class T, int DIM>
void load_queries(const AttendArguments& a, const Task& task, float* queries) {
    const T* from = static_cast<const T*>(a.queries) + (task.request * a.kv_heads + task.head) * a.group * a.dim;
    for (int q = 0; q < a.group; q++)
        for (int d = 0; d < DIM; d++)
            queries[q * DIM + place_of<T>(d)] =
                d < a.dim ? to_float(from[q * a.dim + d]) * static_cast<float>(a.scaling) : 0.0f;
}

// Attend to `left` rows of a part from the row `first` on.
template <class T, int DIM>
void attend_part(const AttendArguments& a, const Task& task, Part part, int64_t first, int64_t left,
                 const float* queries, Weights& weights, const Partial& partial) {
    RowCursor<T> cursor(a, task.request, task.head, part);
    cursor.skip(first);
    const T* rows[2][TILE];
    float scales[2][2][TILE];
    int count = cursor.take(rows[0], left < TILE ? left : TILE, scales[0][0], scales[0][1]);
    for (int tile = 0; count > 0; tile ^= 1) {
        left -= count;
        const int other = tile ^ 1;
        const int next_count = cursor.take(rows[other], left < TILE ? left : TILE, scales[other][0], scales[other][1]);
        if (a.dim == DIM)
            attend_tile<T, DIM>(queries, a.group, rows[tile], scales[tile], count, rows[other], next_count, weights,
                                partial);
        else
            attend_padded_tile<T, DIM>(queries, a.group, a.dim, rows[tile], scales[tile], count, weights, partial);
        count = next_count;
    }
}

template <class T, int DIM>
void attend_unit(const AttendArguments& a, const Task& task, int64_t unit) {
    const Partial partial = partial_of<DIM>(task, unit, a.group);
    alignas(64) float queries[MAX_GROUP * DIM];
    Weights weights;
    load_queries<T, DIM>(a, task, queries);
    std::memset(partial.values, 0, sizeof(float) * a.group * DIM);
    for (int q = 0; q < a.group; q++) partial.highest[q] = -INFINITE, partial.total[q] = 0.0f;

    const int64_t first = unit * task.unit_rows;
    const int64_t rows = task.rows - first < task.unit_rows ? task.rows - first : task.unit_rows;
    if constexpr (!std::is_same_v<T, Half>)
        if (a.rounded) {
            const Request& request = a.requests[task.request];
            const int64_t left = request.sink_rows + request.ring_rows - first;  // in the window
            const int64_t near = left < 0 ? 0 : left < rows ? left : rows;
            attend_part<T, DIM>(a, task, Part::WINDOW, first, near, queries, weights, partial);
            attend_part<Rounded<T>, DIM>(a, task, Part::RETRIEVAL, near > 0 ? 0 : -left, rows - near, queries, weights,
                                         partial);
            return;
        }
    attend_part<T, DIM>(a, task, Part::BOTH, first, rows, queries, weights, partial);
}

template <class T, class Out>
void write(const float* values, float total, int64_t rows, int64_t dim, Out* out) {
    for (int d = 0; d < dim; d++) from_float(rows > 0 ? values[place_of<T>(d)] / total : 0.0f, out + d);
}

// Write a task's output from the partial results of its units; no rows at all give zeros.
template <class T, int DIM>
void merge(const AttendArguments& a, const Task& task) {
    const int64_t first = (task.request * a.kv_heads + task.head) * a.group;
    for (int q = 0; q < a.group; q++) {
        float highest = -INFINITE, total = 0.0f;
        alignas(64) float values[DIM] = {};
        for (int64_t u = 0; u < task.units; u++) {
            const float unit_highest = partial_of<DIM>(task, u, a.group).highest[q];
            highest = unit_highest > highest ? unit_highest : highest;
        }
        for (int64_t u = 0; u < task.units; u++) {
            const Partial partial = partial_of<DIM>(task, u, a.group);
            const float factor = exponential(partial.highest[q] - highest);
            total += partial.total[q] * factor;
            for (int d = 0; d < DIM; d++) values[d] += partial.values[q * DIM + d] * factor;
        }
        if (a.lse != nullptr) {
            a.lse[first + q] = task.rows > 0 ? highest + __builtin_logf(total) : -INFINITE;
            write<T>(values, total, task.rows, a.dim, static_cast<float*>(a.out) + (first + q) * a.dim);
        } else if constexpr (!std::is_same_v<T, Half>) {
            write<T>(values, total, task.rows, a.dim, static_cast<T*>(a.out) + (first + q) * a.dim);
        }
    }
}

template <class T, int DIM>
void attend_units(const AttendArguments& a, Task* tasks) {
    run_tasks(
        tasks, a.batch * a.kv_heads, a.threads, 0,
        [&](Task& task, Arena& arena) { task.partials = arena.take<float>(task.units * a.group * (DIM + 2)); },
        divided([](const Task& task) { return task.units; },
                [&](const Task& task, int64_t unit) { attend_unit<T, DIM>(a, task, unit); }),
        whole([&](const Task& task) { merge<T, DIM>(a, task); }));
}

template <class T>
void attend_rows(const AttendArguments& a, Task* tasks) {
    if (a.dim <= 64) return attend_units<T, 64>(a, tasks);
    if (a.dim <= 96) return attend_units<T, 96>(a, tasks);
    if (a.dim <= 128) return attend_units<T, 128>(a, tasks);
    attend_units<T, MAX_DIM>(a, tasks);
}

Task describe(const AttendArguments& a, int64_t request, int64_t head) {
    Task task = {};
    task.request = request, task.head = head, task.rows = count_rows(a, request, head);
    const int64_t rows = (task.rows / UNITS + TILE - 1) / TILE * TILE;
    task.unit_rows = rows < MIN_UNIT_ROWS ? MIN_UNIT_ROWS : rows > MAX_UNIT_ROWS ? MAX_UNIT_ROWS : rows;
    task.units = task.rows == 0 ? 1 : (task.rows + task.unit_rows - 1) / task.unit_rows;
    return task;
}

void attend(const AttendArguments& a) {
    static thread_local Scratch memory;
    Task* tasks = static_cast<Task*>(memory.reserve(sizeof(Task) * a.batch * a.kv_heads));
    for (int64_t i = 0; i < a.batch * a.kv_heads; i++) tasks[i] = describe(a, i / a.kv_heads, i % a.kv_heads);
    if (a.bfloat16)
        attend_rows<Bfloat16>(a, tasks);
    else if (a.float16)
        attend_rows<Half>(a, tasks);
    else
        attend_rows<float>(a, tasks);
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_attend, kvseek::AttendArguments, kvseek::attend)
