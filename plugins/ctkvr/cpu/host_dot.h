// Inner products of a group's queries with keys that lie anywhere: what a rerank spends its instructions on.
//
// All variants take the pointers of a run of keys, ask for keys of the run after it, line by line while they multiply,
// and write products [group, stride]. Each product is a float32 sum over the head size.
#pragma once

#include "host_rows.h"

namespace kvseek {
namespace {

constexpr int KEY_BLOCK = 32;
constexpr int KEYS = 4;  // that share the registers of one pass
#if defined(__AVX512F__)
constexpr int QUERIES = 4;  // likewise: 16 sums in 32 registers
#else
constexpr int QUERIES = 2;
#endif
constexpr int ASKED = 3;  // keys that are asked for while KEYS are multiplied; the others later (host_score.h)

// A run of keys and where their products go.
template <class T>
struct KeyRun {
    const T* const* keys;  // [count]
    const T* const* next;  // [count] of the run after it
    int count;             // a multiple of KEY_BLOCK
    int dim, group;
    float* products;  // [group, stride]
    int64_t stride;
};

// KEYS keys by COUNT queries [COUNT, dim] in the order of load_pair.
template <class T, int COUNT>
inline void multiply(const float* queries, const KeyRun<T>& run, int key, const T* const* next, float* products) {
    const T* const* keys = run.keys + key;
    Vec sums[KEYS][COUNT] = {};
    int d = 0;
    do {  // at least once: the compiler keeps the sums in registers
        Vec first[KEYS], second[KEYS];
        for (int k = 0; k < ASKED; k++) prefetch(next[k] + d, PAIR * sizeof(T));
        for (int k = 0; k < KEYS; k++) load_pair(keys[k] + d, first[k], second[k]);
        for (int q = 0; q < COUNT; q++) {
            const Vec a = load(queries + q * run.dim + d), b = load(queries + q * run.dim + d + LANES);
            for (int k = 0; k < KEYS; k++) sums[k][q] += first[k] * a + second[k] * b;
        }
        d += PAIR;
    } while (d < run.dim);
    for (int q = 0; q < COUNT; q++)
        sum4(sums[0][q], sums[1][q], sums[2][q], sums[3][q], products + q * run.stride + key);
}

// Queries as float [group, dim] in the order of load_pair.
template <class T>
void multiply_keys(const float* queries, const KeyRun<T>& run) {
    for (int key = 0; key < run.count; key += KEYS) {
        for (int q = 0; q < run.group; q += QUERIES) {
            const float* chunk = queries + q * run.dim;
            const T* const* next = q == 0 ? run.next + key / KEYS * ASKED : run.keys + key;
            float* products = run.products + q * run.stride;
            switch (run.group - q) {
                case 1:
                    multiply<T, 1>(chunk, run, key, next, products);
                    break;
#if defined(__AVX512F__)
                case 2:
                    multiply<T, 2>(chunk, run, key, next, products);
                    break;
                case 3:
                    multiply<T, 3>(chunk, run, key, next, products);
                    break;
#endif
                default:
                    multiply<T, QUERIES>(chunk, run, key, next, products);
            }
        }
    }
}

#if KVSEEK_LEVEL == 4

// Products of bfloat16 keys by an instruction that not every AVX-512 processor has: vdpbf16ps. It multiplies exactly
// and adds in float32; subnormal numbers count as zero. Queries are bfloat16 [group, dim] as they are. Functions carry
// their instruction set themselves, so the compiler keeps it out of all others.
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

#endif

}  // namespace
}  // namespace kvseek
