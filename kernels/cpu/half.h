// IEEE half precision, for processors with and without instructions for it.
#pragma once

#include "simd.h"

namespace kvseek {
namespace {

struct Half {
    uint16_t bits;
};

inline uint16_t to_half(float value) {  // to nearest, ties to even; not negative
#if defined(__F16C__)
    return static_cast<uint16_t>(_cvtss_sh(value, 0));
#else
    uint32_t bits = load_as<uint32_t>(&value);
    if (value != value) return 0x7e00;
    if (value < 6.103515625e-5f) {  // subnormal: an addition rounds to the right bit
        const float shifted = value + 0.5f;
        return static_cast<uint16_t>(load_as<uint32_t>(&shifted) - 0x3f000000);
    }
    bits += 0xfff + ((bits >> 13) & 1);
    return static_cast<uint16_t>((bits >> 13) - (112 << 10));
#endif
}

inline float from_half(uint16_t half) {  // finite, not negative
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    const uint32_t bits = static_cast<uint32_t>(half) << 13;
    return load_as<float>(&bits) * 0x1p112f;
#endif
}

inline float to_float(Half value) {
    const uint16_t magnitude = value.bits & 0x7fff;
    float number = magnitude < 0x7c00 ? from_half(magnitude) : magnitude == 0x7c00 ? INFINITE : __builtin_nanf("");
    return value.bits & 0x8000 ? -number : number;
}

inline Vec load(const Half* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__F16C__) && defined(__AVX2__)
    return (Vec)_mm256_cvtph_ps(load_as<__m128i>(from));
#else
    Vec numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = to_float(from[i]);
    return numbers;
#endif
}

// LANES halves that are not negative as floats; those that stand for no number may become any float.
inline Vec load_half(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(load_as<__m128i>(from));
#else
    return (Vec)(__builtin_convertvector(load_as<HalfVec>(from), WordVec) << 13) * 0x1p112f;
#endif
}

}  // namespace
}  // namespace kvseek
