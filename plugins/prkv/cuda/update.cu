// A new static set (PRKV paper, section 4.1, "Periodic static token update"): read rows beside the decode steps, and
// let rows change places between two of them. When a request has ended, its rows are written back in token order.
#include "layout.cuh"
#include "plugins/shared/frames.cuh"
#ifdef PRKV_CODES
#include "plugins/codes/cuda/nested_codes.cuh"
#endif

namespace kvseek {
namespace prkv {

// Mirrored field by field in update.py.
struct RowsArguments {
    Number* pool;             // rows of the layer from the first of these KV heads on, in host or device memory
    const int* table;         // [max_extents] of the slot
    const int* places;        // [kv_heads, count]; -1, for reading alone: zeros
    Number* rows;             // [kv_heads, count, width]
    long long extent_stride;  // numbers from one extent of the pool to the next
    int count;
    int width;  // numbers from the start of a row on: HEAD_DIM for the key, twice that for all
};

// Mirrored field by field in update.py.
struct PublishArguments {
    Number* pool;
    const int* table;       // [max_extents] of the slot
    const int* leaving;     // [kv_heads, pairs] static place of each pair, or -1
    const int* entering;    // [kv_heads, pairs] the other place
    const Number* entered;  // [kv_heads, pairs, 2, HEAD_DIM] row of the other place of each pair, until now
    const Number* left;     // [kv_heads, pairs, 2, HEAD_DIM] row of the static place of each pair, until now
#ifndef PRKV_CODES
    const Number* new_boxes;  // [kv_heads, pairs, 2, HEAD_DIM] box of the page of each other place, from now on
#endif
    const int* count;  // [1] static rows from now on
#ifdef PRKV_CODES
    unsigned char* high;       // [extents, kv_heads, 1024, codes::FIELD] codes of 2 bits
    __half* scales;            // [extents, kv_heads, 1024]
    const signed char* means;  // as in codes::Means
    const float* mean_steps;
    const float* signs;  // [codes::DIM]
#else
    Number* boxes;  // [extents, kv_heads, PAGES_OF_EXTENT, 2, HEAD_DIM]
#endif
    FrameNumber* frames;  // [extents, kv_heads, 1024] of the pool's rows; null: there are no hot rows
    int* static_rows;     // [1] of the slot
    int* homes;           // [kv_heads, most_static] of the slot
    int* tokens;          // [extents, kv_heads, 1024] retrieval token of each place; null: nobody asks for it
    long long extent_stride;
    int kv_heads, pairs, most_static;
#ifdef PRKV_CODES
    int block_bits;
#endif
};

constexpr int EACH = 16 / static_cast<int>(sizeof(Number));  // numbers of 16 bytes

__device__ __forceinline__ void copy_numbers(Number* to, const Number* from, int count) {
    for (int i = threadIdx.x * EACH; i < count; i += blockDim.x * EACH)
        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
}

#ifdef PRKV_CODES
// Encode the key of a row that has come to a place, with the mean of the block that it is in now. A warp.
__device__ __forceinline__ void encode_row(const PublishArguments& a, const Number* key, long long row) {
    float y[codes::EACH];
    codes::load_vector(key, y);
    codes::rotate(y, a.signs);
    codes::Means(a).subtract(static_cast<unsigned>(row), y);
    codes::store_codes<2>(y, a.high, nullptr, a.scales, row);
}
#endif

}  // namespace prkv
}  // namespace kvseek

// grid: blocks, kv_heads. Few blocks suffice for PCIe: they run beside decode steps.
extern "C" __global__ void __launch_bounds__(256)
    kvseek_prkv_gather(const __grid_constant__ kvseek::prkv::RowsArguments a) {
    using namespace kvseek;
    using namespace kvseek::prkv;
    const int head = blockIdx.y, pieces = a.width / EACH;
    const long long items = static_cast<long long>(a.count) * pieces;
    const long long first = static_cast<long long>(head) * a.count;
#pragma unroll 4
    for (long long item = blockIdx.x * blockDim.x + threadIdx.x; item < items; item += gridDim.x * blockDim.x) {
        const long long row = first + item / pieces;
        const int offset = static_cast<int>(item % pieces) * EACH, place = a.places[row];
        uint4 piece = make_uint4(0, 0, 0, 0);
        if (place >= 0)
            piece = *reinterpret_cast<const uint4*>(a.pool + row_start(a.table, a.extent_stride, head, place) + offset);
        *reinterpret_cast<uint4*>(a.rows + row * a.width + offset) = piece;
    }
}

// grid: as kvseek_prkv_gather, the other way. No place occurs twice.
extern "C" __global__ void __launch_bounds__(256)
    kvseek_prkv_scatter(const __grid_constant__ kvseek::prkv::RowsArguments a) {
    using namespace kvseek;
    using namespace kvseek::prkv;
    const int head = blockIdx.y, pieces = a.width / EACH;
    const long long items = static_cast<long long>(a.count) * pieces;
    const long long first = static_cast<long long>(head) * a.count;
#pragma unroll 4
    for (long long item = blockIdx.x * blockDim.x + threadIdx.x; item < items; item += gridDim.x * blockDim.x) {
        const long long row = first + item / pieces;
        const int offset = static_cast<int>(item % pieces) * EACH;
        *reinterpret_cast<uint4*>(a.pool + row_start(a.table, a.extent_stride, head, a.places[row]) + offset) =
            *reinterpret_cast<const uint4*>(a.rows + row * a.width + offset);
    }
}

// grid: pairs, kv_heads. One launch between two decode steps: each sees the old order or the new one.
extern "C" __global__ void __launch_bounds__(128)
    kvseek_prkv_publish(const __grid_constant__ kvseek::prkv::PublishArguments a) {
    using namespace kvseek;
    using namespace kvseek::prkv;
    const int head = blockIdx.y, number = blockIdx.x;
    const long long pair = static_cast<long long>(head) * a.pairs + number;
    const int leaving = a.leaving[pair], entering = a.entering[pair];
    if (number == 0 && head == 0 && threadIdx.x == 0) *a.static_rows = *a.count;
    if (leaving < 0) return;
    copy_numbers(a.pool + row_start(a.table, a.extent_stride, head, leaving), a.entered + pair * ROW, ROW);
    copy_numbers(a.pool + row_start(a.table, a.extent_stride, head, entering), a.left + pair * ROW, ROW);
#ifdef PRKV_CODES
    const int warp = threadIdx.x / WARP;
    if (warp == 0) encode_row(a, a.entered + pair * ROW, extent_row(a.table, a.kv_heads, head, leaving));
    if (warp == 1) encode_row(a, a.left + pair * ROW, extent_row(a.table, a.kv_heads, head, entering));
#else
    const int page = entering / PAGE;  // that of several pairs, perhaps: they all write the same
    copy_numbers(a.boxes + page_entry(a.table, a.kv_heads, head, page) * BOX, a.new_boxes + pair * BOX, BOX);
#endif
    if (threadIdx.x) return;
    a.homes[static_cast<long long>(head) * a.most_static + leaving] = entering;
    const long long row = extent_row(a.table, a.kv_heads, head, leaving);
    const long long other = extent_row(a.table, a.kv_heads, head, entering);
    if (a.tokens) {
        const int kept = a.tokens[row];
        a.tokens[row] = a.tokens[other];
        a.tokens[other] = kept;
    }
    if (!a.frames) return;
    a.frames[row] = a.frames[other] = NO_FRAME;  // copies hold the rows of before
}
