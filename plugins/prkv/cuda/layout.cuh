// Sizes that the kernels of PRKV agree on. Macros of device.py: PRKV_PAGE rows of a page, PRKV_PAGES pages that a step
// attends to at most, and PRKV_CODES if pages are scored by codes of their rows; otherwise boxes score them.
#pragma once

#include "kernels/cuda/batch.cuh"
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/warp.cuh"

namespace kvseek {
namespace prkv {

constexpr int DIM = KVSEEK_HEAD_DIM;
constexpr int GROUP = KVSEEK_GROUP;
constexpr int PAGE = PRKV_PAGE;
constexpr int PAGES = PRKV_PAGES;
constexpr int LANES = GROUP;  // queries that score pages on their own
constexpr int PAGES_OF_EXTENT = EXTENT_TOKENS / PAGE;
constexpr int BOX = 2 * DIM;  // numbers of a box: the smallest, then the largest
constexpr int ROW = 2 * DIM;  // numbers of a row: the key, then the value
// Pages that a warp scores at once; they lie in one extent.
#ifdef PRKV_CODES
constexpr int UNIT = 64;  // keys whose codes a warp has on their way
constexpr int TILE = PAGE < UNIT ? UNIT / PAGE : 1;
#else
constexpr int TILE = PAGES_OF_EXTENT < 16 ? 8 : 16;
#endif
constexpr int THREADS = DIM <= 128 ? 512 : 256;  // of the selection: a thread holds the numbers of a tile
constexpr int WARPS = THREADS / 32;
constexpr float LOG2_E = 1.4426950408889634f;

static_assert(DIM % 32 == 0 && DIM <= 256, "KVSEEK_HEAD_DIM must be a multiple of 32 up to 256");
static_assert(PAGE >= 8 && PAGE <= 128 && (PAGE & (PAGE - 1)) == 0, "PRKV_PAGE must be a power of two from 8 to 128");
static_assert(PAGES >= 1 && PAGES <= THREADS, "a thread of the selection has at most one page");

// Entry of a page in an array [extents, kv_heads, PAGES_OF_EXTENT, ...].
__device__ __forceinline__ long long page_entry(const int* table_row, int kv_heads, int head, int page) {
    const long long extent = table_row[page / PAGES_OF_EXTENT];
    return (extent * kv_heads + head) * PAGES_OF_EXTENT + page % PAGES_OF_EXTENT;
}

// First number of the row at a place of the pool.
__device__ __forceinline__ long long row_start(const int* table_row, long long extent_stride, int head, int place) {
    const long long inside = static_cast<long long>(head) * EXTENT_TOKENS + place % EXTENT_TOKENS;
    return table_row[place / EXTENT_TOKENS] * extent_stride + inside * ROW;
}

}  // namespace prkv
}  // namespace kvseek
