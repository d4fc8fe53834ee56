// Products of the few rows of a decode step with int8 weights, which are widened in registers.
//
// One row's product waits for the weights, and processors ask for them too late: their own look-ahead ends at the
// border of a page of 4 KiB, and rows of weights are short. So weights are asked for some thousand bytes ahead. Sums
// are float32, and a row's results depend neither on the other rows nor on the number of threads.
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

namespace kvseek {

struct ByteProductArguments {
    const void* x;          // Bfloat16 [rows, inputs]
    const int8_t* weight;   // [outputs, inputs]; inputs is a multiple of 16
    const uint16_t* scale;  // Bfloat16 [outputs]
    const uint16_t* bias;   // Bfloat16 [outputs], or null
    void* out;              // Bfloat16 [rows, outputs]
    int64_t rows, inputs, outputs, threads;
};

namespace {

typedef int8_t SignedVec __attribute__((vector_size(LANES)));

constexpr int TOGETHER = 4;           // outputs, and rows, whose sums are made at the same time
constexpr int64_t UNIT_OUTPUTS = 32;  // that a thread takes at a time
constexpr int AHEAD = 8192;           // bytes
constexpr int LINE = 64;

inline Vec widen(const int8_t* weights) {
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
template <int ROWS>
inline void multiply(const int8_t* weight, int given, const float* x, int64_t inputs, bool ask,
                     float (*sums)[TOGETHER]) {
    const int8_t* rows[TOGETHER];
    for (int i = 0; i < TOGETHER; i++) rows[i] = weight + (i < given ? i : given - 1) * inputs;
    Vec totals[ROWS][TOGETHER] = {};
    for (int64_t k = 0; k < inputs; k += LANES) {
        if (ask && k % LINE == 0)
            for (int i = 0; i < TOGETHER; i++) __builtin_prefetch(rows[i] + k + AHEAD);
        Vec numbers[ROWS];
        for (int r = 0; r < ROWS; r++) numbers[r] = load(x + r * inputs + k);
        for (int i = 0; i < TOGETHER; i++) {
            const Vec weights = widen(rows[i] + k);
            for (int r = 0; r < ROWS; r++) totals[r][i] += weights * numbers[r];
        }
    }
    for (int r = 0; r < ROWS; r++) sum4(totals[r][0], totals[r][1], totals[r][2], totals[r][3], sums[r]);
}

// Outputs first .. last - 1 of all rows, x as floats.
void multiply_outputs(const ByteProductArguments& a, const float* x, int64_t first, int64_t last) {
    const auto number = [](uint16_t bits) { return to_float(Bfloat16{bits}); };
    for (int64_t output = first; output < last; output += TOGETHER) {
        const int given = static_cast<int>(last - output < TOGETHER ? last - output : TOGETHER);
        const int8_t* weight = a.weight + output * a.inputs;
        for (int64_t row = 0; row < a.rows; row += TOGETHER) {
            const int64_t left = a.rows - row;
            const float* numbers = x + row * a.inputs;
            float sums[TOGETHER][TOGETHER];
            switch (left) {
                case 1:
                    multiply<1>(weight, given, numbers, a.inputs, row == 0, sums);
                    break;
                case 2:
                    multiply<2>(weight, given, numbers, a.inputs, row == 0, sums);
                    break;
                case 3:
                    multiply<3>(weight, given, numbers, a.inputs, row == 0, sums);
                    break;
                default:
                    multiply<4>(weight, given, numbers, a.inputs, row == 0, sums);
            }
            for (int r = 0; r < TOGETHER && r < left; r++) {
                for (int i = 0; i < given; i++) {
                    const float bias = a.bias == nullptr ? 0.0f : number(a.bias[output + i]);
                    from_float(sums[r][i] * number(a.scale[output + i]) + bias,
                               static_cast<Bfloat16*>(a.out) + (row + r) * a.outputs + output + i);
                }
            }
        }
    }
}

void multiply_bytes(const ByteProductArguments& a) {
    static thread_local Scratch memory;
    float* x = static_cast<float*>(memory.reserve(a.rows * a.inputs * sizeof(float)));
    for (int64_t i = 0; i < a.rows * a.inputs; i += LANES) store(x + i, load(static_cast<const Bfloat16*>(a.x) + i));
    for_each_chunk(a.threads, 1, a.outputs, UNIT_OUTPUTS,
                   [&](int64_t, int64_t first, int64_t last) { multiply_outputs(a, x, first, last); });
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_byte_product, kvseek::ByteProductArguments, kvseek::multiply_bytes)
