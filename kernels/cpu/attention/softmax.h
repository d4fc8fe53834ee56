// The running softmax of one row of scores, block by block of keys.
#pragma once

#include "kernels/cpu/products.h"

namespace kvseek {
namespace {

// 2^x for x <= 1, relative error below 2e-7; exactly 1 for 0, and 0 for -infinity: a polynomial of the part after the
// point, times a power of two. Half as many instructions as `exponential`.
inline Vec power_of_two(Vec x) {
#if defined(__AVX512F__)
    const Vec r = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
#else
    const float lowest = -126.0f, rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
    const Vec clamped = x < lowest ? splat(lowest) : x;
    const Vec shifted = (clamped - 0.5f) + rounder;
    const Vec r = clamped - (shifted - rounder);
#endif
    Vec p = r * 0.00188195624f + 0.00898015127f;
    p = p * r + 0.0558316894f;
    p = p * r + 0.240153626f;
    p = p * r + 0.693152428f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    const Vec power = (Vec)(((IntVec)shifted + (127 - 0x4b400000)) << 23);
    return x < lowest ? Vec{} : p * power;
#endif
}

// Store weights as words have them; returns what was stored.
inline Vec store_weights(Vec weights, float* to) {
    store(to, weights);
    return weights;
}
inline Vec store_weights(Vec weights, Bfloat16* to) {  // to nearest; weights are not negative
    const WordVec bits = (WordVec)weights + 0x8000;
    const HalfVec halves = __builtin_convertvector(bits >> 16, HalfVec);
    std::memcpy(to, &halves, sizeof(halves));
    return (Vec)(bits & 0xffff0000);
}

// What a row's softmax has come to.
struct Softmax {
    float highest;  // maximum of the scores, times log2(e) * scaling
    float total;    // sum of weights
};

// Turn the first `width` scores of a row, a multiple of LANES, into weights, in place; those from `visible` on are no
// scores. `scale` is log2(e) * scaling. Returns by how much a new maximum shrinks former sums.
//
// The total is that of the weights as they are stored: weights of bfloat16 then still add up to 1.
template <class Number>
inline float soften(float* scores, int64_t visible, int64_t width, float scale, Softmax& softmax) {
    for (int64_t key = visible < 0 ? 0 : visible; key < width; key++) scores[key] = -INFINITE;
    Vec best = splat(-INFINITE);
    for (int64_t key = 0; key < width; key += LANES) best = maximum(best, load(scores + key));
    const float highest = maximum(best) * scale, before = softmax.highest;
    float shrink = 1.0f;
    if (!(highest <= before)) {
        softmax.highest = highest;
        shrink = power_of_two(splat(before - highest))[0];
    }
    Vec total = {};
    Number* weights = reinterpret_cast<Number*>(scores);
    for (int64_t key = 0; key < width; key += LANES)
        total += store_weights(power_of_two(load(scores + key) * scale - softmax.highest), weights + key);
    softmax.total = softmax.total * shrink + sum(total);
    return shrink;
}

}  // namespace
}  // namespace kvseek
