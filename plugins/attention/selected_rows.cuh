// Selected rows: where each one lies, and where a copy of it goes.
//
// A warp takes a few entries at once (16 of 16-bit numbers, 4 of float32): lane l holds entry l % ROWS. The entries of
// the next tile are on their way while this tile is in work, so that only the rows themselves are waited for.
#pragma once

#include "plugins/attention/attend_rows.cuh"
#include "plugins/attention/hot_rows.cuh"

namespace kvseek {
namespace attention {

constexpr int NO_ROW = -2;  // the entry names no row
constexpr int NO_COPY = -1;

// What a selection says about one entry.
struct Entry {
    int place, cached, keep;
};

// Rows of a warp; lane l holds row l % ROWS.
struct FoundRows {
    const Number* from;  // null: no row
    int keep;            // row of SelectedRows::kept that receives a copy; NO_COPY, NO_ROW

    __device__ __forceinline__ const Number* row(int i) const {
        const unsigned long long address = reinterpret_cast<unsigned long long>(from);
        return reinterpret_cast<const Number*>(__shfl_sync(ALL_LANES, address, i));
    }
    __device__ __forceinline__ int keep_of(int i) const { return __shfl_sync(ALL_LANES, keep, i); }
};

// The selected rows of a request and KV head.
struct SelectedRows {
    PoolRows pool;
    const int *places, *cached = nullptr, *keep = nullptr;
    const Number* held = nullptr;  // rows on the device that an entry may be found in: the store's, or the hot ones
    Number* kept = nullptr;        // rows that receive copies; null: another head tile writes them, or nobody
    const int* old_tags = nullptr;
    int* new_tags = nullptr;
    int entries, length;
    bool on_host;
    unsigned long long* hits;

    __device__ SelectedRows(const AttendArguments& a, const Request& request, const Place& place)
        : pool(a, place),
          entries(a.entries),
          length(place.length),
          on_host(a.rows_on_host),
          hits(place.tile ? nullptr : a.hits) {
        const long long list = (static_cast<long long>(place.request) * a.kv_heads + place.kv_head) * a.entries;
        places = a.selected + list;
        if (a.store) {
            const long long own = static_cast<long long>(place.slot) * a.kv_heads + place.kv_head;
            Number* rows = a.store + own * a.store_rows * ROW;
            held = rows, kept = place.tile ? nullptr : rows;
            if (a.cached) cached = a.cached + list;
            if (a.keep) keep = a.keep + list;
        } else if (a.hot_rows) {
            const HotRows hot(a, request, place.kv_head);
            held = hot.old_rows, old_tags = hot.old_tags;
            if (place.tile == 0) kept = hot.new_rows, new_tags = hot.new_tags;
        }
    }

    // Entry `first + lane % ROWS` of the list, below `end`. Its loads are under way: use it late.
    template <int ROWS>
    __device__ __forceinline__ Entry read(int first, int end) const {
        const int entry = first + static_cast<int>(threadIdx.x) % ROWS;
        if (entry >= end) return {-1, -1, NO_COPY};
        return {places[entry], cached ? cached[entry] : -1, keep ? keep[entry] : NO_COPY};
    }

    // Where the rows of such entries lie; the whole warp calls it, once a tile. Rows of the hot buffer are kept in the
    // order of the entries.
    template <int ROWS>
    __device__ __forceinline__ FoundRows find(const Entry& entry, int first, int end) const {
        const int lane = threadIdx.x % 32, own = first + lane % ROWS;
        const bool exists = entry.place >= 0 && entry.place < length;
        int index = entry.cached, keep_at = kept ? entry.keep : NO_COPY;
        if (old_tags) {
            index = find_tags<ROWS>(old_tags, entries, exists ? entry.place : -1);
            if (new_tags && own < end && lane < ROWS) new_tags[own] = exists ? entry.place : -1;
            keep_at = kept ? own : NO_COPY;
        }
        const bool is_held = exists && held && index >= 0;
        if (hits) count_hits<ROWS>(exists, is_held);
        if (!exists) return {nullptr, NO_ROW};
        const Number* from = is_held ? held + static_cast<long long>(index) * ROW : pool.row(entry.place);
        return {from, keep_at >= 0 ? keep_at : NO_COPY};
    }

    template <int ROWS>
    __device__ __forceinline__ void count_hits(bool exists, bool is_held) const {
        constexpr unsigned OWN = (1u << ROWS) - 1;  // the other lanes repeat these
        const int found = __popc(__ballot_sync(ALL_LANES, is_held) & OWN);
        const int rows = __popc(__ballot_sync(ALL_LANES, exists) & OWN);
        if (threadIdx.x % 32 || !rows) return;
        atomicAdd(hits, static_cast<unsigned long long>(found));
        atomicAdd(hits + 1, static_cast<unsigned long long>(rows - found));
    }
};

}  // namespace attention
}  // namespace kvseek
