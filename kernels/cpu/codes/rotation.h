// The randomised Hadamard transform (kernels/reference/codes/rotation.py), in the reference's order of additions.
#pragma once

#include <cstdint>

namespace kvseek {
namespace {

constexpr int MAX_PADDED_DIM = 256;  // longest rotated vector of the kernels

// Hadamard transform of x [size], numbers or vectors of them: passes of stride 1, 2, 4, ...; scaled once at the end.
template <class T>
void transform(T* x, int size) {
    for (int stride = 1; stride < size; stride *= 2) {
        for (int first = 0; first < size; first += 2 * stride) {
            for (int i = first; i < first + stride; i++) {
                const T low = x[i], high = x[i + stride];
                x[i] = low + high;
                x[i + stride] = low - high;
            }
        }
    }
    const float scale = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(size)));
    for (int i = 0; i < size; i++) x[i] *= scale;
}

// Flip the signs of x [size] and transform it. `signs` [size].
inline void rotate(float* x, const float* signs, int size) {
    for (int i = 0; i < size; i++) x[i] *= signs[i];
    transform(x, size);
}

// Round x [size] to integers: the largest channel becomes +-most, ties go to even. Returns what an integer is worth.
inline float round_vector(const float* x, int size, float most, int32_t* integers) {
    const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
    float largest = 0.0f;
    for (int d = 0; d < size; d++) {
        const float magnitude = __builtin_fabsf(x[d]);
        largest = magnitude > largest ? magnitude : largest;
    }
    const float inverse = largest > 0.0f ? most / largest : 0.0f;
    for (int d = 0; d < size; d++) {
        const float rounded = x[d] * inverse + rounder - rounder;
        integers[d] = rounded >= -most && rounded <= most ? static_cast<int32_t>(rounded) : 0;  // 0 for NaN
    }
    return largest / most;
}

}  // namespace
}  // namespace kvseek
