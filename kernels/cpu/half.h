// IEEE half precision, for processors with and without instructions for it. Values are not negative.
#pragma once

#include "simd.h"

namespace kvseek {
namespace {

inline uint16_t to_half(float value) {  // to nearest, ties to even
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

inline float from_half(uint16_t half) {  // finite
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    const uint32_t bits = static_cast<uint32_t>(half) << 13;
    return load_as<float>(&bits) * 0x1p112f;
#endif
}

// LANES halves as floats; those that stand for no number may become any float.
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
