// From the scores of a group's query heads to the top rows.
#pragma once

#include <initializer_list>

#include "simd.h"

namespace kvseek {
namespace {

// Replace scores float [count] by their softmax after multiplication by `scaling`. Readable and writable up to the
// next multiple of LANES.
void softmax(float* scores, int64_t count, float scaling) {
    for (int64_t i = count; i % LANES != 0; i++) scores[i] = -INFINITE;
    Vec best = splat(-INFINITE), total = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Vec scaled = load(scores + i) * scaling;
        store(scores + i, scaled);
        best = maximum(best, scaled);
    }
    const float highest = maximum(best);
    for (int64_t i = 0; i < count; i += LANES) {
        const Vec weight = exponential(load(scores + i) - highest);
        store(scores + i, weight);
        total += weight;
    }
    const float share = 1.0f / sum(total);
    for (int64_t i = 0; i < count; i += LANES) store(scores + i, load(scores + i) * share);
}

// Fold lanes [lanes, stride] into the first: the largest, or the sum (which ranks as the mean does).
void fold(float* scores, int lanes, int64_t stride, int64_t count, bool largest) {
    for (int lane = 1; lane < lanes; lane++) {
        const float* other = scores + lane * stride;
        for (int64_t i = 0; i < count; i += LANES) {
            const Vec a = load(scores + i), b = load(other + i);
            store(scores + i, largest ? maximum(a, b) : a + b);
        }
    }
}

// Unsigned integer that orders as the float does (NaN at the ends).
inline uint32_t rank_of(float value) {
    value += 0.0f;  // -0 becomes +0, so that they tie
    const uint32_t bits = load_as<uint32_t>(&value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The float of a rank.
inline float of_rank(uint32_t rank) {
    const uint32_t bits = rank & 0x80000000u ? rank & 0x7fffffffu : ~rank;
    return load_as<float>(&bits);
}

struct Cut {
    uint32_t rank;  // of the last value taken
    int64_t ties;   // how many of that rank are taken
};

// Where the `wanted` <= count largest of `ranks` end: radix select, 11 bits a round, on ever fewer ranks; it reorders
// `ranks`. Eleven bits of a float are its sign, its exponent and two bits of its fraction, which leaves few already.
Cut find_cut(uint32_t* ranks, int64_t count, int64_t wanted) {
    constexpr int DIGITS = 2048;
    uint32_t prefix = 0;
    for (const int shift : {21, 10, 0}) {
        const uint32_t digits = shift == 0 ? 1023 : DIGITS - 1;
        int32_t histogram[DIGITS] = {};
        for (int64_t i = 0; i < count; i++) histogram[ranks[i] >> shift & digits]++;
        uint32_t digit = digits;
        for (; histogram[digit] < wanted; digit--) wanted -= histogram[digit];
        prefix |= digit << shift;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            const uint32_t rank = ranks[i];
            ranks[kept] = rank;
            kept += (rank >> shift & digits) == digit;
        }
        count = kept;
        if (count == wanted) break;  // whatever the rest of their digits are, all are taken
    }
    if (count != wanted) return {prefix, wanted};
    Cut cut = {ranks[0], 0};
    for (int64_t i = 0; i < count; i++) cut.rank = ranks[i] < cut.rank ? ranks[i] : cut.rank;
    for (int64_t i = 0; i < count; i++) cut.ties += ranks[i] == cut.rank;
    return cut;
}

// places[i] of the `wanted` largest values[i], ties cut by lowest i, in order of i. `ranks` [count] is scratch.
void take_largest(const float* values, const int32_t* places, int64_t count, int64_t wanted, uint32_t* ranks,
                  int32_t* rows) {
    for (int64_t i = 0; i < count; i++) ranks[i] = rank_of(values[i]);
    Cut cut = find_cut(ranks, count, wanted);
    for (int64_t i = 0, taken = 0; taken < wanted; i++) {  // without branches, for which values are taken is chance
        const uint32_t rank = rank_of(values[i]);
        const bool tied = (rank == cut.rank) & (cut.ties > 0);
        rows[taken] = places[i];
        taken += (rank > cut.rank) | tied;
        cut.ties -= tied;
    }
}

}  // namespace
}  // namespace kvseek
