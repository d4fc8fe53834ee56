// Weights as products read them: in the engine's type, or of 8 bits with their exact conversion to it. KVSEEK_WEIGHT 1
// is int8, 2 is float8_e4m3fn (builder/compile/cuda.py). Both types' numbers fit in bfloat16 and in float16.
#pragma once

#include "kernels/cuda/numbers.cuh"

namespace kvseek {
namespace products {

using Byte = unsigned char;  // the bits of a weight of 8

__device__ __forceinline__ unsigned pack(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&both);
}
__device__ __forceinline__ unsigned pack(float low, float high, __half) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&both);
}

#if KVSEEK_WEIGHT == 1

// Byte i of four signed bytes whose sign bits are flipped, which makes them 0 to 255: as the last bits of 2^23 they are
// a float without a conversion.
__device__ __forceinline__ float byte_to_float(unsigned flipped, int i) {
    return __uint_as_float(__byte_perm(flipped, 0x4b000000u, 0x7440 | i)) - 8388736.0f;  // 2^23 + 128
}

// Four weights as two registers of two numbers.
__device__ __forceinline__ void convert(unsigned bytes, unsigned (&numbers)[2]) {
    const unsigned flipped = bytes ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        numbers[i] = pack(byte_to_float(flipped, 2 * i), byte_to_float(flipped, 2 * i + 1), Number());
}

#elif KVSEEK_WEIGHT == 2

// Sign, exponent and fraction of two e4m3 numbers, each in the upper byte of a half register, moved to their places in
// the wider type: its exponent has another bias, which the factor makes up for. Subnormal numbers come out right, too.
__device__ __forceinline__ unsigned widen(unsigned upper_bytes, __nv_bfloat16) {
    const unsigned moved = (upper_bytes & 0x80008000u) | (upper_bytes & 0x7f007f00u) >> 4;
    const __nv_bfloat162 factor =
        __halves2bfloat162(__ushort_as_bfloat16(0x7b80), __ushort_as_bfloat16(0x7b80));  // 2^120
    const __nv_bfloat162 both = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&moved), factor);
    return *reinterpret_cast<const unsigned*>(&both);
}
__device__ __forceinline__ unsigned widen(unsigned upper_bytes, __half) {
    const unsigned moved = (upper_bytes & 0x80008000u) | (upper_bytes & 0x7f007f00u) >> 1;
    const __half2 both = __hmul2(*reinterpret_cast<const __half2*>(&moved), __float2half2_rn(256.0f));  // 2^8
    return *reinterpret_cast<const unsigned*>(&both);
}

__device__ __forceinline__ void convert(unsigned bytes, unsigned (&numbers)[2]) {
    numbers[0] = widen(__byte_perm(bytes, 0, 0x1404), Number());
    numbers[1] = widen(__byte_perm(bytes, 0, 0x3424), Number());
}

#endif

__device__ __forceinline__ unsigned word(const uint4& bits, int i) {
    return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
}

// Weights 4 step .. 4 step + 3 of a piece of 16 bytes, as two registers of two numbers.
__device__ __forceinline__ void four_numbers(const uint4& piece, int step, unsigned (&numbers)[2], Number) {
    numbers[0] = word(piece, 2 * step), numbers[1] = word(piece, 2 * step + 1);
}
#if KVSEEK_WEIGHT != 0
__device__ __forceinline__ void four_numbers(const uint4& piece, int step, unsigned (&numbers)[2], Byte) {
    convert(word(piece, step), numbers);
}
#endif

}  // namespace products
}  // namespace kvseek
