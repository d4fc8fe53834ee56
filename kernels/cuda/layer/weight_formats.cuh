// Weights as products read them: in the engine's type, or of 8 or 4 bits with their exact conversion to it.
// KVSEEK_WEIGHT 1 is int8, 2 is float8_e4m3fn, 3 is 4 bits in groups of KVSEEK_WEIGHT_GROUP inputs, with int8 in groups
// for an output head, 4 is float8_e4m3fn in groups, 5 is int8 in groups, 6 the same with values of 0, which
// KVSEEK_ASYMMETRIC brings beside 3 and 5 (builder/compile/cuda.py). All these numbers fit in bfloat16 and in float16.
#pragma once

#include "kernels/cuda/instructions.cuh"
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

#if KVSEEK_WEIGHT == 1 || KVSEEK_WEIGHT == 3 || KVSEEK_WEIGHT >= 5

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

#elif KVSEEK_WEIGHT == 2 || KVSEEK_WEIGHT == 4

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

// Formats in groups. A cell is 32 inputs of a row; a lane t of four multiplies inputs 8t .. 8t + 7 of it. `chunk` is
// the 16 bytes of a cell that hold them, in whose lower or upper half they lie. `eight` makes them numbers, plus an
// offset if they are SHIFTED, in four registers of two. Of groups of 16, lane t multiplies inputs 4t .. 4t + 3 of each.
constexpr int CELL = 32;

__device__ __forceinline__ float magic_offset(__nv_bfloat16) {
    return 16.0f;
}
__device__ __forceinline__ float magic_offset(__half) {
    return 64.0f;
}

#if KVSEEK_WEIGHT == 3
// A factor, and the value of 0.
struct Int4 {
    static constexpr int BITS = 4, GROUP = KVSEEK_WEIGHT_GROUP;
    static constexpr bool ZERO = true, SHIFTED = true;
    using Scale = __half2;

    __device__ __forceinline__ static int chunk(int, int cell) { return cell; }
    __device__ __forceinline__ static int swizzle(int row) { return row; }
    // Byte j of a cell has input j in its low bits, and j + 16 in its high ones. A nibble among the last bits of 16 in
    // bfloat16, or of 64 in float16, is added to it; the upper byte of these numbers is the same for all nibbles.
    __device__ __forceinline__ static void eight(uint2 bytes, int t, unsigned (&numbers)[4]) {
        constexpr bool WIDE = sizeof(Number) == 2 && KVSEEK_DTYPE == 1;
        const int rotation = WIDE ? (t < 2 ? 29 : 1) : (t < 2 ? 28 : 0);
        constexpr unsigned MASK = WIDE ? 0x78787878u : 0xf0f0f0f0u, ONES = WIDE ? 0x80808080u : 0u;
        constexpr unsigned UPPER = WIDE ? 0x41414141u : 0x54545454u;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned word = i == 0 ? bytes.x : bytes.y;
            const unsigned lower = choose_bits(__funnelshift_r(word, word, rotation), MASK, ONES);
            numbers[2 * i] = __byte_perm(lower, UPPER, 0x4140);
            numbers[2 * i + 1] = __byte_perm(lower, UPPER, 0x4342);
        }
    }
};
#endif

#if KVSEEK_WEIGHT >= 3
// A factor, and with ZERO_ the value of 0.
template <class Scale_, int GROUP_, bool ZERO_ = false>
struct Bytes {
    static constexpr int BITS = 8, GROUP = GROUP_;
    static constexpr bool ZERO = ZERO_, SHIFTED = false;
    using Scale = Scale_;

    __device__ __forceinline__ static int chunk(int t, int cell) { return 2 * cell + t / 2; }
    __device__ __forceinline__ static int swizzle(int row) { return row % 4 * 2 + row / 4; }
    __device__ __forceinline__ static void eight(uint2 bytes, int, unsigned (&numbers)[4]) {
        convert(bytes.x, reinterpret_cast<unsigned (&)[2]>(numbers[0]));
        convert(bytes.y, reinterpret_cast<unsigned (&)[2]>(numbers[2]));
    }
};
using Int8Groups = Bytes<__half, 32>;
using Int8Asymmetric = Bytes<__half2, 16, true>;
using Fp8Groups = Bytes<float, 128>;
#endif

// What layers have, and so experts.
#if KVSEEK_WEIGHT == 0
using Layers = Number;
#elif KVSEEK_WEIGHT < 3
using Layers = Byte;
#elif KVSEEK_WEIGHT == 3
using Layers = Int4;
#elif KVSEEK_WEIGHT == 4
using Layers = Fp8Groups;
#elif KVSEEK_WEIGHT == 5
using Layers = Int8Groups;
#else
using Layers = Int8Asymmetric;
#endif

}  // namespace products
}  // namespace kvseek
