// What every kernel of a decode step reads about the requests of its batch.
//
// The kernels of a captured graph get the same arguments at every replay: whatever varies from step to step lies in
// this array in device memory, which the host uploads before each step.
#pragma once

#include "kernels/request.h"

namespace kvseek {

constexpr int EXTENT_TOKENS = 1024;

// Row of retrieval position `position` in an array [extents, kv_heads, 1024, ...], counted in positions.
__device__ __forceinline__ long long extent_row(const int* table_row, int kv_heads, int head, int position) {
    const long long extent = table_row[position >> 10];
    return ((extent * kv_heads + head) << 10) + (position & (EXTENT_TOKENS - 1));
}

}  // namespace kvseek
