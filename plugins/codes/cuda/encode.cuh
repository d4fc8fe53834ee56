// Encode keys as nested key codes: a warp encodes one key.
#pragma once

#include "nested_codes.cuh"

namespace kvseek {
namespace codes {

// Mirrored field by field in device.py.
struct EncodeArguments {
    const Number* keys;     // [kv_heads, tokens, HEAD_DIM], rows contiguous
    const float* means;     // [kv_heads, HEAD_DIM] of the slot
    unsigned char* high;    // [extents, kv_heads, 1024, FIELD]
    unsigned char* low;     // the same; not written if codes have 2 bits
    __half* scales;         // [extents, kv_heads, 1024]
    const int* table;       // extents of the slot
    const float* signs;     // [DIM]
    long long head_stride;  // of keys, in numbers
    long long token_stride;
    int kv_heads, tokens;
    int first;  // place of the first key
};

constexpr int ENCODE_WARPS = 8;

// What a method's kernel kvseek_codes_encode does. Grid: any number of blocks of ENCODE_WARPS warps, kv_heads.
template <int BITS>
__device__ __forceinline__ void encode_keys(const EncodeArguments& a) {
    const int head = blockIdx.y, first_channel = threadIdx.x % WARP * EACH;
    float mean[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        mean[i] = first_channel + i < HEAD_DIM ? a.means[head * HEAD_DIM + first_channel + i] : 0.0f;
    for (int token = blockIdx.x * ENCODE_WARPS + threadIdx.x / WARP; token < a.tokens;
         token += gridDim.x * ENCODE_WARPS) {
        float y[EACH];
        load_vector(a.keys + head * a.head_stride + token * a.token_stride, y);
#pragma unroll
        for (int i = 0; i < EACH; i++) y[i] -= mean[i];
        rotate(y, a.signs);
        store_codes<BITS>(y, a.high, a.low, a.scales, extent_row(a.table, a.kv_heads, head, a.first + token));
    }
}

}  // namespace codes
}  // namespace kvseek
