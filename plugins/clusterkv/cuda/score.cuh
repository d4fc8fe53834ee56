// Scores of centroids: a block takes UNIT of them at a time, one 16-byte load (two for float32) a thread and centroid.
#pragma once

#include "select.cuh"

namespace kvseek {
namespace clusterkv {

__host__ __device__ constexpr int power_of_two_from(int size) {
    int power = 1;
    while (power < size) power *= 2;
    return power;
}

constexpr int SCORE_THREADS = 256;
constexpr int ROW_THREADS = power_of_two_from(KEY_DIM / 8);  // threads of a centroid; those past its end add nothing
constexpr int ROW_GROUPS = SCORE_THREADS / ROW_THREADS;      // centroids that a block scores at once
constexpr int PASSES = ROW_GROUPS < UNIT ? UNIT / ROW_GROUPS : 1;
constexpr int SUMS = power_of_two_from(QUERY_LANES);  // partial sums of a thread, filled up with zeros
constexpr bool QUERIES_IN_REGISTERS = QUERY_LANES <= 4;
constexpr int HELD_QUERIES = QUERIES_IN_REGISTERS ? QUERY_LANES : 1;

struct ScoreMemory {
    float scores[UNIT][QUERY_LANES];
    // Queries that do not fit the registers of a thread.
    float queries[QUERIES_IN_REGISTERS ? 1 : QUERY_LANES][QUERIES_IN_REGISTERS ? 4 : KEY_DIM];
};

// Add up COUNT sums of each of the 2 * DISTANCE threads of a centroid. A thread ends with those of the lanes it leads:
// with every step it hands half of its sums to its partner, until one is left, which all that remain add up.
template <int COUNT, int DISTANCE>
__device__ __forceinline__ void add_row_threads(float* sums, int thread) {
    if constexpr (DISTANCE > 0) {
        constexpr int KEPT = COUNT > 1 ? COUNT / 2 : 1;
        const bool upper = (thread & DISTANCE) != 0;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const float mine = COUNT > 1 && upper ? sums[i + KEPT] : sums[i];
            const float other = COUNT > 1 && !upper ? sums[i + KEPT] : sums[i];
            sums[i] = mine + __shfl_xor_sync(~0u, other, DISTANCE);
        }
        add_row_threads<KEPT, DISTANCE / 2>(sums, thread);
    }
}
constexpr int LED = SUMS > ROW_THREADS ? SUMS / ROW_THREADS : 1;      // sums that a thread ends with
constexpr int LEADERS = SUMS < ROW_THREADS ? ROW_THREADS / SUMS : 1;  // threads that end with the same ones

// What a thread reads of a unit before it can know the queries.
struct UnitRows {
    Eight<Number> numbers[PASSES];
    int sizes[PASSES];
#if CLUSTERKV_SPREAD
    float spreads[PASSES];
#endif

    __device__ __forceinline__ void load(const SelectArguments& a, const SelectTask& task, int unit, int clusters) {
        const int group = threadIdx.x / ROW_THREADS, offset = threadIdx.x % ROW_THREADS * 8;
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const int inside = p * ROW_GROUPS + group, cluster = unit * UNIT + inside;
            sizes[p] = 0;
            if (inside >= UNIT || cluster >= clusters) continue;
            const long long entry = task.cluster_entry(a, cluster);
            sizes[p] = a.sizes[entry];
#if CLUSTERKV_SPREAD
            spreads[p] = a.spreads[entry];
#endif
            if (offset < KEY_DIM) numbers[p].load(a.centroids + entry * KEY_DIM + offset);
        }
    }
};

// The queries of a task, this thread's eight coordinates of each.
struct TaskQueries {
    float own[HELD_QUERIES][8];

    // Eight coordinates of a lane from `offset` on.
    __device__ __forceinline__ static void read(const SelectArguments& a, const SelectTask& task, int lane, int offset,
                                                float* to) {
        const Number* group = a.queries + static_cast<long long>(task.number) * GROUP_HEADS * KEY_DIM + offset;
        Eight<Number> numbers;
        numbers.load(group + lane * KEY_DIM);
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = numbers[i];
    }

    __device__ __forceinline__ void load(const SelectArguments& a, const SelectTask& task, ScoreMemory& memory) {
        if constexpr (QUERIES_IN_REGISTERS) {
            const int offset = threadIdx.x % ROW_THREADS * 8;
            if (offset >= KEY_DIM) return;  // such a thread's sums are not used
#pragma unroll
            for (int lane = 0; lane < QUERY_LANES; ++lane) read(a, task, lane, offset, own[lane]);
        } else {
            constexpr int EIGHTS = KEY_DIM / 8;
            for (int i = threadIdx.x; i < QUERY_LANES * EIGHTS; i += SCORE_THREADS)
                read(a, task, i / EIGHTS, i % EIGHTS * 8, memory.queries[i / EIGHTS] + i % EIGHTS * 8);
            __syncthreads();
        }
    }

    __device__ __forceinline__ const float* of(int lane, const ScoreMemory& memory) {
        if constexpr (QUERIES_IN_REGISTERS) {
            return own[lane];
        } else {
            const int offset = threadIdx.x % ROW_THREADS * 8;
#pragma unroll
            for (int i = 0; i < 8; ++i) own[0][i] = offset < KEY_DIM ? memory.queries[lane][offset + i] : 0.0f;
            return own[0];
        }
    }
};

// What a cluster's spread is multiplied by for each lane, spread_weight ‖q‖, into shared memory. All threads of the
// block.
__device__ __forceinline__ void weigh_spreads(const SelectArguments& a, TaskQueries& queries, const ScoreMemory& memory,
                                              float* weights) {
    const int thread = threadIdx.x % ROW_THREADS;
    float sums[SUMS] = {};
    if (thread * 8 < KEY_DIM) {
#pragma unroll
        for (int lane = 0; lane < QUERY_LANES; ++lane) {
            const float* query = queries.of(lane, memory);
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[lane] += query[i] * query[i];
        }
    }
    add_row_threads<SUMS, ROW_THREADS / 2>(sums, thread);
    const int first = thread / LEADERS * LED;
    if (threadIdx.x < ROW_THREADS && thread % LEADERS == 0) {
#pragma unroll
        for (int i = 0; i < LED; ++i)
            if (first + i < QUERY_LANES) weights[first + i] = a.spread_weight * sqrtf(sums[i]);
    }
    __syncthreads();
}

// Scores of a unit into shared memory; -infinity for a cluster without keys, or past the last one. `weights` are those
// of weigh_spreads.
__device__ __forceinline__ void score_unit(const SelectArguments& a, const UnitRows& rows, TaskQueries& queries,
                                           ScoreMemory& memory, const float* weights) {
    const int group = threadIdx.x / ROW_THREADS, thread = threadIdx.x % ROW_THREADS;
    const bool holds = thread * 8 < KEY_DIM;
    float sums[PASSES][SUMS] = {};
#pragma unroll
    for (int lane = 0; lane < QUERY_LANES; ++lane) {
        const float* query = queries.of(lane, memory);
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[p][lane] += query[i] * rows.numbers[p][i];
        }
    }
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
        const bool empty = rows.sizes[p] == 0;  // its numbers may be anything
        if (empty || !holds) {
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[p][i] = 0.0f;
        }
        add_row_threads<SUMS, ROW_THREADS / 2>(sums[p], thread);
        const int inside = p * ROW_GROUPS + group, first = thread / LEADERS * LED;
        if (inside >= UNIT || thread % LEADERS) continue;
#if CLUSTERKV_SPREAD
#pragma unroll
        for (int i = 0; i < LED; ++i)
            if (first + i < QUERY_LANES) sums[p][i] += weights[first + i] * rows.spreads[p];
#endif
#pragma unroll
        for (int i = 0; i < LED; ++i)
            if (first + i < QUERY_LANES) memory.scores[inside][first + i] = empty ? -INFINITE : sums[p][i] * a.scale;
    }
}

// Write a unit's scores.
__device__ __forceinline__ void store_scores(const SelectArguments& a, long long unit, const ScoreMemory& memory) {
    float* scores = a.scores + unit * UNIT * QUERY_LANES;
    const float* found = &memory.scores[0][0];
    for (int i = threadIdx.x; i < UNIT * QUERY_LANES; i += SCORE_THREADS) scores[i] = found[i];
}

// Write the largest score of each lane of a unit, and the sum of the powers relative to it: a warp takes a lane.
__device__ __forceinline__ void store_statistics(const SelectArguments& a, long long unit, const ScoreMemory& memory) {
    for (int lane = threadIdx.x / 32; lane < QUERY_LANES; lane += SCORE_THREADS / 32) {
        const float score = memory.scores[threadIdx.x % 32][lane];
        float largest = score;
#pragma unroll
        for (int distance = 16; distance; distance /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        float sum = score > -INFINITE ? power_of_two(score - largest) : 0.0f;  // infinity less infinity is NaN
#pragma unroll
        for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (threadIdx.x % 32 == 0) a.statistics[unit * QUERY_LANES + lane] = make_float2(largest, sum);
    }
}
static_assert(UNIT == 32, "one cluster a thread of a warp");

}  // namespace clusterkv
}  // namespace kvseek
