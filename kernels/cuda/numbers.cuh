// The number type of rows, queries and outputs, chosen when a kernel is compiled: KVSEEK_DTYPE 0 float32, 1 bfloat16,
// 2 float16 (builder/compile/cuda.py).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace kvseek {

constexpr float INFINITE = __builtin_bit_cast(float, 0x7f800000u);

#if KVSEEK_DTYPE == 0
using Number = float;
#elif KVSEEK_DTYPE == 1
using Number = __nv_bfloat16;
#elif KVSEEK_DTYPE == 2
using Number = __half;
#else
#error "KVSEEK_DTYPE must be 0 (float32), 1 (bfloat16) or 2 (float16)"
#endif

__device__ __forceinline__ float to_float(float x) {
    return x;
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ __forceinline__ float to_float(__half x) {
    return __half2float(x);
}

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}

// Bits that compare as unsigned integers as the numbers do that they stand for; -0 comes before 0, NaN is not meant.
__device__ __forceinline__ unsigned ordered_bits(float number) {
    const unsigned bits = __float_as_uint(number);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Eight neighbouring numbers as they lie in memory: one 16-byte load, or two for float32.
template <class T>
struct Eight {
    uint4 bits;
    __device__ __forceinline__ void load(const T* from) { bits = *reinterpret_cast<const uint4*>(from); }
    __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<uint4*>(to) = bits; }
    __device__ __forceinline__ float operator[](int i) const { return to_float(reinterpret_cast<const T*>(&bits)[i]); }
};

template <>
struct Eight<float> {
    float4 low, high;
    __device__ __forceinline__ void load(const float* from) {
        low = reinterpret_cast<const float4*>(from)[0];
        high = reinterpret_cast<const float4*>(from)[1];
    }
    __device__ __forceinline__ void store(float* to) const {
        reinterpret_cast<float4*>(to)[0] = low;
        reinterpret_cast<float4*>(to)[1] = high;
    }
    __device__ __forceinline__ float operator[](int i) const {
        return reinterpret_cast<const float*>(i < 4 ? &low : &high)[i & 3];
    }
};

}  // namespace kvseek
