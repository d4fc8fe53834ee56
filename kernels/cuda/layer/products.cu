// Products of the few rows of a decode step, with weights of 16 bits or of 8 (weight-only quantisation):
// out = (x wᵀ) scale + bias, x and out in the engine's type; gated, out = silu(gate) up of the two halves of that.
//
// A decode step multiplies a few rows with matrices of many megabytes: its time is that of reading the weights once. So
// each warp keeps many loads on their way, from before the kernel before this one has ended, and weights of 8 bits
// become 16-bit numbers in registers, exactly. The tensor cores' 16 rows are output channels, their 8 columns are rows
// of x. The order of a sum's terms is free, so a lane's neighbouring weights serve as they lie, and the same channels
// of x with them. kernels/cuda/layer/products.py launches these kernels; builder/compile/cuda.py sets KVSEEK_WEIGHT.
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
    const void* scale;   // of each row of the weight a float; of weights in groups those of the groups; or null
    const void* bias;    // Number, one for each row of the weight, or null
    void* out;           // Number [rows, outputs]
    int rows;            // at most 8 times the kernel's column tiles
    int outputs;
    int inputs;  // a multiple of the weights in 16 bytes
};

struct QuantiseArguments {
    const void* x;  // Number [rows, inputs]
    void* numbers;  // e4m3 [rows, inputs]
    float* scales;  // [rows]: what its numbers are multiplied by
    int inputs;     // a multiple of 16
};

struct DequantiseArguments {
    const void* weight;  // [outputs, inputs], of 8 or 4 bits
    const void* scale;   // as in LinearArguments
    void* out;           // Number [outputs, inputs]
    int inputs;          // multiple of 16, or of a group
};

namespace products {

constexpr int DEQUANTISE_THREADS = 256, QUANTISE_THREADS = 256;
constexpr float LARGEST_E4M3 = 448.0f;
constexpr float LEAST_ROUNDED = 0x1p-100f;  // 448 divided by much less is infinite, and zeros times that are NaN
constexpr int HALVES = 2;  // pieces of 16 bytes of a row that a lane multiplies of one block: a row's part is a line

// What a kernel's thread block computes: ROW_TILES * 16 rows of the weight, times up to COLUMN_TILES * 8 rows of x. Its
// SPLIT warps take turns at the blocks of a row's channels. With GATED, the tensor cores' rows g are gates and g + 8
// are ups.
//
// A warp adds the products of its blocks, and of 16 channels after the other in a block, as they come; then the warps'
// sums are added, the first warp's first. So the bits of a sum depend on SPLIT alone, which the weight's shape decides,
// and not on how many rows x has, or what is in the others.
template <class Weight_, int SPLIT_, int ROW_TILES_, int COLUMN_TILES_, int AHEAD_, bool GATED_>
struct Shape {
    using Weight = Weight_;
    static constexpr int SPLIT = SPLIT_, ROW_TILES = ROW_TILES_, COLUMN_TILES = COLUMN_TILES_;
    static constexpr int AHEAD = AHEAD_;  // eights of x that are loaded before they are needed, as registers have room
    static constexpr bool GATED = GATED_, GROUPED = false, TWO_GROUPS = false;
    static constexpr int PIECE = 16 / sizeof(Weight);  // weights that are loaded at once
    static constexpr int PIECE_EIGHTS = PIECE / 8;
    static constexpr int BLOCK = HALVES * 4 * PIECE;      // weights of a row
    static constexpr int EIGHTS = HALVES * PIECE_EIGHTS;  // of a row of x and a block that a lane multiplies
    static constexpr int PARTS = ROW_TILES * 2;           // of eight rows of the weight, of which a lane multiplies one
    static constexpr int TILES = ROW_TILES * COLUMN_TILES;

    // The first channel of the result of a part: in this thread block, and of all.
    __device__ __forceinline__ static constexpr int channel(int part) { return (GATED ? part / 2 : part) * 8; }
    __device__ __forceinline__ static int channel_of_all(int part) {
        return blockIdx.x * channel(PARTS) + channel(part);
    }
    // The first of a lane's inputs of an eight: those of its pieces of weights.
    __device__ __forceinline__ static int input(int block, int eight) {
        return block * BLOCK + (eight / PIECE_EIGHTS * 4 + threadIdx.x % 4) * PIECE + eight % PIECE_EIGHTS * 8;
    }
};

// Shared memory: of each warp a block that is multiplied and one on its way; at the end the warps' sums.
template <class S>
union Shared {
    uint4 blocks[S::SPLIT][2][S::PARTS][HALVES][32];
    float4 sums[S::SPLIT][S::TILES][32];
};

// The blocks of a warp.
template <class S>
class Blocks {
  public:
    __device__ __forceinline__ Blocks(const LinearArguments& a, Shared<S>& shared)
        : pieces_(a.inputs / S::PIECE), up_(a.outputs * pieces_), blocks_(shared.blocks[threadIdx.x / 32]) {
        const int lane = threadIdx.x % 32, row = lane / 8, half = lane % 8 / 4;
        const int channel = S::channel_of_all(0) + row;
        from_ = static_cast<const uint4*>(a.weight) + static_cast<long long>(channel) * pieces_;
        channels_ = a.outputs - channel;
        to_ = half * 32 + place(row * 4 + lane % 4, half);
    }

    // Start a block on its way, four rows' lines of 128 bytes at a time. Beyond a row's end there are zeros.
    __device__ __forceinline__ void start(int block, int stage) {
        const int piece = block * HALVES * 4 + threadIdx.x % 8;
        const uint4* from = from_ + piece;
#pragma unroll
        for (int channel = 0; channel < S::channel(S::PARTS); channel += 4) {
            const bool valid = channel < channels_ && piece < pieces_;
#pragma unroll
            for (int up = 0; up < (S::GATED ? 2 : 1); ++up) {
                uint4* to = blocks_[stage][S::GATED ? channel / 8 * 2 + up : channel / 8][0] + channel % 8 * 4 + to_;
                copy_once_16_or_zeros(to, up ? from + up_ : from, valid);
            }
            from += 4 * pieces_;
        }
        close_copy_group();
    }

    // Wait for all that has been started; by then all lanes have multiplied the block before.
    __device__ __forceinline__ void await() {
        await_copy_groups<0>();
        __syncwarp();
    }

    // A lane's piece of a block: of row lane / 4 of a part.
    __device__ __forceinline__ uint4 piece(int stage, int part, int half) const {
        return blocks_[stage][part][half][place(threadIdx.x % 32, half)];
    }

  private:
    // Where a lane's piece lies: the halves of a line in different banks.
    __device__ __forceinline__ static int place(int lane, int half) { return lane ^ half * 4; }

    int pieces_, up_;    // of a row of the weight; from a gate's row to that of its up
    const uint4* from_;  // the first row that a lane copies
    int channels_, to_;
    uint4 (*blocks_)[S::PARTS][HALVES][32];
};

// Eight channels of each of a lane's rows of x: registers of two numbers each.
template <class S>
struct RowEights {
    uint4 rows[S::COLUMN_TILES];
};

// The rows of x that a lane multiplies: row g of each tile.
template <class S>
class Columns {
  public:
    __device__ __forceinline__ Columns(const LinearArguments& a)
        : x_(static_cast<const char*>(a.x)), inputs_(a.inputs) {
#pragma unroll
        for (int tile = 0; tile < S::COLUMN_TILES; ++tile) {
            const int row = tile * 8 + threadIdx.x % 32 / 4;
            const int read = row < a.rows ? row : a.rows - 1;  // what is beyond the last is not stored
            starts_[tile] = static_cast<unsigned>(read * inputs_) * sizeof(Number);
        }
    }

    // A lane's eight inputs, with TWO_GROUPS four and the four that are 16 behind. Beyond a row's end, where weights
    // and scales are zeros, its last ones.
    __device__ __forceinline__ RowEights<S> load(int block, int eight) const {
        RowEights<S> loaded;
        const int input = S::input(block, eight);
        if constexpr (S::TWO_GROUPS) {
            const char* low = x_ + min(input, inputs_ - 4) * sizeof(Number);
            const char* high = x_ + min(input + 16, inputs_ - 4) * sizeof(Number);
#pragma unroll
            for (int tile = 0; tile < S::COLUMN_TILES; ++tile) {
                const uint2 left = *reinterpret_cast<const uint2*>(low + starts_[tile]);
                const uint2 right = *reinterpret_cast<const uint2*>(high + starts_[tile]);
                loaded.rows[tile] = make_uint4(left.x, left.y, right.x, right.y);
            }
            return loaded;
        }
        const char* from = x_ + min(input, inputs_ - 8) * sizeof(Number);
#pragma unroll
        for (int tile = 0; tile < S::COLUMN_TILES; ++tile)
            loaded.rows[tile] = *reinterpret_cast<const uint4*>(from + starts_[tile]);
        return loaded;
    }

  private:
    const char* x_;
    int inputs_;
    unsigned starts_[S::COLUMN_TILES];  // in bytes
};

template <class S>
using Sums = float[S::ROW_TILES][S::COLUMN_TILES][4];

template <class S>
__device__ __forceinline__ void multiply(Sums<S>& sums, const Blocks<S>& blocks, int stage, int eight,
                                         const RowEights<S>& x, unsigned zero) {
    using Weight = typename S::Weight;
    const int half = eight / S::PIECE_EIGHTS;
#pragma unroll
    for (int tile = 0; tile < S::ROW_TILES; ++tile) {
        const uint4 lower = blocks.piece(stage, tile * 2, half);  // rows g and g + 8 of the tile
        const uint4 upper = blocks.piece(stage, tile * 2 + 1, half);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            unsigned low_numbers[2], high_numbers[2];
            four_numbers(lower, eight % S::PIECE_EIGHTS * 2 + step, low_numbers, Weight());
            four_numbers(upper, eight % S::PIECE_EIGHTS * 2 + step, high_numbers, Weight());
            // The tensor cores take neighbouring registers. Weights as they were loaded would be moved there anew for
            // every tile; what comes from an operation, even one that changes nothing, is put there at once.
            if (sizeof(Weight) == sizeof(Number)) {
#pragma unroll
                for (int i = 0; i < 2; ++i) low_numbers[i] ^= zero, high_numbers[i] ^= zero;
            }
#pragma unroll
            for (int column = 0; column < S::COLUMN_TILES; ++column)
                multiply_16x8x16(sums[tile][column], low_numbers[0], high_numbers[0], low_numbers[1], high_numbers[1],
                                 word(x.rows[column], 2 * step), word(x.rows[column], 2 * step + 1), Number());
        }
    }
}

// A sum as a number of the product, for one row of the weight.
template <class S>
__device__ __forceinline__ float finished(const LinearArguments& a, float sum, int weight_row) {
    const float scale = S::GROUPED || a.scale == nullptr ? 1.0f : static_cast<const float*>(a.scale)[weight_row];
    const float bias = a.bias == nullptr ? 0.0f : to_float(static_cast<const Number*>(a.bias)[weight_row]);
    return to_float(from_float<Number>(sum * scale + bias));
}

// Store a lane's sums of one tile: rows g and g + 8 of the weight, rows 2t and 2t + 1 of x.
template <class S>
__device__ __forceinline__ void store(const LinearArguments& a, const float (&sums)[4], int row_tile, int column_tile) {
#pragma unroll
    for (int part = 0; part < (S::GATED ? 1 : 2); ++part) {
        const int output = S::channel_of_all(row_tile * 2 + part) + threadIdx.x % 32 / 4;
        if (output >= a.outputs) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = column_tile * 8 + threadIdx.x % 4 * 2 + i;
            if (row >= a.rows) continue;
            float value = finished<S>(a, sums[part * 2 + i], output);
            if (S::GATED) value = silu(value) * finished<S>(a, sums[2 + i], output + a.outputs);
            static_cast<Number*>(a.out)[static_cast<long long>(row) * a.outputs + output] = from_float<Number>(value);
        }
    }
}

// Add the warps' sums and store them: each warp some of the tiles.
template <class S>
__device__ __forceinline__ void add_and_store(const LinearArguments& a, const Sums<S>& sums,
                                              float4 (&shared)[S::SPLIT][S::TILES][32]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    await_copy_groups<0>();  // zeros, which would be written over the sums
    __syncthreads();
#pragma unroll
    for (int i = 0; i < S::TILES; ++i) {
        const float (&own)[4] = sums[i / S::COLUMN_TILES][i % S::COLUMN_TILES];
        shared[warp][i][lane] = make_float4(own[0], own[1], own[2], own[3]);
    }
    __syncthreads();
    for (int i = warp; i < S::TILES; i += S::SPLIT) {
        float total[4] = {};
#pragma unroll
        for (int other = 0; other < S::SPLIT; ++other) {
            const float4 more = shared[other][i][lane];
            total[0] += more.x, total[1] += more.y, total[2] += more.z, total[3] += more.w;
        }
        store<S>(a, total, i / S::COLUMN_TILES, i % S::COLUMN_TILES);
    }
}

template <class S>
__device__ __forceinline__ void linear(const LinearArguments& a) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared<S>& shared = *reinterpret_cast<Shared<S>*>(memory);
    Blocks<S> blocks(a, shared);
    const int first = threadIdx.x / 32, count = (a.inputs + S::BLOCK - 1) / S::BLOCK;
    blocks.start(first, 0);
    await_earlier_kernels();  // weights are constants, x is not
    allow_later_kernels();
    const Columns<S> columns(a);
    RowEights<S> ahead[S::AHEAD > 0 ? S::AHEAD : 1];
#pragma unroll
    for (int eight = 0; eight < S::AHEAD; ++eight) ahead[eight] = columns.load(first, eight);
    const unsigned zero = a.rows >> 31;  // which the compiler does not know
    Sums<S> sums = {};
    for (int block = first, stage = 0; block < count; block += S::SPLIT, stage ^= 1) {
        blocks.await();
        blocks.start(block + S::SPLIT, stage ^ 1);
#pragma unroll
        for (int eight = 0; eight < S::EIGHTS; ++eight) {
            if constexpr (S::AHEAD > 0) {
                const RowEights<S> current = ahead[eight % S::AHEAD];
                const int later = eight + S::AHEAD;
                ahead[eight % S::AHEAD] = columns.load(block + later / S::EIGHTS * S::SPLIT, later % S::EIGHTS);
                multiply<S>(sums, blocks, stage, eight, current, zero);
            } else {
                multiply<S>(sums, blocks, stage, eight, columns.load(block, eight), zero);
            }
        }
    }
    add_and_store<S>(a, sums, shared.sums);
}

#if KVSEEK_WEIGHT >= 3
#include "kernels/cuda/layer/grouped_products.cuh"
#endif

// Kernels by the rows of x that they have room for, by warps and row tiles: a matrix of few rows, so of few thread
// blocks, needs more warps in each to keep enough weights on their way. With many rows of x, more row tiles read x less
// often. BLOCKS thread blocks find registers on a multiprocessor. kernels/cuda/layer/products.py knows the shapes and
// chooses.
#define KVSEEK_PRODUCT(NAME, WEIGHT, ROWS, SPLIT, ROW_TILES, AHEAD, BLOCKS)                                       \
    extern "C" __global__ void __launch_bounds__(SPLIT * 32, BLOCKS)                                              \
        kvseek_##NAME##_##ROWS##_##SPLIT##_##ROW_TILES(const __grid_constant__ kvseek::LinearArguments a) {       \
        linear<Shape<WEIGHT, SPLIT, ROW_TILES, ROWS / 8, AHEAD, false>>(a);                                       \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(SPLIT * 32, BLOCKS)                                              \
        kvseek_gated_##NAME##_##ROWS##_##SPLIT##_##ROW_TILES(const __grid_constant__ kvseek::LinearArguments a) { \
        linear<Shape<WEIGHT, SPLIT, ROW_TILES, ROWS / 8, AHEAD, true>>(a);                                        \
    }

KVSEEK_PRODUCT(linear, Number, 8, 4, 1, 2, 8)
KVSEEK_PRODUCT(linear, Number, 16, 4, 2, 2, 1)
KVSEEK_PRODUCT(linear, Number, 32, 4, 2, 0, 3)
KVSEEK_PRODUCT(linear, Number, 64, 4, 3, 1, 1)
KVSEEK_PRODUCT(linear, Number, 8, 8, 1, 2, 4)
KVSEEK_PRODUCT(linear, Number, 16, 8, 1, 1, 2)
KVSEEK_PRODUCT(linear, Number, 32, 8, 1, 1, 2)
KVSEEK_PRODUCT(linear, Number, 32, 8, 2, 1, 2)
KVSEEK_PRODUCT(linear, Number, 64, 8, 2, 1, 1)
KVSEEK_PRODUCT(linear, Number, 64, 8, 3, 1, 1)
KVSEEK_PRODUCT(linear, Number, 8, 16, 1, 2, 2)
KVSEEK_PRODUCT(linear, Number, 16, 16, 1, 1, 1)
KVSEEK_PRODUCT(linear, Number, 32, 16, 1, 1, 1)
KVSEEK_PRODUCT(linear, Number, 64, 16, 1, 1, 1)

#if KVSEEK_WEIGHT == 1 || KVSEEK_WEIGHT == 2
KVSEEK_PRODUCT(weight_only_linear, Byte, 8, 4, 1, 4, 8)
KVSEEK_PRODUCT(weight_only_linear, Byte, 16, 4, 2, 2, 1)
KVSEEK_PRODUCT(weight_only_linear, Byte, 32, 4, 2, 0, 4)
KVSEEK_PRODUCT(weight_only_linear, Byte, 64, 4, 3, 0, 1)
KVSEEK_PRODUCT(weight_only_linear, Byte, 8, 8, 1, 4, 4)
KVSEEK_PRODUCT(weight_only_linear, Byte, 16, 8, 1, 2, 1)
KVSEEK_PRODUCT(weight_only_linear, Byte, 16, 8, 2, 2, 1)
KVSEEK_PRODUCT(weight_only_linear, Byte, 32, 8, 2, 1, 1)
KVSEEK_PRODUCT(weight_only_linear, Byte, 32, 8, 3, 1, 1)
KVSEEK_PRODUCT(weight_only_linear, Byte, 64, 8, 2, 0, 1)
KVSEEK_PRODUCT(weight_only_linear, Byte, 64, 8, 3, 0, 1)

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

#if KVSEEK_WEIGHT == 2 && __CUDA_ARCH__ >= 890
// Writes rows out as e4m3, the largest of a row as 448, unless all are less than LEAST_ROUNDED; a row is blockIdx.x.
extern "C" __global__ void __launch_bounds__(QUANTISE_THREADS)
    kvseek_quantise_rows(const __grid_constant__ kvseek::QuantiseArguments a) {
    constexpr int PIECE = 8, WARPS = QUANTISE_THREADS / 32;
    const long long row = static_cast<long long>(blockIdx.x) * a.inputs;
    const Number* x = static_cast<const Number*>(a.x) + row;
    const auto load = [&](int at, float (&numbers)[PIECE]) {
        const uint4 piece = *reinterpret_cast<const uint4*>(x + at);
#pragma unroll
        for (int i = 0; i < PIECE; ++i) numbers[i] = to_float(reinterpret_cast<const Number*>(&piece)[i]);
    };
    await_earlier_kernels();
    float largest = 0.0f, numbers[PIECE];
    for (int at = threadIdx.x * PIECE; at < a.inputs; at += QUANTISE_THREADS * PIECE) {
        load(at, numbers);
#pragma unroll
        for (int i = 0; i < PIECE; ++i) largest = fmaxf(largest, fabsf(numbers[i]));
    }
    __shared__ float of_warps[WARPS];
#pragma unroll
    for (int other = 16; other > 0; other /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) largest = fmaxf(largest, of_warps[warp]);
    const bool zeros = largest < LEAST_ROUNDED;
    const float factor = zeros ? 1.0f : LARGEST_E4M3 / largest;
    if (threadIdx.x == 0) a.scales[blockIdx.x] = zeros ? 1.0f : largest / LARGEST_E4M3;
    unsigned char* to = static_cast<unsigned char*>(a.numbers) + row;
    for (int at = threadIdx.x * PIECE; at < a.inputs; at += QUANTISE_THREADS * PIECE) {
        load(at, numbers);
        unsigned short pairs[PIECE / 2];
#pragma unroll
        for (int i = 0; i < PIECE / 2; ++i) pairs[i] = to_e4m3(numbers[2 * i] * factor, numbers[2 * i + 1] * factor);
        *reinterpret_cast<uint2*>(to + at) =
            make_uint2(pairs[0] | unsigned(pairs[1]) << 16, pairs[2] | unsigned(pairs[3]) << 16);
    }
}
#endif

#if KVSEEK_WEIGHT >= 3
#define KVSEEK_GROUP_PRODUCT_(GATED_NAME, GATED, NAME, FORMAT, ROWS, SPLIT, ROW_TILES, STAGES, AHEAD, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(SPLIT * 32, BLOCKS)                                          \
        kvseek_##GATED_NAME##NAME##_##ROWS##_##SPLIT##_##ROW_TILES(                                           \
            const __grid_constant__ kvseek::LinearArguments a) {                                              \
        groups::linear<groups::Shape<FORMAT, SPLIT, ROW_TILES, STAGES, ROWS / 8, AHEAD, GATED>>(a);           \
    }
#define KVSEEK_GROUP_PRODUCT(NAME, FORMAT, ROWS, SPLIT, ROW_TILES, STAGES, AHEAD, BLOCKS)       \
    KVSEEK_GROUP_PRODUCT_(, false, NAME, FORMAT, ROWS, SPLIT, ROW_TILES, STAGES, AHEAD, BLOCKS) \
    KVSEEK_GROUP_PRODUCT_(gated_, true, NAME, FORMAT, ROWS, SPLIT, ROW_TILES, STAGES, AHEAD, BLOCKS)

#if KVSEEK_WEIGHT == 3
KVSEEK_GROUP_PRODUCT(int4_linear, Int4, 8, 4, 2, 2, 8, 4)
KVSEEK_GROUP_PRODUCT(int4_linear, Int4, 16, 4, 4, 2, 4, 2)
KVSEEK_GROUP_PRODUCT(int4_linear, Int4, 32, 4, 4, 2, 0, 2)
KVSEEK_GROUP_PRODUCT(int4_linear, Int4, 64, 4, 2, 2, 0, 1)
KVSEEK_GROUP_PRODUCT(int4_linear, Int4, 8, 4, 1, 3, 4, 4)
KVSEEK_GROUP_PRODUCT(int4_linear, Int4, 16, 4, 1, 2, 4, 3)
KVSEEK_GROUP_PRODUCT(int4_linear, Int4, 32, 4, 2, 2, 1, 2)
KVSEEK_GROUP_PRODUCT(int4_linear, Int4, 8, 8, 1, 2, 8, 2)
KVSEEK_GROUP_PRODUCT(int4_linear, Int4, 16, 8, 1, 2, 1, 2)
KVSEEK_GROUP_PRODUCT(int4_linear, Int4, 32, 8, 2, 2, 1, 1)
KVSEEK_GROUP_PRODUCT(int4_linear, Int4, 64, 8, 2, 2, 1, 1)
#endif
#if KVSEEK_WEIGHT == 3 || KVSEEK_WEIGHT == 5
KVSEEK_GROUP_PRODUCT(int8_groups_linear, Int8Groups, 8, 4, 2, 2, 2, 4)
KVSEEK_GROUP_PRODUCT(int8_groups_linear, Int8Groups, 16, 4, 2, 2, 1, 4)
KVSEEK_GROUP_PRODUCT(int8_groups_linear, Int8Groups, 32, 4, 2, 2, 1, 3)
KVSEEK_GROUP_PRODUCT(int8_groups_linear, Int8Groups, 64, 4, 2, 2, 0, 2)
#endif
#if KVSEEK_WEIGHT == 4
KVSEEK_GROUP_PRODUCT(fp8_groups_linear, Fp8Groups, 8, 4, 2, 2, 4, 4)
KVSEEK_GROUP_PRODUCT(fp8_groups_linear, Fp8Groups, 16, 4, 2, 2, 2, 3)
KVSEEK_GROUP_PRODUCT(fp8_groups_linear, Fp8Groups, 32, 4, 2, 2, 0, 3)
KVSEEK_GROUP_PRODUCT(fp8_groups_linear, Fp8Groups, 64, 4, 2, 2, 0, 2)
KVSEEK_GROUP_PRODUCT(fp8_groups_linear, Fp8Groups, 8, 8, 1, 2, 4, 2)
KVSEEK_GROUP_PRODUCT(fp8_groups_linear, Fp8Groups, 16, 8, 1, 2, 1, 2)
KVSEEK_GROUP_PRODUCT(fp8_groups_linear, Fp8Groups, 32, 8, 2, 2, 2, 1)
KVSEEK_GROUP_PRODUCT(fp8_groups_linear, Fp8Groups, 64, 8, 2, 2, 1, 1)
#endif
#if KVSEEK_ASYMMETRIC
KVSEEK_GROUP_PRODUCT(int8_asymmetric_linear, Int8Asymmetric, 8, 4, 2, 2, 1, 3)
KVSEEK_GROUP_PRODUCT(int8_asymmetric_linear, Int8Asymmetric, 16, 4, 2, 2, 1, 3)
KVSEEK_GROUP_PRODUCT(int8_asymmetric_linear, Int8Asymmetric, 32, 4, 2, 2, 0, 2)
KVSEEK_GROUP_PRODUCT(int8_asymmetric_linear, Int8Asymmetric, 64, 4, 2, 2, 0, 1)
#endif

// Writes a matrix out in the engine's type, eight weights a thread; a row is blockIdx.x.
template <class Format>
__device__ __forceinline__ void dequantise(const DequantiseArguments& a) {
    using Scale = typename Format::Scale;
    const long long row = blockIdx.x;
    const Byte* weight = static_cast<const Byte*>(a.weight) + row * a.inputs * Format::BITS / 8;
    const Scale* scales = static_cast<const Scale*>(a.scale) + row * (a.inputs / Format::GROUP);
    Number* out = static_cast<Number*>(a.out) + row * a.inputs;
    await_earlier_kernels();  // what read `out` before, if it is memory used again
    for (int at = threadIdx.x * 8; at < a.inputs; at += DEQUANTISE_THREADS * 8) {
        const int t = at % CELL / 8;
        const Byte* from = weight + Format::chunk(t, at / CELL) * 16 + t % 2 * 8;
        unsigned pairs[4];
        Format::eight(*reinterpret_cast<const uint2*>(from), t, pairs);
        const float2 scale = groups::factor_and_zero(scales[at / Format::GROUP]);
        alignas(16) Number numbers[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            // A number times its factor is exact, or nothing is added to it.
            const float number = to_float(reinterpret_cast<const Number*>(pairs)[i]) - groups::offset<Format>();
            numbers[i] = from_float<Number>(number * scale.x + scale.y);
        }
        *reinterpret_cast<uint4*>(out + at) = *reinterpret_cast<const uint4*>(numbers);
    }
}

#define KVSEEK_DEQUANTISE(NAME, FORMAT)                                                   \
    extern "C" __global__ void __launch_bounds__(DEQUANTISE_THREADS)                      \
        kvseek_dequantise_##NAME(const __grid_constant__ kvseek::DequantiseArguments a) { \
        dequantise<FORMAT>(a);                                                            \
    }

#if KVSEEK_WEIGHT == 3
KVSEEK_DEQUANTISE(int4, Int4)
#endif
#if KVSEEK_WEIGHT == 3 || KVSEEK_WEIGHT == 5
KVSEEK_DEQUANTISE(int8_groups, Int8Groups)
#endif
#if KVSEEK_WEIGHT == 4
KVSEEK_DEQUANTISE(fp8_groups, Fp8Groups)
#endif
#if KVSEEK_ASYMMETRIC
KVSEEK_DEQUANTISE(int8_asymmetric, Int8Asymmetric)
#endif
#endif

}  // namespace products
}  // namespace kvseek

#if KVSEEK_EXPERTS
#include "kernels/cuda/layer/experts.cuh"
#endif
#endif
