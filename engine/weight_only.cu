// Products with weights of 8 bits (weight-only quantisation): out = (x wᵀ) scale + bias, x and out in the engine's type.
//
// A decode step multiplies a few rows with matrices of many megabytes: its time is that of reading the weights once. So
// weights go from memory to registers, 16 bytes a load and many loads in flight, and become 16-bit numbers there, exactly;
// the tensor cores' 16 rows are output channels, their 8 columns are rows of x. The order of a sum's terms does not matter to
// the tensor cores, so a lane's 16 neighbouring weights serve as they lie, and the same 16 channels of x with them.
// engine/weight_only_kernels.py launches these kernels; builder/compile_cuda.py sets KVSEEK_WEIGHT.
#include "plugins/common/numbers.cuh"
#include "plugins/common/overlap.cuh"

#if KVSEEK_WEIGHT != 0
#if KVSEEK_DTYPE == 0
#error "weights of 8 bits are multiplied with numbers of 16 bits"
#endif
#include "engine/weight_formats.cuh"
#include "plugins/common/instructions.cuh"

namespace kvseek {

struct WeightOnlyLinearArguments {
    const void* x;       // Number [rows, inputs]
    const void* weight;  // Weight [outputs, inputs]
    const void* scale;   // float [outputs]
    const void* bias;    // Number [outputs], or null
    void* out;           // Number [rows, outputs]
    int rows;            // at most 8 times the kernel's column tiles
    int outputs;
    int inputs;  // multiple of 16
};

struct DequantiseArguments {
    const void* weight;  // Weight [outputs, inputs]
    const void* scale;   // float [outputs]
    void* out;           // Number [outputs, inputs]
    int inputs;          // multiple of 16
};

namespace weight_only {

constexpr int LINEAR_WARPS = 8;
constexpr int LINEAR_THREADS = LINEAR_WARPS * 32;
constexpr int DEQUANTISE_THREADS = 256;
constexpr int PIECE = 16;   // weights that a lane loads at once
constexpr int HALVES = 2;   // pieces of a row that a lane holds of one block of channels: a row's part is 128 weights
constexpr int BLOCK = HALVES * 4 * PIECE;
constexpr int DEPTH = 2;  // blocks that are on their way while one is multiplied

// A lane's weights of a block: rows g and g + 8 of each row tile, two pieces of each.
template <int ROW_TILES>
struct BlockWeights {
    Piece pieces[ROW_TILES][2][HALVES];

    __device__ __forceinline__ void load(const Weight* weight, int first_row, int outputs, int inputs, int block) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                const int row = first_row + tile * 16 + upper * 8 + lane / 4;
#pragma unroll
                for (int half = 0; half < HALVES; ++half) {
                    const int channel = block * BLOCK + half * 4 * PIECE + lane % 4 * PIECE;
                    if (row < outputs && channel < inputs) {
                        pieces[tile][upper][half].load(weight + static_cast<long long>(row) * inputs + channel);
                    } else {
                        pieces[tile][upper][half].clear();
                    }
                }
            }
        }
    }
};

// Sixteen channels of a row of x: eight registers of two numbers each.
struct Channels {
    uint4 low, high;

    __device__ __forceinline__ void load(const Number* from, bool valid) {
        low = high = make_uint4(0, 0, 0, 0);
        if (!valid) return;
        low = reinterpret_cast<const uint4*>(from)[0];
        high = reinterpret_cast<const uint4*>(from)[1];
    }
    __device__ __forceinline__ unsigned operator[](int i) const {
        const uint4& part = i < 4 ? low : high;
        return i % 4 == 0 ? part.x : i % 4 == 1 ? part.y : i % 4 == 2 ? part.z : part.w;
    }
};

template <int ROW_TILES, int COLUMN_TILES>
__device__ __forceinline__ void multiply_block(float (&sums)[ROW_TILES][COLUMN_TILES][4],
                                               const BlockWeights<ROW_TILES>& weights, const Number* x, int rows,
                                               int inputs, int block) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const int channel = block * BLOCK + half * 4 * PIECE + lane % 4 * PIECE;
        Channels channels[COLUMN_TILES];
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; ++tile) {
            const int row = tile * 8 + lane / 4;
            channels[tile].load(x + static_cast<long long>(row) * inputs + channel, row < rows && channel < inputs);
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                unsigned lower[2], upper[2];  // four weights each of rows g and g + 8
                weights.pieces[tile][0][half].numbers(step, lower);
                weights.pieces[tile][1][half].numbers(step, upper);
#pragma unroll
                for (int column = 0; column < COLUMN_TILES; ++column) {
                    multiply_16x8x16(sums[tile][column], lower[0], upper[0], lower[1], upper[1],
                                     channels[column][2 * step], channels[column][2 * step + 1], Number());
                }
            }
        }
    }
}

// A thread block computes ROW_WARPS * ROW_TILES * 16 output channels of all rows of x. Warps of the same channels split the
// sum; the first of them adds the others' parts, always in the same order.
template <int ROW_TILES, int COLUMN_TILES, int ROW_WARPS>
__device__ __forceinline__ void linear(const WeightOnlyLinearArguments& a) {
    constexpr int SPLITS = LINEAR_WARPS / ROW_WARPS, SUMS = ROW_TILES * COLUMN_TILES * 4;
    __shared__ float parts[SPLITS - 1][ROW_WARPS][SUMS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, split = warp / ROW_WARPS;
    const int first_row = (blockIdx.x * ROW_WARPS + warp % ROW_WARPS) * ROW_TILES * 16;
    const int blocks = (a.inputs + BLOCK - 1) / BLOCK;
    const Weight* weight = static_cast<const Weight*>(a.weight);
    const Number* x = static_cast<const Number*>(a.x);
    BlockWeights<ROW_TILES> ahead[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) ahead[d].load(weight, first_row, a.outputs, a.inputs, split + d * SPLITS);
    await_earlier_kernels();  // weights are constants, x is not
    allow_later_kernels();
    float sums[ROW_TILES][COLUMN_TILES][4] = {};
    for (int block = split; block < blocks; block += DEPTH * SPLITS) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const int current = block + d * SPLITS;
            if (current >= blocks) break;
            const BlockWeights<ROW_TILES> weights = ahead[d];
            ahead[d].load(weight, first_row, a.outputs, a.inputs, current + DEPTH * SPLITS);
            multiply_block(sums, weights, x, a.rows, a.inputs, current);
        }
    }
    float* flat = &sums[0][0][0];
    if constexpr (SPLITS > 1) {
        if (split > 0) {
#pragma unroll
            for (int i = 0; i < SUMS; ++i) parts[split - 1][warp % ROW_WARPS][i][lane] = flat[i];
        }
        __syncthreads();
        if (split > 0) return;
        for (int other = 0; other < SPLITS - 1; ++other) {
#pragma unroll
            for (int i = 0; i < SUMS; ++i) flat[i] += parts[other][warp][i][lane];
        }
    }
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            const int output = first_row + tile * 16 + upper * 8 + lane / 4;
            if (output >= a.outputs) continue;
            const float scale = static_cast<const float*>(a.scale)[output];
            const float bias = a.bias == nullptr ? 0.0f : to_float(static_cast<const Number*>(a.bias)[output]);
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int row = column * 8 + lane % 4 * 2 + i;
                    if (row >= a.rows) continue;
                    const float value = sums[tile][column][upper * 2 + i] * scale + bias;
                    static_cast<Number*>(a.out)[static_cast<long long>(row) * a.outputs + output] =
                        from_float<Number>(value);
                }
            }
        }
    }
}

// One kernel for each number of rows of x that shares its weights well: beyond 8 rows, reading x costs too, and a thread block
// that computes more channels reads it for more of them. engine/weight_only_kernels.py knows the channels of a thread block.
extern "C" __global__ void __launch_bounds__(LINEAR_THREADS)
    kvseek_weight_only_linear_8(const __grid_constant__ kvseek::WeightOnlyLinearArguments a) {
    linear<1, 1, 1>(a);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS)
    kvseek_weight_only_linear_16(const __grid_constant__ kvseek::WeightOnlyLinearArguments a) {
    linear<1, 2, 2>(a);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS)
    kvseek_weight_only_linear_32(const __grid_constant__ kvseek::WeightOnlyLinearArguments a) {
    linear<2, 4, 2>(a);
}

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS)
    kvseek_weight_only_linear_64(const __grid_constant__ kvseek::WeightOnlyLinearArguments a) {
    linear<2, 8, 4>(a);
}

// Writes a matrix out in the engine's type, sixteen weights a thread; a row is blockIdx.x.
extern "C" __global__ void __launch_bounds__(DEQUANTISE_THREADS)
    kvseek_dequantise(const __grid_constant__ kvseek::DequantiseArguments a) {
    const float scale = static_cast<const float*>(a.scale)[blockIdx.x];
    const long long row = static_cast<long long>(blockIdx.x) * a.inputs;
    const Weight* weight = static_cast<const Weight*>(a.weight) + row;
    Number* out = static_cast<Number*>(a.out) + row;
    await_earlier_kernels();  // what read `out` before, if it is memory used again
    for (int at = threadIdx.x * PIECE; at < a.inputs; at += DEQUANTISE_THREADS * PIECE) {
        Piece piece;
        piece.load(weight + at);
        alignas(16) Number numbers[PIECE];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            unsigned pairs[2];
            piece.numbers(step, pairs);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Number value = reinterpret_cast<const Number*>(pairs)[i];
                numbers[step * 4 + i] = from_float<Number>(to_float(value) * scale);
            }
        }
        reinterpret_cast<uint4*>(out + at)[0] = reinterpret_cast<const uint4*>(numbers)[0];
        reinterpret_cast<uint4*>(out + at)[1] = reinterpret_cast<const uint4*>(numbers)[1];
    }
}

}  // namespace weight_only
}  // namespace kvseek
#endif
