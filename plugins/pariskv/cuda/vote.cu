// ParisKV, first kernel of a selection: rotate the queries, and give each centroid of each block its votes
// (paper, 4.2).
//
// A warp ranks the 256 centroids of one block for one lane: a bitonic sort with 8 centroids a thread, a quarter of the
// instructions that comparing all pairs takes.
#include "select.cuh"

namespace kvseek {
namespace pariskv {

constexpr int VOTE_THREADS = LANES * WARP;
constexpr int HELD = CENTROIDS / WARP;  // centroids of a thread: HELD * lane ...
constexpr int TIERS = 6;

// A rotated query as columns of the rerank's product: numbers rounded to float16, and in the next column what is
// missing to them. Thread t of a quad multiplies the t-th quarter of the coordinates, four of them a step.
__device__ __forceinline__ void store_columns(const SelectArguments& a, int task, int query, const float (&x)[EACH]) {
    unsigned* tile = a.columns + static_cast<long long>(task * COLUMN_TILES + query / 4) * (STEPS * WARP * 2);
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
        const int coordinate = threadIdx.x % WARP * EACH + i;
        const int quarter = coordinate / QUARTER, step = coordinate % QUARTER / 4, half = coordinate % 4 / 2;
        const __half2 rounded = __floats2half2_rn(x[i], x[i + 1]);
        const float2 back = __half22float2(rounded);
        const __half2 rest = __floats2half2_rn(x[i] - back.x, x[i + 1] - back.y);
        unsigned* column = tile + ((step * WARP) + query % 4 * 8 + quarter) * 2 + half;
        column[0] = *reinterpret_cast<const unsigned*>(&rounded);
        column[4 * 2] = *reinterpret_cast<const unsigned*>(&rest);
    }
}

// Scores of a thread's sign patterns: coordinate 0 added or subtracted first, then 1, ..., as the reference does.
__device__ __forceinline__ void centroid_scores(const float (&x)[EACH], int block, float (&scores)[HELD]) {
#pragma unroll
    for (int i = 0; i < HELD; i++) scores[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
        const float coordinate = __shfl_sync(EVERYONE, x[j % EACH], (block * BLOCK + j) / EACH);
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int centroid = threadIdx.x % WARP * HELD + i;
            scores[i] = centroid >> j & 1 ? scores[i] - coordinate : scores[i] + coordinate;
        }
    }
}

// A number that orders centroids as the reference does: by score, equal scores by falling id. No score is -0.
__device__ __forceinline__ unsigned long long sort_key(float score, int centroid) {
    return static_cast<unsigned long long>(ordered_bits(score)) << 8 | (CENTROIDS - 1 - centroid);
}

// Sort the keys that a warp holds in descending order; key i of lane l has rank HELD l + i.
__device__ __forceinline__ void sort_descending(unsigned long long (&keys)[HELD]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int size = 2; size <= CENTROIDS; size *= 2) {
#pragma unroll
        for (int stride = size / 2; stride > 0; stride /= 2) {
            if (stride >= HELD) {
                const bool keep_larger = ((lane & stride / HELD) == 0) == ((lane * HELD & size) == 0);
#pragma unroll
                for (int i = 0; i < HELD; i++) {
                    const unsigned long long other = __shfl_xor_sync(EVERYONE, keys[i], stride / HELD);
                    keys[i] = (keys[i] > other) == keep_larger ? keys[i] : other;
                }
            } else {
#pragma unroll
                for (int i = 0; i < HELD; i++) {
                    if (i & stride) continue;
                    const bool falling = ((lane * HELD + i) & size) == 0;
                    const unsigned long long first = keys[i], second = keys[i + stride];
                    const bool exchange = (first < second) == falling;
                    keys[i] = exchange ? second : first;
                    keys[i + stride] = exchange ? first : second;
                }
            }
        }
    }
}

// 6 votes while fewer than 5 % of the budget precede, then 5, ... 1 below 15, 30, 50, 75 and 100 %, else none.
__device__ __forceinline__ void vote_limits(int budget, int (&limits)[TIERS]) {
    constexpr int PERCENT[TIERS] = {5, 15, 30, 50, 75, 100};
#pragma unroll
    for (int t = 0; t < TIERS; t++)
        limits[t] = static_cast<int>((static_cast<long long>(PERCENT[t]) * budget + 99) / 100);
}

}  // namespace pariskv
}  // namespace kvseek

// grid: BLOCKS, kv_heads, requests; a warp for each lane
extern "C" __global__ void __launch_bounds__(kvseek::pariskv::VOTE_THREADS)
    kvseek_pariskv_vote(const __grid_constant__ kvseek::pariskv::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::pariskv;
    __shared__ int counts[CENTROIDS];
    __shared__ unsigned votes[CENTROIDS * VOTE_BYTES / 4];
    // Only the queries come from the kernel before this one. Counts change between steps, before an upload that this
    // step waited for. The totals' last readers are `rerank` and `scan` of an earlier selection: `top`, which ends
    // every selection, lets nothing start before it has waited for both.
    const Task task(a, blockIdx.z);
    const int block = blockIdx.x, query = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int* all =
        a.counts + ((static_cast<long long>(task.request.slot) * a.kv_heads + task.head) * BLOCKS + block) * CENTROIDS;
    for (int i = threadIdx.x; i < CENTROIDS; i += VOTE_THREADS) {
        counts[i] = all[i];
        if (block == 0) a.totals[task.number * SCORES + i] = 0;
    }
    for (int i = threadIdx.x; i < CENTROIDS * VOTE_BYTES / 4; i += VOTE_THREADS) votes[i] = 0;
    await_earlier_kernels();
    if (task.idle()) return;
    float x[EACH], scores[HELD];
    codes::load_query<MEAN>(a.queries + static_cast<long long>(task.number) * GROUP * HEAD_DIM, query, a.signs, x);
    if (block == 0) store_columns(a, task.number, query, x);
    centroid_scores(x, block, scores);
    unsigned long long keys[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) keys[i] = sort_key(scores[i], lane * HELD + i);
    sort_descending(keys);
    __syncthreads();
    allow_later_kernels();
    int own[HELD], sum = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        own[i] = counts[CENTROIDS - 1 - static_cast<int>(keys[i] & 255)];
        sum += own[i];
    }
    int preceding = sum_up_to_here(sum, lane) - sum;
    int limits[TIERS];
    vote_limits(task.budget(), limits);
    unsigned char* bytes = reinterpret_cast<unsigned char*>(votes);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int earned = 0;
#pragma unroll
        for (int t = 0; t < TIERS; t++) earned += preceding < limits[t];
        const int centroid = CENTROIDS - 1 - static_cast<int>(keys[i] & 255);
        bytes[centroid * VOTE_BYTES + query] = static_cast<unsigned char>(earned);
        preceding += own[i];
    }
    __syncthreads();
    constexpr int WORDS = VOTE_BYTES / 4;
    unsigned* to = reinterpret_cast<unsigned*>(a.votes) +
                   (static_cast<long long>(task.number) * BLOCKS + block / QUAD * QUAD) * (CENTROIDS * WORDS);
    for (int i = threadIdx.x; i < CENTROIDS * WORDS; i += VOTE_THREADS)
        to[(i / WORDS * QUAD + block % QUAD) * WORDS + i % WORDS] = votes[i];
}
