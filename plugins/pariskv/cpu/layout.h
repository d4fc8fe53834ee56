// Sizes and addresses that ParisKV's kernels share (the arrays: plugins/pariskv/reference.py).
#pragma once

#include <cstdint>

namespace kvseek {
namespace {

constexpr int BLOCK = 8;        // coordinates of a block
constexpr int CENTROIDS = 256;  // sign patterns of a block
constexpr int LEVELS = 8;       // magnitudes of a coordinate
constexpr int MAX_PADDED_DIM = 256;
constexpr int MAX_BLOCKS = MAX_PADDED_DIM / BLOCK;
constexpr int64_t INDEX_EXTENT = 1024;  // tokens of an extent

// Row of the index arrays, seen as [extents * kv_heads * 1024, ...], that holds a place of a KV head.
inline int64_t row_of(const int32_t* extents, int64_t kv_heads, int64_t head, int64_t place) {
    return (extents[place / INDEX_EXTENT] * kv_heads + head) * INDEX_EXTENT + place % INDEX_EXTENT;
}

// Hadamard transform of x [size], numbers or vectors of them, in the reference's order of passes: stride 1, 2, 4, ...;
// scaled once at the end.
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

}  // namespace
}  // namespace kvseek
