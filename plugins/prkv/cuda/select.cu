// PRKV's selection in one launch: scores of all pages, then the rows of the static set and of the best pages (paper,
// section 4.1). Pages are scored by their boxes (bounds_*.cuh) or by codes of their rows (estimates.cuh).
//
// The CTAs of a task, as many as its length asks for, score its pages in tiles, a warp a tile; the last one to finish
// chooses. A second kernel would cost more than the wait for the others.
#include "best.cuh"
#ifdef PRKV_CODES
#include "estimates.cuh"
#elif KVSEEK_DTYPE == 0
#include "bounds_scalar.cuh"
#else
#include "bounds_tensor.cuh"
#endif

namespace kvseek {
namespace prkv {

#ifdef PRKV_CODES
using Scorer = Estimates;
#else
using Scorer = Bounds;
#endif

// Tiles of pages, one after another, dealt to the warps of all CTAs of a task.
struct Tiles {
    int number, last, stride;
    __device__ __forceinline__ Tiles(const Unit& unit, int first_page, int pages)
        : number(first_page / TILE + static_cast<int>(threadIdx.x) / 32 * unit.parts + unit.part),
          last((pages + TILE - 1) / TILE),
          stride(WARPS * unit.parts) {}
    __device__ __forceinline__ bool left() const { return number < last; }
};

// Keep the queries of this step for the next choice of the static set.
__device__ __forceinline__ void record_queries(const SelectArguments& a, const Task& task) {
    constexpr int EACH = 16 / static_cast<int>(sizeof(Number));
    const long long step =
        static_cast<long long>(task.request.slot) * a.recent_queries + task.request.position % a.recent_queries;
    Number* to = a.recent + (step * a.kv_heads + task.head) * GROUP * DIM;
    for (int i = threadIdx.x * EACH; i < GROUP * DIM; i += THREADS * EACH)
        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(task.queries(a) + i);
}

// Choose and count pages, and write the static rows, then those of the pages that are not static; -1 fills up.
__device__ __forceinline__ void choose(const SelectArguments& a, const Task& task, const Unit& unit,
                                       BestMemory& memory) {
    const int static_rows = task.static_rows(a), i = threadIdx.x;
    const int taken = best_pages(a, task, unit, a.top_k - static_rows, memory);
    int* rows = a.rows + static_cast<long long>(task.number) * a.top_k;
    for (int entry = i; entry < static_rows; entry += THREADS) rows[entry] = task.statics(a)[entry];
    int entry = static_rows, end = static_rows;
    for (int page = 0; page < taken; ++page) {
        entry += page < i ? memory.rows[page] : 0;
        end += memory.rows[page];
    }
    for (int k = end + i; k < a.top_k; k += THREADS) rows[k] = -1;
    if (i >= taken) return;
    atomicAdd(a.picked + task.entry(a, memory.pages[i]), 1);  // nobody waits for it
#pragma unroll 8
    for (int row = 0; row < PAGE; ++row) {
        const int token = task.token(a, memory.pages[i] * PAGE + row);
        if (token >= 0) rows[entry++] = token;
    }
}

}  // namespace prkv
}  // namespace kvseek

// grid: as many CTAs as requests at least, kv_heads. Boxes or codes, static rows and requests were written before the
// step: they are read before the wait.
extern "C" __global__ void __launch_bounds__(kvseek::prkv::THREADS, 1)
    kvseek_prkv_select(const __grid_constant__ kvseek::prkv::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::prkv;
    __shared__ BestMemory memory;
    __shared__ Units units;
    __shared__ PowerSum warp_sums[WARPS][LANES];
    const Unit unit = units.divide(a.requests, a.batch, gridDim.x, gridDim.x, SelectionLength(), blockIdx.x);
    const Task task(a, unit.request);
    const int pages = task.pages(), first_page = task.first_page(a);
    Tiles tiles(unit, first_page, pages);
    Scorer scorer(a);
    if (unit.exists && tiles.left()) scorer.load(a, task, tiles.number * TILE);
    await_earlier_kernels();
    if (!unit.exists) return;
    scorer.load_queries(a, task);
    if (unit.part == 0) record_queries(a, task);
    for (; tiles.left(); tiles.number += tiles.stride) {
        const int first = tiles.number * TILE;
        float* scores = a.scores + task.entry(a, first) * LANES;
        scorer.score(
            a, [&](int page) { return first + page >= first_page && first + page < pages; },
            [&](int page, int lane, float score) { scores[page * LANES + lane] = score; },
            [&] {
                if (tiles.number + tiles.stride < tiles.last) scorer.load(a, task, first + tiles.stride * TILE);
            });
    }
    allow_later_kernels();
    scorer.finish([&](int lane, const PowerSum& sum) { warp_sums[threadIdx.x / 32][lane] = sum; });
    __syncthreads();
    if (threadIdx.x < LANES) {
        a.normalisers[(blockIdx.y * gridDim.x + blockIdx.x) * LANES + threadIdx.x] =
            PowerSum::of<WARPS>([&](int warp) { return warp_sums[warp][threadIdx.x]; });
    }
    if (arrive_last(a.finished + task.number, unit.parts)) choose(a, task, unit, memory);
}
