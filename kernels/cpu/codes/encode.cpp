// Encode keys as nested key codes (kernels/reference/codes/key_codes.py defines the result).
//
// A vector lane is a key: neither the transform nor the sums over a key's channels need shuffles.
#include "kernels/cpu/extent_rows.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/parallel.h"
#include "rotation.h"

namespace kvseek {

struct CodesEncodeArguments {
    const void* keys;        // [kv_heads, tokens, dim], contiguous
    int8_t* means;           // [extents, kv_heads, 1024 / block, 2, padded_dim]
    float* mean_steps;       // [extents, kv_heads, 1024 / block]
    uint8_t* high;           // [extents, kv_heads, 1024, padded_dim / 4]
    uint8_t* low;            // the same; not written if codes have 2 bits
    uint16_t* scales;        // [extents, kv_heads, 1024]
    const int32_t* extents;  // extent of each thousand tokens of the slot
    const float* signs;      // [padded_dim]
    int64_t kv_heads, tokens, dim, padded_dim;
    int64_t first;     // place of the first key
    int64_t block;     // neighbouring places that share a mean
    int64_t bits;      // of a code: 2 or 4
    int64_t bfloat16;  // keys are bfloat16, else float32
    int64_t threads;
    double step;  // width of a code's cell
};

namespace {

constexpr int64_t UNIT_KEYS = 1024;
constexpr int FIELDS = 4;  // channels of a byte
constexpr float LARGEST_HALF = 65504.0f;
constexpr float LARGEST_OF_MEAN = 127 * 256 + 127;

// A channel of LANES keys.
using Keys = Vec;

// Channels of LANES keys, flipped by the rotation's signs; the last key fills lanes beyond `count`.
template <class T>
void load_keys(const CodesEncodeArguments& a, const T* keys, int count, Keys* x) {
    float* lanes = reinterpret_cast<float*>(x);
    for (int lane = 0; lane < LANES; lane++) {
        const T* key = keys + (lane < count ? lane : count - 1) * a.dim;
        for (int d = 0; d < a.dim; d++) lanes[d * LANES + lane] = to_float(key[d]) * a.signs[d];
    }
    for (int64_t d = a.dim; d < a.padded_dim; d++) x[d] = Vec{};
}

// Codes of rotated keys x [padded_dim] to codes [padded_dim], which are below 2 * half; returns the keys' scales.
Vec quantise(const Keys* x, int size, float step, int half, IntVec* codes) {
    const float least = static_cast<float>(-half), most = static_cast<float>(half) - 0.5f;
    Vec square = {}, product = {};
    for (int d = 0; d < size; d++) square += x[d] * x[d];
    const float root = static_cast<float>(__builtin_sqrt(static_cast<double>(size)));
    const Vec cells = square > 0.0f ? root / (step * square_root(square)) : Vec{};
    for (int d = 0; d < size; d++) {
        Vec cell = x[d] * cells;
        cell = cell < least ? splat(least) : cell;
        cell = cell > most ? splat(most) : cell;
        IntVec below = __builtin_convertvector(cell, IntVec);            // towards zero
        below += __builtin_convertvector(below, Vec) > cell;             // -1 where that was upwards
        product += (__builtin_convertvector(below, Vec) + 0.5f) * x[d];  // the middle of the cell
        codes[d] = (below + half) & (2 * half - 1);                      // & for NaN alone
    }
    product *= step;
    const Vec scale = product > 0.0f ? square / product : Vec{};
    return scale > LARGEST_HALF ? splat(LARGEST_HALF) : scale;
}

// Write the codes and scales of `count` keys from place `first` on.
void write_keys(const CodesEncodeArguments& a, int64_t head, int64_t first, int count, const IntVec* codes,
                Vec scales) {
    const int row = static_cast<int>(a.padded_dim / FIELDS), bytes = row < 4 ? row : 4;
    const int low_bits = static_cast<int>(a.bits) - 2;
    int64_t at[LANES];
    for (int lane = 0; lane < count; lane++) {
        at[lane] = row_of(a.extents, a.kv_heads, head, first + lane);
        a.scales[at[lane]] = to_half(scales[lane]);
    }
    for (int start = 0; start < row; start += bytes) {
        IntVec high = {}, low = {};
        for (int b = 0; b < bytes; b++) {
            for (int f = 0; f < FIELDS; f++) {
                const IntVec code = codes[f * row + start + b];
                high |= (code >> low_bits) << (8 * b + 2 * f);
                low |= (code & 3) << (8 * b + 2 * f);
            }
        }
        for (int lane = 0; lane < count; lane++) {
            const int32_t words[2] = {high[lane], low[lane]};
            std::memcpy(a.high + at[lane] * row + start, &words[0], bytes);
            if (low_bits != 0) std::memcpy(a.low + at[lane] * row + start, &words[1], bytes);
        }
    }
}

// Write the mean of keys [count, dim], rotated and rounded, as that of a block. Sums of doubles hardly depend on their
// order.
template <class T>
void write_mean(const CodesEncodeArguments& a, const T* keys, int64_t count, int64_t block) {
    double sums[MAX_PADDED_DIM] = {};
    for (int64_t key = 0; key < count; key++)
        for (int64_t d = 0; d < a.dim; d++) sums[d] += to_float(keys[key * a.dim + d]);
    float mean[MAX_PADDED_DIM] = {};
    for (int64_t d = 0; d < a.dim; d++) mean[d] = static_cast<float>(sums[d] / static_cast<double>(count));
    const int size = static_cast<int>(a.padded_dim);
    int32_t integers[MAX_PADDED_DIM];
    rotate(mean, a.signs, size);
    a.mean_steps[block] = round_vector(mean, size, LARGEST_OF_MEAN, integers);
    int8_t* to = a.means + block * 2 * size;
    for (int d = 0; d < size; d++) {  // the second byte is signed: -128 to 127
        const int32_t first = (integers[d] + 128) >> 8;
        to[d] = static_cast<int8_t>(first), to[size + d] = static_cast<int8_t>(integers[d] - 256 * first);
    }
}

// Encode the keys of places first .. last - 1, which are of one block.
template <class T>
void encode_block(const CodesEncodeArguments& a, int64_t head, int64_t first, int64_t last) {
    const int size = static_cast<int>(a.padded_dim), half = 1 << (a.bits - 1);
    const T* keys = static_cast<const T*>(a.keys) + (head * a.tokens + first - a.first) * a.dim;
    const int64_t block = row_of(a.extents, a.kv_heads, head, first) / a.block;
    if (first % a.block == 0) write_mean(a, keys, last - first, block);
    float mean[MAX_PADDED_DIM];
    const int8_t* integers = a.means + block * 2 * size;
    for (int d = 0; d < size; d++)
        mean[d] = static_cast<float>(256 * integers[d] + integers[size + d]) * a.mean_steps[block];
    Keys x[MAX_PADDED_DIM];
    IntVec codes[MAX_PADDED_DIM];
    for (int64_t place = first; place < last; place += LANES, keys += LANES * a.dim) {
        const int count = static_cast<int>(last - place < LANES ? last - place : LANES);
        load_keys(a, keys, count, x);
        transform(x, size);
        for (int d = 0; d < size; d++) x[d] -= splat(mean[d]);
        const Vec scales = quantise(x, size, static_cast<float>(a.step), half, codes);
        write_keys(a, head, place, count, codes, scales);
    }
}

void encode(const CodesEncodeArguments& a) {
    const int64_t start = a.first / a.block * a.block, end = a.first + a.tokens;  // units are whole blocks
    for_each_chunk(a.threads, a.kv_heads, end - start, UNIT_KEYS, [&](int64_t head, int64_t from, int64_t to) {
        for (int64_t block = start + from; block < start + to; block += a.block) {
            const int64_t first = block < a.first ? a.first : block;
            const int64_t last = block + a.block < end ? block + a.block : end;
            if (a.bfloat16)
                encode_block<Bfloat16>(a, head, first, last);
            else
                encode_block<float>(a, head, first, last);
        }
    });
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_codes_encode, kvseek::CodesEncodeArguments, kvseek::encode)
