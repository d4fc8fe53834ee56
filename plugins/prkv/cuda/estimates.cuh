// Scores of pages (Codes.scores in summaries.py) by codes of 2 bits of their rows, on tensor cores, by one warp.
//
// A page's score for a lane is log2 of the sum of 2^x over its rows, x being the row's estimate of q·k times the
// softmax scale and log2 e: what the page would weigh in the softmax over all rows. Static rows weigh nothing. The
// numbers are the same for any dtype of rows. The same interface as bounds_tensor.cuh.
#pragma once

#include "kernels/cuda/codes/products.cuh"
#include "select.cuh"

namespace kvseek {
namespace prkv {

// With g = lane / 4 and t = lane % 4, this lane estimates keys 8 k + g of a unit, k = 0 .. ROWS - 1, for the query
// heads of columns t.
class Estimates {
    using Columns = codes::Columns<LANES>;
    static constexpr int TILES = UNIT / codes::TILE;  // products of a unit
    static constexpr int ROWS = 2 * TILES;            // keys of a unit that a thread estimates
    static constexpr int UNITS = TILE * PAGE / UNIT;  // of TILE pages
    static constexpr int PARTS = TILE;                // pages that a unit has rows of
    static constexpr int EACH_ROWS = ROWS / PARTS;    // of a page
    static_assert(TILE * PAGE % UNIT == 0 && PARTS <= ROWS && ROWS == 8,
                  "a unit is whole pages, or a page whole units");

    // What a warp has on its way: the codes of UNIT keys, and the scales of this thread's keys.
    struct Unit {
        codes::WordTiles<TILES> words;
        codes::MeanWords mean;
        unsigned short scales[ROWS];
        unsigned row;  // of the first key in the arrays
        int place;     // of the first key in the region

        __device__ __forceinline__ void load(const SelectArguments& a, unsigned first_row, int first_place) {
            row = first_row, place = first_place;
            words.load(a.high, row);
            mean.load(codes::Means(a), row);
            const unsigned short* own = reinterpret_cast<const unsigned short*>(a.scales) + row + threadIdx.x % 32 / 4;
#pragma unroll
            for (int k = 0; k < ROWS; ++k) scales[k] = __ldcs(own + 8 * k);
        }
    };
    using Pages = RelativeSum[Columns::COLUMN_TILES][Columns::EACH][PARTS];

    Unit held;
    Columns columns;
    const codes::Queries<LANES>* rounded = nullptr;
    float factor[Columns::COLUMN_TILES][Columns::EACH];       // of a product and a scale, to an exponent
    float mean_factor[Columns::COLUMN_TILES][Columns::EACH];  // of a product with a mean
    PowerSum sums[Columns::COLUMN_TILES][Columns::EACH];
    int length = 0;  // of the region
    int g = threadIdx.x % 32 / 4;

  public:
    __device__ __forceinline__ explicit Estimates(const SelectArguments&) {}

    // Start to load the codes of TILE neighbouring pages. Rows past the region's end hold anything; they do not count.
    __device__ __forceinline__ void load(const SelectArguments& a, const Task& task, int first_page) {
        length = task.request.length;
        held.load(a, task.row(a, first_page * PAGE), first_page * PAGE);
    }

    // All threads call it.
    __device__ __forceinline__ void load_queries(const SelectArguments& a, const Task& task) {
        __shared__ codes::Queries<LANES> queries;
        queries.prepare(task.queries(a), a.signs);
        columns = Columns(queries);
        rounded = &queries;
        // A product is 2 <2h - 3, q>, of which the estimate is <h - 1.5, q> times the width of a cell: a quarter.
        const float quarter = codes::Code<2>::STEP / 4 * a.scaling * LOG2_E;
#pragma unroll
        for (int tile = 0; tile < Columns::COLUMN_TILES; ++tile)
#pragma unroll
            for (int i = 0; i < Columns::EACH; ++i) {
                const int lane = Columns::lane(tile, i);
                factor[tile][i] = lane < LANES ? queries.steps[lane] * quarter : 0.0f;
                mean_factor[tile][i] = lane < LANES ? queries.steps[lane] * a.scaling * LOG2_E : 0.0f;
            }
    }

    // Score the loaded pages: store(page of the tile, lane, score), if `valid(page of the tile)`. `load_next` may load
    // other pages: it is called when these are no longer needed.
    template <class Valid, class Store, class Next>
    __device__ __forceinline__ void score(const SelectArguments& a, const Valid& valid, const Store& store,
                                          const Next& load_next) {
        Pages pages;
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const Unit now = held;
            if (unit + 1 < UNITS)
                held.load(a, now.row + UNIT, now.place + UNIT);
            else
                load_next();
            add_unit(now, pages);
        }
        const int part = g / (8 / PARTS);
        const bool own = g % (8 / PARTS) == 0 && valid(part);
        const float unscaled = 1.0f / (a.scaling * LOG2_E);
#pragma unroll
        for (int tile = 0; tile < Columns::COLUMN_TILES; ++tile)
#pragma unroll
            for (int i = 0; i < Columns::EACH; ++i) {
                const RelativeSum page = of_own_part(pages[tile][i]);
                const int lane = Columns::lane(tile, i);
                if (!own || lane >= LANES) continue;
                const float logarithm = page.largest + log2f(page.sum);
                store(part, lane, logarithm * unscaled);
                sums[tile][i].add(logarithm);
            }
    }

    // What the softmax of each lane divides by, over all pages that this warp has scored: store(lane, sum).
    template <class Store>
    __device__ __forceinline__ void finish(const Store& store) {
#pragma unroll
        for (int tile = 0; tile < Columns::COLUMN_TILES; ++tile)
#pragma unroll
            for (int i = 0; i < Columns::EACH; ++i) {
                PowerSum& sum = sums[tile][i];
                sum.add_lanes(4 + 8 + 16);
                const int lane = Columns::lane(tile, i);
                if (g == 0 && lane < LANES) store(lane, sum);
            }
    }

  private:
    // Add this thread's keys of a unit to the pages that they lie in.
    __device__ __forceinline__ void add_unit(const Unit& unit, Pages& pages) const {
        float exponents[Columns::COLUMN_TILES][Columns::EACH][ROWS];
        float of_mean[Columns::COLUMN_TILES][Columns::EACH] = {};
#pragma unroll
        for (int every = 0; every < LANES; ++every) {
            const float product = unit.mean.product(*rounded, every);
#pragma unroll
            for (int tile = 0; tile < Columns::COLUMN_TILES; ++tile)
#pragma unroll
                for (int i = 0; i < Columns::EACH; ++i)
                    if (Columns::lane(tile, i) == every) of_mean[tile][i] = product * mean_factor[tile][i];
        }
#pragma unroll
        for (int product = 0; product < TILES; ++product) {
            float found[Columns::COLUMN_TILES][2][Columns::EACH];
            columns.multiply(unit.words.keys[product], found);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int k = 2 * product + half;
                const float scale = __half2float(__ushort_as_half(unit.scales[k]));
                const bool inside = unit.place + 8 * k + g < length && !is_static(unit.scales[k]);
#pragma unroll
                for (int tile = 0; tile < Columns::COLUMN_TILES; ++tile)
#pragma unroll
                    for (int i = 0; i < Columns::EACH; ++i)
                        exponents[tile][i][k] =
                            inside ? fmaf(found[tile][half][i] * scale, factor[tile][i], of_mean[tile][i]) : -INFINITE;
            }
        }
#pragma unroll
        for (int tile = 0; tile < Columns::COLUMN_TILES; ++tile)
#pragma unroll
            for (int i = 0; i < Columns::EACH; ++i)
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    float largest = -1e30f, sum = 0.0f;  // a finite number, so that no difference of infinities occurs
#pragma unroll
                    for (int k = 0; k < EACH_ROWS; ++k)
                        largest = fmaxf(largest, exponents[tile][i][part * EACH_ROWS + k]);
#pragma unroll
                    for (int k = 0; k < EACH_ROWS; ++k)
                        sum += power_of_two(exponents[tile][i][part * EACH_ROWS + k] - largest);
                    pages[tile][i][part].add(largest, sum);
                }
    }

    // Add up the pages over the eight threads that have rows of them. Thread g ends up with part g / (8 / PARTS): in
    // each step a thread gives away the half of its parts that it will not end up with.
    __device__ __forceinline__ RelativeSum of_own_part(RelativeSum (&parts)[PARTS]) const {
#pragma unroll
        for (int step = 0; step < 3; ++step) {
            const int mask = 16 >> step, half = PARTS >> (step + 1);
            const bool upper = threadIdx.x & mask;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                RelativeSum kept = upper ? parts[half + i] : parts[i];
                const RelativeSum given = upper ? parts[i] : parts[half + i];
                const float largest = __shfl_xor_sync(EVERYONE, given.largest, mask);
                kept.add(largest, __shfl_xor_sync(EVERYONE, given.sum, mask));
                parts[i] = kept;
            }
            if (half == 0) parts[0].add_lane(mask);
        }
        return parts[0];
    }
};

}  // namespace prkv
}  // namespace kvseek
