// Rounds rows of prompts to FP8 for attention, on GPUs that have it; kernels/cuda/attention/fp8_rows.py launches it.
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/overlap.cuh"

namespace kvseek {

struct Fp8RowsArguments {
    const void* rows;         // Number [heads, tokens, D], strided as below
    const void* centres;      // Number [heads, D], subtracted from a head's rows; or null
    const void* scales;       // float [heads, D], by which the differences are multiplied; or null
    int* clipped;             // becomes 1 if a number is beyond e4m3's largest
    void* rounded;            // e4m3 [heads, tokens, D], strided as below
    long long head_stride;    // of rows, in numbers, a multiple of 8
    long long token_stride;   // likewise
    long long head_stride8;   // of rounded, likewise
    long long token_stride8;  // likewise
    long long pieces;         // heads * tokens * D / 8
    int tokens;
};

namespace fp8_rows {

constexpr int THREADS = 256;
constexpr int HEAD_PIECES = KVSEEK_HEAD_DIM / 8;
constexpr float LARGEST_ROUNDED = 464.0f;  // half-way from e4m3's largest number, 448, to where another one would be

// Eight channels of one token and head a thread.
extern "C" __global__ void __launch_bounds__(THREADS)
    kvseek_fp8_rows(const __grid_constant__ kvseek::Fp8RowsArguments a) {
    await_earlier_kernels();
    const long long piece = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (piece >= a.pieces) return;
    const int channel = static_cast<int>(piece % HEAD_PIECES) * 8;
    const long long row = piece / HEAD_PIECES, head = row / a.tokens, token = row % a.tokens;
    Eight<Number> numbers, centre;
    numbers.load(static_cast<const Number*>(a.rows) + head * a.head_stride + token * a.token_stride + channel);
    if (a.centres) centre.load(static_cast<const Number*>(a.centres) + head * KVSEEK_HEAD_DIM + channel);
    const float* scales = static_cast<const float*>(a.scales) + head * KVSEEK_HEAD_DIM + channel;
    float found[8], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        found[i] = (numbers[i] - (a.centres ? centre[i] : 0.0f)) * (a.scales ? scales[i] : 1.0f);
        largest = fmaxf(largest, fabsf(found[i]));
    }
    if (largest > LARGEST_ROUNDED) *a.clipped = 1;
#if __CUDA_ARCH__ >= 890
    unsigned short pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = to_e4m3(found[2 * i], found[2 * i + 1]);
    unsigned char* to =
        static_cast<unsigned char*>(a.rounded) + head * a.head_stride8 + token * a.token_stride8 + channel;
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pairs[0] | unsigned(pairs[1]) << 16, pairs[2] | unsigned(pairs[3]) << 16);
#endif
}

}  // namespace fp8_rows
}  // namespace kvseek
