// Rows of the pool as vectors of float, for every type that they are stored in, on every instruction level.
//
// Numbers come in pairs of vectors. bfloat16 ones come as the even and the odd numbers of a run, because a shift and a
// mask widen those. Queries and sums are kept in the same order, so nobody sorts but whoever reads or writes them.
#pragma once

#include "kernels/cpu/half.h"

namespace kvseek {
namespace {

struct Half {
    uint16_t bits;
};

constexpr int PAIR = 2 * LANES;  // divides every head size

inline float to_float(Half value) {
    const uint16_t magnitude = value.bits & 0x7fff;
    float number = magnitude < 0x7c00 ? from_half(magnitude) : magnitude == 0x7c00 ? INFINITE : __builtin_nanf("");
    return value.bits & 0x8000 ? -number : number;
}

inline void load_pair(const float* from, Vec& first, Vec& second) {
    first = load(from);
    second = load(from + LANES);
}

inline void load_pair(const Bfloat16* from, Vec& even, Vec& odd) {
    const WordVec words = load_as<WordVec>(from);
    even = (Vec)(words << 16);
    odd = (Vec)(words & 0xffff0000u);
}

inline Vec load(const Half* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__F16C__) && defined(__AVX2__)
    return (Vec)_mm256_cvtph_ps(load_as<__m128i>(from));
#else
    Vec numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = to_float(from[i]);
    return numbers;
#endif
}

inline void load_pair(const Half* from, Vec& first, Vec& second) {
    first = load(from);
    second = load(from + LANES);
}

// Where number d of a row stands among the numbers that load_pair gives.
template <class T>
inline int kept_at(int d) {
    return d;
}
template <>
inline int kept_at<Bfloat16>(int d) {
    return d / PAIR * PAIR + (d % PAIR) / 2 + (d & 1) * LANES;
}

// Ask for the lines of a run of bytes. Into the second-level cache: it takes several times the requests that the first
// level does, and random rows are bound by requests.
inline void prefetch(const void* from, int bytes) {
    const char* line = static_cast<const char*>(from);
    for (int offset = 0; offset < bytes; offset += 64) __builtin_prefetch(line + offset, 0, 2);
}

}  // namespace
}  // namespace kvseek
