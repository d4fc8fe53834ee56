// Sums and maxima over the threads of a warp. All of its threads call these; `lane` is the thread's number in the warp.
#pragma once

namespace kvseek {

constexpr int WARP = 32;
constexpr unsigned EVERYONE = 0xffffffffu;

// Over this thread and those before it.
__device__ __forceinline__ int sum_up_to_here(int value, int lane) {
    int sum = value;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(EVERYONE, sum, step);
        if (lane >= step) sum += other;
    }
    return sum;
}

// Over this thread and those after it.
__device__ __forceinline__ int sum_from_here_on(int value, int lane) {
    int sum = value;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_down_sync(EVERYONE, sum, step);
        if (lane + step < WARP) sum += other;
    }
    return sum;
}

// Over all of them.
__device__ __forceinline__ int sum_of_warp(int value) {
    return __reduce_add_sync(EVERYONE, value);
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) value += __shfl_xor_sync(EVERYONE, value, mask);
    return value;
}

__device__ __forceinline__ float largest_of_warp(float value) {
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) value = fmaxf(value, __shfl_xor_sync(EVERYONE, value, mask));
    return value;
}

}  // namespace kvseek
