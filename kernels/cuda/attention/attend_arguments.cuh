// Arguments of kvseek_attend and the sizes that its parts agree on.
#pragma once

#include "kernels/cuda/batch.cuh"
#include "kernels/cuda/numbers.cuh"

namespace kvseek {

// Of a frame of the hot rows (hot_rows.cuh); 0xffff: no frame holds a copy of the row.
using FrameNumber = unsigned short;

// Of rows of the pool and of hot rows: with KVSEEK_ROUNDED_ROWS integers of 8 bits, whose scales of key and value, two
// bfloat16 a row, lie behind the rows of an extent and KV head (kernels/reference/attention/rounded_rows.py).
#if KVSEEK_ROUNDED_ROWS
using RowNumber = signed char;
constexpr int SCALE_BYTES = 4;
#else
using RowNumber = Number;
constexpr int SCALE_BYTES = 0;
#endif

struct AttendArguments {
    const Number* queries;     // [batch, H, D]
    Number* out;               // [batch, H, D]
    const Request* requests;   // [batch]
    const int* table;          // [slots, table_stride]: extents of a slot
    const Number* window;      // [slots, G, window_rows, 2, D]
    const RowNumber* rows;     // the layer's row pool; host or device memory
    const int* selected;       // [batch, G, entries]: places, -1 anywhere; null: every row
    RowNumber* hot_rows;       // [slots, G, hot_buffers * entries, 2, D]; null: no hot rows (hot_rows.cuh)
    unsigned* hot_scales;      // [slots, G, hot_buffers * entries]: two bfloat16; null: rows are not rounded
    int* hot_places;           // [slots, G, hot_buffers * entries]: place of the row in each frame, or -1
    FrameNumber* frames;       // [frame_count], as [extents, G, 1024]: frame that received each row of the pool last
    float* lse;                // [batch, H]: natural log of the sum of the scores' exponentials; null: not asked for
    float* partials;           // [G, tiles, most_units, KEPT_HEADS, D]
    float2* statistics;        // [G, tiles, most_units, TILE]: largest score, sum of weights
    int* arrivals;             // [batch, G, tiles], 0 between launches
    unsigned long long* hits;  // [slots, G, 2]: selected rows that were found among the hot rows, and that were not
    long long extent_stride;   // numbers from one extent of the pool to the next
    long long window_stride;   // numbers from one slot of the window to the next
    long long frame_count;     // numbers in `frames`
    long long frame_step;      // from a slot's number of a row there to the next slot's; 0: slots share no extents
    int kv_heads;
    int table_stride;
    int window_rows;
    int sink;  // the ring starts at window row `sink`
    int entries;
    int hot_buffers;
    int rows_on_host;   // `rows` lies in host memory
    int batch;          // requests
    int most_units;     // of a list of all of them together
    int dense_splits;   // most units of a list's dense rows
    int dense_rows;     // least rows of such a unit, but for the last
    int selected_rows;  // rows of a unit of selected rows
    float scale;        // softmax scale times log2(e): weights are powers of two
};

namespace attention {

constexpr int DIM = KVSEEK_HEAD_DIM;
constexpr int GROUP = KVSEEK_GROUP;  // query heads of a KV head
constexpr int ROW = 2 * DIM;         // numbers of a row: the key, then the value
constexpr bool ROUNDED = SCALE_BYTES > 0;
constexpr int BLOCK = EXTENT_TOKENS * (ROW + SCALE_BYTES);  // numbers of an extent's rows of a KV head
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE_ROWS = 16;            // rows that a warp takes at once
constexpr int PASS = TILE_ROWS * WARPS;  // rows that a CTA takes at once
constexpr int MAX_SPLITS = 128;          // units of a list
constexpr int WINDOW_ROWS = 128;         // of a unit of the window, if these are at most MAX_WINDOW_SPLITS
constexpr int MAX_WINDOW_SPLITS = 32;
constexpr int ROW_STRIDE = ROW + 16 / static_cast<int>(sizeof(Number));  // of rows in shared memory: no bank conflicts
// Tiles of 16 rows that a warp has in shared memory: a CTA must fit the smallest multiprocessors, which have 99 KB.
constexpr int STAGES = DIM <= 64 ? 3 : DIM <= 128 ? 2 : 1;
static_assert(DIM % 32 == 0 && DIM <= 256, "KVSEEK_HEAD_DIM must be a multiple of 32 up to 256");
static_assert(GROUP >= 1 && GROUP <= 16, "KVSEEK_GROUP must be 1 to 16");

// Heads that one CTA serves. More of them read the rows fewer times, and hold more registers.
#if KVSEEK_DTYPE == 0
constexpr int MOST_HEADS = DIM <= 128 ? 8 : 4;
constexpr int TILE = GROUP >= MOST_HEADS ? MOST_HEADS : GROUP > 4 ? 8 : GROUP > 2 ? 4 : GROUP;
constexpr int SHARED_BYTES = 4224;  // rows stay in registers; the sums of a warp, 32 registers of 33 lanes, do not
#else
constexpr int TILE = GROUP > 8 && DIM <= 128 ? 16 : 8;  // what the tensor cores multiply, used or not
constexpr int SHARED_BYTES = WARPS * STAGES * TILE_ROWS * ROW_STRIDE * static_cast<int>(sizeof(Number));
#endif
constexpr int TILES = (GROUP + TILE - 1) / TILE;
constexpr int KEPT_HEADS = GROUP < TILE ? GROUP : TILE;  // of a partial result

constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float minus_infinity() {
    return __int_as_float(0xff800000);
}

// What a CTA works on: a list is the rows of a request and KV head, and a tile of its query heads.
struct Place {
    int request, slot, kv_head, tile;
    int length;       // tokens of the retrieval region
    int unit, first;  // number of the unit in the launch's scratch memory, and of the list's first one
    int units;        // of the list
    __device__ int first_head() const { return tile * TILE; }  // in the group
    __device__ int heads() const { return min(TILE, GROUP - first_head()); }
    __device__ int query_head() const { return kv_head * GROUP + first_head(); }
};

}  // namespace attention
}  // namespace kvseek
