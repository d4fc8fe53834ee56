// Products of bfloat16 rows with weights in groups along the inputs, each with numbers of its own by which the weights
// are scaled: 4 bits in groups of 32, 64 or 128, those of GGUF's blocks Q4_1 (and Q4_0), AWQ and others; 8 bits in
// groups of 32, those of Q8_0; 8 bits with a value of 0 in groups of 16, which hold those of Q6_K and most others.
// Weights of 4 bits lie in blocks of 32, of which a group has one, two or four; a block of 8 bits is a group.
//
// A prompt multiplies integers, as in byte_products.cpp: sums of a group are exact, and scaled and added up as floats.
#include "few_rows.h"
#include "rounded_rows.h"

namespace kvseek {

struct GroupProductArguments {
    const void* x;          // Bfloat16 [rows, inputs]
    const uint8_t* weight;  // [outputs, inputs]; 4 bits: [outputs, inputs / 32, 16], input j low and j + 16 high
    const uint16_t* scale;  // Half [outputs, inputs / group]; with values of 0 [.., 2], the factor and that
    const uint16_t* bias;   // Bfloat16 [outputs], or null
    void* out;              // Bfloat16 [rows, outputs]
    int64_t rows, inputs, outputs, group, threads;
};

namespace {

// Formats of few_rows.h; each weight has exactly the value that it has dequantised.
template <int BLOCK>
struct Grouped {
    static constexpr int INPUTS = BLOCK, VECTORS = BLOCK / LANES;

    static float factor(const GroupProductArguments&, int64_t) { return 1.0f; }
};

struct Bytes : Grouped<32> {
    static constexpr int BYTES = INPUTS, SHARED = 1, SCALES = 1;

    static inline void values(const uint8_t* block, const float* scale, Vec* to) {
        for (int v = 0; v < VECTORS; v++) to[v] = widen(block + v * LANES) * scale[0];
    }
};

struct BytesAndZeros : Grouped<16> {
    static constexpr int BYTES = INPUTS, SHARED = 1, SCALES = 2;

    static inline void values(const uint8_t* block, const float* scale, Vec* to) {
        for (int v = 0; v < VECTORS; v++) to[v] = widen(block + v * LANES) * scale[0] + scale[1];
    }
};

template <int GROUP>
struct Nibbles : Grouped<32> {
    static constexpr int BYTES = INPUTS / 2, SHARED = GROUP / INPUTS, SCALES = 2;

    static inline void values(const uint8_t* block, const float* scale, Vec* to) {
#if defined(__AVX512F__)
        // A block's sixteen values are made once, and looked up.
        const Vec sixteen = __builtin_convertvector(lane_numbers(), Vec) * scale[0] + scale[1];
        const __m512i bytes = _mm512_cvtepu8_epi32(load_as<__m128i>(block));  // a look-up reads the lowest 4 bits
        to[0] = (Vec)_mm512_permutexvar_ps(bytes, (__m512)sixteen);
        to[1] = (Vec)_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), (__m512)sixteen);
#else
        for (int v = 0; v < VECTORS / 2; v++) {
            const uint8_t* from = block + v * LANES;
#if defined(__AVX2__)
            const IntVec bytes = (IntVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
            const IntVec bytes = __builtin_convertvector(load_as<ByteVec>(from), IntVec);
#endif
            to[v] = __builtin_convertvector(bytes & 15, Vec) * scale[0] + scale[1];
            to[v + VECTORS / 2] = __builtin_convertvector(bytes >> 4, Vec) * scale[0] + scale[1];
        }
#endif
    }
};

// The weights as numbers [outputs, inputs]: Bfloat16 if `rows` is 1, else float.
template <class Format, class T>
void write_values(const GroupProductArguments& a) {
    const int64_t blocks = a.inputs / Format::INPUTS;
    for_each_chunk(a.threads, 1, a.outputs, UNIT_OUTPUTS, [&](int64_t, int64_t first, int64_t last) {
        static thread_local Scratch memory;
        const int64_t scales = blocks / Format::SHARED * Format::SCALES;
        float* scale = static_cast<float*>(memory.reserve(scales * sizeof(float)));
        for (int64_t output = first; output < last; output++) {
            widen_halves(a.scale + output * scales, scales, scale);
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t number = output * blocks + block;
                Vec values[Format::VECTORS];
                Format::values(a.weight + number * Format::BYTES, scale + block / Format::SHARED * Format::SCALES,
                               values);
                T* to = static_cast<T*>(a.out) + number * Format::INPUTS;
                for (int v = 0; v < Format::VECTORS; v++) store(to + v * LANES, values[v]);
            }
        }
    });
}

template <class Format>
void write_values(const GroupProductArguments& a) {
    return a.rows == 1 ? write_values<Format, Bfloat16>(a) : write_values<Format, float>(a);
}

// What TILE_OUTPUTS outputs have in one block of inputs; outputs that do not exist are zeros.
template <int BLOCK>
struct BlockTile {
    static constexpr int STEPS = BLOCK / Words::PAIR;  // words of an output
    uint32_t words[STEPS][TILE_OUTPUTS];
    int32_t offsets[TILE_OUTPUTS];  // what 2^7 in every high byte adds, negative
    float factors[TILE_OUTPUTS], zeros[TILE_OUTPUTS];
};

typedef float TileTotals[TILE_ROWS][TILE_OUTPUTS];

// Sums over the blocks of TILE_ROWS rows of bytes, in units of the rows; `sums` are those of each row's blocks.
template <int BLOCK>
void multiply_tile(const uint8_t* bytes, const float* sums, const BlockTile<BLOCK>* tiles, int64_t blocks,
                   TileTotals& of) {
    std::memset(of, 0, sizeof(of));
    for (int64_t block = 0; block < blocks; block++) {
        const BlockTile<BLOCK>& tile = tiles[block];
        for (int r = 0; r < TILE_ROWS; r++)
            for (int output = 0; output < TILE_OUTPUTS; output++) {
                int32_t total[PLANES] = {tile.offsets[output], 0};
                for (int plane = 0; plane < PLANES; plane++) {
                    const uint8_t* row = bytes + ((r * PLANES + plane) * blocks + block) * BLOCK;
                    for (int k = 0; k < BLOCK; k++)
                        total[plane] += row[k] * static_cast<int8_t>(tile.words[k / 4][output] >> k % 4 * 8);
                }
                of[r][output] += tile.factors[output] * static_cast<float>(total[0] * 256 + total[1]);
                of[r][output] += tile.zeros[output] * sums[r * blocks + block];
            }
    }
}

#if KVSEEK_LEVEL == 4
// See multiply_tile_vnni of byte_products.cpp. The high bytes' sums are shifted, and the low bytes' added to them.
template <int BLOCK>
void multiply_tile_vnni(const uint8_t* bytes, const float* sums, const BlockTile<BLOCK>* tiles, int64_t blocks,
                        TileTotals& of) {
    constexpr int COLUMNS = TILE_OUTPUTS / LANES;
    Vec totals[TILE_ROWS][COLUMNS] = {};
    for (int64_t block = 0; block < blocks; block++) {
        const BlockTile<BLOCK>& tile = tiles[block];
        IntVec own[TILE_ROWS][COLUMNS];
#pragma GCC unroll 6
        for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < COLUMNS; v++) own[r][v] = load(tile.offsets + v * LANES);
        for (int plane = 0; plane < PLANES; plane++) {
            if (plane == 1) {
#pragma GCC unroll 6
                for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 2
                    for (int v = 0; v < COLUMNS; v++) own[r][v] <<= 8;
            }
            const uint8_t* from = bytes + (plane * blocks + block) * BLOCK;
#pragma GCC unroll 1
            for (int step = 0; step < tile.STEPS; step++) {
                asm volatile("" ::: "memory");  // else weights of all steps are kept in registers, and sums in memory
                IntVec weights[COLUMNS];
#pragma GCC unroll 2
                for (int v = 0; v < COLUMNS; v++) weights[v] = load_as<IntVec>(tile.words[step] + v * LANES);
#pragma GCC unroll 6
                for (int r = 0; r < TILE_ROWS; r++) {
                    const uint8_t* row = from + r * PLANES * blocks * BLOCK;
                    const IntVec four = load_as<int32_t>(row + step * Words::PAIR) - IntVec{};
#pragma GCC unroll 2
                    for (int v = 0; v < COLUMNS; v++)
                        asm("vpdpbusd %2, %1, %0" : "+v"(own[r][v]) : "v"(four), "v"(weights[v]));
                }
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < COLUMNS; v++) {
                totals[r][v] += load(tile.factors + v * LANES) * __builtin_convertvector(own[r][v], Vec);
                totals[r][v] += load(tile.zeros + v * LANES) * sums[r * blocks + block];
            }
    }
#pragma GCC unroll 6
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < COLUMNS; v++) store(of[r] + v * LANES, totals[r][v]);
}
#endif

// Unpack outputs first .. last - 1, at most TILE_OUTPUTS; `packed` is work space.
template <class Format>
void unpack(const GroupProductArguments& a, int64_t first, int64_t last, uint32_t* packed,
            BlockTile<Format::INPUTS>* tiles) {
    const int64_t blocks = a.inputs / Format::INPUTS, row_bytes = blocks * Format::BYTES, count = last - first;
    const int64_t scales = blocks / Format::SHARED * Format::SCALES;
    float* scale = reinterpret_cast<float*>(packed + row_bytes / Words::PAIR * TILE_OUTPUTS);
    std::memset(scale + count * scales, 0, (TILE_OUTPUTS - count) * scales * sizeof(float));
    widen_halves(a.scale + first * scales, count * scales, scale);
    const int8_t* weight = reinterpret_cast<const int8_t*>(a.weight) + first * row_bytes;
    pack_columns<Words>(Rows<int8_t>{weight, row_bytes, count, row_bytes}, TILE_OUTPUTS, packed);
    for (int64_t block = 0; block < blocks; block++) {
        BlockTile<Format::INPUTS>& tile = tiles[block];
        int32_t totals[TILE_OUTPUTS] = {};
        for (int step = 0; step < Format::BYTES / Words::PAIR; step++, packed += TILE_OUTPUTS)
            for (int output = 0; output < TILE_OUTPUTS; output++) {
                const uint32_t word = packed[output];
                if constexpr (Format::BYTES == Format::INPUTS) {
                    tile.words[step][output] = word;
                    for (int k = 0; k < Words::PAIR; k++) totals[output] += static_cast<int8_t>(word >> k * 8);
                } else {
                    const uint32_t low = word & 0x0f0f0f0f, high = word >> 4 & 0x0f0f0f0f;
                    tile.words[step][output] = low, tile.words[step + tile.STEPS / 2][output] = high;
                    totals[output] += ((low + high) * 0x01010101u) >> 24;  // the sum of its bytes
                }
            }
        for (int output = 0; output < TILE_OUTPUTS; output++) {
            const float* own = scale + output * scales + block / Format::SHARED * Format::SCALES;
            tile.offsets[output] = -128 * totals[output];
            tile.factors[output] = own[0], tile.zeros[output] = Format::SCALES == 2 ? own[1] : 0.0f;
        }
    }
}

// Outputs first .. last - 1, at most TILE_OUTPUTS, of rows `from` .. `to` - 1, which have been rounded.
template <class Format>
void multiply_rounded(const GroupProductArguments& a, const RoundedRows& rounded, int64_t from, int64_t to,
                      int64_t first, int64_t last) {
    static thread_local Scratch memory;
    using Tile = BlockTile<Format::INPUTS>;
    const int64_t blocks = a.inputs / Format::INPUTS;
    constexpr int64_t PACKED = TILE_OUTPUTS * (Format::BYTES + Format::SCALES * sizeof(float));
    Tile* tiles = static_cast<Tile*>(memory.reserve(blocks * (sizeof(Tile) + PACKED)));
    uint32_t* packed = reinterpret_cast<uint32_t*>(tiles + blocks);
    unpack<Format>(a, first, last, packed, tiles);
    auto multiply = multiply_tile<Format::INPUTS>;
#if KVSEEK_LEVEL == 4
    if (kvseek_processor_extends(KVSEEK_VNNI)) multiply = multiply_tile_vnni<Format::INPUTS>;
#endif
    float biases[TILE_OUTPUTS] = {};
    for (int64_t output = first; a.bias != nullptr && output < last; output++)
        biases[output - first] = to_float(Bfloat16{a.bias[output]});
    for (int64_t row = from; row < to; row += TILE_ROWS) {
        TileTotals totals;
        multiply(rounded.bytes + row * PLANES * a.inputs, rounded.sums + row * blocks, tiles, blocks, totals);
        for (int r = 0; r < TILE_ROWS && row + r < to; r++) {
            Bfloat16 results[TILE_OUTPUTS];
            for (int i = 0; i < TILE_OUTPUTS; i += LANES)
                store(results + i, load(totals[r] + i) * rounded.units[row + r] + load(biases + i));
            std::memcpy(static_cast<Bfloat16*>(a.out) + (row + r) * a.outputs + first, results,
                        (last - first) * sizeof(Bfloat16));
        }
    }
}

template <class Format>
void multiply_prompt(const GroupProductArguments& a) {
    const auto unit = [&](const RoundedRows& rounded, int64_t from, int64_t to, int64_t first, int64_t last) {
        multiply_rounded<Format>(a, rounded, from, to, first, last);
    };
    multiply_prompt(a, Format::INPUTS, unit);
}

// Call run(format) with the format of 4 bits in groups of a.group.
template <class Run>
void with_nibbles(const GroupProductArguments& a, const Run& run) {
    switch (a.group) {
        case 128:
            return run(Nibbles<128>{});
        case 64:
            return run(Nibbles<64>{});
        default:
            return run(Nibbles<32>{});
    }
}

void multiply_nibbles(const GroupProductArguments& a) {
    with_nibbles(a, [&](auto format) { multiply_few_rows<decltype(format)>(a); });
}

void multiply_nibbles_prompt(const GroupProductArguments& a) {
    with_nibbles(a, [&](auto format) { multiply_prompt<decltype(format)>(a); });
}

void write_nibbles(const GroupProductArguments& a) {
    with_nibbles(a, [&](auto format) { write_values<decltype(format)>(a); });
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_nibble_product, kvseek::GroupProductArguments, kvseek::multiply_nibbles)
KVSEEK_KERNEL(kvseek_nibble_product_prompt, kvseek::GroupProductArguments, kvseek::multiply_nibbles_prompt)
KVSEEK_KERNEL(kvseek_nibble_product_values, kvseek::GroupProductArguments, kvseek::write_nibbles)
KVSEEK_KERNEL(kvseek_zero_byte_product, kvseek::GroupProductArguments, kvseek::multiply_few_rows<kvseek::BytesAndZeros>)
KVSEEK_KERNEL(kvseek_zero_byte_product_prompt, kvseek::GroupProductArguments,
              kvseek::multiply_prompt<kvseek::BytesAndZeros>)
KVSEEK_KERNEL(kvseek_zero_byte_product_values, kvseek::GroupProductArguments,
              kvseek::write_values<kvseek::BytesAndZeros>)
KVSEEK_KERNEL(kvseek_group_byte_product, kvseek::GroupProductArguments, kvseek::multiply_few_rows<kvseek::Bytes>)
KVSEEK_KERNEL(kvseek_group_byte_product_prompt, kvseek::GroupProductArguments, kvseek::multiply_prompt<kvseek::Bytes>)
KVSEEK_KERNEL(kvseek_group_byte_product_values, kvseek::GroupProductArguments, kvseek::write_values<kvseek::Bytes>)
