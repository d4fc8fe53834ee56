// Hot rows: the selected rows of a slot's last step, kept on the device by the engine for methods without a store.
//
// A slot has two buffers of `entries` rows and tags. A step at position p reads buffer (p + 1) % 2 and writes buffer
// p % 2, so no CTA writes what another one reads. Rows of the retrieval region never change while a request lives, so a
// tag that matches is enough; the host clears the tags when a slot gets another request. The search relies on tags that
// ascend, with -1s at the end: of other selections few rows are found, and all the others are read from the pool.
#pragma once

#include "plugins/attention/attend_arguments.cuh"

namespace kvseek {
namespace attention {

// Where each row of a warp is among ascending tags: a lane asks for `place` of row lane % ROWS, and gets its index or
// -1. Eight neighbouring lanes look one row up and cut what is left to an eighth at a time; the ROWS / 4 rounds of a
// warp are under way together. The whole warp calls it.
template <int ROWS>
__device__ __forceinline__ int find_tags(const int* tags, int entries, int place) {
    constexpr int ROUNDS = ROWS / 4;
    const int lane = threadIdx.x % 32, part = lane % 8;
    int wanted[ROUNDS], low[ROUNDS], found[ROUNDS];
    bool may_be_there[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        wanted[r] = __shfl_sync(ALL_LANES, place, 4 * r + lane / 8);
        low[r] = 0, may_be_there[r] = true;
    }
    for (int count = entries, stride = 0; stride != 1; count = stride) {
        stride = (count + 7) / 8;
        int tag[ROUNDS];
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int index = low[r] + part * stride;
            tag[r] = part * stride < count && index < entries ? tags[index] : -1;
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const unsigned all = __ballot_sync(ALL_LANES, tag[r] >= 0 && tag[r] <= wanted[r]);
            const unsigned below = all >> (lane & ~7) & 0xff;  // the first lanes of the eight: tags ascend
            may_be_there[r] = may_be_there[r] && below != 0;
            const int nearest = below ? __popc(below) - 1 : 0;
            low[r] += nearest * stride;
            found[r] = __shfl_sync(ALL_LANES, tag[r], nearest, 8);
        }
    }
    int result = -1;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int index = may_be_there[r] && found[r] == wanted[r] ? low[r] : -1;
        const int of_row = __shfl_sync(ALL_LANES, index, lane % 4 * 8);
        if (lane % ROWS / 4 == r) result = of_row;
    }
    return result;
}

// What a CTA reads and writes of the hot rows.
struct HotRows {
    const Number* old_rows;  // [entries, 2, D]
    const int* old_tags;
    Number* new_rows;
    int* new_tags;

    __device__ HotRows(const AttendArguments& a, const Request& request, int kv_head) {
        const int parity = request.position & 1;
        const long long buffers = static_cast<long long>(request.slot) * 2;
        const long long old_list = (buffers + 1 - parity) * a.kv_heads + kv_head;
        const long long new_list = (buffers + parity) * a.kv_heads + kv_head;
        old_rows = a.hot_rows + old_list * a.entries * ROW, old_tags = a.hot_tags + old_list * a.entries;
        new_rows = a.hot_rows + new_list * a.entries * ROW, new_tags = a.hot_tags + new_list * a.entries;
    }
};

}  // namespace attention
}  // namespace kvseek
