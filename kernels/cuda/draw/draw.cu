// Draws the next tokens of requests from their logits; kernels/cuda/draw/draw.py launches it.
//
// A team of gridDim.x blocks draws for one request, each block with a part of the vocabulary. All blocks of a launch
// run at once, so a team can meet: each of its blocks adds to sums in memory and waits until all have. Nothing is
// sorted. Where top-k, top-p or the likeliest tokens end is searched digit by digit: tokens are counted, or their
// weights added up, by the first bits of their ranks (rank_of), and the search goes on among those that share the bits
// where the limit is reached. A meeting is a digit. All sums are of whole numbers, so their order does not matter.
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/overlap.cuh"

#define KVSEEK_DRAW __device__ __forceinline__
#include "kernels/draw.h"

namespace kvseek {

struct DrawArguments {
    const void* logits;  // Number [any, vocabulary]
    const void* rows;    // DrawRow [requests]
    void* meetings;      // draw::Meetings [requests], zero before
    void* scores;        // float [requests, vocabulary], work space
    void* drawn;         // DrawnToken [requests]
    int vocabulary;
};

namespace draw {

constexpr int THREADS = 256;
constexpr int MOST_BLOCKS = 64;  // of a team
constexpr int TOGETHER = 8;      // tokens that a thread loads before it looks at the first
constexpr int DIGIT = 4;         // bits
constexpr int DIGITS = 1 << DIGIT;
constexpr unsigned MINUS_INFINITE = ~0xff800000u, ABOVE_ALL = 0xff800000u;  // rank_bits of the infinities
constexpr bool SHORT = KVSEEK_DTYPE == 1;  // bfloat16 has zeros in the last 16 bits of its float

using Whole = unsigned long long;

// What the blocks of a team tell each other. Sums take turns: those of the next turn are cleared before this one's
// meeting, when every block has read them.
struct Meetings {
    unsigned arrived, listed;
    Whole sums[3][DIGITS];
    Whole parts[MOST_BLOCKS];
    Whole likeliest[MOST_LIKELIEST];
};

struct Team {
    Meetings* shared;
    unsigned met, turn;
    Whole* result;    // [DIGITS] in shared memory: what the last meeting found
    Whole* counts;    // [DIGITS, THREADS] in shared memory
    int first, last;  // tokens of this block
    int id_bits;

    // Wait for the other blocks: what they wrote before is visible after.
    __device__ void meet() {
        ++met;
        __syncthreads();
        if (gridDim.x > 1 && threadIdx.x == 0) {
            __threadfence();
            atomicAdd(&shared->arrived, 1u);
            while (*static_cast<volatile unsigned*>(&shared->arrived) < met * gridDim.x) {
            }
            __threadfence();
        }
        __syncthreads();
    }

    // Combine a value of each thread below `count` over the team's blocks.
    template <class Combine>
    __device__ void combine(Whole value, int count, const Combine& with) {
        if (threadIdx.x < DIGITS) {
            if (blockIdx.x == 0) shared->sums[(turn + 1) % 3][threadIdx.x] = 0;
            if (threadIdx.x < count) with(&shared->sums[turn % 3][threadIdx.x], value);
        }
        meet();
        if (threadIdx.x < DIGITS) result[threadIdx.x] = __ldcg(&shared->sums[turn % 3][threadIdx.x]);
        ++turn;
        __syncthreads();
    }
    __device__ void add(Whole value, int count) {
        combine(value, count, [](Whole* to, Whole own) { atomicAdd(to, own); });
    }
    __device__ void largest(Whole value, int count) {
        combine(value, count, [](Whole* to, Whole own) { atomicMax(to, own); });
    }
};

// body(id, value of the token) for this thread's tokens of its block's part.
template <class Load, class Body>
__device__ __forceinline__ void for_each_token(const Team& team, const Load& load, const Body& body) {
    for (int start = team.first + threadIdx.x; start < team.last; start += TOGETHER * THREADS) {
        float values[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) values[i] = load(min(start + i * THREADS, team.last - 1));
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            if (start + i * THREADS < team.last) body(start + i * THREADS, values[i]);
    }
}

__device__ __forceinline__ Whole sum_of_warp(Whole value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
    return value;
}

__device__ __forceinline__ Whole largest_of_warp(Whole value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, mask));
    return value;
}

// Show the block the value of each warp: `space` [warps] in shared memory.
__device__ __forceinline__ void show(Whole value, Whole* space) {
    __syncthreads();
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = value;
    __syncthreads();
}

// A value of each thread, added up over the block, and over the threads before this one; the largest. Known to every
// thread.
__device__ __forceinline__ Whole sum_of_block(Whole value, Whole* space) {
    show(sum_of_warp(value), space);
    Whole sum = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) sum += space[warp];
    return sum;
}
__device__ __forceinline__ Whole sum_before(Whole value, Whole* space) {
    show(sum_of_warp(value), space);
    Whole sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const Whole other = __shfl_up_sync(0xffffffffu, sum, step);
        if (threadIdx.x % 32 >= step) sum += other;
    }
    sum -= value;
    for (int warp = 0; warp < threadIdx.x / 32; ++warp) sum += space[warp];
    return sum;
}
__device__ __forceinline__ Whole largest_of_block(Whole value, Whole* space) {
    show(largest_of_warp(value), space);
    Whole most = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) most = max(most, space[warp]);
    return most;
}

// The lowest rank, but for its last `last` bits, whose tokens and all of higher ranks have together the amount
// `limit_of(the amount of all)` or more. Tokens of ranks below `floor` do not count. `whole`: the scores are Numbers.
template <class Load, class Amount, class Limit>
__device__ Whole lowest_rank(Team& team, Whole floor, int last, bool whole, const Load& load, const Amount& amount,
                             const Limit& limit_of) {
    Whole above = 0, prefix = 0, limit = 0;
    bool first = true;
    for (int shift = 32 + team.id_bits - DIGIT;; shift -= DIGIT) {
        for (int digit = 0; digit < DIGITS; ++digit) team.counts[digit * THREADS + threadIdx.x] = 0;
        for_each_token(team, load, [&](int id, float score) {
            const Whole own = rank_of(score, id, team.id_bits);
            if (own >= floor && (own >> shift) >> DIGIT == prefix)
                team.counts[(own >> shift & (DIGITS - 1)) * THREADS + threadIdx.x] += amount(score);
        });
        __syncthreads();
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (int digit = warp; digit < DIGITS; digit += THREADS / 32) {
            Whole sum = 0;
            for (int thread = lane; thread < THREADS; thread += 32) sum += team.counts[digit * THREADS + thread];
            sum = sum_of_warp(sum);
            __syncwarp();
            if (lane == 0) team.counts[digit * THREADS] = sum;
        }
        __syncthreads();
        team.add(threadIdx.x < DIGITS ? team.counts[threadIdx.x * THREADS] : 0, DIGITS);
        if (first) {
            Whole total = 0;
            for (int digit = 0; digit < DIGITS; ++digit) total += team.result[digit];
            limit = limit_of(total);
            if (limit > total) return floor;
            first = false;
        }
        int digit = DIGITS - 1;
        while (above + team.result[digit] < limit) above += team.result[digit--];
        prefix = prefix << DIGIT | digit;
        if (shift == last || above + team.result[digit] == limit) {
            const Whole found = prefix << shift;
            return found > floor ? found : floor;
        }
        if (SHORT && whole && shift == team.id_bits + 16) {  // the last bits of a Number's float are the same for all
            prefix = prefix << 16 | (prefix >> 15 & 1 ? 0 : 0xffff);
            shift -= 16;
            if (shift == last) {
                const Whole found = prefix << shift;
                return found > floor ? found : floor;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) kvseek_draw(const __grid_constant__ kvseek::DrawArguments a) {
    __shared__ Whole counts[DIGITS * THREADS], result[DIGITS], space[THREADS / 32];
    __shared__ DrawRow row;
    await_earlier_kernels();
    const int request = blockIdx.y, vocabulary = a.vocabulary;
    if (threadIdx.x == 0) row = static_cast<const DrawRow*>(a.rows)[request];
    __syncthreads();
    const Number* logits = static_cast<const Number*>(a.logits) + static_cast<long long>(row.row) * vocabulary;
    float* scores = static_cast<float*>(a.scores) + static_cast<long long>(request) * vocabulary;
    DrawnToken* out = static_cast<DrawnToken*>(a.drawn) + request;
    const int size = (vocabulary + gridDim.x - 1) / gridDim.x;
    Team team{static_cast<Meetings*>(a.meetings) + request, 0, 0, result, counts};
    team.first = min(static_cast<int>(blockIdx.x) * size, vocabulary), team.last = min(team.first + size, vocabulary);
    team.id_bits = DIGIT;
    while (1 << team.id_bits < vocabulary) team.id_bits += DIGIT;
    const auto inside = [&](int id) { return id >= team.first && id < team.last; };
    const auto logit_of = [&](int id) { return to_float(logits[id]); };
    const auto score_of = [&](int id) { return scores[id]; };

    // All that changes logits before the temperature. A NaN ranks above and below all numbers: `not_numbers` counts
    // them.
    unsigned most = 0, not_numbers = 0;
    Whole best = 0;
    for_each_token(team, logit_of, [&](int id, float logit) {
        if (logit != logit) not_numbers = 1;
        most = max(most, rank_bits(logit));
        scores[id] = logit;
    });
    __syncthreads();
    for (int i = threadIdx.x; i < row.bias_count; i += THREADS)
        if (inside(row.bias_ids[i])) scores[row.bias_ids[i]] += row.biases[i];
    if (row.bias_count > 0) __syncthreads();
    if (row.occurrences != nullptr || row.allowed != nullptr) {
        for_each_token(team, score_of, [&](int id, float score) {
            if (row.occurrences != nullptr && row.occurrences[id] != 0)
                score = penalised(row, score, row.occurrences[id]);
            if (row.allowed != nullptr && (row.allowed[id / 32] >> id % 32 & 1) == 0) score = -INFINITE;
            scores[id] = score;
        });
        __syncthreads();
    }
    for (int i = threadIdx.x; i < row.bans; i += THREADS)
        if (inside(row.banned[i])) scores[row.banned[i]] = -INFINITE;
    if (row.bans > 0) __syncthreads();
    for_each_token(team, score_of, [&](int id, float score) { best = max(best, rank_of(score, id, team.id_bits)); });
    const Whole ends[2] = {largest_of_block(not_numbers != 0 ? 1ull << 32 : most, space),
                           largest_of_block(best, space)};
    team.largest(threadIdx.x == 0 ? ends[0] : ends[1], 2);
    const Whole found = result[0];
    best = result[1];
    const float largest = found >> 32 != 0 ? __uint_as_float(0x7fc00000u) : of_rank_bits(static_cast<unsigned>(found));
    const float highest = of_rank_bits(static_cast<unsigned>(best >> team.id_bits));
    const bool writes = blockIdx.x == 0 && threadIdx.x == 0;
    if (!is_finite(largest) || !is_finite(highest)) {
        if (writes)
            out->token = -1, out->status = is_finite(largest) ? NOTHING_LEFT : NOT_FINITE, out->largest = largest;
        return;
    }
    if (writes) out->status = DRAWN, out->largest = largest;
    const bool whole = row.bias_count == 0 && row.occurrences == nullptr;

    // Log probabilities of the likeliest, from the model's own logits.
    double base = 0.0;
    if (row.likeliest >= 0) {
        Whole total = 0;
        for_each_token(team, logit_of, [&](int, float logit) { total += weight_of(logit, largest, 1.0); });
        total = sum_of_block(total, space);
        team.add(total, 1);
        base = largest + log(static_cast<double>(result[0]) / (1ull << WEIGHT_BITS));
        const int count = min(row.likeliest, vocabulary);
        if (count > 0) {
            const Whole lowest =
                lowest_rank(team, 0, 0, true, logit_of, [](float) { return 1; }, [&](Whole) { return count; });
            for_each_token(team, logit_of, [&](int id, float logit) {
                const Whole own = rank_of(logit, id, team.id_bits);
                if (own >= lowest) team.shared->likeliest[atomicAdd(&team.shared->listed, 1u)] = own;
            });
            team.meet();
            if (blockIdx.x == 0 && threadIdx.x < count) {
                const Whole own = __ldcg(&team.shared->likeliest[threadIdx.x]);
                int place = 0;
                for (int i = 0; i < count; ++i) place += __ldcg(&team.shared->likeliest[i]) > own;
                const unsigned mask = (1u << team.id_bits) - 1u;
                out->ids[place] = static_cast<int>(mask - (static_cast<unsigned>(own) & mask));
                const double logit = of_rank_bits(static_cast<unsigned>(own >> team.id_bits));
                out->log_probabilities[place] = static_cast<float>(logit - base);
            }
        }
    }
    const auto take = [&](int token) {
        out->token = token;
        if (row.likeliest >= 0) out->log_probability = static_cast<float>(to_float(logits[token]) - base);
        if (row.occurrences != nullptr) row.occurrences[token] = (row.occurrences[token] + 1) | SEEN;
        if (row.latest != nullptr) *row.latest = token;
    };
    if (row.greedy) {
        const unsigned mask = (1u << team.id_bits) - 1u;
        if (writes) take(static_cast<int>(mask - (static_cast<unsigned>(best) & mask)));
        return;
    }

    // The tokens that top-k, top-p and min-p leave are those whose rank and whose weight are not lower than these.
    Whole lowest = 0;
    const Whole least = static_cast<Whole>(row.least_weight);
    const double inverse_temperature = row.inverse_temperature;
    const auto weight = [&](float score) { return weight_of(score, highest, inverse_temperature); };
    if (row.top_k > 0 && row.top_k < vocabulary)
        lowest = lowest_rank(
            team, 0, team.id_bits, whole, score_of, [](float) { return 1; }, [&](Whole) { return row.top_k; });
    if (row.top_p < 1)
        lowest = lowest_rank(team, lowest, 0, whole, score_of, weight,
                             [&](Whole total) { return share_of(total, row.top_p); });
    const auto kept = [&](int id) {
        const float score = scores[id];
        if (rank_of(score, id, team.id_bits) < lowest) return Whole(0);
        const Whole own = weight(score);
        return own >= least ? own : 0;
    };

    // Each thread adds up neighbouring tokens, so that sums follow the ids.
    const int each = (size + THREADS - 1) / THREADS;
    const int begin = min(team.first + static_cast<int>(threadIdx.x) * each, team.last);
    const int end = min(begin + each, team.last);
    Whole own = 0;
    for (int id = begin; id < end; ++id) own += kept(id);
    const Whole part = sum_of_block(own, space);
    if (threadIdx.x == 0) team.shared->parts[blockIdx.x] = part;
    team.meet();
    const Whole other = threadIdx.x < gridDim.x ? __ldcg(&team.shared->parts[threadIdx.x]) : 0;
    const Whole total = sum_of_block(other, space);
    Whole before = sum_of_block(threadIdx.x < blockIdx.x ? other : 0, space);
    const Whole target = high_product(random_bits(row.seed, row.number), total);
    if (target < before || target >= before + part) return;
    before += sum_before(own, space);
    if (target < before || target >= before + own) return;
    for (int id = begin;; ++id) {
        before += kept(id);
        if (before > target) return take(id);
    }
}

}  // namespace draw
}  // namespace kvseek
