// Products of small packed matrices, which stay in the caches: those of attention over a prompt, and of queries with
// the keys that they list (ctkvr).
//
// A word is what one lane multiplies in one instruction: a float (`Floats`), or two bfloat16 numbers that are next to
// each other along the dimension that is summed over (`Pairs`). Sums are float32.
#pragma once

#include "simd.h"

namespace kvseek {
namespace {

constexpr int ROWS = 6;  // of a product
#if defined(__AVX512F__)
constexpr int WIDE = 4;  // vectors: ROWS * WIDE sums, WIDE right words and one left word fit the 32 registers
#else
constexpr int WIDE = 2;  // 16 registers
#endif
constexpr int NARROW = 2;
constexpr int COLUMNS = NARROW * LANES;  // numbers of columns are multiples of it

// C [ROWS, columns] = C * factors [ROWS] + A [ROWS, steps] B [steps, columns]. Strides are in words.
struct Product {
    const uint32_t* a;
    int64_t a_stride;
    const uint32_t* b;
    int64_t b_stride;
    int64_t steps;
    float* c;
    int64_t c_stride;
    const float* factors;  // null: they are 0
};

struct Floats {
    using Number = float;
    static constexpr int PAIR = 1;  // numbers of a word

    // Not inlined: among its caller's variables, GCC 12 keeps the sums in registers less well (6 % slower).
    template <int VECTORS>
    __attribute__((noinline)) static void multiply(const Product& p) {
        Vec sums[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = p.factors == nullptr ? Vec{} : load(p.c + r * p.c_stride + v * LANES) * p.factors[r];
        const uint32_t *left = p.a, *right = p.b;
        for (int64_t step = 0; step < p.steps; step++, left++, right += p.b_stride) {
            Vec words[VECTORS];
            for (int v = 0; v < VECTORS; v++) words[v] = load_as<Vec>(right + v * LANES);
            for (int r = 0; r < ROWS; r++) {
                const Vec word = splat(load_as<float>(left + r * p.a_stride));
                for (int v = 0; v < VECTORS; v++) sums[r][v] += word * words[v];
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) store(p.c + r * p.c_stride + v * LANES, sums[r][v]);
    }
};

#if KVSEEK_LEVEL == 4

// By vdpbf16ps, which not every AVX-512 processor has: the function carries its instruction set itself.
struct Pairs {
    using Number = Bfloat16;
    static constexpr int PAIR = 2;

    template <int VECTORS>
    __attribute__((target("avx512bf16"))) static void multiply(const Product& p) {
        __m512 sums[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = p.factors == nullptr ? _mm512_setzero_ps()
                                                  : (__m512)(load(p.c + r * p.c_stride + v * LANES) * p.factors[r]);
        const uint32_t *left = p.a, *right = p.b;
        for (int64_t step = 0; step < p.steps; step++, left++, right += p.b_stride) {
            __m512bh words[VECTORS];
            for (int v = 0; v < VECTORS; v++) words[v] = (__m512bh)_mm512_loadu_si512(right + v * LANES);
            for (int r = 0; r < ROWS; r++) {
                const __m512bh word = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(left + r * p.a_stride));
                for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], word, words[v]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(p.c + r * p.c_stride + v * LANES, sums[r][v]);
    }
};

#endif

// A product of any multiple of COLUMNS columns.
template <class Words>
void multiply(Product product, int64_t columns) {
    int64_t done = 0;
    for (; columns - done >= WIDE * LANES; done += WIDE * LANES) {
        Words::template multiply<WIDE>(product);
        product.b += WIDE * LANES, product.c += WIDE * LANES;
    }
    if (done < columns) Words::template multiply<NARROW>(product);
}

}  // namespace
}  // namespace kvseek
