// What the two kernels of a selection share: their arguments, and where their intermediate results lie.
#pragma once

#include "kernels/cuda/codes/nested_codes.cuh"
#include "kernels/cuda/codes/queries.cuh"
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/power_sum.cuh"
#include "kernels/cuda/task.cuh"
#include "kernels/cuda/units.cuh"

namespace kvseek {
namespace nested {

using codes::DIM, codes::EACH, codes::GROUP, codes::HEAD_DIM, codes::FIELD, codes::FIELDS;
constexpr int LANES = GROUP;  // queries, each of which ranks on its own
using codes::LOG2_E;
static_assert(GROUP <= 16, "at most 16 query heads share a KV head");

constexpr int BINS = 4096;    // of the scan's scores: the first 12 bits of 16
constexpr int BIN_SHIFT = 4;  // bits of a score behind those of its bin

// A "task" is a request and a KV head: request * kv_heads + head.
struct SelectArguments {
    const Number* queries;      // [batch, kv_heads * GROUP, HEAD_DIM]
    const Request* requests;    // [batch]; method_fields[0]: candidates wanted, at most the region's length
    const int* table;           // [slots, max_extents]
    const unsigned char* high;  // [extents, kv_heads, 1024, FIELD]
    const unsigned char* low;   // [extents, kv_heads, 1024, FIELD]
    const __half* scales;       // [extents, kv_heads, 1024]
    const signed char* means;   // as in codes::Means
    const float* mean_steps;
    const float* signs;      // [DIM]
    unsigned short* scores;  // [scratch extents, kv_heads, 1024] of each key: larger is better
    int* totals;             // [tasks, BINS] keys by score; zeros between selections
    int* places;             // [kv_heads, blocks of the choice, capacity] candidates of a block, ascending
    float* estimates;        // [kv_heads, blocks of the choice, capacity, LANES] of these candidates
    unsigned* keys;          // [kv_heads, blocks of the choice, capacity] what they are ranked by
    int* counts;             // [kv_heads, blocks of the choice] how many they are
    PowerSum* normalisers;   // [kv_heads, blocks of the choice, LANES] sums of the powers
    int* finished;           // [tasks] blocks of the choice that are done; zeros between selections
    int* rows;               // [batch, kv_heads, top_k] result
    int batch, kv_heads, max_extents, top_k;
    int capacity;  // most candidates of a task
    int block_bits;
    float scaling;  // softmax scale
};

using Queries = codes::Queries<LANES>;

struct Task : TaskOf<SelectArguments> {
    using TaskOf::TaskOf;

    __device__ __forceinline__ int wanted() const { return request.method_fields[0]; }
    __device__ __forceinline__ const Number* queries(const SelectArguments& a) const {
        return a.queries + static_cast<long long>(number) * GROUP * HEAD_DIM;
    }
};

// Share out keys among the blocks of a launch, of which a task has `most` at most; returns this block's unit. All
// threads call it.
__device__ __forceinline__ Unit share_keys(const SelectArguments& a, Units& units, int most) {
    return units.divide(a.requests, a.batch, gridDim.x, most, SelectionLength(), blockIdx.x);
}

}  // namespace nested
}  // namespace kvseek
