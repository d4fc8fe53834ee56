// The router of a mixture of experts in a decode step: which experts each row has, with which weights, and which rows
// each expert has. One thread block for all rows; kernels/cuda/layer/experts.py launches it, and route of
// engine/model/experts.py says what is correct.
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/warp.cuh"

#if KVSEEK_EXPERTS
namespace kvseek {

struct RouteArguments {
    const void* logits;  // Number [rows, experts]
    void* weights;       // float [rows, chosen]
    void* slots;         // int [slots]: the experts that some row has chosen, ascending; -1 behind the last
    void* starts;        // int [slots + 1]: the first pair of each slot, and behind the last the number of pairs
    void* pairs;         // int [rows * chosen]: row * chosen + place, by expert and then by row
    int rows;            // at most 64
    int experts;         // at most 512
    int chosen;          // at most 32, as many as a warp has lanes
    int normalised;      // whether a row's weights are divided by their sum
    int slot_count;      // at least min(experts, rows * chosen)
};

struct CombineArguments {
    const void* products;  // Number [rows * chosen, hidden]: of pairs, in another order
    const void* weights;   // float [rows * chosen]
    const void* places;    // long long [rows * chosen]: where the product of a pair is
    void* out;  // Number [rows, hidden]: sums of a row's products times their weights, in the order of its pairs
    int chosen;
    int hidden;  // multiple of 8
};

namespace routing {

constexpr int COMBINE_THREADS = 256;

constexpr int MOST_ROWS = 64, MOST_EXPERTS = 512, MOST_CHOSEN = WARP;
constexpr int FEW_EXPERTS = 128;  // for which a lane needs fewer registers
constexpr int WORDS = MOST_ROWS / 32;

// The number that ordered_bits has made bits of.
__device__ __forceinline__ float number_of(unsigned bits) {
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

struct Shared {
    unsigned rows[MOST_EXPERTS][WORDS];  // a bit for each row that has chosen the expert
    short chosen[MOST_ROWS][MOST_CHOSEN];
};

// The experts of one row, by a warp, of which each lane has EACH: lane, lane + 32, ... Of equal logits that of the
// first expert is taken, and 0 equals -0.
template <int EACH>
__device__ __forceinline__ void choose(const RouteArguments& a, int row, int lane, Shared& shared) {
    const Number* logits = static_cast<const Number*>(a.logits) + row * a.experts;
    unsigned keys[EACH];
    float own[EACH], largest = -INFINITE;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int expert = i * WARP + lane;
        own[i] = expert < a.experts ? to_float(logits[expert]) + 0.0f : -INFINITE;
        keys[i] = expert < a.experts ? max(ordered_bits(own[i]), 1u) : 0;
        largest = fmaxf(largest, own[i]);
    }
    largest = largest_of_warp(largest);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (i * WARP + lane < a.experts) sum += expf(own[i] - largest);
    sum = sum_of_warp(sum);
    unsigned key = 0, chosen = 0;  // of the lane's place
    for (int place = 0; place < a.chosen; ++place) {
        unsigned best = 0, expert = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (keys[i] > best) best = keys[i], expert = i * WARP + lane;
        const unsigned found = __reduce_max_sync(EVERYONE, best);
        expert = __reduce_min_sync(EVERYONE, best == found ? expert : MOST_EXPERTS);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (i * WARP + lane == expert) keys[i] = 0;
        if (lane == place) key = found, chosen = expert;
    }
    float weight = lane < a.chosen ? expf(number_of(key) - largest) / sum : 0.0f;
    const float total = sum_of_warp(weight);
    if (lane < a.chosen) {
        if (a.normalised) weight /= total;
        static_cast<float*>(a.weights)[row * a.chosen + lane] = weight;
        shared.chosen[row][lane] = static_cast<short>(chosen);
        atomicOr(&shared.rows[chosen][row / 32], 1u << row % 32);
    }
}

// The rows of each expert, by one warp: a lane has neighbouring experts.
__device__ __forceinline__ void group(const RouteArguments& a, int lane, const Shared& shared) {
    const int each = (a.experts + WARP - 1) / WARP, first = min(lane * each, a.experts);
    const int last = min(first + each, a.experts);
    int hit = 0, count = 0;
    for (int expert = first; expert < last; ++expert) {
        int rows = 0;
        for (int word = 0; word < WORDS; ++word) rows += __popc(shared.rows[expert][word]);
        hit += rows > 0, count += rows;
    }
    int slot = sum_up_to_here(hit, lane) - hit, at = sum_up_to_here(count, lane) - count;
    const int found = __shfl_sync(EVERYONE, slot + hit, WARP - 1);
    int* slots = static_cast<int*>(a.slots);
    int* starts = static_cast<int*>(a.starts);
    for (int expert = first; expert < last; ++expert) {
        const int before = at;
        for (int word = 0; word < WORDS; ++word) {
            for (unsigned rows = shared.rows[expert][word]; rows != 0; rows &= rows - 1) {
                const int row = word * 32 + __ffs(static_cast<int>(rows)) - 1;
                int place = 0;
                while (shared.chosen[row][place] != expert) ++place;
                static_cast<int*>(a.pairs)[at++] = row * a.chosen + place;
            }
        }
        if (at > before) slots[slot] = expert, starts[slot] = before, ++slot;
    }
    for (int rest = found + lane; rest <= a.slot_count; rest += WARP) {
        if (rest < a.slot_count) slots[rest] = -1;
        starts[rest] = a.rows * a.chosen;
    }
}

}  // namespace routing
}  // namespace kvseek

extern "C" __global__ void __launch_bounds__(1024) kvseek_route(const __grid_constant__ kvseek::RouteArguments a) {
    using namespace kvseek;
    __shared__ routing::Shared shared;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    for (int expert = threadIdx.x; expert < a.experts; expert += blockDim.x)
        for (int word = 0; word < routing::WORDS; ++word) shared.rows[expert][word] = 0;
    __syncthreads();
    await_earlier_kernels();
    allow_later_kernels();
    for (int row = warp; row < a.rows; row += warps) {
        if (a.experts <= routing::FEW_EXPERTS)
            routing::choose<routing::FEW_EXPERTS / WARP>(a, row, lane, shared);
        else
            routing::choose<routing::MOST_EXPERTS / WARP>(a, row, lane, shared);
    }
    __syncthreads();
    if (warp == 0) routing::group(a, lane, shared);
}

// Of a prompt: eight channels of a row, which is blockIdx.x, for each thread.
extern "C" __global__ void __launch_bounds__(kvseek::routing::COMBINE_THREADS)
    kvseek_combine(const __grid_constant__ kvseek::CombineArguments a) {
    using namespace kvseek;
    const long long pair = static_cast<long long>(blockIdx.x) * a.chosen;
    await_earlier_kernels();
    for (int at = threadIdx.x * 8; at < a.hidden; at += routing::COMBINE_THREADS * 8) {
        float sums[8] = {};
        for (int place = 0; place < a.chosen; ++place) {
            const float weight = static_cast<const float*>(a.weights)[pair + place];
            const long long from = static_cast<const long long*>(a.places)[pair + place] * a.hidden + at;
            Eight<Number> part;
            part.load(static_cast<const Number*>(a.products) + from);
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] += weight * part[i];
        }
        alignas(16) Number numbers[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) numbers[i] = from_float<Number>(sums[i]);
        Number* to = static_cast<Number*>(a.out) + static_cast<long long>(blockIdx.x) * a.hidden + at;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(numbers);
    }
}
#endif
