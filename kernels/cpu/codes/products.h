// Integer products of rounded queries with the codes of many keys.
//
// A byte of a plane has the 2 bits of 4 channels that lie P/4 apart. So a shift and a mask turn a vector of bytes into
// a vector of codes, which one instruction multiplies with the query's channels in bytes and adds up by fours. Four
// vectors of keys are transposed first, such that the sums of a key stay where they are from product to product, and
// few are left to be added across a vector.
#pragma once

#include "kernels/cpu/constants.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/simd.h"
#include "rotation.h"

namespace kvseek {
namespace {

constexpr int FIELDS = 4;  // channels of a byte
constexpr int MAX_ROW = MAX_PADDED_DIM / FIELDS;

#if defined(__AVX512BW__)
constexpr int WIDTH = 64;  // bytes of a vector
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#endif

#if defined(__AVX2__)
typedef int8_t Operand;
typedef uint32_t Bytes __attribute__((vector_size(WIDTH)));  // as words, which C++ shifts
constexpr int ROW_WORDS = 4;                                 // of 4 bytes, of 16 bytes of a row
constexpr int OPERANDS = ROW_WORDS * FIELDS * (MAX_ROW > WIDTH ? MAX_ROW : WIDTH);
#else
typedef int16_t Operand;  // no instruction for bytes: the query's integers as compilers multiply them
constexpr int OPERANDS = MAX_PADDED_DIM;
#endif

// A rotated query, rounded to 8 bits.
struct RoundedQuery {
    int32_t sum;                                   // of its integers
    float step;                                    // what an integer is worth
    float length;                                  // of the vector of integers
    alignas(64) int16_t channels[MAX_PADDED_DIM];  // its integers
    alignas(64) Operand operands[OPERANDS];        // the same, as order_operands lays them out
};

// Planes of codes of keys that lie one after another; without `low`, a code is its 2 highest bits.
struct Planes {
    const uint8_t *high, *low;
    int ahead;  // bytes, how far ahead keys are asked for; 0 for keys that lie in the cache
};

// Lay out the integers of a query for rows of `row` bytes.
inline void order_operands(const Operand* integers, int row, Operand* operands) {
#if defined(__AVX2__)
    if (row >= 16) {  // vectors (part of the row, word, field); 16 bytes of one are 4 times the word
        for (int part = 0; part < row; part += WIDTH) {
            for (int vector = 0; vector < ROW_WORDS * FIELDS; vector++, operands += WIDTH) {
                const int word = vector / FIELDS, field = vector % FIELDS;
                for (int b = 0; b < WIDTH; b += 4)
                    std::memcpy(operands + b, integers + field * row + (part + b / 16 * 16) % row + 4 * word, 4);
            }
        }
        return;
    }
#endif
    std::memcpy(operands, integers, FIELDS * row * sizeof(Operand));
}

#if defined(__AVX2__)

#if defined(__AVX512BW__)
typedef __m512i Wide;
#define KVSEEK_WIDE(name) _mm512_##name  // the intrinsic of a vector of WIDTH bytes
#else
typedef __m256i Wide;
#define KVSEEK_WIDE(name) _mm256_##name
#endif

inline Bytes low_words(Bytes a, Bytes b) {
    return (Bytes)KVSEEK_WIDE(unpacklo_epi32)((Wide)a, (Wide)b);
}
inline Bytes high_words(Bytes a, Bytes b) {
    return (Bytes)KVSEEK_WIDE(unpackhi_epi32)((Wide)a, (Wide)b);
}
inline Bytes low_pairs(Bytes a, Bytes b) {
    return (Bytes)KVSEEK_WIDE(unpacklo_epi64)((Wide)a, (Wide)b);
}
inline Bytes high_pairs(Bytes a, Bytes b) {
    return (Bytes)KVSEEK_WIDE(unpackhi_epi64)((Wide)a, (Wide)b);
}
inline Bytes add_halves(Bytes a, Bytes b) {
    return (Bytes)KVSEEK_WIDE(add_epi16)((Wide)a, (Wide)b);
}
inline Bytes multiply_bytes(Bytes a, Bytes b) {
    return (Bytes)KVSEEK_WIDE(maddubs_epi16)((Wide)a, (Wide)b);
}
inline Bytes sum_pairs(Bytes halves) {
    return (Bytes)KVSEEK_WIDE(madd_epi16)((Wide)halves, KVSEEK_WIDE(set1_epi16)(1));
}

#if defined(__AVX512BW__)
// Write the sums of 4 vectors of rows, which lie in a vector's words as `transpose` puts them, in the order of keys.
template <int ROW>
inline void store_keys(Bytes sums, int32_t* to) {
    const __m512i all = (__m512i)sums;
    if (ROW == 16) {
        const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        return _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, all));
    }
    const __m512i pairs = _mm512_add_epi32(all, _mm512_shuffle_i32x4(all, all, 0xb1));
    if (ROW == 32) {
        const __m512i order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 11, 3, 10, 2, 9, 1, 8, 0);
        const __m256i keys = _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, pairs));
        return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), keys);
    }
    const __m512i fours = _mm512_add_epi32(pairs, _mm512_shuffle_i32x4(pairs, pairs, 0x4e));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(fours));
}
#else
template <int ROW>
inline void store_keys(Bytes sums, int32_t* to) {
    const __m256i all = (__m256i)sums;
    if (ROW == 16) {
        const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
        return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(all, order));
    }
    const __m128i keys = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), keys);
}
#endif

// Vector w gets word w of each 16 bytes of the 4 vectors.
inline void transpose(Bytes* v) {
    const Bytes low01 = low_words(v[0], v[1]), high01 = high_words(v[0], v[1]);
    const Bytes low23 = low_words(v[2], v[3]), high23 = high_words(v[2], v[3]);
    v[0] = low_pairs(low01, low23), v[1] = high_pairs(low01, low23);
    v[2] = low_pairs(high01, high23), v[3] = high_pairs(high01, high23);
}

// Codes in bytes of one of the FIELDS channels of each byte.
template <bool LOW>
inline Bytes codes_of(Bytes high, Bytes low, int field) {
    if (!LOW) return high >> (2 * field) & 0x03030303;
    const Bytes upper = field == 0 ? high << 2 : high >> (2 * field - 2);
    return (upper & 0x0c0c0c0c) | (low >> (2 * field) & 0x03030303);
}

// Sums of products of codes and a query's integers. VNNI adds 4 of them to 32 bits at once; x86-64-v4 does not include
// it, so the compiler is not asked for it.
template <bool VNNI>
struct Sums {
    Bytes total = {};
    Bytes halves = {};  // sums of pairs of products in 16 bits, until `widen`
    void add(Bytes codes, Bytes operand) {
#if defined(__AVX512BW__)
        if (VNNI) {
            asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(codes), "v"(operand));
            return;
        }
#endif
        halves = add_halves(halves, multiply_bytes(codes, operand));
    }
    void widen() {
        if (VNNI) return;
        total += sum_pairs(halves);
        halves = Bytes{};
    }
};

// What plane_sums does, for rows of at least 16 bytes and COUNT queries.
template <int ROW, bool LOW, bool VNNI, int COUNT>
void vector_sums(const Planes& planes, int count, const RoundedQuery* queries, int32_t* sums, int64_t stride) {
    constexpr int PARTS = ROW > WIDTH ? ROW / WIDTH : 1, KEYS = 4 * (ROW < WIDTH ? WIDTH / ROW : 1);
    constexpr int BLOCKS = WIDTH == 64 ? 2 : 1;  // of KEYS keys, that share the operands; AVX2 has registers for one
    constexpr int EXACT = LOW ? 2 : 4;  // words whose products are added up in 16 bits: 2 * 15 * 127 * 8 < 2^15
    for (int first = 0; first < count; first += BLOCKS * KEYS) {
        Sums<VNNI> of[BLOCKS][COUNT];
        if (planes.ahead != 0) {
            for (int b = 0; b < BLOCKS * KEYS * ROW; b += 64) {
                __builtin_prefetch(planes.high + first * ROW + b + planes.ahead);
                if (LOW) __builtin_prefetch(planes.low + first * ROW + b + planes.ahead);
            }
        }
        for (int part = 0; part < PARTS; part++) {
            Bytes high[BLOCKS][4], low[BLOCKS][4];
            for (int block = 0; block < BLOCKS; block++) {
                for (int v = 0; v < 4; v++) {
                    const int at = (first + block * KEYS) * ROW + (PARTS * v + part) * WIDTH;
                    high[block][v] = load_as<Bytes>(planes.high + at);
                    if (LOW) low[block][v] = load_as<Bytes>(planes.low + at);
                }
                transpose(high[block]);
                if (LOW) transpose(low[block]);
            }
#pragma GCC unroll 4
            for (int word = 0; word < ROW_WORDS; word++) {
#pragma GCC unroll 4
                for (int field = 0; field < FIELDS; field++) {
                    Bytes codes[BLOCKS];
                    for (int block = 0; block < BLOCKS; block++)
                        codes[block] = codes_of<LOW>(high[block][word], low[block][word], field);
                    const int vector = (part * ROW_WORDS + word) * FIELDS + field;
                    for (int q = 0; q < COUNT; q++) {
                        const Bytes operand = load_as<Bytes>(queries[q].operands + vector * WIDTH);
                        for (int block = 0; block < BLOCKS; block++) of[block][q].add(codes[block], operand);
                    }
                }
                if ((word + 1) % EXACT == 0)
                    for (int block = 0; block < BLOCKS; block++)
                        for (int q = 0; q < COUNT; q++) of[block][q].widen();
            }
        }
        for (int block = 0; block < BLOCKS; block++)
            for (int q = 0; q < COUNT; q++)
                store_keys<ROW>(of[block][q].total, sums + q * stride + first + block * KEYS);
    }
}

template <int ROW, bool LOW, bool VNNI>
void vector_sums(const Planes& planes, int count, const RoundedQuery* queries, int lanes, int32_t* sums,
                 int64_t stride) {
    constexpr int MOST = 4;  // queries whose sums stay in registers
    for (int lane = 0; lane < lanes; lane += MOST, queries += MOST, sums += MOST * stride) {
        with_constant<1, 2, 3, MOST>(lanes - lane, [&](auto together) {
            vector_sums<ROW, LOW, VNNI, together>(planes, count, queries, sums, stride);
        });
    }
}

template <int ROW>
void vector_sums(const Planes& planes, int count, const RoundedQuery* queries, int lanes, int32_t* sums,
                 int64_t stride) {
    const bool vnni = WIDTH == 64 && kvseek_processor_extends(KVSEEK_VNNI);
    if (vnni && planes.low == nullptr)
        vector_sums<ROW, false, WIDTH == 64>(planes, count, queries, lanes, sums, stride);
    else if (vnni)
        vector_sums<ROW, true, WIDTH == 64>(planes, count, queries, lanes, sums, stride);
    else if (planes.low == nullptr)
        vector_sums<ROW, false, false>(planes, count, queries, lanes, sums, stride);
    else
        vector_sums<ROW, true, false>(planes, count, queries, lanes, sums, stride);
}

#endif

}  // namespace
}  // namespace kvseek
