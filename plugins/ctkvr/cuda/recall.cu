// CTkvr, second kernel of a selection: recall places (candidates.cuh) and score their keys exactly (paper, algorithm 2,
// parts b and c). If host cores score them, the places go to host memory instead.
#include "recall.cuh"

namespace kvseek {
namespace ctkvr {
namespace decode {

// Largest exponent of a tile's keys and sum of the powers relative to it, of one head; the same in all lanes that
// differ in their line alone. -infinity stands for a key that is not there; the tile has at least one.
__device__ __forceinline__ float2 sum_powers(float first, float second) {
    float largest = fmaxf(first, second);
#pragma unroll
    for (int mask = 4; mask < WARP; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(EVERYONE, largest, mask));
    float sum = power_of_two(first - largest) + power_of_two(second - largest);
#pragma unroll
    for (int mask = 4; mask < WARP; mask *= 2) sum += __shfl_xor_sync(EVERYONE, sum, mask);
    return make_float2(largest, sum);
}

// Score the recalled places with ranks first .. first + 15, below `count`, for all heads of the group.
__device__ __forceinline__ void score_tile(const StepArguments& a, const Task& task, const int* extents, int first,
                                           int count) {
    const long long list = static_cast<long long>(task.number) * a.capacity;
    const int ranks[2] = {first + line_of_lane(), first + line_of_lane() + 8};
    const Number* keys[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // ranks that are not there repeat the last one
        const int place = a.recalled[list + min(ranks[i], count - 1)];
        const long long inside = static_cast<long long>(task.head) * EXTENT_TOKENS + place % EXTENT_TOKENS;
        keys[i] = a.rows + extents[place / EXTENT_TOKENS] * a.extent_stride + inside * (2 * DIM);
    }
    RowTile tile;
    tile.load(keys[0], keys[1]);
    float products[HALVES][4];
    tile.multiply_group(task.queries(a.queries), products);
    const long long tiles = (a.capacity + TILE - 1) / TILE;
    float2* statistics = a.statistics + (task.number * tiles + first / TILE) * GROUP;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = 8 * half + 2 * part_of_lane() + i;
            const bool exists = head < GROUP;
            float exponents[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const float score = products[half][2 * row + i];
                exponents[row] = ranks[row] < count && exists ? score * a.scale : -INFINITE;
                if (ranks[row] < count && exists) a.scores[(list + ranks[row]) * GROUP + head] = score;
            }
            const float2 powers = sum_powers(exponents[0], exponents[1]);
            if (line_of_lane() == 0 && exists) statistics[head] = powers;
        }
    }
}

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek

// grid: as many blocks as requests at least, kv_heads. Dynamic shared memory: max_extents * (4 + 128) bytes
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::decode::RECALL_THREADS, 1)
    kvseek_ctkvr_recall(const __grid_constant__ kvseek::ctkvr::decode::StepArguments a) {
    using namespace kvseek::ctkvr::decode;
    extern __shared__ __align__(16) unsigned char dynamic_memory[];
    __shared__ RecallMemory memory;
    recall(
        a, dynamic_memory, memory, [](const Task&) {},
        [&](const Task& task, const int* extents, int first, int last) { score_tile(a, task, extents, first, last); });
}
