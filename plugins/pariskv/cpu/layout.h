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

}  // namespace
}  // namespace kvseek
