// Bounding boxes of the keys of each page (PRKV paper, section 4.1, "Hybrid KV Sparsity").
#ifndef PRKV_CODES
#include "layout.cuh"

namespace kvseek {
namespace prkv {

struct BoxArguments {
    const Number* keys;      // [kv_heads, tokens, HEAD_DIM], strided
    const int* table;        // [max_extents] of the slot
    Number* boxes;           // [extents, kv_heads, PAGES_OF_EXTENT, 2, HEAD_DIM]
    Number* pending;         // [kv_heads, 2, HEAD_DIM] of the slot: keys that are to join a page that others began
    long long head_stride;   // numbers from one KV head to the next
    long long token_stride;  // numbers from one token to the next
    int kv_heads, tokens;
    int first;  // place of the first token
};

constexpr int PIECES = DIM / 8;  // of a key: a thread has eight channels

}  // namespace prkv
}  // namespace kvseek

// grid: blocks, kv_heads. A thread takes eight channels of a page. A page that other keys began is visible to decode
// steps: what joins it waits in `pending`.
extern "C" __global__ void __launch_bounds__(256)
    kvseek_prkv_boxes(const __grid_constant__ kvseek::prkv::BoxArguments a) {
    using namespace kvseek;
    using namespace kvseek::prkv;
    const int head = blockIdx.y, first_page = a.first / PAGE, last_page = (a.first + a.tokens - 1) / PAGE;
    const int threads = gridDim.x * blockDim.x, items = (last_page - first_page + 1) * PIECES;
    for (int item = blockIdx.x * blockDim.x + threadIdx.x; item < items; item += threads) {
        const int page = first_page + item / PIECES, channel = item % PIECES * 8;
        const int begin = max(page * PAGE - a.first, 0), end = min(page * PAGE + PAGE - a.first, a.tokens);
        const Number* key = a.keys + head * a.head_stride + channel;
        float low[8], high[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) low[c] = INFINITE, high[c] = -INFINITE;
#pragma unroll 8
        for (int token = begin; token < end; ++token) {
            Eight<Number> eight;
            eight.load(key + token * a.token_stride);
#pragma unroll
            for (int c = 0; c < 8; ++c) low[c] = fminf(low[c], eight[c]), high[c] = fmaxf(high[c], eight[c]);
        }
        const bool begun = page * PAGE < a.first;
        Number* box = begun ? a.pending + head * BOX : a.boxes + page_entry(a.table, a.kv_heads, head, page) * BOX;
#pragma unroll
        for (int c = 0; c < 8; ++c) {  // numbers of the keys: exact
            box[channel + c] = from_float<Number>(low[c]);
            box[DIM + channel + c] = from_float<Number>(high[c]);
        }
    }
}

// grid: kv_heads; HEAD_DIM threads. Let the keys in `pending` join the page of place `first`.
extern "C" __global__ void __launch_bounds__(kvseek::prkv::DIM)
    kvseek_prkv_join(const __grid_constant__ kvseek::prkv::BoxArguments a) {
    using namespace kvseek;
    using namespace kvseek::prkv;
    const int head = blockIdx.x, channel = threadIdx.x, page = a.first / PAGE;
    Number* box = a.boxes + page_entry(a.table, a.kv_heads, head, page) * BOX + channel;
    const Number* joining = a.pending + head * BOX + channel;
    if (to_float(joining[0]) < to_float(box[0])) box[0] = joining[0];
    if (to_float(joining[DIM]) > to_float(box[DIM])) box[DIM] = joining[DIM];
}
#endif
