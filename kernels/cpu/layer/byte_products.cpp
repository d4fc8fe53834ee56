// Products of bfloat16 rows with int8 weights: of the few rows of a decode step, and of the many rows of a prompt.
//
// A prompt multiplies integers, by VNNI where the processor has it.
#include "few_rows.h"
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

// Weights of a row that has one scale, as a format of few_rows.h.
struct RowBytes {
    static constexpr int INPUTS = 16, BYTES = 16, SHARED = 1, SCALES = 0;

    static inline void values(const uint8_t* group, const float*, Vec* to) {
        for (int v = 0; v < INPUTS / LANES; v++) to[v] = widen(group + v * LANES);
    }
    static float factor(const ByteProductArguments& a, int64_t output) { return to_float(Bfloat16{a.scale[output]}); }
};

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

KVSEEK_KERNEL(kvseek_byte_product, kvseek::ByteProductArguments, kvseek::multiply_few_rows<kvseek::RowBytes>)
KVSEEK_KERNEL(kvseek_byte_product_prompt, kvseek::ByteProductArguments, kvseek::multiply_prompt)
