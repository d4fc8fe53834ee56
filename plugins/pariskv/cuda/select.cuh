// What the four kernels of a ParisKV selection share: their arguments, and where their intermediate results lie.
#pragma once

#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/power_sum.cuh"
#include "kernels/cuda/task.cuh"
#include "kernels/cuda/units.cuh"
#include "layout.cuh"

namespace kvseek {
namespace pariskv {

// A "task" is a request and a KV head: request * kv_heads + head.
// Results that grow with the region lie in scratch extents: entry i of a task is in the scratch row of place i.
struct SelectArguments {
    const Number* queries;       // [batch, kv_heads * GROUP, HEAD_DIM]
    const Request* requests;     // [batch]; method_fields: keys that earn tiers, ceil(rho n); candidates
    const int* table;            // [slots, max_extents]
    const unsigned char* ids;    // [extents, kv_heads, 1024, BLOCKS]
    const unsigned char* codes;  // [extents, kv_heads, 1024, CODE_BYTES]
    const __half* weights;       // [extents, kv_heads, 1024, BLOCKS]
    const int* counts;           // [slots, kv_heads, BLOCKS, 256]
    const float* signs;          // [DIM]
    const float* levels;         // [8]
    unsigned* columns;           // [tasks, COLUMN_TILES, STEPS, 32, 2] rotated queries, as the rerank multiplies them
    unsigned char* votes;        // [tasks, BLOCKS / 4, 256, 4, VOTE_BYTES] votes of each centroid, a byte a lane
    int* totals;                 // [tasks, SCORES] keys with at least so many votes
    int* chunk_totals;           // [kv_heads, chunks, SCORES] the same, of the keys of a chunk
    unsigned char* scores;       // [scratch extents, kv_heads, 1024] votes of each key
    int* candidates;             // [scratch extents, kv_heads, 1024] places, ascending
    float* estimates;            // [scratch extents, kv_heads, 1024, LANES] of candidates
    unsigned* keys;              // [scratch extents, kv_heads, 1024] of candidates: larger is better
    PowerSum* normalisers;       // [kv_heads, chunks, LANES] sums of the powers
    unsigned* best_keys;         // [kv_heads, top blocks, top_k]
    int* best_places;            // [kv_heads, top blocks, top_k]
    int* finished;               // [tasks] blocks of the last kernel that are done; 0 between launches
    int* rows;                   // [batch, kv_heads, top_k] result
    int batch, kv_heads, max_extents, top_k;
    int scan_blocks;  // of a KV head; each has CHUNKS_OF_SCAN chunks, of which a block of the rerank takes one
    float scaling;    // softmax scale
};

struct Task : TaskOf<SelectArguments> {
    using TaskOf::TaskOf;

    __device__ __forceinline__ int budget() const { return request.method_fields[0]; }
    __device__ __forceinline__ int candidates() const { return request.method_fields[1]; }
};

// Share out keys among the blocks of the scan, and return the unit of the one with this number. All threads call it.
__device__ __forceinline__ Unit share_keys(const SelectArguments& a, Units& units, int number) {
    return units.divide(a.requests, a.batch, a.scan_blocks, a.scan_blocks, SelectionLength(), number);
}
// Number of the first chunk of a block of the scan, in arrays [kv_heads, chunks, ...].
__device__ __forceinline__ int first_chunk(const SelectArguments& a, int block) {
    return (static_cast<int>(blockIdx.y) * a.scan_blocks + block) * CHUNKS_OF_SCAN;
}

}  // namespace pariskv
}  // namespace kvseek
