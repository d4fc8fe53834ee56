// Where the key and the value of a decode step's token go in a layer's window.
#pragma once

#include "kernels/cuda/batch.cuh"

namespace kvseek {

// Row of a request's new token in a window [slots, kv_heads, window_rows, 2, D], counted in pairs of key and value.
__device__ __forceinline__ long long window_row(const Request& request, int kv_heads, int kv_head, int window_rows) {
    return (static_cast<long long>(request.slot) * kv_heads + kv_head) * window_rows + request.write_row;
}

}  // namespace kvseek
