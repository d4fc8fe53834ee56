// Products of the few bfloat16 rows of a decode step with narrow weights, which are widened in registers.
//
// One row's product waits for the weights, and processors ask for them too late: their own look-ahead ends at the
// border of a page of 4 KiB, and rows of weights are short. So weights are asked for some thousand bytes ahead. Sums
// are float32, and a row's results depend neither on the other rows nor on the number of threads.
//
// A format of weights has INPUTS in a block, whose weights take BYTES. SHARED blocks have SCALES halves beside them,
// which `values` takes as floats; `factor` is by what an output's sum is multiplied.
#pragma once

#include "kernels/cpu/half.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/parallel.h"

namespace kvseek {
namespace {

typedef int8_t SignedVec __attribute__((vector_size(LANES)));

constexpr int TOGETHER = 4;           // outputs, and rows, whose sums are made at the same time
constexpr int64_t UNIT_OUTPUTS = 32;  // that a thread takes at a time
constexpr int AHEAD = 8192;           // bytes
constexpr int LINE = 64;

// LANES weights of int8.
inline Vec widen(const uint8_t* weights) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(weights)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(weights))));
#else
    return __builtin_convertvector(__builtin_convertvector(load_as<SignedVec>(weights), IntVec), Vec);
#endif
}

// Sums of ROWS rows x [ROWS, inputs] with TOGETHER outputs' weights, of which `given` exist, into sums
// [ROWS][TOGETHER].
template <class Format, int ROWS>
inline void multiply_rows(const uint8_t* weight, const float* scale, int given, const float* x, int64_t blocks,
                          bool ask, float (*sums)[TOGETHER]) {
    constexpr int VECTORS = Format::INPUTS / LANES;
    const uint8_t* rows[TOGETHER];
    const float* scales[TOGETHER];
    const int64_t row_scales = blocks / Format::SHARED * Format::SCALES;
    for (int i = 0; i < TOGETHER; i++) {
        const int64_t row = i < given ? i : given - 1;
        rows[i] = weight + row * blocks * Format::BYTES, scales[i] = scale + row * row_scales;
    }
    Vec totals[ROWS][TOGETHER] = {};
    for (int64_t block = 0; block < blocks; block++) {
        if (ask && block * Format::BYTES % LINE == 0)
            for (int i = 0; i < TOGETHER; i++) __builtin_prefetch(rows[i] + block * Format::BYTES + AHEAD);
        for (int i = 0; i < TOGETHER; i++) {
            Vec values[VECTORS];
            Format::values(rows[i] + block * Format::BYTES, scales[i] + block / Format::SHARED * Format::SCALES,
                           values);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++)
                    totals[r][i] += values[v] * load(x + (r * blocks + block) * Format::INPUTS + v * LANES);
        }
    }
    for (int r = 0; r < ROWS; r++) sum4(totals[r][0], totals[r][1], totals[r][2], totals[r][3], sums[r]);
}

void widen_halves(const uint16_t* halves, int64_t count, float* to) {
    const Half* from = reinterpret_cast<const Half*>(halves);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    for (; i < count; i++) to[i] = to_float(from[i]);
}

// Outputs first .. last - 1 of all rows, x as floats.
template <class Format, class Arguments>
void multiply_outputs(const Arguments& a, const float* x, int64_t first, int64_t last) {
    static thread_local Scratch memory;
    const int64_t blocks = a.inputs / Format::INPUTS, scales = blocks / Format::SHARED * Format::SCALES;
    float* scale = static_cast<float*>(memory.reserve(TOGETHER * scales * sizeof(float)));
    for (int64_t output = first; output < last; output += TOGETHER) {
        const int given = static_cast<int>(last - output < TOGETHER ? last - output : TOGETHER);
        const uint8_t* weight = reinterpret_cast<const uint8_t*>(a.weight) + output * blocks * Format::BYTES;
        prefetch(a.scale + output * scales + AHEAD / 8, given * scales * 2);
        widen_halves(a.scale + output * scales, given * scales, scale);
        for (int64_t row = 0; row < a.rows; row += TOGETHER) {
            const int64_t left = a.rows - row;
            const float* numbers = x + row * a.inputs;
            float sums[TOGETHER][TOGETHER];
            switch (left) {
                case 1:
                    multiply_rows<Format, 1>(weight, scale, given, numbers, blocks, row == 0, sums);
                    break;
                case 2:
                    multiply_rows<Format, 2>(weight, scale, given, numbers, blocks, row == 0, sums);
                    break;
                case 3:
                    multiply_rows<Format, 3>(weight, scale, given, numbers, blocks, row == 0, sums);
                    break;
                default:
                    multiply_rows<Format, 4>(weight, scale, given, numbers, blocks, row == 0, sums);
            }
            for (int r = 0; r < TOGETHER && r < left; r++)
                for (int i = 0; i < given; i++) {
                    const float bias = a.bias == nullptr ? 0.0f : to_float(Bfloat16{a.bias[output + i]});
                    from_float(sums[r][i] * Format::factor(a, output + i) + bias,
                               static_cast<Bfloat16*>(a.out) + (row + r) * a.outputs + output + i);
                }
        }
    }
}

template <class Format, class Arguments>
void multiply_few_rows(const Arguments& a) {
    static thread_local Scratch memory;
    float* x = static_cast<float*>(memory.reserve(a.rows * a.inputs * sizeof(float)));
    for (int64_t i = 0; i < a.rows * a.inputs; i += LANES) store(x + i, load(static_cast<const Bfloat16*>(a.x) + i));
    for_each_chunk(a.threads, 1, a.outputs, UNIT_OUTPUTS,
                   [&](int64_t, int64_t first, int64_t last) { multiply_outputs<Format>(a, x, first, last); });
}

}  // namespace
}  // namespace kvseek
