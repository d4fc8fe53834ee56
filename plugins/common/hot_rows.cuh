// Selected rows: looked up among those of the slot's last step, copied into shared memory, kept for the next step.
//
// The hot rows of a slot are two buffers of `entries` rows and tags. A step at position p reads buffer (p + 1) % 2 and
// writes buffer p % 2, so no CTA writes what another one reads. Rows of the retrieval region never change while a
// request lives, so a tag that matches is enough; the host clears the tags when a slot gets another request.
#pragma once

#include "plugins/common/attend_rows.cuh"

namespace kvseek {
namespace attention {

// Index of `position` among ascending tags that end in -1s, or -1. Each eight neighbouring lanes look one position up
// and cut what is left to an eighth at a time; the whole warp takes part.
__device__ __forceinline__ int find_tag(const int* tags, int entries, int position) {
    const int lane = threadIdx.x % 32, part = lane % 8;
    int low = 0, count = entries;
    bool may_be_there = true;
    while (true) {
        const int stride = (count + 7) / 8, index = low + part * stride;
        const int tag = part * stride < count && index < entries ? tags[index] : -1;
        const unsigned below = __ballot_sync(~0u, tag >= 0 && tag <= position) >> (lane & ~7) & 0xff;
        may_be_there = may_be_there && below != 0;  // tags ascend: the lanes below are the first ones
        const int nearest = below ? __popc(below) - 1 : 0;
        low += nearest * stride;
        const int found = __shfl_sync(~0u, tag, nearest, 8);
        if (stride <= 1) return may_be_there && found == position ? low : -1;
        count = stride;
    }
}

// What a CTA reads and writes of the hot rows.
struct HotRows {
    const Number* old_rows = nullptr;  // [entries, 2, D]
    const int* old_tags = nullptr;     // null: there are no hot rows
    Number* new_rows = nullptr;
    int* new_tags = nullptr;  // null: another head tile writes them

    __device__ HotRows(const AttendArguments& a, const Request& request, const Place& place) {
        if (!a.hot_rows) return;
        const int parity = request.position & 1;
        const long long buffers = static_cast<long long>(request.slot) * 2;
        const long long old_list = (buffers + 1 - parity) * a.kv_heads + place.kv_head;
        const long long new_list = (buffers + parity) * a.kv_heads + place.kv_head;
        old_rows = a.hot_rows + old_list * a.entries * ROW;
        old_tags = a.hot_tags + old_list * a.entries;
        if (place.tile) return;
        new_rows = a.hot_rows + new_list * a.entries * ROW;
        new_tags = a.hot_tags + new_list * a.entries;
    }
};

constexpr int ROW_PIECES = ROW * static_cast<int>(sizeof(Number)) / 16;
constexpr int COPIES = (STAGED * ROW_PIECES + THREADS - 1) / THREADS;  // 16-byte pieces of a thread
constexpr int PIECE = 16 / static_cast<int>(sizeof(Number));           // numbers of a piece

// Copy selected rows first .. first + 15 (below `end`) of a list into shared memory; returns how many there are.
// All loads of a CTA are on their way at once, neighbouring lanes reading neighbouring bytes: a row in host memory is
// one request over PCIe, not several.
__device__ __forceinline__ int stage_rows(const AttendArguments& a, const Place& place, const HotRows& hot,
                                          const int* selected, int first, int end, const Number** sources,
                                          Number* staged) {
    const int row = threadIdx.x / 8, entry = first + row;
    const int chosen = entry < end ? selected[entry] : -1;
    const bool exists = chosen >= 0 && chosen < place.length;
    const int position = exists ? chosen : -1;
    const int found = hot.old_tags ? find_tag(hot.old_tags, a.entries, position) : -1;
    const bool leader = threadIdx.x % 8 == 0;
    if (leader && exists) {
        const Number* from_hot = hot.old_rows + static_cast<long long>(max(found, 0)) * ROW;
        sources[row] = found >= 0 ? from_hot : PoolRows(a, place).row(position);
    }
    if (leader && hot.new_tags && entry < end) hot.new_tags[entry] = position;
    const int rows = __syncthreads_count(leader && exists);
    if (a.hits && !place.tile) {
        const int hits = __syncthreads_count(leader && found >= 0);
        if (threadIdx.x == 0) {
            atomicAdd(a.hits, static_cast<unsigned long long>(hits));
            atomicAdd(a.hits + 1, static_cast<unsigned long long>(rows - hits));
        }
    }
    uint4 pieces[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
        const int piece = threadIdx.x + i * THREADS, of = piece / ROW_PIECES;
        pieces[i] = make_uint4(0, 0, 0, 0);  // what is missing is multiplied by 0: it must not be NaN
        if (of < rows) pieces[i] = load_once_16(sources[of] + piece % ROW_PIECES * PIECE);
    }
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
        const int piece = threadIdx.x + i * THREADS, of = piece / ROW_PIECES, offset = piece % ROW_PIECES * PIECE;
        if (of < STAGED) *reinterpret_cast<uint4*>(staged + of * StagedRows::STRIDE + offset) = pieces[i];
        if (of < rows && hot.new_rows)
            *reinterpret_cast<uint4*>(hot.new_rows + static_cast<long long>(first + of) * ROW + offset) = pieces[i];
    }
    __syncthreads();
    return rows;
}

}  // namespace attention
}  // namespace kvseek
