// Nested codes, first kernel of a selection: score every key of the region by the 2 highest bits, and count the scores.
//
// A key's score is the largest over the lanes (query heads) of s <h, q> / ‖q‖.
#include "plugins/codes/cuda/products.cuh"
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

// What a warp has on its way: the words of UNIT keys, and the scales of those whose scores this thread ends up with.
struct Unit {
    codes::WordTiles<UNIT_TILES> words;
    unsigned short scales[PAIRS];
    unsigned scratch;  // row of the unit's first key in scratch

    // The key of a pair of tiles whose score this thread ends up with.
    __device__ __forceinline__ static int own(int pair) {
        const int t = threadIdx.x % 4, g = threadIdx.x % WARP / 4;
        return pair * (2 * codes::TILE) + t / 2 * codes::TILE + t % 2 * 8 + g;
    }

    __device__ __forceinline__ void load(const SelectArguments& a, const Task& task, int number) {
        const unsigned row = task.row(a, number * UNIT);
        scratch = task.scratch_row(a, number * UNIT);
        words.load(a.high, row);
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++)
            scales[pair] = __ldcs(reinterpret_cast<const unsigned short*>(a.scales) + row + own(pair));
    }
};

// The queries' columns of this thread, and what a product of each counts.
struct Columns : codes::Columns<LANES> {
    float factor[COLUMN_TILES][EACH];
    float bias[COLUMN_TILES][EACH];  // -infinity in columns without a lane

    __device__ __forceinline__ explicit Columns(const Queries& queries) : codes::Columns<LANES>(queries) {
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int own = lane(tile, i);
                factor[tile][i] = own < LANES ? queries.inverses[own] : 0.0f;
                bias[tile][i] = own < LANES ? 0.0f : -INFINITE;
            }
    }

    // 2 <2h - 3, q> / ‖q‖, the largest over the lanes that this thread has columns of, for rows g and g + 8 of a tile;
    // then over those of its neighbour: the even thread keeps row g, the odd one row g + 8.
    __device__ __forceinline__ float products(const codes::Words (&keys)[2]) const {
        float found[COLUMN_TILES][2][EACH];
        multiply(keys, found);
        float best[2] = {-INFINITE, -INFINITE};
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    best[half] = fmaxf(best[half], fmaf(found[tile][half][i], factor[tile][i], bias[tile][i]));
        const bool later = threadIdx.x % 2;
        const float kept = later ? best[1] : best[0], given = later ? best[0] : best[1];
        return fmaxf(kept, __shfl_xor_sync(EVERYONE, given, 1));
    }

    // The same of this thread's own key of a pair of tiles.
    __device__ __forceinline__ float own_product(const codes::Words (&first)[2],
                                                 const codes::Words (&second)[2]) const {
        const float low = products(first), high = products(second);
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

// grid: chunks, tasks
extern "C" __global__ void __launch_bounds__(kvseek::nested::SCAN_THREADS)
    kvseek_nested_scan(const __grid_constant__ kvseek::nested::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::nested;
    __shared__ ScanMemory memory;
    const Task task(a);  // requests, table and codes are older than this step's kernels
    const int length = task.idle() ? 0 : task.length();
    const Share units((length + UNIT - 1) / UNIT, a.chunks, blockIdx.x);
    int number = units.first + static_cast<int>(threadIdx.x) / WARP;
    Unit next;
    if (number < units.last) next.load(a, task, number);
    for (int i = threadIdx.x; i < BINS; i += SCAN_THREADS) memory.histogram[i] = 0;
    await_earlier_kernels();
    allow_later_kernels();
    if (task.idle()) return;
    memory.queries.prepare(task.queries(a), a.signs);
    const Columns columns(memory.queries);
    for (; number < units.last; number += SCAN_WARPS) {
        const Unit unit = next;
        if (number + SCAN_WARPS < units.last) next.load(a, task, number + SCAN_WARPS);
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const float product = columns.own_product(unit.words.keys[2 * pair], unit.words.keys[2 * pair + 1]);
            const unsigned score = ordered_half(product * __half2float(__ushort_as_half(unit.scales[pair])));
            if (number * UNIT + Unit::own(pair) < length) {
                a.scores[unit.scratch + Unit::own(pair)] = static_cast<unsigned short>(score);
                atomicAdd(&memory.histogram[score >> BIN_SHIFT], 1);
            }
        }
    }
    __syncthreads();
    int* totals = a.totals + task.number * BINS;
    for (int i = threadIdx.x; i < BINS; i += SCAN_THREADS)
        if (const int count = memory.histogram[i]) atomicAdd(totals + i, count);
}
