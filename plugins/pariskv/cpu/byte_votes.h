// Summing votes with AVX-512 VBMI, which looks 64 bytes up in a table of 128 at once. x86-64-v4 does not include it, so
// it is asked for by function and checked at run time.
#pragma once

#include "kernels/cpu/kernel.h"
#include "kernels/cpu/simd.h"
#include "layout.h"

namespace kvseek {
namespace {

#if KVSEEK_LEVEL == 4

constexpr int AHEAD = 2048;  // bytes of ids that are asked for ahead: processors do not look beyond a page's end

#define VBMI __attribute__((target("avx512vbmi")))

bool looks_up_bytes(int64_t blocks) {
    return blocks % 8 == 0 && kvseek_processor_extends(KVSEEK_VBMI);
}

// Ids of 8 blocks of 64 keys, one block a vector: from rows of `blocks` bytes, at the first of the 8 blocks.
VBMI inline void load_blocks(const uint8_t* ids, int64_t blocks, __m512i* of_block) {
    constexpr long long ONES = 0x0101010101010101;
    const __m512i numbers = _mm512_set_epi64(7 * ONES, 6 * ONES, 5 * ONES, 4 * ONES, 3 * ONES, 2 * ONES, 1 * ONES, 0);
    const __m512i by_block = _mm512_add_epi8(_mm512_set1_epi64(0x3830282018100800), numbers);
    const __m512i offsets = _mm512_mullo_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi64(blocks));
    __m512i a[8], b[8];
    for (int i = 0; i < 8; i++) {  // 8 keys: 64-bit element = block, byte = key
        const uint8_t* keys = ids + i * 8 * blocks;
        const __m512i rows = blocks == 8 ? _mm512_loadu_si512(keys) : _mm512_i64gather_epi64(offsets, keys, 1);
        a[i] = _mm512_permutexvar_epi8(by_block, rows);
    }
    // Transpose the 8 x 8 matrix of 64-bit elements.
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 1]);
    }
    for (int odd = 0; odd < 2; odd++) {
        const __m512i low04 = _mm512_shuffle_i64x2(b[odd], b[odd + 2], 0x88);
        const __m512i low26 = _mm512_shuffle_i64x2(b[odd], b[odd + 2], 0xdd);
        const __m512i high04 = _mm512_shuffle_i64x2(b[odd + 4], b[odd + 6], 0x88);
        const __m512i high26 = _mm512_shuffle_i64x2(b[odd + 4], b[odd + 6], 0xdd);
        of_block[odd] = _mm512_shuffle_i64x2(low04, high04, 0x88);
        of_block[odd + 4] = _mm512_shuffle_i64x2(low04, high04, 0xdd);
        of_block[odd + 2] = _mm512_shuffle_i64x2(low26, high26, 0x88);
        of_block[odd + 6] = _mm512_shuffle_i64x2(low26, high26, 0xdd);
    }
}

// table[id] for 64 ids; bit i of `upper`: id i is 128 or more.
VBMI inline __m512i look_up(const uint8_t* table, __m512i ids, __mmask64 upper) {
    const __m512i* t = reinterpret_cast<const __m512i*>(table);
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(t), ids, _mm512_load_si512(t + 1));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(t + 2), ids, _mm512_load_si512(t + 3));
    return _mm512_mask_blend_epi8(upper, low, high);
}

// Best lane's sum for each key: ids [1024, blocks], ballots [lanes, blocks, 256] to best [count, rounded up to 64].
VBMI void sum_byte_votes(const uint8_t* ids, int count, int64_t blocks, const uint8_t* ballots, int lanes,
                         uint8_t* best) {
    for (int first = 0; first < count; first += 64) {
        for (int64_t line = 0; line < 64 * blocks; line += 64) __builtin_prefetch(ids + first * blocks + line + AHEAD);
        __m512i sums[16] = {};
        for (int64_t block = 0; block < blocks; block += 8) {
            __m512i of_block[8];
            load_blocks(ids + first * blocks + block, blocks, of_block);
            __mmask64 upper[8];
            for (int b = 0; b < 8; b++) upper[b] = _mm512_movepi8_mask(of_block[b]);
            for (int lane = 0; lane < lanes; lane++) {
                const uint8_t* tables = ballots + (lane * blocks + block) * CENTROIDS;
                __m512i sum = sums[lane];
                for (int b = 0; b < 8; b++)
                    sum = _mm512_add_epi8(sum, look_up(tables + b * CENTROIDS, of_block[b], upper[b]));
                sums[lane] = sum;
            }
        }
        __m512i highest = sums[0];
        for (int lane = 1; lane < lanes; lane++) highest = _mm512_max_epu8(highest, sums[lane]);
        _mm512_storeu_si512(best + first, highest);
    }
}

#else

constexpr bool looks_up_bytes(int64_t) {
    return false;
}
inline void sum_byte_votes(const uint8_t*, int, int64_t, const uint8_t*, int, uint8_t*) {}

#endif

}  // namespace
}  // namespace kvseek
