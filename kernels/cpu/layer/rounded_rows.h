// Rows of a prompt as integers, whose products with narrow weights VNNI computes: a row of x is rounded to 16 bits of
// its largest number, and its two bytes are two rows of a product of bytes. So the weights are never widened, sums of
// integers are exact in any order, and a rounding to 2^-16 of the largest number is less than that of the result to
// bfloat16.
#pragma once

#include "kernels/cpu/kernel.h"
#include "kernels/cpu/packing.h"
#include "kernels/cpu/parallel.h"

namespace kvseek {
namespace {

constexpr int PLANES = 2;     // bytes of a rounded number, the high ones first
constexpr int TILE_ROWS = 6;  // rows of x whose sums with TILE_OUTPUTS outputs stay in registers
constexpr int BYTE_ROWS = TILE_ROWS * PLANES;
constexpr int TILE_OUTPUTS = 2 * 16;  // 2 vectors of AVX-512; their weights nearly fit the first-level cache
constexpr int64_t UNIT_ROWS =
    32 * TILE_ROWS;                 // that share packed weights; the bytes of x stay in the second-level cache
constexpr int64_t ROUND_ROWS = 16;  // that a thread rounds at a time
constexpr float MOST = 32767.0f, LEAST = 1e-33f;  // LEAST: rows of smaller numbers count as zeros

// Packed as pack_columns does: a word has 4 weights of an output.
struct Words {
    static constexpr int PAIR = 4;
};

// Write `row`, [inputs], as PLANES rows of bytes, each number plus 2^15; returns what a unit of the numbers is worth:
// NaN if a number is not finite.
float round_row(const Bfloat16* row, int64_t inputs, uint8_t* bytes) {
    IntVec most = {};
    for (int64_t k = 0; k < inputs; k += LANES) {
        const IntVec size = (IntVec)load(row + k) & 0x7fffffff;  // orders NaN and infinity behind all numbers
        most = size > most ? size : most;
    }
    int32_t largest_bits = 0;
    for (int i = 0; i < LANES; i++) largest_bits = most[i] > largest_bits ? most[i] : largest_bits;
    const float largest = load_as<float>(&largest_bits);
    const bool finite = largest_bits < 0x7f800000;
    const float inverse = finite && largest >= LEAST ? MOST / largest : 0.0f;
    for (int64_t k = 0; k < inputs; k += LANES) {
        const Vec shifted = load(row + k) * inverse + 12582912.0f;  // 1.5 * 2^23 leaves an integer in the low bits
        const IntVec number = (IntVec)shifted - 0x4b400000 + 0x8000;
        const ByteVec high = __builtin_convertvector(number >> 8 & 0xff, ByteVec);
        const ByteVec low = __builtin_convertvector(number & 0xff, ByteVec);
        std::memcpy(bytes + k, &high, LANES);
        std::memcpy(bytes + inputs + k, &low, LANES);
    }
    return finite ? largest / MOST : __builtin_nanf("");
}

// Rows of x as bytes, `units` that their numbers are worth, and, if they are asked for, sums of each row's numbers in
// groups of `group`, in units. Rows behind the last one, up to a tile, are zeros.
struct RoundedRows {
    const uint8_t* bytes;  // [rows, PLANES, inputs]
    const float* units;    // [rows]
    const float* sums;     // [rows, inputs / group]
};

// Round the rows of x, and call unit(rounded, from, to, first, last) for outputs first .. last - 1, at most
// TILE_OUTPUTS, of rows from .. to - 1. `group`, unless it is 0, divides the inputs.
template <class Arguments, class Unit>
void multiply_prompt(const Arguments& a, int64_t group, const Unit& unit) {
    static thread_local Scratch memory;
    const int64_t rows = (a.rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS, row_bytes = PLANES * a.inputs;
    const int64_t groups = group == 0 ? 0 : a.inputs / group;
    float* units = static_cast<float*>(memory.reserve(rows * (row_bytes + (1 + groups) * sizeof(float))));
    float* sums = units + rows;
    uint8_t* bytes = reinterpret_cast<uint8_t*>(sums + rows * groups);
    std::memset(bytes + a.rows * row_bytes, 0, (rows - a.rows) * row_bytes);
    std::memset(sums + a.rows * groups, 0, (rows - a.rows) * groups * sizeof(float));
    for_each_chunk(a.threads, 1, a.rows, ROUND_ROWS, [&](int64_t, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            uint8_t* own = bytes + row * row_bytes;
            units[row] = round_row(static_cast<const Bfloat16*>(a.x) + row * a.inputs, a.inputs, own);
            for (int64_t number = 0; number < groups; number++) {
                int32_t total = 0;
                for (int64_t k = number * group; k < (number + 1) * group; k++)
                    total += own[k] * 256 + own[a.inputs + k] - 0x8000;
                sums[row * groups + number] = static_cast<float>(total);
            }
        }
    });
    const RoundedRows rounded{bytes, units, sums};
    for_each_chunk(a.threads, (a.rows + UNIT_ROWS - 1) / UNIT_ROWS, a.outputs, TILE_OUTPUTS,
                   [&](int64_t number, int64_t first, int64_t last) {
                       const int64_t from = number * UNIT_ROWS, to = from + UNIT_ROWS;
                       unit(rounded, from, to < a.rows ? to : a.rows, first, last);
                   });
}

}  // namespace
}  // namespace kvseek
