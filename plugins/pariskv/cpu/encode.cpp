// ParisKV: encode keys into an index (ParisKV paper, section 4; plugins/pariskv/reference.py defines the result).
//
// A vector lane is a key: the transform, the radius and the levels need no shuffles, and the additions come in the
// reference's order, so centroid ids are the same to the bit.
#include "kernels/cpu/half.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/parallel.h"
#include "layout.h"

namespace kvseek {

struct EncodeArguments {
    const void* keys;         // [kv_heads, tokens, dim], contiguous
    uint8_t* ids;             // [extents, kv_heads, 1024, blocks]
    uint8_t* codes;           // [extents, kv_heads, 1024, padded_dim / 2]
    uint16_t* weights;        // [extents, kv_heads, 1024, blocks]
    const int32_t* extents;   // extent of each thousand tokens of the slot
    const float* signs;       // [padded_dim]
    const float* levels;      // [8]
    const float* thresholds;  // [7]
    int64_t kv_heads, tokens, dim, padded_dim;
    int64_t first;     // place of the first key
    int64_t bfloat16;  // keys are bfloat16, else float32
    int64_t threads;
};

namespace {

constexpr int64_t UNIT_KEYS = 1024;
constexpr float LARGEST_HALF = 65504.0f;

// A coordinate, or a block's radius, of LANES keys.
using Keys = Vec;

struct Block {
    IntVec id, code;
    Vec weight;
};

// Coordinates of LANES keys, flipped by the rotation's signs; the last key fills lanes beyond `count`.
template <class T>
void load_keys(const EncodeArguments& a, const T* keys, int count, Keys* x) {
    float* lanes = reinterpret_cast<float*>(x);
    for (int lane = 0; lane < LANES; lane++) {
        const T* key = keys + (lane < count ? lane : count - 1) * a.dim;
        for (int d = 0; d < a.dim; d++) lanes[d * LANES + lane] = to_float(key[d]) * a.signs[d];
    }
    for (int64_t d = a.dim; d < a.padded_dim; d++) x[d] = Vec{};
}

Block encode_block(const EncodeArguments& a, const Keys* x) {
    Vec square = {}, alpha = {};
    for (int j = 0; j < BLOCK; j++) square += x[j] * x[j];
    const Vec radius = square_root(square), divisor = radius > 0.0f ? radius : splat(1.0f);
    Block block = {};
    for (int j = 0; j < BLOCK; j++) {
        const IntVec negative = x[j] < 0.0f;
        const Vec magnitude = (negative ? -x[j] : x[j]) / divisor;
        IntVec level = {};
        Vec value = splat(a.levels[0]);
        for (int t = 0; t < LEVELS - 1; t++) {
            const IntVec above = magnitude > a.thresholds[t];
            level -= above;
            value = above ? splat(a.levels[t + 1]) : value;
        }
        alpha += value * magnitude;
        block.id |= negative & (1 << j);
        block.code |= (level | (negative & LEVELS)) << (4 * j);
    }
    block.weight = radius > 0.0f ? radius / alpha : Vec{};
    block.weight = block.weight > LARGEST_HALF ? splat(LARGEST_HALF) : block.weight;
    return block;
}

// Write one block of `count` keys from place `first` on.
void write_block(const EncodeArguments& a, int64_t head, int64_t first, int count, int64_t b, const Block& block) {
    const int64_t blocks = a.padded_dim / BLOCK;
    for (int lane = 0; lane < count; lane++) {
        const int64_t at = row_of(a.extents, a.kv_heads, head, first + lane) * blocks + b;
        const int32_t code = block.code[lane];
        a.ids[at] = static_cast<uint8_t>(block.id[lane]);
        std::memcpy(a.codes + at * sizeof(code), &code, sizeof(code));
        a.weights[at] = to_half(block.weight[lane]);
    }
}

template <class T>
void encode_unit(const EncodeArguments& a, int64_t head, int64_t first, int64_t last) {
    const int64_t blocks = a.padded_dim / BLOCK;
    Keys x[MAX_PADDED_DIM];
    for (int64_t token = first; token < last; token += LANES) {
        const int count = static_cast<int>(last - token < LANES ? last - token : LANES);
        load_keys(a, static_cast<const T*>(a.keys) + (head * a.tokens + token) * a.dim, count, x);
        transform(x, static_cast<int>(a.padded_dim));
        for (int64_t b = 0; b < blocks; b++)
            write_block(a, head, a.first + token, count, b, encode_block(a, x + b * BLOCK));
    }
}

void encode(const EncodeArguments& a) {
    for_each_chunk(a.threads, a.kv_heads, a.tokens, UNIT_KEYS, [&](int64_t head, int64_t first, int64_t last) {
        if (a.bfloat16)
            encode_unit<Bfloat16>(a, head, first, last);
        else
            encode_unit<float>(a, head, first, last);
    });
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_pariskv_encode, kvseek::EncodeArguments, kvseek::encode)
