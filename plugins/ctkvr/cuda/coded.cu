// CTkvr with execution "codes": keys as codes in device memory, and the recall that scores them by codes, so that no
// key is read from the row pool before the rows are chosen.
#include "step.cuh"

#if CTKVR_CODE_BITS
#include "kernels/cuda/codes/encode.cuh"
#include "kernels/cuda/codes/estimate.cuh"
#include "recall.cuh"

namespace kvseek {
namespace ctkvr {
namespace decode {

constexpr int MEMBERS = codes::MEMBERS;       // neighbouring threads that estimate one key
constexpr int KEYS_AT_ONCE = WARP / MEMBERS;  // of a warp
constexpr int ROUNDS = TILE / KEYS_AT_ONCE;   // of a tile
constexpr int HEADS_EACH = (GROUP + MEMBERS - 1) / MEMBERS;
static_assert(ROUNDS * KEYS_AT_ONCE == TILE, "a tile is a number of whole rounds: codes of 64 channels or more");

struct CodedStepArguments {
    StepArguments step;
    const unsigned char* high;  // [extents, kv_heads, 1024, codes::FIELD] codes of the keys
    const unsigned char* low;   // the same, of codes of 4 bits
    const __half* scales;       // [extents, kv_heads, 1024]
    const signed char* means;   // as in codes::Means
    const float* mean_steps;
    const float* signs;  // [codes::DIM] of the rotation
    int block_bits;
};

// Estimate q·k of the recalled places with ranks first .. first + 15, below `count`, for all heads of
// the group. Of a key, thread `member` keeps the scores of heads member, member + MEMBERS, ...
__device__ __forceinline__ void estimate_tile(const CodedStepArguments& a, const codes::Queries<GROUP>& queries,
                                              const Task& task, const int* extents, int first, int count) {
    const StepArguments& step = a.step;
    const int member = threadIdx.x % MEMBERS, key = threadIdx.x % WARP / MEMBERS;
    const long long list = static_cast<long long>(task.number) * step.capacity;
    float exponents[ROUNDS][HEADS_EACH];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int rank = first + round * KEYS_AT_ONCE + key;
        const int place = step.recalled[list + min(rank, count - 1)];  // ranks that are not there repeat the last one
        const unsigned head_row = static_cast<unsigned>(extents[place / EXTENT_TOKENS] * step.kv_heads + task.head);
        const unsigned row = head_row * EXTENT_TOKENS + place % EXTENT_TOKENS;
        const float scale = __half2float(a.scales[row]);
        int sums[GROUP];
        float products[GROUP];
        codes::multiply_row<CTKVR_CODE_BITS>(a.high, a.low, row, queries, sums);
        codes::multiply_mean(codes::Means(a), row, queries, products);
#pragma unroll
        for (int i = 0; i < HEADS_EACH; ++i) exponents[round][i] = -INFINITE;
#pragma unroll
        for (int head = 0; head < GROUP; ++head) {
            if (member != head % MEMBERS || rank >= count) continue;
            const float score = codes::estimate_of<CTKVR_CODE_BITS>(sums[head], scale, products[head], queries, head);
            step.scores[(list + rank) * GROUP + head] = score;
            exponents[round][head / MEMBERS] = score * step.scale;
        }
    }
    const long long tiles = (step.capacity + TILE - 1) / TILE;
    float2* statistics = step.statistics + (task.number * tiles + first / TILE) * GROUP;
#pragma unroll
    for (int i = 0; i < HEADS_EACH; ++i) {
        float largest = -INFINITE, sum = 0.0f;
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) largest = fmaxf(largest, exponents[round][i]);
#pragma unroll
        for (int mask = MEMBERS; mask < WARP; mask *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(EVERYONE, largest, mask));
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) sum += power_of_two(exponents[round][i] - largest);
#pragma unroll
        for (int mask = MEMBERS; mask < WARP; mask *= 2) sum += __shfl_xor_sync(EVERYONE, sum, mask);
        const int head = i * MEMBERS + member;
        if (key == 0 && head < GROUP) statistics[head] = make_float2(largest, sum);
    }
}

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek

extern "C" __global__ void __launch_bounds__(kvseek::codes::ENCODE_WARPS * 32)
    kvseek_codes_encode(const __grid_constant__ kvseek::codes::EncodeArguments a) {
    kvseek::codes::encode_keys<CTKVR_CODE_BITS>(a);
}

// As kvseek_ctkvr_recall. The queries are rotated while the probe runs: the probe lets this kernel start when it has
// itself waited for the kernel that wrote them.
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::decode::RECALL_THREADS, 1)
    kvseek_ctkvr_recall_coded(const __grid_constant__ kvseek::ctkvr::decode::CodedStepArguments a) {
    using namespace kvseek::ctkvr::decode;
    extern __shared__ __align__(16) unsigned char dynamic_memory[];
    __shared__ RecallMemory memory;
    __shared__ kvseek::codes::Queries<GROUP> queries;
    recall(
        a.step, dynamic_memory, memory,
        [&](const Task& task) { queries.prepare(task.queries(a.step.queries), a.signs); },
        [&](const Task& task, const int* extents, int first, int last) {
            estimate_tile(a, queries, task, extents, first, last);
        });
}

#endif
