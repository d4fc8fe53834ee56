// Products of bfloat16 rows with int8 weights: of the few rows of a decode step, and of the many rows of a prompt.
//
// A decode step widens the weights in registers. One row's product waits for the weights, and processors ask for them
// too late: their own look-ahead ends at the border of a page of 4 KiB, and rows of weights are short. So weights are
// asked for some thousand bytes ahead. Sums are float32, and a row's results depend neither on the other rows nor on
// the number of threads.
//
// A prompt multiplies integers, by VNNI where the processor has it.
#include "rounded_rows.h"

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

// Sums of BYTE_ROWS rows of bytes with TILE_OUTPUTS outputs' packed weights.
typedef int32_t TileSums[BYTE_ROWS][TILE_OUTPUTS];

void multiply_tile(const uint8_t* bytes, const uint32_t* words, int64_t inputs, TileSums& sums) {
    std::memset(sums, 0, sizeof(sums));
    const int8_t* weights = reinterpret_cast<const int8_t*>(words);
    for (int64_t k = 0; k < inputs; k += Words::PAIR, weights += TILE_OUTPUTS * Words::PAIR)
        for (int r = 0; r < BYTE_ROWS; r++)
            for (int output = 0; output < TILE_OUTPUTS; output++)
                for (int i = 0; i < Words::PAIR; i++)
                    sums[r][output] += bytes[r * inputs + k + i] * weights[output * Words::PAIR + i];
}

#if KVSEEK_LEVEL == 4
// Words of 4 bytes; the instruction is written out because GCC 12 copies the sums of its intrinsic to and fro.
void multiply_tile_vnni(const uint8_t* bytes, const uint32_t* words, int64_t inputs, TileSums& sums) {
    constexpr int VECTORS = TILE_OUTPUTS / LANES;
    IntVec of[BYTE_ROWS][VECTORS] = {};
    for (int64_t k = 0; k < inputs; k += Words::PAIR, words += TILE_OUTPUTS) {
        IntVec weights[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) weights[v] = load_as<IntVec>(words + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < BYTE_ROWS; r++) {
            const IntVec four = load_as<int32_t>(bytes + r * inputs + k) - IntVec{};
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) asm("vpdpbusd %2, %1, %0" : "+v"(of[r][v]) : "v"(four), "v"(weights[v]));
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < BYTE_ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) store(sums[r] + v * LANES, of[r][v]);
}
#endif

// Outputs first .. last - 1, at most TILE_OUTPUTS, of rows `from` .. `to` - 1, which have been rounded.
void multiply_rounded(const ByteProductArguments& a, const RoundedRows& rounded, int64_t from, int64_t to,
                      int64_t first, int64_t last) {
    static thread_local Scratch memory;
    uint32_t* words = static_cast<uint32_t*>(memory.reserve(a.inputs * TILE_OUTPUTS));
    const int8_t* weight = a.weight + first * a.inputs;
    pack_columns<Words>(Rows<int8_t>{weight, a.inputs, last - first, a.inputs}, TILE_OUTPUTS, words);
    int32_t offsets[TILE_OUTPUTS] = {};  // what 2^7 in every high byte adds
    float scales[TILE_OUTPUTS] = {}, biases[TILE_OUTPUTS] = {};
    for (int64_t output = first; output < last; output++) {
        const int64_t i = output - first;
        int32_t total = 0;
        for (int64_t k = 0; k < a.inputs; k++) total += weight[i * a.inputs + k];
        offsets[i] = 128 * total;
        scales[i] = to_float(Bfloat16{a.scale[output]});
        if (a.bias != nullptr) biases[i] = to_float(Bfloat16{a.bias[output]});
    }
    auto multiply = multiply_tile;
#if KVSEEK_LEVEL == 4
    if (kvseek_processor_extends(KVSEEK_VNNI)) multiply = multiply_tile_vnni;
#endif
    for (int64_t row = from; row < to; row += TILE_ROWS) {
        TileSums sums;
        multiply(rounded.bytes + row * PLANES * a.inputs, words, a.inputs, sums);
        for (int r = 0; r < TILE_ROWS && row + r < to; r++) {
            Bfloat16 results[TILE_OUTPUTS];
            for (int i = 0; i < TILE_OUTPUTS; i += LANES) {
                const IntVec high = load(sums[PLANES * r] + i) - load(offsets + i),
                             low = load(sums[PLANES * r + 1] + i);
                const Vec total = __builtin_convertvector(high, Vec) * 256.0f + __builtin_convertvector(low, Vec);
                store(results + i, total * (load(scales + i) * rounded.units[row + r]) + load(biases + i));
            }
            std::memcpy(static_cast<Bfloat16*>(a.out) + (row + r) * a.outputs + first, results,
                        (last - first) * sizeof(Bfloat16));
        }
    }
}

void multiply_prompt(const ByteProductArguments& a) {
    multiply_prompt(a, 0, [&](const RoundedRows& rounded, int64_t from, int64_t to, int64_t first, int64_t last) {
        multiply_rounded(a, rounded, from, to, first, last);
    });
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_byte_product, kvseek::ByteProductArguments, kvseek::multiply_bytes)
KVSEEK_KERNEL(kvseek_byte_product_prompt, kvseek::ByteProductArguments, kvseek::multiply_prompt)
