// ParisKV, third step: estimate the candidates' scores from their 4-bit codes.
#pragma once

#include "kernels/cpu/half.h"
#include "layout.h"
#include "votes.h"

namespace kvseek {
namespace {

// Coordinates that one step of `decode` turns from nibbles to floats, all the low nibbles first.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int STEP = 2 * LANES;
#else
constexpr int STEP = 1;
#endif

// Where `decode` puts a coordinate of a vector of padded_dim coordinates.
inline int index_of(int coordinate, int padded_dim) {
    if (STEP == 1 || padded_dim % STEP != 0) return coordinate;
    const int inside = coordinate % STEP;
    return coordinate - inside + inside % 2 * (STEP / 2) + inside / 2;
}

// Nibble to signed level.
struct Levels {
    alignas(64) float of[2 * LEVELS];
    explicit Levels(const float* levels) {
        for (int i = 0; i < LEVELS; i++) of[i] = levels[i], of[LEVELS + i] = -levels[i];
    }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// 8 bytes of codes, that is 2 blocks, to 16 coordinates times their block's weight.
inline __m256 signed_level(__m256i nibbles, __m256 magnitudes) {
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(nibbles, 28), _mm256_set1_epi32(INT32_MIN));
    const __m256 level = _mm256_permutevar8x32_ps(magnitudes, nibbles);  // reads the low 3 bits of an index
    return _mm256_xor_ps(level, _mm256_castsi256_ps(sign));
}

inline void decode_step(const uint8_t* codes, const uint16_t* weights, const Levels& levels, float* key) {
    const __m256 magnitudes = _mm256_load_ps(levels.of);
    const __m256 weight = _mm256_set_m128(_mm_set1_ps(from_half(weights[1])), _mm_set1_ps(from_half(weights[0])));
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    _mm256_store_ps(key, _mm256_mul_ps(signed_level(bytes, magnitudes), weight));
    const __m256 high = signed_level(_mm256_srli_epi32(bytes, 4), magnitudes);
    _mm256_store_ps(key + LANES, _mm256_mul_ps(high, weight));
}
#else
inline void decode_step(const uint8_t*, const uint16_t*, const Levels&, float*) {}  // STEP = 1: never called
#endif

// A key's estimate from its row of codes and weights: float [padded_dim], coordinates at index_of().
inline void decode(const uint8_t* codes, const uint16_t* weights, int padded_dim, const Levels& levels, float* key) {
    if (STEP > 1 && padded_dim % STEP == 0) {
        for (int d = 0; d < padded_dim; d += STEP) decode_step(codes + d / 2, weights + d / BLOCK, levels, key + d);
        return;
    }
    for (int d = 0; d < padded_dim; d++) {
        const int nibble = codes[d / 2] >> (d % 2 * 4) & 15;
        key[d] = levels.of[nibble] * from_half(weights[d / BLOCK]);
    }
}

// <key, query> for COUNT queries [COUNT, padded_dim] into estimates[lane * stride].
template <int COUNT>
inline void dot(const float* key, const float* queries, int padded_dim, float* estimates, int64_t stride) {
    float sums[PACK];
    if (padded_dim % LANES == 0) {
        Vec partial[PACK] = {};
        for (int d = 0; d < padded_dim; d += LANES) {
            const Vec coordinates = load(key + d);
            for (int q = 0; q < COUNT; q++) partial[q] += coordinates * load(queries + q * padded_dim + d);
        }
        sum4(partial[0], partial[1], partial[2], partial[3], sums);
    } else {
        for (int q = 0; q < COUNT; q++) {
            sums[q] = 0.0f;
            for (int d = 0; d < padded_dim; d++) sums[q] += key[d] * queries[q * padded_dim + d];
        }
    }
    for (int q = 0; q < COUNT; q++) estimates[q * stride] = sums[q];
}

// Estimates of up to PACK lanes for one decoded key.
inline void dot_lanes(const float* key, const float* queries, int lanes, int padded_dim, float* estimates,
                      int64_t stride) {
    switch (lanes) {
        case 1:
            return dot<1>(key, queries, padded_dim, estimates, stride);
        case 2:
            return dot<2>(key, queries, padded_dim, estimates, stride);
        case 3:
            return dot<3>(key, queries, padded_dim, estimates, stride);
        default:
            return dot<4>(key, queries, padded_dim, estimates, stride);
    }
}

}  // namespace
}  // namespace kvseek
