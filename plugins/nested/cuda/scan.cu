// Nested codes, first kernel of a selection: score every key of the region by the 2 highest bits, and count the scores.
//
// A key's score is the largest over the lanes (query heads) of (s <h, q> + <m - m0, q>) / ‖q‖, m being the mean of the
// key's block and m0 that of the first block: without m0 the lane whose product with all keys is large would win.
//
// Up to four neighbouring requests that have the same keys, such as the positions of a draft, are scanned together as
// far as they have: a warp reads and unpacks the keys once. Scores are the same to the bit.
#include "kernels/cuda/codes/products.cuh"
#include "select.cuh"

namespace kvseek {
namespace nested {

constexpr int SCAN_THREADS = 256;
constexpr int SCAN_WARPS = SCAN_THREADS / WARP;
constexpr int UNIT_TILES = 4;
constexpr int UNIT = UNIT_TILES * codes::TILE;  // keys that a warp has on their way
constexpr int PAIRS = UNIT_TILES / 2;

using codes::MOST_TOGETHER;
using RequestColumns = codes::RequestColumns<LANES>;
// Of more lanes or wider heads registers do not suffice.
constexpr bool SCANS_TOGETHER = LANES <= 8 && DIM <= 128;

struct ScanMemory {
    union {
        alignas(16) int histogram[BINS];
        // Of requests scanned together, two counts of 16 bits a word.
        unsigned pairs[SCANS_TOGETHER ? MOST_TOGETHER / 2 : 1][BINS];
    };
    Queries queries[SCANS_TOGETHER ? MOST_TOGETHER : 1];
    // Of each request's lanes: products with the mean of the first block, and what a product with a mean counts.
    float first[MOST_TOGETHER][LANES], factors[MOST_TOGETHER][LANES];
};

// What a block does: a part of the places begin .. end - 1, for one request or some neighbours together.
struct Scanning {
    Unit block;
    int requests, begin, end;
};

// The places that a request has in common with its companions count for the first of these, and the others for each.
struct CommonPlaces {
    __device__ __forceinline__ int operator()(const Request& request) const {
        return SCANS_TOGETHER && request.companions == 0 ? request.common : 0;
    }
};
struct OwnPlaces {
    __device__ __forceinline__ int operator()(const Request& request) const {
        return request.dense ? 0 : request.length - (SCANS_TOGETHER ? request.common : 0);
    }
};

// All threads of the block call it.
__device__ __forceinline__ Scanning share_scan(const SelectArguments& a, Units& units) {
    const int number = blockIdx.x, most = gridDim.x;
    if (a.batch == 1) return {{0, number, most, 0, a.requests[0].dense == 0}, 1, 0, a.requests[0].length};
    units.divide_two(a.requests, a.batch, gridDim.x, most, CommonPlaces(), OwnPlaces());
    __syncthreads();
    Unit block = units.find(number);
    const Request* request = a.requests + block.request;
    const int common = CommonPlaces()(*request), parts = Units::units_of(common, most, units.of_amount);
    if (block.part >= parts) {
        block.part -= parts, block.parts -= parts;
        return {block, 1, request->length - OwnPlaces()(*request), request->length};
    }
    block.parts = parts;
    int requests = 1;
    while (requests < MOST_TOGETHER && block.request + requests < a.batch && request[requests].companions == requests)
        requests++;
    return {block, requests, 0, common};
}

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

// The same of two keys whose scores are no less than -LARGEST_HALF, the first in the lower half.
__device__ __forceinline__ unsigned ordered_halves(float first, float second) {
    const __half2 both = __floats2half2_rn(fminf(first, codes::LARGEST_HALF), fminf(second, codes::LARGEST_HALF));
    const unsigned bits = *reinterpret_cast<const unsigned*>(&both);
    return bits ^ ((bits >> 15 & 0x00010001u) * 0xffffu | 0x80008000u);
}

// Scan for one request. The warp's units are own.first .. own.last - 1.
__device__ __forceinline__ void scan_alone(const SelectArguments& a, const Scanning& work, const Share& own,
                                           ScanMemory& memory) {
    const Task task(a, work.block.request);
    KeyUnit next;
    codes::MeanWords first;
    if (work.block.exists) first.load(codes::Means(a), task.row(a, 0));
    if (own.first < own.last) next.load(a, task, own.first, true);
    for (int i = threadIdx.x; i < BINS; i += SCAN_THREADS) memory.histogram[i] = 0;
    await_earlier_kernels();
    allow_later_kernels();
    if (!work.block.exists) return;
    Queries& queries = memory.queries[0];
    queries.prepare(task.queries(a), a.signs);
    Columns columns(queries);
    columns.multiply_mean(first, queries, columns.first);
    for (int number = own.first; number < own.last; number++) {
        const KeyUnit unit = next;
        if (number + 1 < own.last) next.load(a, task, number + 1, false);
        if (unit.new_block) columns.take_mean(unit.mean, queries);
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const unsigned score = ordered_half(columns.own_product(unit, pair));
            if (number * UNIT + KeyUnit::own(pair) < work.end) {
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

// What a warp has on its way of UNIT keys that several requests have. This thread's rows of a tile's product are two
// neighbouring keys.
struct CommonUnit {
    codes::Words keys[UNIT_TILES][2];
    unsigned scales[UNIT_TILES];  // two
    codes::MeanEighths mean;
    bool new_block;
    const unsigned char* high;  // of the thread's first key in the plane, and its scale
    const unsigned short* scale;

    // The first of this thread's keys of a tile.
    __device__ __forceinline__ static int own(int tile) {
        return tile * codes::TILE + 2 * (static_cast<int>(threadIdx.x) % WARP / 4);
    }
    // Turn to the unit at a row of the planes.
    __device__ __forceinline__ void aim(const SelectArguments& a, unsigned row, bool is_first) {
        const unsigned first = row + own(0);
        high = a.high + static_cast<size_t>(first) * FIELD + threadIdx.x % 4 * (4 * codes::WORDS);
        scale = reinterpret_cast<const unsigned short*>(a.scales) + first;
        new_block = is_first || (row & ((1u << a.block_bits) - 1)) == 0;
        if (new_block) mean.load(codes::Means(a), row);
    }
    __device__ __forceinline__ void load_tile(int tile) {
        const unsigned char* from = high + tile * (codes::TILE * FIELD);
        keys[tile][0].load_again(from), keys[tile][1].load_again(from + FIELD);
        scales[tile] = __ldcs(reinterpret_cast<const unsigned*>(scale + tile * codes::TILE));
    }
};

// Add the counts of requests scanned together to their tasks' totals, and begin anew. All threads call it.
__device__ __forceinline__ void add_pairs(const SelectArguments& a, const Scanning& work, ScanMemory& memory) {
    __syncthreads();
    int* totals = a.totals + Task(a, work.block.request).number * BINS;
    const int stride = a.kv_heads * BINS;  // from a request's to the next one's
#pragma unroll 1
    for (int pair = 0; 2 * pair < work.requests; pair++) {
#pragma unroll 4
        for (int i = 0; i < BINS / SCAN_THREADS; i++) {
            const int bin = i * SCAN_THREADS + threadIdx.x;
            const unsigned counts = memory.pairs[pair][bin];
            if (counts & 0xffff) atomicAdd(totals + 2 * pair * stride + bin, static_cast<int>(counts & 0xffff));
            if (counts >> 16) atomicAdd(totals + (2 * pair + 1) * stride + bin, static_cast<int>(counts >> 16));
        }
    }
}

// Scan for several requests. `most_units` is the most units of any warp.
__device__ __forceinline__ void scan_together(const SelectArguments& a, const Scanning& work, const Share& own,
                                              int most_units, ScanMemory& memory) {
    constexpr int COUNTED_UNITS = 0xffff / (UNIT * SCAN_WARPS);  // of a warp, after which a count may be full
    const Task task(a, work.block.request);
    // The request whose scores this thread ends up with. If there is none, those of the last one, which do not count.
    const int member = threadIdx.x % 4, request = min(member, work.requests - 1);
    const Task own_task(a, work.block.request + request);
    const unsigned one = member == request ? 1u << member % 2 * 16 : 0;
    CommonUnit unit;
    codes::MeanEighths first;
    first.load(codes::Means(a), task.row(a, 0));
    if (own.first < own.last) {
        unit.aim(a, task.row(a, own.first * UNIT), true);
#pragma unroll
        for (int tile = 0; tile < UNIT_TILES; tile++) unit.load_tile(tile);
    }
    auto clear = [&] {
        for (int i = threadIdx.x; i < MOST_TOGETHER / 2 * BINS / 4; i += SCAN_THREADS)
            reinterpret_cast<uint4*>(memory.pairs)[i] = make_uint4(0, 0, 0, 0);
    };
    clear();
    await_earlier_kernels();
    allow_later_kernels();
    if (!work.block.exists) return;
#pragma unroll 1
    for (int i = threadIdx.x / WARP; i < MOST_TOGETHER * LANES; i += SCAN_WARPS) {
        const Task other(a, work.block.request + min(i / LANES, work.requests - 1));
        memory.queries[i / LANES].prepare_lane(other.queries(a), i % LANES, a.signs);
    }
    __syncthreads();
    const Queries& queries = memory.queries[member];
    const RequestColumns columns(memory.queries);
    float factor[LANES], bias[LANES];
    if (threadIdx.x < MOST_TOGETHER * LANES) {  // a product counts for a width of a cell
        const int other = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        memory.factors[other][lane] = memory.queries[other].inverses[lane] / codes::Code<4>::STEP;
    }
#pragma unroll
    for (int lane = 0; lane < LANES; lane++) {
        factor[lane] = queries.inverses[lane], bias[lane] = 0.0f;
        const float product = first.product(queries, lane);
        if (threadIdx.x < 4) memory.first[member][lane] = product;
    }
    __syncthreads();
    unsigned* counters = memory.pairs[member / 2];
    // Take the last keys of the warp's last unit off again, if the region has ended before them.
    auto uncount = [&](int surplus) {
#pragma unroll 1
        for (int i = 0; i < 2 * UNIT_TILES && surplus > 0; i++) {
            const int place = CommonUnit::own(i / 2) + i % 2;
            const unsigned score = a.scores[own_task.scratch_row(a, (own.last - 1) * UNIT + place)];
            if (place >= UNIT - surplus) atomicAdd(&counters[score >> BIN_SHIFT], 0u - one);
        }
    };
    for (int start = 0; start < most_units; start += COUNTED_UNITS) {
        if (start > 0) {
            __syncthreads();
            clear();
            __syncthreads();
        }
        const int stop = min(own.first + start + COUNTED_UNITS, own.last);
#pragma unroll 1
        for (int number = own.first + start; number < stop; number++) {
            if (unit.new_block) {
#pragma unroll
                for (int lane = 0; lane < LANES; lane++)
                    bias[lane] =
                        (unit.mean.product(queries, lane) - memory.first[member][lane]) * memory.factors[member][lane];
            }
            if (number + 1 < own.last) unit.aim(a, task.row(a, (number + 1) * UNIT), false);  // else it stays
            unsigned short* scores = a.scores + own_task.scratch_row(a, number * UNIT) + CommonUnit::own(0);
#pragma unroll
            for (int tile = 0; tile < UNIT_TILES; tile++) {
                const codes::Words keys[2] = {unit.keys[tile][0], unit.keys[tile][1]};
                const float2 scales = __half22float2(*reinterpret_cast<const __half2*>(&unit.scales[tile]));
                unit.load_tile(tile);
                float products[2][2 * RequestColumns::TILES];
                columns.multiply(keys, products);
                float best[2] = {-codes::LARGEST_HALF, -codes::LARGEST_HALF};
#pragma unroll
                for (int lane = 0; lane < LANES; lane++) {
                    best[0] = fmaxf(best[0], fmaf(products[0][lane], factor[lane] * scales.x, bias[lane]));
                    best[1] = fmaxf(best[1], fmaf(products[1][lane], factor[lane] * scales.y, bias[lane]));
                }
                const unsigned both = ordered_halves(best[0], best[1]);
                // Beyond the end too: an extent is allocated whole.
                *reinterpret_cast<unsigned*>(scores + tile * codes::TILE) = both;
                atomicAdd(&counters[(both & 0xffff) >> BIN_SHIFT], one);
                atomicAdd(&counters[both >> (16 + BIN_SHIFT)], one);
            }
        }
        if (stop == own.last && own.first + start < stop) uncount(own.last * UNIT - work.end);
        add_pairs(a, work, memory);
    }
}

}  // namespace nested
}  // namespace kvseek

// grid: as many blocks as requests have common and own places to scan, kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::nested::SCAN_THREADS, kvseek::nested::SCANS_TOGETHER ? 2 : 1)
    kvseek_nested_scan(const __grid_constant__ kvseek::nested::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::nested;
    __shared__ ScanMemory memory;
    __shared__ Units units;
    const Scanning work = share_scan(a, units);  // requests, table and codes are older than this step's kernels
    const int first = work.begin / UNIT;
    const Share share(work.block.exists ? (work.end + UNIT - 1) / UNIT - first : 0, work.block.parts, work.block.part);
    Share own(share.last - share.first, SCAN_WARPS, threadIdx.x / WARP);  // neighbours, which share means
    own.first += first + share.first, own.last += first + share.first;
    if (SCANS_TOGETHER && work.requests > 1)
        scan_together(a, work, own, (share.last - share.first + SCAN_WARPS - 1) / SCAN_WARPS, memory);
    else
        scan_alone(a, work, own, memory);
}
