// The activation of an MLP's gates.
#pragma once

namespace kvseek {

__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + expf(-x));
}

}  // namespace kvseek
