// Estimates of q·k from nested key codes (plugins/codes/key_codes.py): integer products of rounded queries with planes
// of codes, of keys that lie one after another. Keys at given places are copied together first (gather_rows).
//
// A byte of a plane has the 2 bits of 4 channels that lie P/4 apart. So a shift and a mask turn a vector of bytes into
// a vector of codes of neighbouring channels, which one instruction multiplies with the query's channels in bytes.
#pragma once

#include "../../shared/extent_rows.h"
#include "../../shared/half.h"
#include "rotation.h"

namespace kvseek {
namespace {

constexpr int FIELDS = 4;        // channels of a byte
constexpr int MAX_QUERIES = 16;  // query heads of a group
constexpr int MAX_ROW = MAX_PADDED_DIM / FIELDS;
constexpr float QUERY_LARGEST = 127.0f;

#if defined(__AVX512BW__)
constexpr int WIDTH = 64;  // bytes of a vector
typedef __m512i Bytes;
typedef int8_t Operand;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
typedef __m256i Bytes;
typedef int8_t Operand;
#else
constexpr int WIDTH =
    16;  // no instruction for bytes: `operands` is the query as it is, in numbers that compilers multiply
typedef int16_t Operand;
#endif

// A rotated query, rounded to 8 bits.
struct RoundedQuery {
    int32_t sum;                                                                 // of its integers
    float step;                                                                  // what an integer is worth
    float length;                                                                // of the vector of integers
    alignas(64) Operand operands[FIELDS * (MAX_ROW > WIDTH ? MAX_ROW : WIDTH)];  // in the order of plane_sums
};

// Whether vectors of bytes multiply rows of this many bytes.
constexpr bool vectorised(int row) {
#if defined(__AVX2__)
    return row >= 16;
#else
    return row < 0;
#endif
}

// Round the rotated query lane [size]: the largest channel becomes +-127, ties go to even.
void round_query(const float* lane, int size, RoundedQuery* query) {
    const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
    float largest = 0.0f;
    for (int d = 0; d < size; d++) {
        const float magnitude = __builtin_fabsf(lane[d]);
        largest = magnitude > largest ? magnitude : largest;
    }
    const float inverse = largest > 0.0f ? QUERY_LARGEST / largest : 0.0f;
    Operand integers[MAX_PADDED_DIM];
    int32_t sum = 0, square = 0;
    for (int d = 0; d < size; d++) {
        const float rounded = lane[d] * inverse + rounder - rounder;
        const int32_t integer =
            rounded >= -QUERY_LARGEST && rounded <= QUERY_LARGEST ? static_cast<int32_t>(rounded) : 0;
        integers[d] = static_cast<Operand>(integer);
        sum += integer, square += integer * integer;
    }
    query->sum = sum, query->step = largest / QUERY_LARGEST;
    query->length = __builtin_sqrtf(static_cast<float>(square));
    const int row = size / FIELDS, width = vectorised(row) && row < WIDTH ? WIDTH : row;
    for (int f = 0; f < FIELDS; f++)
        for (int b = 0; b < width; b += row)
            std::memcpy(query->operands + f * width + b, integers + f * row, row * sizeof(Operand));
}

#if defined(__AVX2__)

#if defined(__AVX512BW__)
inline Bytes field(Bytes bytes, int f) {
    return _mm512_and_si512(_mm512_srli_epi16(bytes, 2 * f), _mm512_set1_epi8(3));
}

// Sums of 4 neighbouring products of codes and queries, added up over the fields. A pair of products is below 2^10, so
// 16 bits hold 4 pairs. VNNI multiplies 4 bytes at once; x86-64-v4 does not include it, so the compiler is not asked
// for it.
template <bool VNNI>
inline Bytes multiply(const Bytes* fields, const int8_t* operands, int64_t stride) {
    if (VNNI) {
        Bytes sum = _mm512_setzero_si512();
        for (int f = 0; f < FIELDS; f++)
            asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(fields[f]), "v"(load_as<Bytes>(operands + f * stride)));
        return sum;
    }
    Bytes sum = _mm512_maddubs_epi16(fields[0], load_as<Bytes>(operands));
    for (int f = 1; f < FIELDS; f++)
        sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(fields[f], load_as<Bytes>(operands + f * stride)));
    return _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
}
inline Bytes add(Bytes a, Bytes b) {
    return _mm512_add_epi32(a, b);
}

// Sums over groups of 4 integers: lane l of 128 bits has those of a, b, c and d in it.
inline Bytes sum4(Bytes a, Bytes b, Bytes c, Bytes d) {
    const Bytes ab = add(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const Bytes cd = add(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return add(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// From sum4 of 4 vectors of rows to the sums of their keys, in order.
template <int ROW>
inline void store_keys(Bytes sums, int32_t* to) {
    if (ROW == 16) {
        const Bytes order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        return _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, sums));
    }
    sums = add(sums, _mm512_shuffle_i32x4(sums, sums, 0xb1));
    if (ROW == 32) {
        const Bytes order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 11, 3, 10, 2, 9, 1, 8, 0);
        const __m256i keys = _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, sums));
        return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), keys);
    }
    sums = add(sums, _mm512_shuffle_i32x4(sums, sums, 0x4e));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(sums));
}
#else
inline Bytes field(Bytes bytes, int f) {
    return _mm256_and_si256(_mm256_srli_epi16(bytes, 2 * f), _mm256_set1_epi8(3));
}
template <bool VNNI>
inline Bytes multiply(const Bytes* fields, const int8_t* operands, int64_t stride) {
    Bytes sum = _mm256_maddubs_epi16(fields[0], load_as<Bytes>(operands));
    for (int f = 1; f < FIELDS; f++)
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(fields[f], load_as<Bytes>(operands + f * stride)));
    return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
}
inline Bytes add(Bytes a, Bytes b) {
    return _mm256_add_epi32(a, b);
}
inline Bytes sum4(Bytes a, Bytes b, Bytes c, Bytes d) {
    const Bytes ab = add(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    const Bytes cd = add(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    return add(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}
template <int ROW>
inline void store_keys(Bytes sums, int32_t* to) {
    if (ROW == 16) {
        const Bytes order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
        return _mm256_storeu_si256(reinterpret_cast<Bytes*>(to), _mm256_permutevar8x32_epi32(sums, order));
    }
    const __m128i keys = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), keys);
}
#endif

// What plane_sums does, for rows of at least 16 bytes: 4 vectors of rows at a time.
template <int ROW, bool VNNI, bool MORE>
void vector_sums(const uint8_t* plane, int count, const RoundedQuery* queries, int lanes, int32_t* sums,
                 int64_t stride) {
    constexpr int LOADS = ROW > WIDTH ? ROW / WIDTH : 1, KEYS = ROW < WIDTH ? WIDTH / ROW : 1;
    for (int first = 0; first < count; first += 4 * KEYS) {
        Bytes fields[4][LOADS][FIELDS];
        for (int v = 0; v < 4; v++) {
            for (int part = 0; part < LOADS; part++) {
                const Bytes bytes = load_as<Bytes>(plane + (first + v * KEYS) * ROW + part * WIDTH);
                for (int f = 0; f < FIELDS; f++) fields[v][part][f] = field(bytes, f);
            }
        }
        for (int lane = 0; lane < lanes; lane++) {
            Bytes products[4];
            for (int v = 0; v < 4; v++) {
                products[v] = multiply<VNNI>(fields[v][0], queries[lane].operands, LOADS * WIDTH);
                for (int part = 1; part < LOADS; part++) {
                    const int8_t* operands = queries[lane].operands + part * WIDTH;
                    products[v] = add(products[v], multiply<VNNI>(fields[v][part], operands, LOADS * WIDTH));
                }
            }
            int32_t* to = sums + lane * stride + first;
            int32_t before[4 * KEYS];
            if (MORE) std::memcpy(before, to, sizeof(before));
            store_keys<ROW>(sum4(products[0], products[1], products[2], products[3]), to);
            if (MORE)
                for (int k = 0; k < 4 * KEYS; k++) to[k] += 4 * before[k];
        }
    }
}

template <int ROW>
void vector_sums(const uint8_t* plane, int count, const RoundedQuery* queries, int lanes, bool more, int32_t* sums,
                 int64_t stride) {
#if defined(__AVX512BW__)
    static const bool vnni = __builtin_cpu_supports("avx512vnni");
#else
    constexpr bool vnni = false;
#endif
    if (vnni && more) return vector_sums<ROW, WIDTH == 64, true>(plane, count, queries, lanes, sums, stride);
    if (vnni) return vector_sums<ROW, WIDTH == 64, false>(plane, count, queries, lanes, sums, stride);
    if (more) return vector_sums<ROW, false, true>(plane, count, queries, lanes, sums, stride);
    vector_sums<ROW, false, false>(plane, count, queries, lanes, sums, stride);
}

#endif

// What plane_sums does, for any row: ROW, or `row` if ROW is 0.
template <int ROW>
void key_sums(const uint8_t* plane, int row, int count, const RoundedQuery* queries, int lanes, bool more,
              int32_t* sums, int64_t stride) {
    const int bytes = ROW == 0 ? row : ROW;
    int16_t codes[MAX_PADDED_DIM];
    for (int key = 0; key < count; key++) {
        const uint8_t* from = plane + static_cast<int64_t>(key) * bytes;
        for (int f = 0; f < FIELDS; f++)
            for (int b = 0; b < bytes; b++) codes[f * bytes + b] = from[b] >> (2 * f) & 3;
        for (int lane = 0; lane < lanes; lane++) {
            int32_t sum = 0;
            for (int d = 0; d < FIELDS * bytes; d++) sum += codes[d] * queries[lane].operands[d];
            int32_t& to = sums[lane * stride + key];
            to = more ? 4 * to + sum : sum;
        }
    }
}

// <plane, query> of `count` keys that lie one after another and queries [lanes] into sums[lane * stride + key]; if
// `more`, 4 times the sum that is there is added, so that the low plane goes on where the high one ended. `plane` is
// readable and `sums` writable up to the next multiple of 16 keys.
void plane_sums(const uint8_t* plane, int row, int count, const RoundedQuery* queries, int lanes, bool more,
                int32_t* sums, int64_t stride) {
    switch (row) {
#if defined(__AVX2__)
        case 16:
            return vector_sums<16>(plane, count, queries, lanes, more, sums, stride);
        case 32:
            return vector_sums<32>(plane, count, queries, lanes, more, sums, stride);
        case 64:
            return vector_sums<64>(plane, count, queries, lanes, more, sums, stride);
#else
        case 16:
            return key_sums<16>(plane, row, count, queries, lanes, more, sums, stride);
        case 32:
            return key_sums<32>(plane, row, count, queries, lanes, more, sums, stride);
        case 64:
            return key_sums<64>(plane, row, count, queries, lanes, more, sums, stride);
#endif
        default:
            return key_sums<0>(plane, row, count, queries, lanes, more, sums, stride);
    }
}

// Estimates of LANES keys from their sums: `bits` planes' bits, a query's sum of integers, and what half a cell is
// worth.
inline Vec scale_sums(const int32_t* sums, Vec scales, int bits, int32_t query_sum, float worth) {
    const IntVec twice = 2 * load_as<IntVec>(sums) - ((1 << bits) - 1) * query_sum;
    return __builtin_convertvector(twice, Vec) * scales * worth;
}

// Copy rows of `row` bytes of a plane to where they lie one after another.
inline void gather_rows(const uint8_t* plane, int row, const int64_t* rows, int count, uint8_t* to) {
    switch (row) {
        case 16:
            for (int i = 0; i < count; i++) std::memcpy(to + i * 16, plane + rows[i] * 16, 16);
            return;
        case 32:
            for (int i = 0; i < count; i++) std::memcpy(to + i * 32, plane + rows[i] * 32, 32);
            return;
        default:
            for (int i = 0; i < count; i++) std::memcpy(to + i * row, plane + rows[i] * row, row);
    }
}

}  // namespace
}  // namespace kvseek
