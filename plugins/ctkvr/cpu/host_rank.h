// Between the two parts of a step: which keys are worth attending to, and which enter the centroid's list.
//
// A key's value is the largest softmax weight that a head of the group gives it. Its logarithm, the largest of
// score - log-sum-exp, ranks alike and does not run out of small numbers. Ties are cut by lowest place.
#pragma once

#include "host_tasks.h"

namespace kvseek {
namespace {

constexpr int BINS = 2048;

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
    Vec lowest = splat(INFINITE), highest = splat(-INFINITE);
    for (int i = 0; i < task.count; i += LANES) {
        Vec value = load(task.scores + i) - sums[0];
        for (int q = 1; q < job.group; q++) value = maximum(value, load(task.scores + q * task.stride + i) - sums[q]);
        store(task.values + i, value);
        highest = maximum(highest, value);
        if (i + LANES <= task.count) lowest = value < lowest ? value : lowest;
    }
    for (int i = task.count / LANES * LANES; i < task.count; i++)  // what follows the last key must not count
        lowest[0] = task.values[i] < lowest[0] ? task.values[i] : lowest[0];
    task.highest = maximum(highest);
    task.lowest = -maximum(-lowest);
}

// Bins of equal width between the extreme values: a value never lies in a higher bin than a larger value.
class Binning {
  public:
    explicit Binning(const Task& task) : lowest_(task.lowest) {
        const float width = task.highest - task.lowest;
        scale_ = width > 0 && width < INFINITE ? BINS / width : 0.0f;
        scale_ = scale_ < INFINITE ? scale_ : 0.0f;
    }
    IntVec bins(Vec values) const {  // 0 for what is no number
        Vec bin = (values - lowest_) * scale_;
        bin = bin > 0.0f ? bin : Vec{};
        bin = bin < BINS - 1.0f ? bin : splat(BINS - 1.0f);
        return __builtin_convertvector(bin, IntVec);
    }

  private:
    float lowest_, scale_;
};

// Unsigned integer that orders as value, then as lower place.
inline uint64_t rank_of(float value, int32_t place) {
    const uint32_t bits = load_as<uint32_t>(&value);
    const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~place);
}

// Least of the `wanted` largest of `count` different ranks; reorders them. Radix select, a byte a round.
inline uint64_t least_taken(uint64_t* ranks, int64_t count, int64_t wanted) {
    for (int shift = 56; shift > 0 && count > 1; shift -= 8) {
        int32_t histogram[256] = {};
        for (int64_t i = 0; i < count; i++) histogram[ranks[i] >> shift & 255]++;
        uint64_t digit = 255;
        for (; histogram[digit] < wanted; digit--) wanted -= histogram[digit];
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            const uint64_t rank = ranks[i];
            ranks[kept] = rank;
            kept += (rank >> shift & 255) == digit;
        }
        count = kept;
    }
    uint64_t least = ranks[0];
    for (int64_t i = 0; i < count; i++) {  // differ in the last byte alone
        int64_t above = 0;
        for (int64_t j = 0; j < count; j++) above += ranks[j] > ranks[i];
        if (above == wanted - 1) least = ranks[i];
    }
    return least;
}

// Append those of the indices first + [0, LANES) whose lane is set and that are below count; returns how many. `to`
// must have room for LANES.
inline int append(IntVec set, int first, int count, int32_t* to) {
#if defined(__AVX512F__)
    const __mmask16 inside = count - first >= LANES ? 0xffff : static_cast<__mmask16>((1u << (count - first)) - 1);
    const __mmask16 mask = _mm512_test_epi32_mask((__m512i)set, (__m512i)set) & inside;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(lanes, _mm512_set1_epi32(first))));
    return __builtin_popcount(mask);
#else
    int appended = 0;
    for (int i = 0; i < LANES && first + i < count; i++) {
        to[appended] = first + i;
        appended += set[i] != 0;
    }
    return appended;
#endif
}

// Indices of the `wanted` best keys, ascending, into `rows` [stride]; returns their number.
int take_best(const Task& task, int wanted, int32_t* rows) {
    if (wanted >= task.count) {
        for (int i = 0; i < task.count; i++) rows[i] = i;
        return task.count;
    }
    const Binning binning(task);
    int32_t histogram[BINS] = {};
    for (int i = 0; i < task.count; i += LANES) {
        const IntVec bins = binning.bins(load(task.values + i));
        for (int lane = 0; lane < LANES && i + lane < task.count; lane++) histogram[bins[lane]]++;
    }
    int border = BINS - 1, left = wanted, ties = 0, taken = 0;
    for (; histogram[border] < left; border--) left -= histogram[border];
    for (int i = 0; i < task.count; i += LANES)
        ties += append(binning.bins(load(task.values + i)) == border, i, task.count, task.borderline + ties);
    for (int i = 0; i < ties; i++)
        task.ranks[i] = rank_of(task.values[task.borderline[i]], task.places[task.borderline[i]]);
    const uint64_t least = least_taken(task.ranks, ties, left);
    int next = 0;
    for (int i = 0; i < task.count; i += LANES) {
        IntVec set = binning.bins(load(task.values + i)) > border;
        for (; next < ties && task.borderline[next] < i + LANES; next++) {
            const int index = task.borderline[next];
            if (rank_of(task.values[index], task.places[index]) >= least) set[index - i] = -1;
        }
        taken += append(set, i, task.count, rows + taken);
    }
    return taken;
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
    a.best_count[pair] = count;
}

}  // namespace
}  // namespace kvseek
