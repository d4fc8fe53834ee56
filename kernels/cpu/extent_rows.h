// Where an index keeps the arrays of a place: [extents, kv_heads, 1024, ...].
#pragma once

#include <cstdint>

namespace kvseek {
namespace {

constexpr int64_t INDEX_EXTENT = 1024;  // tokens of an extent

// Row of the index arrays, seen as [extents * kv_heads * 1024, ...], that holds a place of a KV head.
inline int64_t row_of(const int32_t* extents, int64_t kv_heads, int64_t head, int64_t place) {
    return (extents[place / INDEX_EXTENT] * kv_heads + head) * INDEX_EXTENT + place % INDEX_EXTENT;
}

}  // namespace
}  // namespace kvseek
