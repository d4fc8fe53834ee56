// The randomised Hadamard transform (plugins/codes/rotation.py), in the reference's order of additions.
#pragma once

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

}  // namespace
}  // namespace kvseek
