// Nested codes, second kernel of a selection: the keys with the best scores become candidates, their q·k is estimated
// from all bits, and the top k of them are the result.
//
// The blocks of a task share its region. Each collects the candidates of its part, in order, and estimates them; the
// last one to finish ranks all of them.
#include "plugins/shared/largest.cuh"
#include "select.cuh"

namespace kvseek {
namespace nested {

using largest::HELD_KEYS, largest::KEYS_EACH, largest::TOP_THREADS, largest::TOP_WARPS;
static_assert(BINS == largest::BINS, "the totals of the scan are searched as a histogram of the ranking");

constexpr int AT_ONCE = 8;                       // scores that a thread reads at a time
constexpr int PASS = AT_ONCE * TOP_THREADS;      // keys that a block judges at a time
constexpr int MEMBERS = DIM / 32;                // threads that estimate one candidate, 32 channels each
constexpr int MOST_BLOCKS = 32;                  // of a task

struct Memory : largest::TopMemory {
    alignas(16) signed char integers[LANES][2][DIM];
    int offsets[LANES];
    float normaliser[LANES];         // log2 of the sum of the exponentials
    int before[MOST_BLOCKS + 1];     // candidates of earlier blocks
};

// Which scores belong to candidates: all bins above the border, and the first keys of the border's bin.
struct Border {
    int bin;   // -1: every key is a candidate
    int room;  // keys of the border's bin that may become candidates, the first ones
    int held;  // keys of the border's bin in the whole region
};

__device__ __forceinline__ Border find_border(const SelectArguments& a, const Task& task, Memory& memory) {
    if (task.length() <= a.capacity) return {-1, 0, 0};
    reinterpret_cast<int4*>(memory.histogram)[threadIdx.x] =
        reinterpret_cast<const int4*>(a.totals + task.number * BINS)[threadIdx.x];
    __syncthreads();
    find_bin(memory, task.wanted());
    return {memory.digit, a.capacity - memory.above, memory.histogram[memory.digit]};
}

// Two numbers in one: keys above the border, and keys in its bin in the upper half.
__device__ __forceinline__ int sum_up_to_block(Memory& memory, int value, int& all) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int sum = sum_up_to_here(value, lane);
    __syncthreads();  // the last round's sums are read
    if (lane == WARP - 1) memory.partial[warp] = sum;
    __syncthreads();
    int before = 0;
    all = 0;
#pragma unroll
    for (int w = 0; w < TOP_WARPS; w++) {
        const int part = memory.partial[w];
        if (w < warp) before += part;
        all += part;
    }
    return before + sum;
}

// Judge the keys of `first .. last - 1`, multiples of AT_ONCE, in rounds: act(place, above) for each thread's candidates
// and ties in order, between what came before.
struct Scores {
    unsigned short own[AT_ONCE];
    int first;  // place of own[0]
    int count;  // that exist

    __device__ __forceinline__ Scores(const SelectArguments& a, const Task& task, int start, int last)
        : first(start + static_cast<int>(threadIdx.x) * AT_ONCE), count(min(max(last - first, 0), AT_ONCE)) {
        if (count > 0) *reinterpret_cast<uint4*>(own) = *reinterpret_cast<const uint4*>(a.scores + task.row(a, first));
    }
    __device__ __forceinline__ bool above(int i, const Border& border) const {
        return i < count && (own[i] >> BIN_SHIFT) > border.bin;
    }
    __device__ __forceinline__ bool tie(int i, const Border& border) const {
        return i < count && (own[i] >> BIN_SHIFT) == border.bin;
    }
};

// Ties in the parts of earlier blocks. Only needed if not all ties fit, which takes thousands of nearly equal scores.
__device__ __noinline__ int ties_before(const SelectArguments& a, const Task& task, Memory& memory, int last,
                                        const Border& border) {
    int own = 0;
    for (int start = 0; start < last; start += PASS) {
        const Scores scores(a, task, start, last);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) own += scores.tie(i, border);
    }
    int all;
    __syncthreads();
    if (threadIdx.x == 0) memory.appended = 0;
    __syncthreads();
    atomicAdd(&memory.appended, own);
    __syncthreads();
    all = memory.appended;
    __syncthreads();
    return all;
}

// Write the candidates of places first .. last - 1 to the block's list; returns how many they are.
__device__ __forceinline__ int collect(const SelectArguments& a, const Task& task, Memory& memory,
                                       const Border& border, int first, int last, int* places) {
    int ties = border.held > border.room ? ties_before(a, task, memory, first, border) : 0;
    int listed = 0;
    for (int start = first; start < last; start += PASS) {
        const Scores scores(a, task, start, last);
        int above = 0, equal = 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) above += scores.above(i, border), equal += scores.tie(i, border);
        int all;
        const int sums = sum_up_to_block(memory, above + (equal << 16), all);
        int next_above = (sums & 0xffff) - above, next_tie = ties + (sums >> 16) - equal;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const bool is_above = scores.above(i, border), is_tie = scores.tie(i, border);
            // Ties that came before in this call count only as far as there was room for them.
            const int entry = listed + next_above + min(next_tie, border.room) - min(ties, border.room);
            if (is_above || (is_tie && next_tie < border.room)) places[entry] = scores.first + i;
            next_above += is_above, next_tie += is_tie;
        }
        const int new_ties = ties + (all >> 16);
        listed += (all & 0xffff) + min(new_ties, border.room) - min(ties, border.room);
        ties = new_ties;
    }
    return listed;
}

__device__ __forceinline__ void load_queries(const SelectArguments& a, const Task& task, Memory& memory) {
    constexpr int COUNT = LANES * 2 * DIM / 16;
    const uint4* from = reinterpret_cast<const uint4*>(a.integers) + static_cast<long long>(task.number) * COUNT;
    for (int i = threadIdx.x; i < COUNT; i += TOP_THREADS) reinterpret_cast<uint4*>(memory.integers)[i] = from[i];
    __syncthreads();
    for (int lane = threadIdx.x / WARP; lane < LANES; lane += TOP_WARPS) {
        int sum = 0;
        for (int channel = threadIdx.x % WARP; channel < DIM; channel += WARP)
            sum += 256 * memory.integers[lane][0][channel] + memory.integers[lane][1][channel];
        sum = sum_of_warp(sum);
        if (threadIdx.x % WARP == 0) memory.offsets[lane] = (codes::LEVELS - 1) * sum / 2;
    }
    __syncthreads();
}

// Estimate q·k (but for q·mean, which is the same for all keys of a lane) of the block's candidates.
__device__ __forceinline__ void estimate(const SelectArguments& a, const Task& task, const Memory& memory, int count,
                                         const int* places, float* estimates) {
    const int member = threadIdx.x % MEMBERS;
    const float factor = a.steps[task.number] * codes::STEP;
    for (int first = 0; first < count; first += TOP_THREADS / MEMBERS) {  // warps stay whole: they exchange sums
        const int i = first + static_cast<int>(threadIdx.x) / MEMBERS;
        const unsigned row = task.row(a, places[min(i, count - 1)]);
        const uint2 high = *reinterpret_cast<const uint2*>(a.high + static_cast<size_t>(row) * FIELD + 8 * member);
        const uint2 low = *reinterpret_cast<const uint2*>(a.low + static_cast<size_t>(row) * FIELD + 8 * member);
        const float scale = __half2float(a.scales[row]) * factor;
        int sums[LANES][2] = {};
#pragma unroll
        for (int field = 0; field < FIELDS; field++) {
#pragma unroll
            for (int word = 0; word < 2; word++) {
                const unsigned codes = codes::four_codes(word ? high.y : high.x, word ? low.y : low.x, field);
                const int channel = field * FIELD + 8 * member + 4 * word;
#pragma unroll
                for (int lane = 0; lane < LANES; lane++)
#pragma unroll
                    for (int part = 0; part < 2; part++)
                        sums[lane][part] =
                            __dp4a(static_cast<int>(codes),
                                   *reinterpret_cast<const int*>(&memory.integers[lane][part][channel]),
                                   sums[lane][part]);
            }
        }
#pragma unroll
        for (int lane = 0; lane < LANES; lane++) {
            int sum = 256 * sums[lane][0] + sums[lane][1];
#pragma unroll
            for (int mask = 1; mask < MEMBERS; mask *= 2) sum += __shfl_xor_sync(EVERYONE, sum, mask);
            if (member == lane % MEMBERS && i < count)
                estimates[i * LANES + lane] = static_cast<float>(sum - memory.offsets[lane]) * scale;
        }
    }
    __syncthreads();
}

// Merge largest exponents and sums of the powers relative to them, one pair a thread of a warp.
__device__ __forceinline__ float2 merge_of_warp(float2 own) {
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) {
        const float other = __shfl_xor_sync(EVERYONE, own.x, mask), sum = __shfl_xor_sync(EVERYONE, own.y, mask);
        const float both = fmaxf(fmaxf(own.x, other), -1e30f);  // nothing at all has -infinity
        own = make_float2(both, own.y * power_of_two(own.x - both) + sum * power_of_two(other - both));
    }
    return own;
}

// The block's normalisers: a warp takes a lane.
__device__ __forceinline__ void store_normalisers(const SelectArguments& a, int count, const float* estimates,
                                                  float2* normalisers) {
    const float scale = a.scaling * LOG2_E;
    for (int lane = threadIdx.x / WARP; lane < LANES; lane += TOP_WARPS) {
        float2 own = make_float2(-INFINITE, 0.0f);
        for (int i = threadIdx.x % WARP; i < count; i += WARP) {
            const float exponent = estimates[i * LANES + lane] * scale, both = fmaxf(own.x, exponent);
            own = make_float2(both, own.y * power_of_two(own.x - both) + power_of_two(exponent - both));
        }
        own = merge_of_warp(own);
        if (threadIdx.x % WARP == 0) normalisers[lane] = own;
    }
}

// Where entry i of all candidates lies: the blocks' lists one after another.
struct Lists {
    const SelectArguments& a;
    const Memory& memory;
    long long first;  // of the task's lists

    __device__ __forceinline__ long long entry(int i) const {
        int block = 0;
        while (block + 1 < a.blocks && memory.before[block + 1] <= i) block++;
        return first + static_cast<long long>(block) * a.capacity + (i - memory.before[block]);
    }
};

// What a candidate is ranked by: its estimate, or the mean or the largest of its softmax weights.
__device__ __forceinline__ unsigned rank_key(const SelectArguments& a, const Memory& memory, const float* estimates) {
    if constexpr (REDUCTION == MEAN) return ordered_bits(__ldcg(estimates));
    float value = 0.0f;
#pragma unroll
    for (int lane = 0; lane < LANES; lane++) {
        const float weight = power_of_two(__ldcg(estimates + lane) * (a.scaling * LOG2_E) - memory.normaliser[lane]);
        value = REDUCTION == MAX ? fmaxf(value, weight) : value + weight;
    }
    return ordered_bits(value);
}

struct Held {
    unsigned keys[KEYS_EACH];

    __device__ __forceinline__ Held(const SelectArguments& a, const Memory& memory, const Lists& lists, int count) {
#pragma unroll
        for (int k = 0; k < KEYS_EACH; k++) {
            const int i = k * TOP_THREADS + threadIdx.x;
            keys[k] = i < count ? rank_key(a, memory, a.estimates + lists.entry(i) * LANES) : 0;
        }
    }
};

// Rank all candidates of the task, once every block has written its own.
__device__ __forceinline__ void rank(const SelectArguments& a, const Task& task, Memory& memory) {
    const int warp = threadIdx.x / WARP, thread = threadIdx.x % WARP;
    if (warp == 0) {
        const int own = thread < a.blocks ? __ldcg(a.counts + task.number * a.blocks + thread) : 0;
        const int sum = sum_up_to_here(own, thread);
        memory.before[thread] = sum - own;
        if (thread == WARP - 1) memory.before[WARP] = sum;
    }
    if (REDUCTION != MEAN) {
        const float2* parts = a.normalisers + static_cast<long long>(task.number) * a.blocks * LANES;
        for (int lane = warp; lane < LANES; lane += TOP_WARPS) {
            float2 own = make_float2(-INFINITE, 0.0f);
            if (thread < a.blocks) own = __ldcg(parts + thread * LANES + lane);
            own = merge_of_warp(own);
            if (thread == 0) memory.normaliser[lane] = own.x + log2f(own.y);
        }
    }
    __syncthreads();
    const int count = memory.before[WARP], top_k = a.top_k;
    const Lists lists{a, memory, static_cast<long long>(task.number) * a.blocks * a.capacity};
    int* rows = a.rows + static_cast<long long>(task.number) * top_k;
    for (int i = min(count, top_k) + threadIdx.x; i < top_k; i += TOP_THREADS) rows[i] = -1;
    auto take = [&](int order, int i, unsigned) { rows[order] = __ldcg(a.places + lists.entry(i)); };
    if (count <= HELD_KEYS && take_largest(memory, count, top_k, Held(a, memory, lists, count), take)) return;
    unsigned* keys = a.keys + lists.first;
    for (int i = threadIdx.x; i < count; i += TOP_THREADS)
        keys[i] = rank_key(a, memory, a.estimates + lists.entry(i) * LANES);
    __syncthreads();
    take_by_digits(memory, count, top_k, [&](int i) { return keys[i]; }, take);
}

}  // namespace nested
}  // namespace kvseek

// grid: blocks, tasks
extern "C" __global__ void __launch_bounds__(kvseek::largest::TOP_THREADS, 1)
    kvseek_nested_choose(const __grid_constant__ kvseek::nested::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::nested;
    __shared__ Memory memory;
    static_assert(MOST_BLOCKS == WARP, "a thread of a warp for each block");
    const Task task(a);
    await_earlier_kernels();
    if (task.idle()) return;
    const Border border = find_border(a, task, memory);
    const Share parts((task.length() + AT_ONCE - 1) / AT_ONCE, a.blocks, blockIdx.x);
    const int first = parts.first * AT_ONCE, last = min(parts.last * AT_ONCE, task.length());
    const long long own = static_cast<long long>(task.number) * a.blocks + blockIdx.x;
    int* places = a.places + own * a.capacity;
    float* estimates = a.estimates + own * a.capacity * LANES;
    load_queries(a, task, memory);
    const int count = collect(a, task, memory, border, first, last, places);
    __syncthreads();
    if (count > 0) estimate(a, task, memory, count, places, estimates);
    if (REDUCTION != MEAN) store_normalisers(a, count, estimates, a.normalisers + own * LANES);
    if (threadIdx.x == 0) a.counts[own] = count;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) memory.last = atomicAdd(a.finished + task.number, 1) == a.blocks - 1;
    __syncthreads();
    if (!memory.last) return;
    __threadfence();
    rank(a, task, memory);
    reinterpret_cast<int4*>(a.totals + task.number * BINS)[threadIdx.x] = make_int4(0, 0, 0, 0);
    if (threadIdx.x == 0) a.finished[task.number] = 0;
}
