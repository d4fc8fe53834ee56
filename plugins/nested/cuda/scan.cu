// Nested codes, first kernel of a selection: score every key of the region by the 2 highest bits, and count the scores.
//
// A key's score is the largest over the lanes (query heads) of (s <h, q> + <m - m0, q>) / ‖q‖, m being the mean of the
// key's block and m0 that of the first block: without m0 the lane whose product with all keys is large would win.
#include "kernels/cuda/codes/products.cuh"
#include "select.cuh"

namespace kvseek {
namespace nested {

constexpr int SCAN_THREADS = 256;
constexpr int SCAN_WARPS = SCAN_THREADS / WARP;
constexpr int UNIT_TILES = 4;
constexpr int UNIT = UNIT_TILES * codes::TILE;  // keys that a warp has on their way
constexpr int PAIRS = UNIT_TILES / 2;

struct ScanMemory {
    int histogram[BINS];
    Queries queries;
};

// What a warp has on its way: the words of UNIT keys, the scales of this thread's rows of their products, and the mean
// of their block, if it is another one than that of the unit before.
struct KeyUnit {
    codes::WordTiles<UNIT_TILES> words;
    unsigned short scales[2 * UNIT_TILES];
    codes::MeanWords mean;
    bool new_block;
    unsigned scratch;  // row of the unit's first key in scratch

    // The key of a pair of tiles whose score this thread ends up with.
    __device__ __forceinline__ static int own(int pair) {
        const int t = threadIdx.x % 4, g = threadIdx.x % WARP / 4;
        return pair * (2 * codes::TILE) + t / 2 * codes::TILE + t % 2 * 8 + g;
    }

    __device__ __forceinline__ void load(const SelectArguments& a, const Task& task, int number, bool is_first) {
        const unsigned row = task.row(a, number * UNIT);
        scratch = task.scratch_row(a, number * UNIT);
        words.load(a.high, row);
        const unsigned short* own_scales =
            reinterpret_cast<const unsigned short*>(a.scales) + row + threadIdx.x % WARP / 4;
#pragma unroll
        for (int k = 0; k < 2 * UNIT_TILES; k++) scales[k] = __ldcs(own_scales + 8 * k);
        new_block = is_first || (row & ((1u << a.block_bits) - 1)) == 0;
        if (new_block) mean.load(codes::Means(a), row);
    }
    __device__ __forceinline__ float scale(int k) const { return __half2float(__ushort_as_half(scales[k])); }
};

// The queries' columns of this thread, and what a product of each counts.
struct Columns : codes::Columns<LANES> {
    float factor[COLUMN_TILES][EACH];
    float first[COLUMN_TILES][EACH];  // products with the mean of the first block
    float bias[COLUMN_TILES][EACH];   // what the mean of the block counts; -infinity in columns without a lane

    __device__ __forceinline__ explicit Columns(const Queries& queries) : codes::Columns<LANES>(queries) {
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int own = lane(tile, i);
                factor[tile][i] = own < LANES ? queries.inverses[own] : 0.0f;
                first[tile][i] = 0.0f, bias[tile][i] = -INFINITE;
            }
    }

    // Take the mean of a block: `into` are the products of this thread's lanes with it.
    __device__ __forceinline__ void multiply_mean(const codes::MeanWords& mean, const Queries& queries,
                                                  float (&into)[COLUMN_TILES][EACH]) {
#pragma unroll
        for (int every = 0; every < LANES; every++) {
            const float product = mean.product(queries, every);
#pragma unroll
            for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    if (lane(tile, i) == every) into[tile][i] = product;
        }
    }
    __device__ __forceinline__ void take_mean(const codes::MeanWords& mean, const Queries& queries) {
        multiply_mean(mean, queries, bias);
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (lane(tile, i) < LANES)  // a product counts for a width of a cell
                    bias[tile][i] = (bias[tile][i] - first[tile][i]) * (factor[tile][i] / codes::Code<4>::STEP);
    }

    // (2 <2h - 3, q> s + the mean's part) / ‖q‖, the largest over the lanes that this thread has columns of, for rows g
    // and g + 8 of a tile; then over those of its neighbour: the even thread keeps row g, the odd one row g + 8.
    __device__ __forceinline__ float products(const codes::Words (&keys)[2], float scale, float later_scale) const {
        float found[COLUMN_TILES][2][EACH];
        multiply(keys, found);
        float best[2] = {-INFINITE, -INFINITE};
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    best[half] = fmaxf(
                        best[half],
                        fmaf(found[tile][half][i], factor[tile][i] * (half == 0 ? scale : later_scale), bias[tile][i]));
        const bool later = threadIdx.x % 2;
        const float kept = later ? best[1] : best[0], given = later ? best[0] : best[1];
        return fmaxf(kept, __shfl_xor_sync(EVERYONE, given, 1));
    }

    // The same of this thread's own key of a pair of tiles.
    __device__ __forceinline__ float own_product(const KeyUnit& unit, int pair) const {
        const int k = 4 * pair;
        const float low = products(unit.words.keys[2 * pair], unit.scale(k), unit.scale(k + 1));
        const float high = products(unit.words.keys[2 * pair + 1], unit.scale(k + 2), unit.scale(k + 3));
        const bool later = threadIdx.x % 4 >= 2;
        const float kept = later ? high : low, given = later ? low : high;
        return fmaxf(kept, __shfl_xor_sync(EVERYONE, given, 2));
    }
};

// 16 bits that are ordered as the scores are: a float16, turned if it is negative.
__device__ __forceinline__ unsigned ordered_half(float score) {
    const float limited = fminf(fmaxf(score, -codes::LARGEST_HALF), codes::LARGEST_HALF);
    const unsigned bits = __half_as_ushort(__float2half_rn(limited));
    return bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
}

}  // namespace nested
}  // namespace kvseek

// grid: as many blocks as requests at least, kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::nested::SCAN_THREADS)
    kvseek_nested_scan(const __grid_constant__ kvseek::nested::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::nested;
    __shared__ ScanMemory memory;
    __shared__ Units units;
    const Unit block = share_keys(a, units, gridDim.x);  // requests, table and codes are older than this step's kernels
    const Task task(a, block.request);
    const int length = block.exists ? task.length() : 0;
    const Share share((length + UNIT - 1) / UNIT, block.parts, block.part);
    Share own(share.last - share.first, SCAN_WARPS, threadIdx.x / WARP);  // neighbours, which share means
    own.first += share.first, own.last += share.first;
    KeyUnit next;
    codes::MeanWords first;
    if (length > 0) first.load(codes::Means(a), task.row(a, 0));
    if (own.first < own.last) next.load(a, task, own.first, true);
    for (int i = threadIdx.x; i < BINS; i += SCAN_THREADS) memory.histogram[i] = 0;
    await_earlier_kernels();
    allow_later_kernels();
    if (!block.exists) return;
    memory.queries.prepare(task.queries(a), a.signs);
    Columns columns(memory.queries);
    columns.multiply_mean(first, memory.queries, columns.first);
    for (int number = own.first; number < own.last; number++) {
        const KeyUnit unit = next;
        if (number + 1 < own.last) next.load(a, task, number + 1, false);
        if (unit.new_block) columns.take_mean(unit.mean, memory.queries);
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const unsigned score = ordered_half(columns.own_product(unit, pair));
            if (number * UNIT + KeyUnit::own(pair) < length) {
                a.scores[unit.scratch + KeyUnit::own(pair)] = static_cast<unsigned short>(score);
                atomicAdd(&memory.histogram[score >> BIN_SHIFT], 1);
            }
        }
    }
    __syncthreads();
    int* totals = a.totals + task.number * BINS;
    for (int i = threadIdx.x; i < BINS; i += SCAN_THREADS)
        if (const int count = memory.histogram[i]) atomicAdd(totals + i, count);
}
