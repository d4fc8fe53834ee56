// Merges attention over parts of a prompt by their log-sum-exps; engine/model/cuda/attention.py launches it.
//
// The parts of one chunk are merged at once: an output is rounded to Number in its part and once more here, however
// many parts there are.
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/overlap.cuh"

namespace kvseek {

struct MergeAttentionArguments {
    const void* outputs[32];          // Number or e4m3 [blocks, tokens, H, D], or with the heads before the tokens
    const void* scales[32];           // float [H, D], which multiply a part's e4m3; null: a part of Number
    const void* lses[32];             // float [blocks, H, at least tokens], natural logarithms
    long long head_strides[32];       // of outputs, in numbers, multiples of 8
    long long token_strides[32];      // likewise
    long long lse_strides[32];        // of a head in lses
    long long block_strides[32];      // of outputs, a multiple of 8
    long long lse_block_strides[32];  // of lses
    int blocks[32];                   // of a part
    void* merged;                     // Number [tokens, H, D]
    long long pieces;                 // tokens * H * D / 8
    int parts;
    int heads;
};

namespace merge_attention {

constexpr int THREADS = 256;
constexpr int HEAD_PIECES = KVSEEK_HEAD_DIM / 8;

// Eight neighbouring numbers of e4m3.
__device__ __forceinline__ void load_e4m3(const void* from, float (&numbers)[8]) {
#if __CUDA_ARCH__ >= 890
    const uint2 bits = *static_cast<const uint2*>(from);
    const unsigned short pairs[4] = {static_cast<unsigned short>(bits.x), static_cast<unsigned short>(bits.x >> 16),
                                     static_cast<unsigned short>(bits.y), static_cast<unsigned short>(bits.y >> 16)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(from_e4m3(pairs[i]));
        numbers[2 * i] = pair.x, numbers[2 * i + 1] = pair.y;
    }
#endif
}

// Eight channels of one token and head a thread.
extern "C" __global__ void __launch_bounds__(THREADS)
    kvseek_merge_attention(const __grid_constant__ kvseek::MergeAttentionArguments a) {
    await_earlier_kernels();
    const long long piece = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (piece >= a.pieces) return;
    const int channel = static_cast<int>(piece % HEAD_PIECES) * 8;
    const long long row = piece / HEAD_PIECES, token = row / a.heads, head = row % a.heads;
    float largest = -INFINITE;
    for (int part = 0; part < a.parts; ++part) {
        const float* lses = static_cast<const float*>(a.lses[part]) + head * a.lse_strides[part] + token;
        for (int block = 0; block < a.blocks[part]; ++block)
            largest = fmaxf(largest, lses[block * a.lse_block_strides[part]]);
    }
    float values[8] = {}, total = 0.0f;
    for (int part = 0; part < a.parts; ++part) {
        const float* lses = static_cast<const float*>(a.lses[part]) + head * a.lse_strides[part] + token;
        const float* scales = static_cast<const float*>(a.scales[part]);
        const long long first = head * a.head_strides[part] + token * a.token_strides[part] + channel;
        for (int block = 0; block < a.blocks[part]; ++block) {
            const float weight = expf(lses[block * a.lse_block_strides[part]] - largest);
            const long long at = first + block * a.block_strides[part];
            float numbers[8];
            if (scales) {
                load_e4m3(static_cast<const unsigned char*>(a.outputs[part]) + at, numbers);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    values[i] += weight * scales[head * KVSEEK_HEAD_DIM + channel + i] * numbers[i];
            } else {
                Eight<Number> eight;
                eight.load(static_cast<const Number*>(a.outputs[part]) + at);
#pragma unroll
                for (int i = 0; i < 8; ++i) values[i] += weight * eight[i];
            }
            total += weight;
        }
    }
    alignas(16) Number rounded[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) rounded[i] = from_float<Number>(values[i] / total);
    Eight<Number> packed;
    packed.load(rounded);
    packed.store(static_cast<Number*>(a.merged) + piece * 8);
}

}  // namespace merge_attention
}  // namespace kvseek
