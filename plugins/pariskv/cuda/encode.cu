// ParisKV: encode keys, and count their centroids (paper, section 4). A warp encodes one key.
#include "layout.cuh"

namespace kvseek {
namespace pariskv {

struct EncodeArguments {
    const Number* keys;       // [kv_heads, tokens, HEAD_DIM], rows contiguous
    unsigned char* ids;       // [extents, kv_heads, 1024, BLOCKS]
    unsigned char* codes;     // [extents, kv_heads, 1024, CODE_BYTES]
    __half* weights;          // [extents, kv_heads, 1024, BLOCKS]
    int* counts;              // [kv_heads, BLOCKS, 256] of the slot
    const int* table;         // extents of the slot
    const float* signs;       // [DIM]
    const float* levels;      // [8]
    const float* thresholds;  // [7]
    long long head_stride;    // of keys, in numbers
    long long token_stride;
    int kv_heads, tokens;
    int first;  // place of the first key
};

constexpr float LARGEST_HALF = 65504.0f;
constexpr int ENCODE_WARPS = 8;
constexpr int COUNT_THREADS = 256;

// Sum of a block's coordinates, as the reference adds them: neighbours, then neighbouring sums, ...
__device__ __forceinline__ float block_sum(const float (&x)[EACH]) {
    float sums[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) sums[i] = x[i];
#pragma unroll
    for (int stride = 1; stride < EACH; stride *= 2)
#pragma unroll
        for (int i = 0; i + stride < EACH; i += 2 * stride) sums[i] = __fadd_rn(sums[i], sums[i + stride]);
    float sum = sums[0];
#pragma unroll
    for (int mask = 1; mask < BLOCK_THREADS; mask *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(EVERYONE, sum, mask));
    return sum;
}

__device__ __forceinline__ void encode_key(const EncodeArguments& a, int head, int token) {
    const int lane = threadIdx.x % WARP, member = lane % BLOCK_THREADS;
    float x[EACH], squares[EACH], products[EACH];
    load_vector(a.keys + head * a.head_stride + token * a.token_stride, x);
    rotate(x, a.signs);
#pragma unroll
    for (int i = 0; i < EACH; i++) squares[i] = __fmul_rn(x[i], x[i]);
    const float radius = __fsqrt_rn(block_sum(squares));
    const float divisor = radius > 0.0f ? radius : 1.0f;
    unsigned id = 0, code = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const float magnitude = __fdiv_rn(fabsf(x[i]), divisor);
        const unsigned negative = x[i] < 0.0f;
        unsigned level = 0;
#pragma unroll
        for (int t = 0; t < LEVELS - 1; t++) level += magnitude > a.thresholds[t];
        products[i] = __fmul_rn(a.levels[level], magnitude);
        id |= negative << (member * EACH + i);
        code |= (level | negative << 3) << (4 * i);
    }
    const float cosine = block_sum(products);
#pragma unroll
    for (int mask = 1; mask < BLOCK_THREADS; mask *= 2) id |= __shfl_xor_sync(EVERYONE, id, mask);
    const float weight = radius > 0.0f ? __fdiv_rn(radius, cosine) : 0.0f;
    const long long row = extent_row(a.table, a.kv_heads, head, a.first + token);
    unsigned char* codes = a.codes + row * CODE_BYTES + lane * (EACH / 2);
    if constexpr (EACH == 2) *codes = static_cast<unsigned char>(code);
    if constexpr (EACH == 4) *reinterpret_cast<unsigned short*>(codes) = static_cast<unsigned short>(code);
    if constexpr (EACH == 8) *reinterpret_cast<unsigned*>(codes) = code;
    if (member == 0) {
        const long long block = row * BLOCKS + lane / BLOCK_THREADS;
        a.ids[block] = static_cast<unsigned char>(id);
        a.weights[block] = __float2half_rn(fminf(weight, LARGEST_HALF));
    }
}

}  // namespace pariskv
}  // namespace kvseek

// grid: any number of blocks, kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::pariskv::ENCODE_WARPS * 32)
    kvseek_pariskv_encode(const __grid_constant__ kvseek::pariskv::EncodeArguments a) {
    using namespace kvseek;
    using namespace kvseek::pariskv;
    const int warp = blockIdx.x * ENCODE_WARPS + threadIdx.x / WARP;
    for (int token = warp; token < a.tokens; token += gridDim.x * ENCODE_WARPS) encode_key(a, blockIdx.y, token);
}

// Count the centroids of keys that are encoded already. grid: any number of blocks, kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::pariskv::COUNT_THREADS)
    kvseek_pariskv_count(const __grid_constant__ kvseek::pariskv::EncodeArguments a) {
    using namespace kvseek;
    using namespace kvseek::pariskv;
    __shared__ int counts[BLOCKS * CENTROIDS];
    const int head = blockIdx.y;
    for (int i = threadIdx.x; i < BLOCKS * CENTROIDS; i += COUNT_THREADS) counts[i] = 0;
    __syncthreads();
    for (int token = blockIdx.x * COUNT_THREADS + threadIdx.x; token < a.tokens; token += gridDim.x * COUNT_THREADS) {
        const unsigned* ids =
            reinterpret_cast<const unsigned*>(a.ids + extent_row(a.table, a.kv_heads, head, a.first + token) * BLOCKS);
#pragma unroll
        for (int word = 0; word < BLOCKS / 4; word++) {
            const unsigned four = ids[word];
#pragma unroll
            for (int i = 0; i < 4; i++) atomicAdd(&counts[(4 * word + i) * CENTROIDS + (four >> 8 * i & 255)], 1);
        }
    }
    __syncthreads();
    int* total = a.counts + head * (BLOCKS * CENTROIDS);
    for (int i = threadIdx.x; i < BLOCKS * CENTROIDS; i += COUNT_THREADS)
        if (counts[i] != 0) atomicAdd(total + i, counts[i]);
}
