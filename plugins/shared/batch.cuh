// What every kernel of a decode step reads about the requests of its batch. Mirrors plugins/batch.py.
//
// The kernels of a captured graph get the same arguments at every replay: whatever varies from step to step lies in
// this array in device memory, which the host uploads before each step.
#pragma once

namespace kvseek {

struct Request {
    int token;       // last token, the decoder's input
    int slot;        // row of the window, the extent table and the index's per-slot arrays
    int position;    // of `token` in the sequence
    int write_row;   // window row that receives its key and value
    int sink_rows;   // window rows 0 .. sink_rows - 1 are valid
    int ring_first;  // first valid ring row, counted from the ring's start
    int ring_rows;   // valid ring rows from there; they wrap. Counts the row of `token`
    int length;      // tokens in the retrieval region
    int dense;       // attend to the whole retrieval region: no selection was made
    int plan[7];     // the method's own numbers (DeviceIndex.plan)
};
static_assert(sizeof(Request) == 64, "plugins/batch.py uploads 16 integers a request");

constexpr int EXTENT_TOKENS = 1024;

// Row of retrieval position `position` in an array [extents, kv_heads, 1024, ...], counted in positions.
__device__ __forceinline__ long long extent_row(const int* table_row, int kv_heads, int head, int position) {
    const long long extent = table_row[position >> 10];
    return ((extent * kv_heads + head) << 10) + (position & (EXTENT_TOKENS - 1));
}

}  // namespace kvseek
