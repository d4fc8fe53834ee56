// ParisKV, third step: estimate the candidates' scores from their 4-bit codes.
#pragma once

#include "kernels/cpu/half.h"
#include "kernels/cpu/simd.h"
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
    with_constant<1, 2, 3, PACK>(lanes, [&](auto count) { dot<count>(key, queries, padded_dim, estimates, stride); });
}

// 16 keys at a time: a vector lane is a key, so that sums need no shuffles, and a block's 8 nibbles are a lane's 32
// bits.

#if defined(__AVX512F__)

constexpr int GROUP_BLOCKS = 8;  // blocks that are transposed at once

inline bool reranks_keys(int padded_dim) {
    return padded_dim % (GROUP_BLOCKS * BLOCK) == 0;
}

// From rows i and i + 4 in words[i], and rows i + 8 and i + 12 in words[i + 4], of 8 words each, to word i of all rows.
inline void transpose_words(__m512i* words) {
    __m512i turned[8];
    for (int i = 0; i < 8; i += 4) {
        const __m512i low01 = _mm512_unpacklo_epi32(words[i], words[i + 1]);
        const __m512i high01 = _mm512_unpackhi_epi32(words[i], words[i + 1]);
        const __m512i low23 = _mm512_unpacklo_epi32(words[i + 2], words[i + 3]);
        const __m512i high23 = _mm512_unpackhi_epi32(words[i + 2], words[i + 3]);
        turned[i] = _mm512_unpacklo_epi64(low01, low23), turned[i + 1] = _mm512_unpackhi_epi64(low01, low23);
        turned[i + 2] = _mm512_unpacklo_epi64(high01, high23), turned[i + 3] = _mm512_unpackhi_epi64(high01, high23);
    }
    for (int i = 0; i < 4; i++) {
        words[i] = _mm512_shuffle_i32x4(turned[i], turned[i + 4], 0x88);
        words[i + 4] = _mm512_shuffle_i32x4(turned[i], turned[i + 4], 0xdd);
    }
}

// Codes and weights of 8 blocks of the 16 keys at rows [16] of the index, transposed.
inline void load_blocks(const uint8_t* codes, const uint16_t* weights, const int64_t* rows, int64_t blocks,
                        __m512i* of_codes, __m512i* of_weights) {
    for (int i = 0; i < 8; i++) {
        const int64_t low = rows[i % 4 + i / 4 * 8] * blocks, high = rows[i % 4 + i / 4 * 8 + 4] * blocks;
        const __m256i code = load_as<__m256i>(codes + low * 4);
        of_codes[i] = _mm512_inserti64x4(_mm512_castsi256_si512(code), load_as<__m256i>(codes + high * 4), 1);
        const __m128i weight = load_as<__m128i>(weights + low);
        const __m256i both =
            _mm256_inserti128_si256(_mm256_castsi128_si256(weight), load_as<__m128i>(weights + high), 1);
        of_weights[i] = _mm512_castps_si512(_mm512_cvtph_ps(both));
    }
    transpose_words(of_codes);
    transpose_words(of_weights);
}

// Estimates of the keys at rows [16] and the first COUNT of queries [padded_dim, PACK] into estimates[q * stride].
template <int COUNT>
inline void estimate_keys(const uint8_t* codes, const uint16_t* weights, const int64_t* rows, int padded_dim,
                          const float* levels, const float* queries, float* estimates, int64_t stride) {
    const __m512 table = _mm512_loadu_ps(levels);
    const int64_t blocks = padded_dim / BLOCK;
    __m512 sums[COUNT] = {};
    for (int64_t first = 0; first < blocks; first += GROUP_BLOCKS) {
        __m512i of_codes[8], of_weights[8];
        load_blocks(codes + first * 4, weights + first, rows, blocks, of_codes, of_weights);
#pragma GCC unroll 8
        for (int b = 0; b < GROUP_BLOCKS; b++) {
            const float* block = queries + (first + b) * BLOCK * PACK;
            __m512 products[COUNT] = {};
#pragma GCC unroll 8
            for (int j = 0; j < BLOCK; j++) {  // a look-up reads the low 4 bits of an index
                const __m512 level = _mm512_permutexvar_ps(_mm512_srli_epi32(of_codes[b], 4 * j), table);
                for (int q = 0; q < COUNT; q++)
                    products[q] = _mm512_fmadd_ps(level, _mm512_set1_ps(block[j * PACK + q]), products[q]);
            }
            for (int q = 0; q < COUNT; q++)
                sums[q] = _mm512_fmadd_ps(products[q], _mm512_castsi512_ps(of_weights[b]), sums[q]);
        }
    }
    for (int q = 0; q < COUNT; q++) _mm512_storeu_ps(estimates + q * stride, sums[q]);
}

inline void estimate_keys(const uint8_t* codes, const uint16_t* weights, const int64_t* rows, int padded_dim,
                          const float* levels, const float* queries, int lanes, float* estimates, int64_t stride) {
    with_constant<1, 2, 3, PACK>(lanes, [&](auto count) {
        estimate_keys<count>(codes, weights, rows, padded_dim, levels, queries, estimates, stride);
    });
}

#else

inline bool reranks_keys(int) {
    return false;
}
inline void estimate_keys(const uint8_t*, const uint16_t*, const int64_t*, int, const float*, const float*, int, float*,
                          int64_t) {}

#endif

}  // namespace
}  // namespace kvseek
