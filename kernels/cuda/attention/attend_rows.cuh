// Where attention finds rows that follow one another: in the window's ring, in the extents of the row pool.
//
// A source gives tiles of at most 16 consecutive rows of its own numbering; a tile gives the address of a row. Tiles
// start at multiples of 16, so a tile of the pool lies within one extent. Selected rows: selected_rows.cuh.
#pragma once

#include "kernels/cuda/attention/attend_arguments.cuh"
#include "kernels/cuda/instructions.cuh"

namespace kvseek {
namespace attention {

struct AdjacentRows {
    const RowNumber* first;
    __device__ __forceinline__ const RowNumber* row(int i) const { return first + i * ROW; }
};

// Rows of the retrieval region, numbered by place.
struct PoolRows {
    static constexpr bool SCALED = ROUNDED;
    const RowNumber* rows;
    const int* extents;
    long long extent_stride;
    int kv_heads, kv_head;

    __device__ PoolRows(const AttendArguments& a, const Place& place)
        : rows(a.rows),
          extents(a.table + static_cast<long long>(place.slot) * a.table_stride),
          extent_stride(a.extent_stride),
          kv_heads(a.kv_heads),
          kv_head(place.kv_head) {}

    __device__ __forceinline__ int extent(int position) const { return extents[position / EXTENT_TOKENS]; }
    __device__ __forceinline__ const RowNumber* block(int extent) const {
        return rows + extent * extent_stride + static_cast<long long>(kv_head) * BLOCK;
    }
    __device__ __forceinline__ const RowNumber* row(int extent, int position) const {
        return block(extent) + position % EXTENT_TOKENS * ROW;
    }
    __device__ __forceinline__ const RowNumber* row(int position) const { return row(extent(position), position); }
    // Scales of a row that is rounded: the key's in the lower half.
    __device__ __forceinline__ unsigned scales(int extent, int position) const {
        return load_once_4(block(extent) + EXTENT_TOKENS * ROW + position % EXTENT_TOKENS * SCALE_BYTES);
    }
    // Number of the row in an array [extents, G, 1024].
    __device__ __forceinline__ long long number(int extent, int position) const {
        return (static_cast<long long>(extent) * kv_heads + kv_head) * EXTENT_TOKENS + position % EXTENT_TOKENS;
    }
    __device__ __forceinline__ AdjacentRows tile(int first) const { return {row(first)}; }
};

// Valid rows of the window: the sink's, then the ring's, oldest first.
struct WindowRows {
    static constexpr bool SCALED = false;
    const Number* window;
    int sink, ring, sink_rows, ring_first;

    __device__ WindowRows(const AttendArguments& a, const Request& request, int kv_head)
        : window(a.window + request.slot * a.window_stride + static_cast<long long>(kv_head) * a.window_rows * ROW),
          sink(a.sink),
          ring(a.window_rows - a.sink),
          sink_rows(request.sink_rows),
          ring_first(request.ring_first) {}

    struct Tile {
        const WindowRows& source;
        int first;
        __device__ __forceinline__ const Number* row(int i) const {
            const int rank = first + i;
            int ring_row = source.ring_first + rank - source.sink_rows;
            if (ring_row >= source.ring) ring_row -= source.ring;
            return source.window + (rank < source.sink_rows ? rank : source.sink + ring_row) * ROW;
        }
    };
    __device__ __forceinline__ Tile tile(int first) const { return {*this, first}; }
};

}  // namespace attention
}  // namespace kvseek
