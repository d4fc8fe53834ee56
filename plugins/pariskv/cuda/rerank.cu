// ParisKV, third kernel of a selection: collect the candidates (collect.cuh), and estimate their q·k from 4-bit codes
// (paper, section 4.3).
//
// The estimates of 16 candidates and all lanes are one small matrix product, done by the tensor cores. Their operands
// are float16: a code times its weight is rounded once, and a query is split into a rounded part and the rest, in
// neighbouring columns, so it keeps 22 bits. Which coordinate stands in which column of the product is free as long as
// both operands agree: thread t of a quad takes the t-th quarter of a key, as it lies in memory.
#include "collect.cuh"

namespace kvseek {
namespace pariskv {

constexpr int RERANK_THREADS = 256;
constexpr int RERANK_WARPS = RERANK_THREADS / WARP;
constexpr int TILE = 16;  // candidates of a matrix product

// A quarter of a key: codes and weights.
struct Quarter {
    unsigned codes[QUARTER / 8];
    unsigned weights[QUARTER / 16];

    __device__ __forceinline__ void load(const SelectArguments& a, unsigned row, int quarter) {
        copy(codes, a.codes + quarter * sizeof(codes) + static_cast<size_t>(row) * CODE_BYTES);
        copy(weights, a.weights + quarter * (BLOCKS / 4) + static_cast<size_t>(row) * BLOCKS);
    }

    // Coordinates 4 step .. 4 step + 3 of the quarter, weighted, as two pairs. `pairs` is the address in shared memory
    // of the thread's copy of RerankMemory::pairs.
    __device__ __forceinline__ void decode(unsigned pairs, int step, unsigned& low, unsigned& high) const {
        const __half2 weight = __half2half2(reinterpret_cast<const __half*>(weights)[step / 2]);
        low = weighted(pairs, 2 * step, weight);
        high = weighted(pairs, 2 * step + 1, weight);
    }

  private:
    __device__ __forceinline__ unsigned weighted(unsigned pairs, int byte, __half2 weight) const {
        // A product of bytes takes one of the word's four and turns it into the address of its row.
        const unsigned address = __dp4a(codes[byte / 4], 4u * WARP << 8 * (byte % 4), pairs);
        unsigned pair;
        asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(address));
        const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&pair), weight);
        return *reinterpret_cast<const unsigned*>(&product);
    }

    template <int N>
    __device__ __forceinline__ static void copy(unsigned (&to)[N], const void* from) {
        if constexpr (N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N / 4; i++) {
                const uint4 four = __ldg(static_cast<const uint4*>(from) + i);
                to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
            }
        } else if constexpr (N == 2) {
            const uint2 two = __ldg(static_cast<const uint2*>(from));
            to[0] = two.x, to[1] = two.y;
        } else {
            static_assert(N == 1, "a quarter is 1, 2, 4 or 8 words");
            to[0] = __ldg(static_cast<const unsigned*>(from));
        }
    }
};

// This thread's share of the queries: column threadIdx % 32 / 4 of each tile, its quarter's coordinates (vote.cu).
__device__ __forceinline__ void load_columns(const SelectArguments& a, int task,
                                             uint2 (&columns)[COLUMN_TILES][STEPS]) {
    const uint2* from = reinterpret_cast<const uint2*>(a.columns) +
                        static_cast<long long>(task) * (COLUMN_TILES * STEPS * WARP) + threadIdx.x % WARP;
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
        for (int step = 0; step < STEPS; step++) columns[tile][step] = from[(tile * STEPS + step) * WARP];
}

struct RerankMemory {
    // Two neighbouring coordinates by the byte of their codes, once for each thread of a warp.
    unsigned pairs[256][WARP];
    Counts counts[RERANK_WARPS];
    PowerSum normalisers[RERANK_WARPS][COLUMN_TILES * 4];
};

// A thread fills the row of one byte, from another column on than its neighbours: they would meet in one bank.
__device__ __forceinline__ void fill_pairs(const SelectArguments& a, unsigned (*pairs)[WARP]) {
    static_assert(RERANK_THREADS == 256, "one row a thread");
    auto level = [&](unsigned code) { return __float2half_rn(code & 8 ? -a.levels[code & 7] : a.levels[code & 7]); };
    const __half2 pair = __halves2half2(level(threadIdx.x & 15), level(threadIdx.x >> 4));
#pragma unroll
    for (int i = 0; i < WARP; i++)
        pairs[threadIdx.x][(i + threadIdx.x) % WARP] = *reinterpret_cast<const unsigned*>(&pair);
}

// Estimate candidates first .. last - 1 of the list for all lanes, 16 a warp at a time.
__device__ __forceinline__ void estimate(const SelectArguments& a, const Task& task, const unsigned (*pairs)[WARP],
                                         const uint2 (&columns)[COLUMN_TILES][STEPS], int first, int last,
                                         PowerSum (&own)[COLUMN_TILES]) {
    if (first >= last) return;
    const int lane = threadIdx.x % WARP, quarter = lane % 4, line = lane / 4;
    const unsigned own_pairs = static_cast<unsigned>(__cvta_generic_to_shared(&pairs[0][lane]));
    const float scale = a.scaling * LOG2_E;
    unsigned row;   // in scratch, of the tile's first candidate: tiles lie inside one extent
    int places[2];  // rows of the product: line and line + 8
    auto look_up = [&](int tile) {
        row = task.scratch_row(a, tile);
#pragma unroll
        for (int i = 0; i < 2; i++) {  // entries outside of first .. last - 1 repeat a candidate, for nothing
            const int entry = max(first, min(tile + line + 8 * i, last - 1)) - tile;
            places[i] = a.candidates[static_cast<size_t>(row + entry)];
        }
    };
    int tile = first / TILE * TILE + threadIdx.x / WARP * TILE;
    if (tile < last) look_up(tile);
    for (; tile < last; tile += RERANK_WARPS * TILE) {
        Quarter keys[2];
#pragma unroll
        for (int i = 0; i < 2; i++) keys[i].load(a, task.row(a, places[i]), quarter);
        float* estimates = a.estimates + static_cast<size_t>(row + line) * LANES + quarter;
        if (tile + RERANK_WARPS * TILE < last) look_up(tile + RERANK_WARPS * TILE);
        float sums[COLUMN_TILES][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            unsigned a0, a1, a2, a3;
            keys[0].decode(own_pairs, step, a0, a2);
            keys[1].decode(own_pairs, step, a1, a3);
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; c++) {
                const uint2 b = columns[c][step];
                multiply_16x8x16(sums[c], a0, a1, a2, a3, b.x, b.y, __half());
            }
        }
        const int index = tile + line;
        const bool valid[2] = {index >= first && index < last, index + 8 >= first && index + 8 < last};
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; c++) {
            if (c * 4 + quarter >= LANES || !(valid[0] || valid[1])) continue;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float value = sums[c][2 * i] + sums[c][2 * i + 1];
                if (valid[i]) estimates[8 * i * LANES + 4 * c] = value;
                if (!MEAN && valid[i]) own[c].add(value * scale);
            }
        }
    }
}

// Merge the threads' normalisers and store the block's.
__device__ __forceinline__ void store_normalisers(const SelectArguments& a, RerankMemory& memory,
                                                  PowerSum (&own)[COLUMN_TILES]) {
    const int quarter = threadIdx.x % 4, line = threadIdx.x % WARP / 4;
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; c++) {
        own[c].add_lanes(WARP - 4);
        if (line == 0) memory.normalisers[threadIdx.x / WARP][c * 4 + quarter] = own[c];
    }
    __syncthreads();
    if (threadIdx.x < LANES) {
        const PowerSum all = PowerSum::of<RERANK_WARPS>([&](int w) { return memory.normalisers[w][threadIdx.x]; });
        a.normalisers[static_cast<long long>(first_chunk(a, 0) + blockIdx.x) * LANES + threadIdx.x] = all;
    }
}

}  // namespace pariskv
}  // namespace kvseek

// grid: CHUNKS_OF_SCAN for each block of the scan, kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::pariskv::RERANK_THREADS)
    kvseek_pariskv_rerank(const __grid_constant__ kvseek::pariskv::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::pariskv;
    __shared__ RerankMemory memory;
    static_assert(RERANK_THREADS == SCORES, "one entry a thread");
    fill_pairs(a, memory.pairs);
    __shared__ Units units;
    const Unit scanned = share_keys(a, units, blockIdx.x / CHUNKS_OF_SCAN);
    const Task task(a, scanned.request);
    const int chunk = scanned.part * CHUNKS_OF_SCAN + blockIdx.x % CHUNKS_OF_SCAN;
    await_earlier_kernels();
    allow_later_kernels();
    if (!scanned.exists) return;
    const Share extents((task.length() + EXTENT_TOKENS - 1) / EXTENT_TOKENS, scanned.parts * CHUNKS_OF_SCAN, chunk);
    PowerSum own[COLUMN_TILES];
    if (extents.first < extents.last) {  // the same for the whole block
        uint2 columns[COLUMN_TILES][STEPS];
        load_columns(a, task.number, columns);
        // The threshold is the highest score that enough keys reach; of those that just reach it, the first are taken.
        const int* totals = a.totals + task.number * SCORES;
        const int wanted = task.candidates();
        const int threshold = __syncthreads_count(totals[threadIdx.x] >= wanted) - 1;
        const Collector collector{a, task, threshold, wanted - totals[threshold + 1], extents.first * UNITS};
        const Counts before = count_before(a, first_chunk(a, scanned.first), chunk, threshold);
        const int warp = threadIdx.x / WARP;
        const Share own_units((extents.last - extents.first) * UNITS, RERANK_WARPS, warp);
        memory.counts[warp] = collector.count(own_units.first, own_units.last);
        __syncthreads();
        Counts here = before, after = before;
#pragma unroll
        for (int w = 0; w < RERANK_WARPS; w++) {
            after.above += memory.counts[w].above, after.ties += memory.counts[w].ties;
            if (w < warp) here = after;
        }
        collector.write(own_units.first, own_units.last, here);
        __syncthreads();
        estimate(a, task, memory.pairs, columns, collector.taken(before), collector.taken(after), own);
    }
    if (!MEAN) store_normalisers(a, memory, own);
}
