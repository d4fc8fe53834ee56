// Products of the few rows of a decode step, with weights of 16 bits or of 8 (weight-only quantisation):
// out = (x wᵀ) scale + bias, x and out in the engine's type; gated, out = silu(gate) up of the two halves of that.
//
// A decode step multiplies a few rows with matrices of many megabytes: its time is that of reading the weights once. So
// each lane keeps many loads of 16 bytes on their way, from before the kernel before this one has ended, and weights of
// 8 bits become 16-bit numbers in registers, exactly. The tensor cores' 16 rows are output channels, their 8 columns
// are rows of x. The order of a sum's terms is free, so a lane's neighbouring weights serve as they lie, and the same
// channels of x with them.
// kernels/cuda/layer/products.py launches these kernels; builder/compile/cuda.py sets KVSEEK_WEIGHT.
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/overlap.cuh"

#if KVSEEK_DTYPE == 0
#if KVSEEK_WEIGHT != 0
#error "weights of 8 bits are multiplied with numbers of 16 bits"
#endif
#else
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/layer/activation.cuh"
#include "kernels/cuda/layer/weight_formats.cuh"

namespace kvseek {

struct LinearArguments {
    const void* x;       // Number [rows, inputs]
    const void* weight;  // Weight [outputs, inputs], gated [2 outputs, inputs]: gates first
    const void* scale;   // float, one for each row of the weight, or null
    const void* bias;    // Number, one for each row of the weight, or null
    void* out;           // Number [rows, outputs]
    int rows;            // at most 8 times the kernel's column tiles
    int outputs;
    int inputs;  // a multiple of the weights in 16 bytes
};

struct DequantiseArguments {
    const void* weight;  // Byte [outputs, inputs]
    const void* scale;   // float [outputs]
    void* out;           // Number [outputs, inputs]
    int inputs;          // multiple of 16
};

namespace products {

constexpr int DEQUANTISE_THREADS = 256;
constexpr int HALVES = 2;  // pieces of 16 bytes of a row that a lane loads of one block: a row's part of it is a line

// What a kernel's thread block computes: ROW_TILES * 16 rows of the weight, times up to COLUMN_TILES * 8 rows of x. Its
// warps take turns at the blocks of a row's channels; DEPTH blocks of a warp are on their way or being multiplied. With
// GATED, the tensor cores' rows g are gates and g + 8 are ups.
template <class Weight_, int WARPS_, int DEPTH_, int ROW_TILES_, int COLUMN_TILES_, bool GATED_>
struct Shape {
    using Weight = Weight_;
    static constexpr int WARPS = WARPS_, DEPTH = DEPTH_, ROW_TILES = ROW_TILES_, COLUMN_TILES = COLUMN_TILES_;
    static constexpr bool GATED = GATED_;
    static constexpr int PIECE = 16 / sizeof(Weight);  // weights that a lane loads at once
    static constexpr int STEPS = PIECE / 4;            // products of a piece
    static constexpr int BLOCK = HALVES * 4 * PIECE;   // weights of a row
    static constexpr int PARTS = ROW_TILES * 2;        // rows of the weight that a lane has pieces of
    static constexpr int CHANNELS = GATED ? ROW_TILES * 8 : ROW_TILES * 16;  // of the result
    static constexpr int PIECES = PARTS * HALVES;                            // of a lane and a block
    static constexpr int SUMS = ROW_TILES * COLUMN_TILES * 4;
    // With few rows of x, registers have room for its next block, and for a sum of each half: products do not wait for
    // x, and half as long for each other.
    static constexpr bool FEW = COLUMN_TILES <= 2;
    static constexpr int CHAINS = FEW ? HALVES : 1;

    // The channel of the result that a lane's part belongs to.
    __device__ __forceinline__ static int channel(int part) {
        return blockIdx.x * CHANNELS + (GATED ? part / 2 : part) * 8 + threadIdx.x % 32 / 4;
    }
    __device__ __forceinline__ static int weight_row(int part, int outputs) {
        return channel(part) + (GATED && part % 2 ? outputs : 0);
    }
};

// Shared memory. A lane reads the pieces alone that it has loaded, so the ring needs no barrier.
template <class S>
struct Shared {
    uint4 ring[S::WARPS][S::DEPTH][S::PIECES][32];
    float parts[S::WARPS - 1][S::SUMS][32];
};

// The blocks of a warp on their way from memory.
template <class S>
class Blocks {
  public:
    __device__ __forceinline__ Blocks(const LinearArguments& a, Shared<S>& shared)
        : weight_(static_cast<const Weight*>(a.weight)),
          outputs_(a.outputs),
          inputs_(a.inputs),
          ring_(shared.ring[threadIdx.x / 32]),
          block_(threadIdx.x / 32) {}

    // Start the warp's next block on its way. Beyond the end of a row there are zeros, and a group to wait for.
    __device__ __forceinline__ void start_next() {
        const int lane = threadIdx.x % 32, input = block_ * S::BLOCK + lane % 4 * S::PIECE;
#pragma unroll
        for (int part = 0; part < S::PARTS; ++part) {
            const Weight* from = weight_ + static_cast<long long>(S::weight_row(part, outputs_)) * inputs_ + input;
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const bool valid = S::channel(part) < outputs_ && input + half * 4 * S::PIECE < inputs_;
                copy_once_16_or_zeros(&ring_[next_stage_][part * HALVES + half][lane],
                                      valid ? from + half * 4 * S::PIECE : weight_, valid);
            }
        }
        close_copy_group();
        next_stage_ = next_stage_ + 1 == S::DEPTH ? 0 : next_stage_ + 1;
        block_ += S::WARPS;
    }

    // Wait for the oldest block that has not been taken; its pieces.
    __device__ __forceinline__ const uint4 (*take())[32] {
        await_copy_groups<S::DEPTH - 2>();
        const uint4(*pieces)[32] = ring_[stage_];
        stage_ = stage_ + 1 == S::DEPTH ? 0 : stage_ + 1;
        return pieces;
    }

  private:
    using Weight = typename S::Weight;
    const Weight* weight_;
    int outputs_, inputs_;
    uint4 (*ring_)[S::PIECES][32];
    int block_;  // what start_next loads
    int next_stage_ = 0, stage_ = 0;
};

// The channels of a row of x that a piece of weights is multiplied with: registers of two numbers each.
template <int PIECE>
struct Channels {
    uint4 eights[PIECE / 8];

    __device__ __forceinline__ void load(const Number* from, bool valid) {
#pragma unroll
        for (int i = 0; i < PIECE / 8; ++i)
            eights[i] = valid ? reinterpret_cast<const uint4*>(from)[i] : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ unsigned operator[](int i) const { return word(eights[i / 4], i % 4); }
};

// A lane's channels of one half of a block, in all rows of x.
template <class S>
struct Half {
    Channels<S::PIECE> channels[S::COLUMN_TILES];

    __device__ __forceinline__ void load(const LinearArguments& a, int block, int half) {
        const int lane = threadIdx.x % 32, input = block * S::BLOCK + half * 4 * S::PIECE + lane % 4 * S::PIECE;
#pragma unroll
        for (int tile = 0; tile < S::COLUMN_TILES; ++tile) {
            const int row = tile * 8 + lane / 4;
            const Number* from = static_cast<const Number*>(a.x) + static_cast<long long>(row) * a.inputs + input;
            channels[tile].load(from, row < a.rows && input < a.inputs);
        }
    }
};

template <class S>
using Sums = float[S::ROW_TILES][S::COLUMN_TILES][4];

template <class S>
__device__ __forceinline__ void multiply_half(Sums<S>& sums, const uint4 (*pieces)[32], int half, const Half<S>& x) {
    using Weight = typename S::Weight;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < S::ROW_TILES; ++tile) {
        const uint4 lower = pieces[tile * 2 * HALVES + half][lane];  // rows g and g + 8 of the tile
        const uint4 upper = pieces[(tile * 2 + 1) * HALVES + half][lane];
#pragma unroll
        for (int step = 0; step < S::STEPS; ++step) {
            unsigned low_numbers[2], high_numbers[2];
            four_numbers(lower, step, low_numbers, Weight());
            four_numbers(upper, step, high_numbers, Weight());
#pragma unroll
            for (int column = 0; column < S::COLUMN_TILES; ++column) {
                const Channels<S::PIECE>& channels = x.channels[column];
                multiply_16x8x16(sums[tile][column], low_numbers[0], high_numbers[0], low_numbers[1], high_numbers[1],
                                 channels[2 * step], channels[2 * step + 1], Number());
            }
        }
    }
}

template <class S>
__device__ __forceinline__ void add_chains(Sums<S> (&sums)[S::CHAINS]) {
    float* total = &sums[0][0][0][0];
#pragma unroll
    for (int chain = 1; chain < S::CHAINS; ++chain) {
#pragma unroll
        for (int i = 0; i < S::SUMS; ++i) total[i] += (&sums[chain][0][0][0])[i];
    }
}

// The first warp adds the others' sums to its own, always in the same order. Returns whether this is the first warp.
template <class S>
__device__ __forceinline__ bool add_parts(Sums<S>& sums, float (&parts)[S::WARPS - 1][S::SUMS][32]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* flat = &sums[0][0][0];
    if (warp > 0) {
#pragma unroll
        for (int i = 0; i < S::SUMS; ++i) parts[warp - 1][i][lane] = flat[i];
    }
    __syncthreads();
    if (warp > 0) return false;
#pragma unroll
    for (int other = 0; other < S::WARPS - 1; ++other) {
#pragma unroll
        for (int i = 0; i < S::SUMS; ++i) flat[i] += parts[other][i][lane];
    }
    return true;
}

// A sum as a number of the product, for one row of the weight.
__device__ __forceinline__ float finished(const LinearArguments& a, float sum, int weight_row) {
    const float scale = a.scale == nullptr ? 1.0f : static_cast<const float*>(a.scale)[weight_row];
    const float bias = a.bias == nullptr ? 0.0f : to_float(static_cast<const Number*>(a.bias)[weight_row]);
    return to_float(from_float<Number>(sum * scale + bias));
}

template <class S>
__device__ __forceinline__ void store(const LinearArguments& a, const Sums<S>& sums) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < S::PARTS; part += S::GATED ? 2 : 1) {
        const int output = S::channel(part);
        if (output >= a.outputs) continue;
#pragma unroll
        for (int i = 0; i < S::COLUMN_TILES * 2; ++i) {
            const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
            if (row >= a.rows) continue;
            const float* own = sums[part / 2][i / 2] + i % 2;
            float value = finished(a, own[part % 2 * 2], S::weight_row(part, a.outputs));
            if (S::GATED) value = silu(value) * finished(a, own[2], S::weight_row(part + 1, a.outputs));
            static_cast<Number*>(a.out)[static_cast<long long>(row) * a.outputs + output] = from_float<Number>(value);
        }
    }
}

template <class S>
__device__ __forceinline__ void linear(const LinearArguments& a) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared<S>& shared = *reinterpret_cast<Shared<S>*>(memory);
    Blocks<S> blocks(a, shared);
#pragma unroll
    for (int d = 0; d < S::DEPTH - 1; ++d) blocks.start_next();
    await_earlier_kernels();  // weights are constants, x is not
    allow_later_kernels();
    const int first = threadIdx.x / 32, count = (a.inputs + S::BLOCK - 1) / S::BLOCK;
    Half<S> x[HALVES];
#pragma unroll
    for (int half = 0; S::FEW && half < HALVES; ++half) x[half].load(a, first, half);
    Sums<S> sums[S::CHAINS] = {};
    for (int block = first; block < count; block += S::WARPS) {
        const uint4(*pieces)[32] = blocks.take();
        blocks.start_next();  // into the stage that was multiplied before
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            if constexpr (S::FEW) {
                const Half<S> current = x[half];
                x[half].load(a, block + S::WARPS, half);
                multiply_half<S>(sums[half], pieces, half, current);
            } else {
                x[0].load(a, block, half);
                multiply_half<S>(sums[0], pieces, half, x[0]);
            }
        }
    }
    add_chains<S>(sums);
    if (add_parts<S>(sums[0], shared.parts)) store<S>(a, sums[0]);
}

// Kernels by the rows of x that they have room for, and by warps: a matrix of few rows, so of few thread blocks, needs
// more warps in each, or more depth, to keep enough weights on their way. kernels/cuda/layer/products.py knows the
// shapes and chooses.
#define KVSEEK_PRODUCT(NAME, WEIGHT, ROWS, WARPS, DEPTH, ROW_TILES)                                 \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                        \
        kvseek_##NAME##_##ROWS##_##WARPS(const __grid_constant__ kvseek::LinearArguments a) {       \
        linear<Shape<WEIGHT, WARPS, DEPTH, ROW_TILES, ROWS / 8, false>>(a);                         \
    }                                                                                               \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                        \
        kvseek_gated_##NAME##_##ROWS##_##WARPS(const __grid_constant__ kvseek::LinearArguments a) { \
        linear<Shape<WEIGHT, WARPS, DEPTH, ROW_TILES, ROWS / 8, true>>(a);                          \
    }

KVSEEK_PRODUCT(linear, Number, 8, 4, 2, 1)
KVSEEK_PRODUCT(linear, Number, 8, 8, 4, 1)
KVSEEK_PRODUCT(linear, Number, 8, 16, 2, 1)

#if KVSEEK_WEIGHT != 0
KVSEEK_PRODUCT(weight_only_linear, Byte, 8, 4, 2, 1)
KVSEEK_PRODUCT(weight_only_linear, Byte, 8, 8, 2, 1)
KVSEEK_PRODUCT(weight_only_linear, Byte, 8, 16, 2, 1)
KVSEEK_PRODUCT(weight_only_linear, Byte, 16, 4, 2, 2)
KVSEEK_PRODUCT(weight_only_linear, Byte, 16, 8, 2, 1)
KVSEEK_PRODUCT(weight_only_linear, Byte, 32, 4, 2, 2)
KVSEEK_PRODUCT(weight_only_linear, Byte, 32, 8, 2, 2)
KVSEEK_PRODUCT(weight_only_linear, Byte, 64, 4, 2, 2)

// Writes a matrix out in the engine's type, sixteen weights a thread; a row is blockIdx.x.
extern "C" __global__ void __launch_bounds__(DEQUANTISE_THREADS)
    kvseek_dequantise(const __grid_constant__ kvseek::DequantiseArguments a) {
    const float scale = static_cast<const float*>(a.scale)[blockIdx.x];
    const long long row = static_cast<long long>(blockIdx.x) * a.inputs;
    constexpr int PIECE = 16;  // weights that a thread widens at a time
    const Byte* weight = static_cast<const Byte*>(a.weight) + row;
    Number* out = static_cast<Number*>(a.out) + row;
    await_earlier_kernels();  // what read `out` before, if it is memory used again
    for (int at = threadIdx.x * PIECE; at < a.inputs; at += DEQUANTISE_THREADS * PIECE) {
        const uint4 piece = *reinterpret_cast<const uint4*>(weight + at);
        alignas(16) Number numbers[PIECE];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            unsigned pairs[2];
            four_numbers(piece, step, pairs, Byte());
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
#endif

}  // namespace products
}  // namespace kvseek
#endif
