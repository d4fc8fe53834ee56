// Nested codes: encode keys. A warp encodes one key.
#include "layout.cuh"

namespace kvseek {
namespace nested {

// Mirrored field by field in device.py.
struct EncodeArguments {
    const Number* keys;     // [kv_heads, tokens, HEAD_DIM], rows contiguous
    const float* means;     // [kv_heads, HEAD_DIM] of the slot
    unsigned char* high;    // [extents, kv_heads, 1024, FIELD]
    unsigned char* low;     // [extents, kv_heads, 1024, FIELD]
    __half* scales;         // [extents, kv_heads, 1024]
    const int* table;       // extents of the slot
    const float* signs;     // [DIM]
    long long head_stride;  // of keys, in numbers
    long long token_stride;
    int kv_heads, tokens;
    int first;  // place of the first key
};

constexpr int ENCODE_WARPS = 8;

}  // namespace nested
}  // namespace kvseek

// grid: any number of blocks, kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::nested::ENCODE_WARPS * 32)
    kvseek_nested_encode(const __grid_constant__ kvseek::nested::EncodeArguments a) {
    using namespace kvseek;
    using namespace kvseek::nested;
    const int head = blockIdx.y, first_channel = threadIdx.x % WARP * EACH;
    float mean[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        mean[i] = first_channel + i < HEAD_DIM ? a.means[head * HEAD_DIM + first_channel + i] : 0.0f;
    for (int token = blockIdx.x * ENCODE_WARPS + threadIdx.x / WARP; token < a.tokens;
         token += gridDim.x * ENCODE_WARPS) {
        float y[EACH];
        codes::load_vector(a.keys + head * a.head_stride + token * a.token_stride, y);
#pragma unroll
        for (int i = 0; i < EACH; i++) y[i] -= mean[i];
        codes::rotate(y, a.signs);
        codes::store_codes(y, a.high, a.low, a.scales, extent_row(a.table, a.kv_heads, head, a.first + token));
    }
}
