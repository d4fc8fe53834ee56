// Sizes of rotated vectors, fixed when the kernels are compiled (builder/compile/cuda.py).
#pragma once

#include "kernels/cuda/batch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/warp.cuh"

namespace kvseek {
namespace codes {

constexpr int HEAD_DIM = KVSEEK_HEAD_DIM;
constexpr int GROUP = KVSEEK_GROUP;

__host__ __device__ constexpr int padded(int size) {
    int power = 64;
    while (power < size) power *= 2;
    return power;
}

constexpr int DIM = padded(HEAD_DIM);  // of a rotated vector
constexpr int EACH = DIM / WARP;       // coordinates that a lane of a warp holds of a vector: EACH * lane ...

constexpr float LOG2_E = 1.4426950408889634f;

}  // namespace codes
}  // namespace kvseek
