// Inner products of bfloat16 keys by an instruction that not every AVX-512 processor has: vdpbf16ps.
//
// It multiplies exactly and adds in float32; subnormal numbers count as zero. Queries are bfloat16 [group, dim] as they
// are. Functions carry their instruction set themselves, so the compiler keeps it out of all others.
#pragma once

#include "host_dot.h"

#if KVSEEK_LEVEL == 4

namespace kvseek {
namespace {

#define KVSEEK_BF16_DOTS __attribute__((target("avx512bf16")))

constexpr int WORDS = 32;  // bfloat16 numbers of a vector

KVSEEK_BF16_DOTS inline __m512bh load_words(const Bfloat16* from) {
    return (__m512bh)_mm512_loadu_si512(from);
}

template <int COUNT>
KVSEEK_BF16_DOTS inline void multiply_words(const Bfloat16* queries, const KeyRun<Bfloat16>& run, int key,
                                            const Bfloat16* const* next, float* products) {
    const Bfloat16* const* keys = run.keys + key;
    __m512 sums[KEYS][COUNT];
    for (int k = 0; k < KEYS; k++)
        for (int q = 0; q < COUNT; q++) sums[k][q] = _mm512_setzero_ps();
    int d = 0;
    do {
        __m512bh words[KEYS];
        for (int k = 0; k < ASKED; k++) prefetch(next[k] + d, WORDS * sizeof(Bfloat16));
        for (int k = 0; k < KEYS; k++) words[k] = load_words(keys[k] + d);
        for (int q = 0; q < COUNT; q++) {
            const __m512bh query = load_words(queries + q * run.dim + d);
            for (int k = 0; k < KEYS; k++) sums[k][q] = _mm512_dpbf16_ps(sums[k][q], words[k], query);
        }
        d += WORDS;
    } while (d < run.dim);
    for (int q = 0; q < COUNT; q++)
        sum4((Vec)sums[0][q], (Vec)sums[1][q], (Vec)sums[2][q], (Vec)sums[3][q], products + q * run.stride + key);
}

KVSEEK_BF16_DOTS void multiply_keys_by_dots(const Bfloat16* queries, const KeyRun<Bfloat16>& run) {
    for (int key = 0; key < run.count; key += KEYS) {
        for (int q = 0; q < run.group; q += QUERIES) {
            const Bfloat16* chunk = queries + q * run.dim;
            const Bfloat16* const* next = q == 0 ? run.next + key / KEYS * ASKED : run.keys + key;
            float* products = run.products + q * run.stride;
            switch (run.group - q) {
                case 1:
                    multiply_words<1>(chunk, run, key, next, products);
                    break;
                case 2:
                    multiply_words<2>(chunk, run, key, next, products);
                    break;
                case 3:
                    multiply_words<3>(chunk, run, key, next, products);
                    break;
                default:
                    multiply_words<QUERIES>(chunk, run, key, next, products);
            }
        }
    }
}

}  // namespace
}  // namespace kvseek

#endif
