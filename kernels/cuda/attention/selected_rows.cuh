// Selected rows: where each one lies, and where a copy of it goes.
//
// A warp takes a few entries at once (16 of 16-bit numbers, 4 of float32): lane l < ROWS holds entry l, the others
// none. The places of the next tile's entries are on their way while this tile is in work.
#pragma once

#include "kernels/cuda/attention/attend_rows.cuh"
#include "kernels/cuda/attention/hot_rows.cuh"

namespace kvseek {
namespace attention {

constexpr int NO_ROW = -2;  // the entry names no row
constexpr int NO_COPY = -1;

// Rows of a warp; lane l < ROWS holds row l.
struct FoundRows {
    const RowNumber* from;  // null: no row
    int keep;               // frame of the hot rows that receives a copy; NO_COPY, NO_ROW
    unsigned scales = 0;    // of a row that is rounded

    __device__ __forceinline__ const RowNumber* row(int i) const {
        const unsigned long long address = reinterpret_cast<unsigned long long>(from);
        return reinterpret_cast<const RowNumber*>(__shfl_sync(ALL_LANES, address, i));
    }
    __device__ __forceinline__ int keep_of(int i) const { return __shfl_sync(ALL_LANES, keep, i); }
};

// The selected rows of a request and KV head.
struct SelectedRows {
    PoolRows pool;
    HotRows hot;
    const int* places;
    int length;
    bool on_host;

    __device__ SelectedRows(const AttendArguments& a, const Request& request, const Place& place)
        : pool(a, place),
          hot(a, request, place),
          places(a.selected + (static_cast<long long>(place.request) * a.kv_heads + place.kv_head) * a.entries),
          length(place.length),
          on_host(a.rows_on_host) {}

    // Place of this lane's entry, `first` + lane, below `end`; or -1. Its load is under way: use it late.
    template <int ROWS>
    __device__ __forceinline__ int read(int first, int end) const {
        const int lane = threadIdx.x % 32;
        return lane < ROWS && first + lane < end ? places[first + lane] : -1;
    }

    // Where the rows of entries `first` .. `first` + ROWS - 1 lie, whose places `read` gave. The whole warp calls it,
    // once a tile.
    template <int ROWS>
    __device__ __forceinline__ FoundRows find(int place, int first) const {
        const bool exists = place >= 0 && place < length;
        int copy = -1;  // frame of one
        FoundRows found{nullptr, NO_ROW};
        if (exists) {
            const int extent = pool.extent(place);
            found = {pool.row(extent, place), NO_COPY};
            if (hot.exist()) {
                const long long number = pool.number(extent, place);
                copy = hot.find(number, place);
                if (copy >= 0) found.from = hot.row(copy);
                if (hot.receives) found.keep = hot.receive(number, place, first + static_cast<int>(threadIdx.x) % 32);
            }
            if (ROUNDED) found.scales = copy >= 0 ? hot.scales[copy] : pool.scales(extent, place);
        }
        if (hot.hits) hot.note(exists, copy >= 0);
        return found;
    }
};

}  // namespace attention
}  // namespace kvseek
