// Vectors of the width that the instruction level offers: GCC/Clang vector types for arithmetic, intrinsics only for
// what those cannot say. Everything has internal linkage (kernel.h says why).
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvseek {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint32_t WordVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));
typedef uint8_t ByteVec __attribute__((vector_size(LANES)));

constexpr float INFINITE = __builtin_inff();

struct Bfloat16 {
    uint16_t bits;
};

template <class V, class T>
inline V load_as(const T* from) {
    V result;
    std::memcpy(&result, from, sizeof(V));
    return result;
}

inline Vec load(const float* from) {
    return load_as<Vec>(from);
}
inline Vec load(const Bfloat16* from) {
    return (Vec)(__builtin_convertvector(load_as<HalfVec>(from), WordVec) << 16);
}
inline IntVec load(const int32_t* from) {
    return load_as<IntVec>(from);
}
inline void store(float* to, Vec value) {
    std::memcpy(to, &value, sizeof(Vec));
}
inline void store(Bfloat16* to, Vec value) {  // as from_float
    const WordVec bits = (WordVec)value;
    const WordVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const HalfVec halves = __builtin_convertvector(value == value ? rounded : (bits >> 16) | 0x40, HalfVec);
    std::memcpy(to, &halves, sizeof(HalfVec));
}
inline void store(int32_t* to, IntVec value) {
    std::memcpy(to, &value, sizeof(IntVec));
}
inline Vec splat(float value) {
    return value - Vec{};
}

inline IntVec lane_numbers() {
    IntVec numbers = {};
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    return numbers;
}

inline float to_float(float value) {
    return value;
}
inline float to_float(Bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    return load_as<float>(&bits);
}
inline void from_float(float value, float* to) {
    *to = value;
}
inline void from_float(float value, Bfloat16* to) {  // to nearest, ties to even; NaN stays NaN
    const uint32_t bits = load_as<uint32_t>(&value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = static_cast<uint16_t>(value == value ? rounded : (bits >> 16) | 0x40);
}

inline Vec maximum(Vec a, Vec b) {
    return b > a ? b : a;
}

inline float sum(Vec value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#else
    float total = 0.0f;
    for (int i = 0; i < LANES; i++) total += value[i];
    return total;
#endif
}

inline int32_t sum(IntVec value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)value);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += value[i];
    return total;
#endif
}

inline float maximum(Vec value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float best = value[0];
    for (int i = 1; i < LANES; i++) best = value[i] > best ? value[i] : best;
    return best;
#endif
}

// The four sums over the lanes of a, b, c and d.
inline void sum4(Vec a, Vec b, Vec c, Vec d, float* sums) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
    const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
#else
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps((__m256)a, (__m256)b), _mm256_unpackhi_ps((__m256)a, (__m256)b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps((__m256)c, (__m256)d), _mm256_unpackhi_ps((__m256)c, (__m256)d));
    const __m256 half = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
#endif
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
    sums[0] = sum(a), sums[1] = sum(b), sums[2] = sum(c), sums[3] = sum(d);
#endif
}

// Bit i: bytes[i] >= least, of 64 bytes.
inline uint64_t at_least64(const uint8_t* bytes, uint8_t least) {
#if defined(__AVX512BW__)
    return _mm512_cmpge_epu8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8(static_cast<char>(least)));
#elif defined(__AVX2__)
    const __m256i limit = _mm256_set1_epi8(static_cast<char>(least));
    const __m256i a = load_as<__m256i>(bytes), b = load_as<__m256i>(bytes + 32);
    const uint32_t low = _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(a, limit), a));
    const uint32_t high = _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(b, limit), b));
    return static_cast<uint64_t>(high) << 32 | low;
#elif defined(__SSE2__)
    const __m128i limit = _mm_set1_epi8(static_cast<char>(least));
    uint64_t bits = 0;
    for (int i = 0; i < 64; i += 16) {
        const __m128i some = load_as<__m128i>(bytes + i);
        bits |= static_cast<uint64_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(some, limit), some))) << i;
    }
    return bits;
#else
    uint64_t bits = 0;
    for (int i = 0; i < 64; i++) bits |= static_cast<uint64_t>(bytes[i] >= least) << i;
    return bits;
#endif
}

// Bit i: bytes[i] == value, of 64 bytes.
inline uint64_t equal64(const uint8_t* bytes, uint8_t value) {
#if defined(__AVX512BW__)
    return _mm512_cmpeq_epu8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8(static_cast<char>(value)));
#endif
    const uint64_t reached = at_least64(bytes, value);
    return value == 255 ? reached : reached & ~at_least64(bytes, static_cast<uint8_t>(value + 1));
}

// Ask for the lines of a run of bytes.
inline void prefetch(const void* from, int64_t bytes) {
    const char* line = static_cast<const char*>(from);
    for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(line + offset, 0, 3);
}

// The lowest `count` set bits.
inline uint64_t lowest_bits(uint64_t bits, int64_t count) {
    if (__builtin_popcountll(bits) <= count) return bits;
    uint64_t kept = 0;
    for (; count > 0; count--, bits &= bits - 1) kept |= bits & (~bits + 1);
    return kept;
}

#if defined(__AVX512F__)
// Write the lanes of `values` whose bits are set, one after another; returns how many. They are compressed in a
// register, for AMD's processors take a hundred cycles to compress into memory.
inline int append(IntVec values, uint64_t bits, int32_t* to) {
    const int count = __builtin_popcountll(bits);
    const __m512i kept = _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), (__m512i)values);
    _mm512_mask_storeu_epi32(to, static_cast<__mmask16>((1u << count) - 1), kept);
    return count;
}
#endif

// Write first + i for every bit i that is set; returns how many.
inline int append_places(uint64_t bits, int32_t first, int32_t* to) {
    const int count = __builtin_popcountll(bits);
#if defined(__AVX512F__)
    for (int i = 0; i < 64; i += LANES) to += append(lane_numbers() + (first + i), bits >> i & 0xffff, to);
#else
    for (; bits != 0; bits &= bits - 1) *to++ = first + __builtin_ctzll(bits);
#endif
    return count;
}

inline Vec square_root(Vec value) {
    for (int i = 0; i < LANES; i++) value[i] = __builtin_sqrtf(value[i]);
    return value;
}

// e^x for x <= 88, relative error about 1e-7: x = n ln 2 + r, a polynomial of r, times 2^n. Below -87 it is 0; NaN
// stays.
inline Vec exponential(Vec x) {
    const float lowest = -87.0f, rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
    const Vec clamped = x < lowest ? splat(lowest) : x;
    const Vec shifted = clamped * 1.44269504f + rounder;
    const Vec n = shifted - rounder;
    const Vec r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
    Vec p = r * (1.0f / 720.0f) + (1.0f / 120.0f);
    p = p * r + (1.0f / 24.0f);
    p = p * r + (1.0f / 6.0f);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Vec power = (Vec)(((IntVec)shifted + (127 - 0x4b400000)) << 23);
    return x < lowest ? Vec{} : p * power;
}

inline float exponential(float x) {
    return exponential(splat(x))[0];
}

// ln x of positive normal numbers, absolute error about 1e-7 near 1: x = 2^n m with m from √½ to √2, and
// ln m = 2 artanh t with t = (m - 1) / (m + 1).
inline Vec logarithm(Vec x) {
    const IntVec n = ((IntVec)x - 0x3f3504f3) >> 23;  // the bits of √½
    const Vec m = (Vec)((IntVec)x - (n << 23));
    const Vec t = (m - 1.0f) / (m + 1.0f), square = t * t;
    Vec p = square * (1.0f / 9.0f) + (1.0f / 7.0f);
    p = p * square + (1.0f / 5.0f);
    p = p * square + (1.0f / 3.0f);
    return __builtin_convertvector(n, Vec) * 0.693147181f + (p * square + 1.0f) * t * 2.0f;
}

}  // namespace
}  // namespace kvseek
