// Where attention finds its rows: the window's ring, the extents of the row pool, a copy in shared memory.
//
// A source gives tiles of at most 16 consecutive rows of its own numbering; a tile gives the address of a row. Tiles
// start at multiples of 16, so a tile of the pool lies within one extent.
#pragma once

#include "plugins/common/attend_arguments.cuh"
#include "plugins/common/instructions.cuh"

namespace kvseek {
namespace attention {

struct FromMemory {
    __device__ __forceinline__ static uint4 load_16(const void* from) { return load_once_16(from); }
    __device__ __forceinline__ static uint2 load_8(const void* from) { return load_once_8(from); }
    __device__ __forceinline__ static unsigned load_4(const void* from) { return load_once_4(from); }
};

struct FromShared {
    __device__ __forceinline__ static uint4 load_16(const void* from) { return *static_cast<const uint4*>(from); }
    __device__ __forceinline__ static uint2 load_8(const void* from) { return *static_cast<const uint2*>(from); }
    __device__ __forceinline__ static unsigned load_4(const void* from) { return *static_cast<const unsigned*>(from); }
};

template <int STRIDE>  // numbers from row to row
struct AdjacentRows {
    const Number* first;
    __device__ __forceinline__ const Number* row(int i) const { return first + i * STRIDE; }
};

// Rows of the retrieval region, numbered by position.
struct PoolRows : FromMemory {
    const Number* rows;
    const int* extents;
    long long extent_stride;
    int kv_head;

    __device__ PoolRows(const AttendArguments& a, const Place& place)
        : rows(a.rows),
          extents(a.table + static_cast<long long>(place.slot) * a.table_stride),
          extent_stride(a.extent_stride),
          kv_head(place.kv_head) {}

    __device__ __forceinline__ const Number* row(int position) const {
        const int inside = kv_head * EXTENT_TOKENS + position % EXTENT_TOKENS;
        return rows + extents[position / EXTENT_TOKENS] * extent_stride + static_cast<long long>(inside) * ROW;
    }
    __device__ __forceinline__ AdjacentRows<ROW> tile(int first) const { return {row(first)}; }
};

// Valid rows of the window: the sink's, then the ring's, oldest first.
struct WindowRows : FromMemory {
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

// Selected rows that the CTA has copied; a row is padded so that the lanes of a warp meet in few memory banks.
struct StagedRows : FromShared {
    static constexpr int STRIDE = ROW_STRIDE;
    const Number* rows;
    __device__ explicit StagedRows(const Number* rows) : rows(rows) {}
    __device__ __forceinline__ AdjacentRows<STRIDE> tile(int first) const { return {rows + first * STRIDE}; }
};

}  // namespace attention
}  // namespace kvseek
