// Hot rows: copies, on the device, of the rows that a slot's last steps selected from a pool in host memory.
//
// A slot and KV head has a buffer of `entries` frames for each of these steps and one more. The step at position p
// copies its entry e to frame e of buffer p mod buffers: where to write needs no search. As a step counts the rows in
// that buffer as not found, no CTA reads a frame that another one writes. (Where several CTAs serve the heads of a
// group, one of them writes the number of a row's frame while the others read it. They find the frame of before, which
// stays as it is, or this step's, and then read the pool.)
//
// For each row of the pool, `frames` says which frame received it last; for each frame, `places` says whose row it
// holds. A copy is found if both agree, so `frames` need not be cleared when extents pass from one request to another:
// of a row that this request has not copied yet it may say anything, but no frame holds that row. (Briggs and Torczon,
// An Efficient Representation for Sparse Sets, 1993.) Only `places` of a slot are cleared for the slot's next request.
//
// Slots may share extents. So that each has a number of its own for a row of these, the entry of `frames` is moved by a
// step for each slot, around the end. It may then be that of another row of another slot, which overwrites it: as said,
// it may hold anything.
//
// The rows of a request do not change.
#pragma once

#include "kernels/cuda/attention/attend_arguments.cuh"

namespace kvseek {
namespace attention {

// The hot rows of a slot and KV head in one step.
struct HotRows {
    RowNumber* rows = nullptr;           // [size, 2, D]; null: there are none
    unsigned* scales = nullptr;          // [size]: of rows that are rounded
    int* places = nullptr;               // [size]: place of the row that a frame holds, or -1
    FrameNumber* frames = nullptr;       // [count]: the frame that received each row of the pool last
    unsigned long long* hits = nullptr;  // [2]: rows that were found, and rows that were not; null: not counted here
    int size = 0, entries = 0;
    int first = 0;                   // frame of this step's buffer
    long long count = 0, shift = 0;  // of `frames`: its size, and where row 0 of the pool has its number
    bool receives = false;           // whether this CTA copies rows; another head tile reads the same ones

    __device__ HotRows(const AttendArguments& a, const Request& request, const Place& place) {
        if (!a.hot_rows) return;
        const long long list = static_cast<long long>(place.slot) * a.kv_heads + place.kv_head;
        size = a.hot_buffers * a.entries, entries = a.entries;
        rows = a.hot_rows + list * size * ROW, places = a.hot_places + list * size, frames = a.frames;
        if (ROUNDED) scales = a.hot_scales + list * size;
        first = request.position % a.hot_buffers * a.entries;
        count = a.frame_count, shift = place.slot * a.frame_step;
        receives = place.tile == 0;
        if (receives) hits = a.hits + 2 * list;
    }

    __device__ __forceinline__ bool exist() const { return rows != nullptr; }

    // Where the slot's frame of row `number` of the pool stands.
    __device__ __forceinline__ FrameNumber& frame_of(long long number) const {
        const long long moved = number + shift;
        return frames[moved < count ? moved : moved - count];
    }

    // The frame with a copy of the row at `place`, which is row `number` of the pool, or -1.
    __device__ __forceinline__ int find(long long number, int place) const {
        const int frame = frame_of(number);
        const bool written = static_cast<unsigned>(frame - first) < static_cast<unsigned>(entries);
        return frame >= size || written || places[frame] != place ? -1 : frame;
    }
    __device__ __forceinline__ RowNumber* row(int frame) const { return rows + static_cast<long long>(frame) * ROW; }

    // Note that the frame of an entry holds this row, and return the frame; the caller copies the row there.
    __device__ __forceinline__ int receive(long long number, int place, int entry) const {
        const int frame = first + entry;
        places[frame] = place, frame_of(number) = static_cast<FrameNumber>(frame);
        return frame;
    }

    // Count the rows of a warp; the whole warp calls it.
    __device__ __forceinline__ void note(bool exists, bool found) const {
        const int all = __popc(__ballot_sync(ALL_LANES, exists)), hot = __popc(__ballot_sync(ALL_LANES, found));
        if (threadIdx.x % 32) return;
        if (hot) atomicAdd(hits, static_cast<unsigned long long>(hot));
        if (all > hot) atomicAdd(hits + 1, static_cast<unsigned long long>(all - hot));
    }
};

}  // namespace attention
}  // namespace kvseek
