// CTkvr on host cores: the arguments of kvseek_ctkvr_host_step, and what it may report.
#pragma once

#include <cstdint>

namespace kvseek {

// One layer's work of a decode step. Sizes are in numbers, not in bytes.
struct HostStep {
    void* pool;                     // of kvseek_ctkvr_pool_create; null: the threads of the OpenMP runtime
    const void* queries;            // [batch, heads, head_dim]
    const int32_t* recalled;        // [batch, kv_heads, capacity] places, ascending
    const int32_t* recalled_count;  // [batch, kv_heads]; 0: nothing is done for the request
    const int32_t* slots;           // [batch]
    const int32_t* table;           // [table_slots, max_extents]
    const void* rows;               // [extents, kv_heads, 1024, 2, head_dim], contiguous but for the extent stride
    float* out;                     // [batch, heads, head_dim]; null: no attention
    float* lse;                     // [batch, heads] natural logarithm; null with `out`
    int32_t* selected;              // [batch, kv_heads, top_k] ascending, -1 fills up; null: not wanted
    int32_t* best;                  // [batch, kv_heads, rho] ascending, -1 fills up; null: not wanted
    int32_t* error;                 // one HostError, written only if something is wrong
    // Codes that rank the keys (kernels/reference/codes), and `out` is null. All null: keys rank by themselves.
    const uint8_t* high;      // [extents, kv_heads, 1024, padded_dim / 4]
    const uint8_t* low;       // the same
    const uint16_t* scales;   // [extents, kv_heads, 1024]
    const int8_t* means;      // [extents, kv_heads, 1024 / block, 2, padded_dim] what codes leave out
    const float* mean_steps;  // [extents, kv_heads, 1024 / block]
    const float* signs;       // [padded_dim] of the rotation
    int64_t extent_stride;
    int32_t batch, heads, kv_heads, head_dim;
    int32_t capacity, top_k, rho;
    int32_t table_slots, max_extents;
    int32_t dtype;    // of queries and rows: HostType
    int32_t threads;  // without a pool
    int32_t padded_dim;
    int32_t block;  // neighbouring places that share a mean
    float scaling;
    float step;  // width of a code's cell
};

enum HostType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

enum HostError : int32_t {
    NO_ERROR = 0,
    BAD_SHAPE = 1,  // a size that the kernels do not support
    BAD_COUNT = 2,  // a recalled_count beyond the capacity
    BAD_SLOT = 3,   // a slot that the table does not hold
    BAD_PLACE = 4,  // a place outside of the slot's extents
    NO_MEMORY = 5,  // for intermediate results
};

constexpr int32_t MAX_HOST_GROUP = 16;
constexpr int32_t MAX_HOST_DIM = 256;
constexpr int32_t HOST_DIM_STEP = 32;

}  // namespace kvseek
