// Puts keys and values that something else rotated, such as a TensorRT plan, into the window.
// kernels/cuda/layer/layer.py launches it.
#include "kernels/cuda/layer/window_row.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/overlap.cuh"

namespace kvseek {

struct AppendArguments {
    const void* keys;      // Number [batch, G, D], rotated
    const void* values;    // Number [batch, G, D]
    const void* requests;  // Request [batch]
    void* window;          // Number [slots, G, window_rows, 2, D]
    int kv_heads;
    int window_rows;
};

namespace append {

constexpr int APPEND_THREADS = 128;
constexpr int PIECES = KVSEEK_HEAD_DIM / 8;  // of a key, and of a value
static_assert(KVSEEK_HEAD_DIM % 8 == 0, "rows are copied in pieces of eight numbers");

// One thread block a request.
extern "C" __global__ void __launch_bounds__(APPEND_THREADS)
    kvseek_append(const __grid_constant__ kvseek::AppendArguments a) {
    await_earlier_kernels();
    allow_later_kernels();
    const Request& request = static_cast<const Request*>(a.requests)[blockIdx.x];
    const long long first = static_cast<long long>(blockIdx.x) * a.kv_heads;
    for (int work = threadIdx.x; work < a.kv_heads * 2 * PIECES; work += APPEND_THREADS) {
        const int piece = work % PIECES, part = work / PIECES % 2, kv_head = work / (2 * PIECES);
        const void* source = part == 0 ? a.keys : a.values;
        const Number* from = static_cast<const Number*>(source) + (first + kv_head) * KVSEEK_HEAD_DIM;
        const long long row = window_row(request, a.kv_heads, kv_head, a.window_rows);
        Number* to = static_cast<Number*>(a.window) + (row * 2 + part) * KVSEEK_HEAD_DIM;
        Eight<Number> eight;
        eight.load(from + piece * 8);
        eight.store(to + piece * 8);
    }
}

}  // namespace append
}  // namespace kvseek
