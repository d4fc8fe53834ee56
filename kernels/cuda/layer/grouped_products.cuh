// Products with weights in groups along the inputs; a part of kernels/cuda/layer/products.cu, whose namespace is open.
//
// A sum over the group is multiplied once by the group's factor, in float32. Where a format has a value of 0, or its
// numbers come with an offset, that is added times the sum of x over the group, which the tensor cores compute with
// ones. Scales travel with their weights to shared memory.
namespace groups {

template <class Format>
__device__ __forceinline__ float offset() {
    if constexpr (Format::SHIFTED) return magic_offset(Number());
    return 0.0f;
}

__device__ __forceinline__ float2 factor_and_zero(__half2 scale) {
    return __half22float2(scale);
}
__device__ __forceinline__ float2 factor_and_zero(__half scale) {
    return make_float2(__half2float(scale), 0.0f);
}
__device__ __forceinline__ float2 factor_and_zero(float scale) {
    return make_float2(scale, 0.0f);
}

// As products::Shape, with blocks of a line of each row of the weight.
template <class Format_, int SPLIT_, int ROW_TILES_, int STAGES_, int COLUMN_TILES_, int AHEAD_, bool GATED_>
struct Shape {
    using Format = Format_;
    using Scale = typename Format::Scale;
    static constexpr int SPLIT = SPLIT_, ROW_TILES = ROW_TILES_, COLUMN_TILES = COLUMN_TILES_;
    static constexpr int STAGES = STAGES_;  // of blocks: one that is multiplied, the others on their way
    static constexpr int AHEAD = AHEAD_;    // cells of x that are loaded before they are needed
    static constexpr bool GATED = GATED_, GROUPED = true, TWO_GROUPS = Format::GROUP < CELL;
    static constexpr int BLOCK = 128 * 8 / Format::BITS;  // weights of a row
    static constexpr int CELLS = BLOCK / CELL;
    static constexpr int SCALE_WORDS = BLOCK / Format::GROUP * sizeof(Scale) / 4;  // of a row and a block
    static constexpr int PARTS = ROW_TILES * 2;  // of eight rows of the weight, of which a lane multiplies one
    static constexpr int ROWS = PARTS * 8;
    static constexpr int TILES = ROW_TILES * COLUMN_TILES;
    static_assert(BLOCK % Format::GROUP == 0, "a block has whole groups");
    static_assert(AHEAD <= CELLS, "cells ahead are of the next block at most");

    __device__ __forceinline__ static constexpr int channel(int part) { return (GATED ? part / 2 : part) * 8; }
    __device__ __forceinline__ static int channel_of_all(int part) {
        return blockIdx.x * channel(PARTS) + channel(part);
    }
    __device__ __forceinline__ static int input(int block, int cell) {
        return block * BLOCK + cell * CELL + threadIdx.x % 4 * (TWO_GROUPS ? 4 : 8);
    }
};

template <class S>
struct Stage {
    uint4 chunks[S::ROWS][8];
    unsigned scales[S::SCALE_WORDS][S::ROWS];
};

// Shared memory: of each warp a block that is multiplied and those on their way; at the end the warps' sums.
template <class S>
union Shared {
    Stage<S> stages[S::SPLIT][S::STAGES];
    float4 sums[S::SPLIT][S::TILES][32];
};

// The blocks of a warp.
template <class S>
class Blocks {
  public:
    using Format = typename S::Format;

    __device__ __forceinline__ Blocks(const LinearArguments& a, Shared<S>& shared)
        : chunks_(a.inputs / (16 * 8 / Format::BITS)),
          words_(a.inputs / Format::GROUP * static_cast<int>(sizeof(typename S::Scale)) / 4),
          outputs_(a.outputs),
          stages_(shared.stages[threadIdx.x / 32]) {
        const int row = threadIdx.x % 32 / 8;
        const int channel = S::channel_of_all(0) + row;
        from_ = static_cast<const uint4*>(a.weight) + static_cast<long long>(channel) * chunks_;
        up_ = static_cast<long long>(a.outputs) * chunks_;
        channels_ = a.outputs - channel;
        scales_ = static_cast<const unsigned*>(a.scale);
    }

    // Start a block on its way, four rows' lines of 128 bytes at a time. Beyond a row's end there are zeros.
    __device__ __forceinline__ void start(int block, int stage) {
        const int lane = threadIdx.x % 32, chunk = block * 8 + lane % 8;
        const uint4* from = from_ + chunk;
#pragma unroll
        for (int channel = 0; channel < S::channel(S::PARTS); channel += 4) {
            const bool valid = channel < channels_ && chunk < chunks_;
            const int row = channel % 8 + lane / 8;  // of a part
#pragma unroll
            for (int up = 0; up < (S::GATED ? 2 : 1); ++up) {
                const int part = S::GATED ? channel / 8 * 2 + up : channel / 8;
                copy_once_16_or_zeros(&stages_[stage].chunks[part * 8 + row][lane % 8 ^ Format::swizzle(row)],
                                      up ? from + up_ : from, valid);
            }
            from += 4 * chunks_;
        }
        start_scales(block, stage);
        close_copy_group();
    }

    // Wait for the block that was started first; by then all lanes have multiplied the one before.
    __device__ __forceinline__ void await() {
        await_copy_groups<S::STAGES - 2>();
        __syncwarp();
    }

    // Eight weights of a lane, of row lane / 4 of a part.
    __device__ __forceinline__ void eight(int stage, int part, int cell, unsigned (&numbers)[4]) const {
        const int row = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const uint4(&chunks)[8] = stages_[stage].chunks[part * 8 + row];
        if constexpr (S::TWO_GROUPS) {  // four weights of each group
            const uint4 *low = &chunks[2 * cell ^ Format::swizzle(row)],
                        *high = &chunks[2 * cell + 1 ^ Format::swizzle(row)];
            const uint2 words =
                make_uint2(reinterpret_cast<const unsigned*>(low)[t], reinterpret_cast<const unsigned*>(high)[t]);
            Format::eight(words, t, numbers);
        } else {
            const uint4* chunk = &chunks[Format::chunk(t, cell) ^ Format::swizzle(row)];
            Format::eight(reinterpret_cast<const uint2*>(chunk)[t % 2], t, numbers);
        }
    }

    // The factor of the same row and cell, or half of it, and the value of 0 less what the numbers' offset makes of it.
    __device__ __forceinline__ float2 scale(int stage, int part, int cell, int half = 0) const {
        const int group = cell * CELL / Format::GROUP + half, row = part * 8 + threadIdx.x % 32 / 4;
        constexpr int IN_WORD = 4 / sizeof(typename S::Scale);
        const unsigned* word = &stages_[stage].scales[group / IN_WORD][row];
        float2 scale = factor_and_zero(reinterpret_cast<const typename S::Scale*>(word)[group % IN_WORD]);
        if constexpr (Format::SHIFTED) scale.y -= offset<Format>() * scale.x;
        return scale;
    }

  private:
    __device__ __forceinline__ void start_scales(int block, int stage) {
        constexpr int ALL = S::ROWS * S::SCALE_WORDS;
#pragma unroll
        for (int i = 0; i < (ALL + 31) / 32; ++i) {
            const int at = i * 32 + threadIdx.x % 32, word = at % S::SCALE_WORDS, row = at / S::SCALE_WORDS;
            if (ALL % 32 != 0 && at >= ALL) break;
            const int part = row / 8, channel = S::channel_of_all(0) + S::channel(part) + row % 8;
            const int weight_row = S::GATED && part % 2 == 1 ? outputs_ + channel : channel;
            const int word_of_row = block * S::SCALE_WORDS + word;
            copy_async_4_or_zeros(&stages_[stage].scales[word][row],
                                  scales_ + static_cast<long long>(weight_row) * words_ + word_of_row,
                                  channel < outputs_ && word_of_row < words_);
        }
    }

    int chunks_, words_, outputs_;  // of a row of the weight: of 16 bytes, of its scales
    const uint4* from_;             // the first row that a lane copies
    long long up_;                  // from a gate's row to that of its up
    int channels_;
    const unsigned* scales_;
    Stage<S>* stages_;
};

__device__ __forceinline__ unsigned ones(__nv_bfloat16) {
    return 0x3f803f80u;
}
__device__ __forceinline__ unsigned ones(__half) {
    return 0x3c003c00u;
}

// Sums over the part of a group that has been multiplied, not scaled yet: of weights times x, and of x.
template <class S>
struct GroupSums {
    Sums<S> products;
    float of_x[S::Format::ZERO ? S::COLUMN_TILES : 1][4];
};

// Of a cell that is two groups.
template <class S>
__device__ __forceinline__ void multiply_halves(Sums<S>& sums, const Blocks<S>& blocks, int stage, int cell,
                                                const RowEights<S>& x) {
    const unsigned one = ones(Number());
    float of_x[2][S::COLUMN_TILES][4] = {};
#pragma unroll
    for (int column = 0; column < S::COLUMN_TILES; ++column) {
        const uint4& of_row = x.rows[column];
        multiply_16x8x16(of_x[0][column], one, one, one, one, of_row.x, of_row.y, Number());
        multiply_16x8x16(of_x[1][column], one, one, one, one, of_row.z, of_row.w, Number());
    }
#pragma unroll
    for (int tile = 0; tile < S::ROW_TILES; ++tile) {
        unsigned lower[4], upper[4];  // rows g and g + 8 of the tile
        blocks.eight(stage, tile * 2, cell, lower);
        blocks.eight(stage, tile * 2 + 1, cell, upper);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 scales[2] = {blocks.scale(stage, tile * 2, cell, half),
                                      blocks.scale(stage, tile * 2 + 1, cell, half)};
#pragma unroll
            for (int column = 0; column < S::COLUMN_TILES; ++column) {
                const unsigned left = word(x.rows[column], 2 * half), right = word(x.rows[column], 2 * half + 1);
                float products[4] = {};
                multiply_16x8x16(products, lower[2 * half], upper[2 * half], lower[2 * half + 1], upper[2 * half + 1],
                                 left, right, Number());
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float sum = fmaf(scales[i / 2].x, products[i], sums[tile][column][i]);
                    sums[tile][column][i] = fmaf(scales[i / 2].y, of_x[half][column][i], sum);
                }
            }
        }
    }
}

template <class S>
__device__ __forceinline__ void multiply(Sums<S>& sums, GroupSums<S>& group, const Blocks<S>& blocks, int stage,
                                         int cell, const RowEights<S>& x) {
    constexpr bool ZERO = S::Format::ZERO;
    constexpr int CELLS_OF_GROUP = S::Format::GROUP / CELL;
    if (cell % CELLS_OF_GROUP == 0) group = GroupSums<S>();
    if constexpr (ZERO) {
        const unsigned one = ones(Number());
#pragma unroll
        for (int column = 0; column < S::COLUMN_TILES; ++column) {
            float (&of_x)[4] = group.of_x[column];
            multiply_16x8x16(of_x, one, one, one, one, x.rows[column].x, x.rows[column].y, Number());
            multiply_16x8x16(of_x, one, one, one, one, x.rows[column].z, x.rows[column].w, Number());
        }
    }
    const bool whole = cell % CELLS_OF_GROUP == CELLS_OF_GROUP - 1;
#pragma unroll
    for (int tile = 0; tile < S::ROW_TILES; ++tile) {
        unsigned lower[4], upper[4];  // rows g and g + 8 of the tile
        blocks.eight(stage, tile * 2, cell, lower);
        blocks.eight(stage, tile * 2 + 1, cell, upper);
        float2 scales[2] = {};
        if (whole) scales[0] = blocks.scale(stage, tile * 2, cell), scales[1] = blocks.scale(stage, tile * 2 + 1, cell);
#pragma unroll
        for (int column = 0; column < S::COLUMN_TILES; ++column) {
            const uint4& of_row = x.rows[column];
            float (&products)[4] = group.products[tile][column];
            multiply_16x8x16(products, lower[0], upper[0], lower[1], upper[1], of_row.x, of_row.y, Number());
            multiply_16x8x16(products, lower[2], upper[2], lower[3], upper[3], of_row.z, of_row.w, Number());
            if (!whole) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& sum = sums[tile][column][i];
                sum = fmaf(scales[i / 2].x, products[i], sum);
                if constexpr (ZERO) sum = fmaf(scales[i / 2].y, group.of_x[column][i], sum);
            }
        }
    }
}

template <class S>
__device__ __forceinline__ void multiply_cell(Sums<S>& sums, GroupSums<S>& group, const Blocks<S>& blocks, int stage,
                                              int cell, const RowEights<S>& x) {
    if constexpr (S::TWO_GROUPS)
        multiply_halves<S>(sums, blocks, stage, cell, x);
    else
        multiply<S>(sums, group, blocks, stage, cell, x);
}

template <class S>
__device__ __forceinline__ void linear(const LinearArguments& a) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared<S>& shared = *reinterpret_cast<Shared<S>*>(memory);
    Blocks<S> blocks(a, shared);
    constexpr int STARTED = S::STAGES - 1;  // blocks on their way
    const int first = threadIdx.x / 32, count = (a.inputs + S::BLOCK - 1) / S::BLOCK;
    int next = first, started = first;
#pragma unroll
    for (int stage = 0; stage < STARTED; ++stage, started += S::SPLIT) blocks.start(started, stage);
    await_earlier_kernels();  // weights are constants, x is not
    allow_later_kernels();
    const Columns<S> columns(a);
    RowEights<S> ahead[S::AHEAD > 0 ? S::AHEAD : 1];
#pragma unroll
    for (int cell = 0; cell < S::AHEAD; ++cell) ahead[cell] = columns.load(first, cell);
    Sums<S> sums = {};
    GroupSums<S> group;
    int stage = 0, free = STARTED;
    while (next < count) {
        const int block = next;
        next += S::SPLIT;
        blocks.await();
        blocks.start(started, free);
        started += S::SPLIT;
#pragma unroll
        for (int cell = 0; cell < S::CELLS; ++cell) {
            if constexpr (S::AHEAD > 0) {
                const RowEights<S> current = ahead[cell % S::AHEAD];
                const int later = cell + S::AHEAD;
                ahead[cell % S::AHEAD] = columns.load(later < S::CELLS ? block : next, later % S::CELLS);
                multiply_cell<S>(sums, group, blocks, stage, cell, current);
            } else {
                multiply_cell<S>(sums, group, blocks, stage, cell, columns.load(block, cell));
            }
        }
        free = stage;
        stage = stage == STARTED ? 0 : stage + 1;
    }
    add_and_store<S>(a, sums, shared.sums);
}

}  // namespace groups
