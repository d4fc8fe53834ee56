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
    const Number* first;
    __device__ __forceinline__ const Number* row(int i) const { return first + i * ROW; }
};

// Rows of the retrieval region, numbered by place.
struct PoolRows {
    const Number* rows;
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
    __device__ __forceinline__ const Number* row(int extent, int position) const {
        const int inside = kv_head * EXTENT_TOKENS + position % EXTENT_TOKENS;
        return rows + extent * extent_stride + static_cast<long long>(inside) * ROW;
    }
    __device__ __forceinline__ const Number* row(int position) const { return row(extent(position), position); }
    // Number of the row in an array [extents, G, 1024].
    __device__ __forceinline__ long long number(int extent, int position) const {
        return (static_cast<long long>(extent) * kv_heads + kv_head) * EXTENT_TOKENS + position % EXTENT_TOKENS;
    }
    __device__ __forceinline__ AdjacentRows tile(int first) const { return {row(first)}; }
};

// Valid rows of the window: the sink's, then the ring's, oldest first.
struct WindowRows {
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
