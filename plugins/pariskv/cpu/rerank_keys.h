// ParisKV, third step, 16 keys at a time: a vector lane is a key, so that sums need no shuffles, and a block's 8
// nibbles are a lane's 32 bits.
#pragma once

#include "kernels/cpu/simd.h"
#include "layout.h"
#include "votes.h"

namespace kvseek {
namespace {

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
    switch (lanes) {
        case 1:
            return estimate_keys<1>(codes, weights, rows, padded_dim, levels, queries, estimates, stride);
        case 2:
            return estimate_keys<2>(codes, weights, rows, padded_dim, levels, queries, estimates, stride);
        case 3:
            return estimate_keys<3>(codes, weights, rows, padded_dim, levels, queries, estimates, stride);
        default:
            return estimate_keys<4>(codes, weights, rows, padded_dim, levels, queries, estimates, stride);
    }
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
