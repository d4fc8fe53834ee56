// Nested codes, second kernel of a selection: the keys with the best scores become candidates, their q·k is estimated
// from all 4 bits, and the top k of them are the result.
//
// The blocks of a task share its region, as many as its length asks for. Each collects the candidates of its part, in
// order, and estimates them; the last one to finish ranks all of them.
#include "kernels/cuda/codes/rank.cuh"
#include "kernels/cuda/largest.cuh"
#include "select.cuh"

namespace kvseek {
namespace nested {

constexpr int CHOOSE_THREADS = 512;
constexpr int CHOOSE_REGISTERS = 64;
constexpr int CHOOSE_WARPS = CHOOSE_THREADS / WARP;
constexpr int LISTED = 1600;  // candidates that are ranked in shared memory (HELD_CANDIDATES of device.py)
constexpr int LISTED_EACH = (LISTED + CHOOSE_THREADS - 1) / CHOOSE_THREADS;
constexpr int BORDER_KEYS = 256;
using Top = largest::Largest<CHOOSE_THREADS, LISTED_EACH, largest::WeightBits, BORDER_KEYS>;
static_assert(BINS == largest::BINS, "the totals of the scan are searched as a histogram of the ranking");

constexpr int AT_ONCE = 8;                 // scores that a thread reads at a time
constexpr int UNIT_KEYS = AT_ONCE * WARP;  // keys that a warp judges at a time
constexpr int GROUP_UNITS = 3;             // units whose scores a warp holds
constexpr int ENTRIES = 128;               // of a warp's list of threads that have candidates
constexpr int MOST_BLOCKS = 16;            // of a task
using Ranking = codes::Ranking<4, LANES, CHOOSE_THREADS>;

// Keys above the border, and keys in its bin.
struct Counts {
    int above, ties;
};

struct Memory : Top::Memory {
    Queries queries;
    Counts counts[CHOOSE_WARPS];
    float normaliser[LANES];      // log2 of the sum of the exponentials
    int before[MOST_BLOCKS + 1];  // candidates of earlier blocks, and of all
    int places[LISTED];
    alignas(16) unsigned keys[LISTED];

    // The warps' parts of the normalisers, where the keys lie later, when candidates have been estimated.
    using Normalisers = PowerSum[CHOOSE_WARPS][LANES];
    __device__ __forceinline__ Normalisers& normalisers() { return *reinterpret_cast<Normalisers*>(keys); }
    // Each warp's list, where the list of taken keys lies later.
    using Entries = unsigned[CHOOSE_WARPS][ENTRIES];
    __device__ __forceinline__ unsigned* entries() { return reinterpret_cast<Entries&>(taken)[threadIdx.x / WARP]; }
};
static_assert(sizeof(Memory::Normalisers) <= sizeof(Memory::keys), "they share the keys' memory");
static_assert(sizeof(Memory::Entries) <= sizeof(Memory::taken), "they share the taken keys' memory");

// Which scores belong to candidates: those of all bins above the border's, and the first keys of the border's bin.
struct Border {
    int bin;   // -1: every key is a candidate
    int room;  // keys of the border's bin that may become candidates
    int held;  // keys of the border's bin in the whole region
};

// Begin to copy the totals of the scan to shared memory.
__device__ __forceinline__ void fetch_totals(const SelectArguments& a, const Task& task, Memory& memory) {
    for (int i = threadIdx.x; i < BINS / 4; i += CHOOSE_THREADS)
        copy_async_16(memory.histogram + 4 * i, a.totals + task.number * BINS + 4 * i);
    close_copy_group();
}

__device__ __forceinline__ Border find_border(const SelectArguments& a, const Task& task, Memory& memory) {
    await_copy_groups<0>();
    __syncthreads();
    if (task.length() <= task.wanted()) return {-1, 0, 0};
    Top::find_bin(memory, task.wanted());
    return {memory.digit, a.capacity - memory.above, memory.histogram[memory.digit]};
}

// Scores of some neighbouring units of a warp: AT_ONCE neighbouring keys of each unit for a thread.
struct Scores {
    uint4 own[GROUP_UNITS];
    int first;  // unit

    __device__ __forceinline__ void load(const SelectArguments& a, const Task& task, int start, int last) {
        first = start;
#pragma unroll
        for (int u = 0; u < GROUP_UNITS; u++)  // keys beyond the length too: an extent is allocated whole
            if (start + u < last) own[u] = *reinterpret_cast<const uint4*>(a.scores + task.scratch_row(a, place(u)));
    }
    // Of the thread's first key of a unit.
    __device__ __forceinline__ int place(int u) const {
        return (first + u) * UNIT_KEYS + static_cast<int>(threadIdx.x) % WARP * AT_ONCE;
    }
    // Whether one of the thread's keys of a unit has a score of at least `least`.
    __device__ __forceinline__ bool reach(int u, unsigned least) const {
        const unsigned most = __vmaxu2(__vmaxu2(own[u].x, own[u].y), __vmaxu2(own[u].z, own[u].w));
        return max(most & 0xffff, most >> 16) >= least;
    }
};

// Two counts in one number: keys above the border in the low half, ties in the high half.
__device__ __forceinline__ int both_counts(unsigned bits) {
    return __popc(bits & 255) | __popc(bits >> 8) << 16;
}

// A warp's units `first` .. and its list: few threads have candidates, and these are judged together, whatever unit
// they are of. An entry is the number of AT_ONCE keys, counted from the warp's first key on; above its lower 16 bits
// lies their verdict.
struct Candidates {
    const SelectArguments& a;
    const Task& task;
    const Border& border;
    unsigned* list;
    int first;  // unit

    __device__ __forceinline__ int place(unsigned entry) const {
        return first * UNIT_KEYS + static_cast<int>(entry & 0xffff) * AT_ONCE;
    }

    // One bit for each key: above the border in the low byte, in its bin in the next one.
    __device__ __forceinline__ unsigned judge(int place) const {
        const uint4 own = *reinterpret_cast<const uint4*>(a.scores + task.scratch_row(a, place));
        const unsigned words[4] = {own.x, own.y, own.z, own.w};
        unsigned verdict = 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int bin = (words[i / 2] >> 16 * (i % 2) & 0xffff) >> BIN_SHIFT;
            verdict |= (bin > border.bin ? 1u : bin == border.bin ? 256u : 0u) << i;
        }
        if (const int left = task.length() - place; left < AT_ONCE) verdict &= 0x0101u * ((1u << max(left, 0)) - 1);
        return verdict;
    }

    // Judge the keys of the list; returns this thread's counts.
    __device__ __forceinline__ Counts judge_list(int entries) const {
        Counts own = {0, 0};
        for (int i = threadIdx.x % WARP; i < entries; i += WARP) {
            const unsigned verdict = judge(place(list[i]));
            list[i] |= verdict << 16;
            own.above += __popc(verdict & 255), own.ties += __popc(verdict >> 8);
        }
        return own;
    }

    // List who has candidates in the warp's units, up to `last`, of which `scores` may hold the first; act(entries)
    // takes the list when it is full, and at the end. Returns how many entries are left if it was never full; else -1.
    template <class Act>
    __device__ __forceinline__ int visit(Scores& scores, int last, const Act& act) const {
        const int lane = threadIdx.x % WARP;
        const unsigned least = static_cast<unsigned>(max(border.bin, 0)) << BIN_SHIFT;
        int entries = 0;
        bool was_full = false;
        for (int start = first;; start += GROUP_UNITS) {
            if (start >= last || entries > ENTRIES - GROUP_UNITS * WARP) {
                __syncwarp();
                act(entries);
                if (start >= last) break;
                __syncwarp();
                entries = 0, was_full = true;
            }
            if (start != scores.first) scores.load(a, task, start, last);
#pragma unroll
            for (int u = 0; u < GROUP_UNITS; u++) {
                const bool has = start + u < last && scores.reach(u, least);
                const unsigned having = __ballot_sync(EVERYONE, has);
                if (has) list[entries + __popc(having & ((1u << lane) - 1))] = (start + u - first) * WARP + lane;
                entries += __popc(having);
            }
        }
        return was_full ? -1 : entries;
    }

    // Count the candidates of the warp's units. Returns what `visit` does.
    __device__ __forceinline__ int count(Scores& scores, int last, Counts& counts) const {
        Counts own = {0, 0};
        const int entries = visit(scores, last, [&](int listed) {
            const Counts found = judge_list(listed);
            own.above += found.above, own.ties += found.ties;
        });
        counts = {sum_of_warp(own.above), sum_of_warp(own.ties)};
        return entries;
    }
};

// Ties in the parts of earlier blocks. Only needed if not all of them fit: then thousands of scores are nearly equal.
__device__ __forceinline__ int ties_before(const SelectArguments& a, const Task& task, Memory& memory,
                                           const Border& border, int units) {
    const Share own(units, CHOOSE_WARPS, threadIdx.x / WARP);
    Scores scores;
    scores.first = -1;
    Counts counts;
    Candidates{a, task, border, memory.entries(), own.first}.count(scores, own.last, counts);
    if (threadIdx.x == 0) memory.appended = 0;
    __syncthreads();
    if (threadIdx.x % WARP == 0) atomicAdd(&memory.appended, counts.ties);
    __syncthreads();
    return memory.appended;
}

// Write the places of the block's candidates in order; returns how many they are. The warp's units are own.first ..
// own.last - 1, the block's begin at `start`.
__device__ __forceinline__ int collect(const SelectArguments& a, const Task& task, Memory& memory, const Border& border,
                                       Scores& scores, const Share& own, int start, int* places) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool too_many = border.held > border.room;
    const int earlier = too_many ? ties_before(a, task, memory, border, start) : 0;
    const Candidates candidates{a, task, border, memory.entries(), own.first};
    Counts counted;
    const int listed = candidates.count(scores, own.last, counted);
    if (lane == 0) memory.counts[warp] = counted;
    __syncthreads();
    Counts here = {0, earlier}, all = here;
#pragma unroll
    for (int w = 0; w < CHOOSE_WARPS; w++) {
        all.above += memory.counts[w].above, all.ties += memory.counts[w].ties;
        if (w < warp) here = {here.above + memory.counts[w].above, here.ties + memory.counts[w].ties};
    }
    const int missing = min(earlier, border.room);  // ties that stand in other blocks' lists
    const auto write = [&](int entries) {
        for (int i = lane; i - lane < entries; i += WARP) {
            const unsigned entry = i < entries ? candidates.list[i] : 0, bits = entry >> 16;
            const int sums = both_counts(bits), through = sum_up_to_here(sums, lane), before = through - sums;
            int above = here.above + (before & 0xffff), ties = here.ties + (before >> 16);
            for (unsigned left = (bits | bits >> 8) & 255; left != 0; left &= left - 1) {
                const int key = __ffs(left) - 1, place = candidates.place(entry) + key;
                const bool is_above = bits >> key & 1;
                if (is_above || ties < border.room) {
                    const int to = above + min(ties, border.room) - missing;
                    places[to] = place;
                    if (to < LISTED) memory.places[to] = place;
                }
                above += is_above, ties += !is_above;
            }
            const int last = __shfl_sync(EVERYONE, through, WARP - 1);
            here = {here.above + (last & 0xffff), here.ties + (last >> 16)};
        }
    };
    if (listed >= 0) {
        write(listed);
    } else {  // the list has lost some
        scores.first = -1;
        candidates.visit(scores, own.last, [&](int entries) {
            candidates.judge_list(entries);
            __syncwarp();
            write(entries);
        });
    }
    __syncthreads();
    return all.above + min(all.ties, border.room) - missing;
}

// Estimate the block's candidates.
__device__ __forceinline__ void estimate(const SelectArguments& a, const Task& task, Memory& memory, int count,
                                         const int* places, float* estimates, PowerSum* normalisers) {
    auto row_of = [&](int entry) { return task.row(a, entry < LISTED ? memory.places[entry] : places[entry]); };
    Ranking::estimate(a.high, a.low, a.scales, codes::Means(a), memory.queries, count, row_of, a.scaling * LOG2_E,
                      memory.normalisers(), estimates, normalisers);
}

// Where the results of the block with this number lie, in arrays [kv_heads, blocks, ...].
__device__ __forceinline__ int list_of(int block) {
    return static_cast<int>(blockIdx.y * gridDim.x) + block;
}

// Where entry i of all candidates lies: the blocks' lists one after another.
struct Lists {
    const Memory& memory;
    long long first;  // of the task's lists
    int capacity;

    __device__ __forceinline__ long long entry(int i) const {
        int block = 0;
#pragma unroll
        for (int step = MOST_BLOCKS / 2; step > 0; step /= 2)
            if (memory.before[block + step] <= i) block += step;
        return first + static_cast<long long>(block) * capacity + (i - memory.before[block]);
    }
};

// Read how many candidates each block has, and merge their normalisers.
__device__ __forceinline__ void gather_blocks(const SelectArguments& a, const Unit& block, Memory& memory) {
    const int first = list_of(block.first);
    const int warp = threadIdx.x / WARP, thread = threadIdx.x % WARP;
    if (warp == 0) {
        const int own = thread < block.parts ? __ldcg(a.counts + first + thread) : 0;
        const int sum = sum_up_to_here(own, thread);
        if (thread <= MOST_BLOCKS) memory.before[thread] = sum - own;
    }
    const PowerSum* parts = a.normalisers + first * LANES;
    for (int lane = CHOOSE_WARPS - 1 - warp; lane < LANES; lane += CHOOSE_WARPS)
        Ranking::normalise(parts, block.parts, lane, memory.normaliser[lane]);
    __syncthreads();
}

// What candidates are ranked by, in shared memory.
struct Held {
    const unsigned* keys;

    __device__ __forceinline__ unsigned operator()(int k) const { return keys[k * CHOOSE_THREADS + threadIdx.x]; }
};

// Rank all candidates of the task, once every block has written its own.
__device__ __forceinline__ void rank(const SelectArguments& a, const Task& task, const Unit& block, Memory& memory) {
    gather_blocks(a, block, memory);
    const int count = memory.before[MOST_BLOCKS], top_k = a.top_k;
    const Lists lists{memory, static_cast<long long>(list_of(block.first)) * a.capacity, a.capacity};
    int* rows = a.rows + static_cast<long long>(task.number) * top_k;
    for (int i = min(count, top_k) + threadIdx.x; i < top_k; i += CHOOSE_THREADS) rows[i] = -1;
    const bool listed = count <= LISTED;
    unsigned* keys = listed ? memory.keys : a.keys + lists.first;
#pragma unroll 2
    for (int i = threadIdx.x; i < count; i += CHOOSE_THREADS) {
        const long long entry = lists.entry(i);
        const int place = __ldcg(a.places + entry);
        keys[i] = Ranking::key_of(a.estimates + entry * LANES, memory.normaliser, a.scaling * LOG2_E);
        if (listed) memory.places[i] = place;
    }
    __syncthreads();
    auto take = [&](int order, int i, unsigned) {
        rows[order] = listed ? memory.places[i] : __ldcg(a.places + lists.entry(i));
    };
    if (listed && Top::take_largest(memory, count, top_k, Held{memory.keys}, take)) return;
    Top::take_by_digits(memory, count, top_k, [&](int i) { return keys[i]; }, take);
}

}  // namespace nested
}  // namespace kvseek

// grid: as many blocks as requests at least, kv_heads
extern "C" __global__ void __maxnreg__(kvseek::nested::CHOOSE_REGISTERS)
    kvseek_nested_choose(const __grid_constant__ kvseek::nested::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::nested;
    __shared__ Memory memory;
    __shared__ Units units;
    const Unit block = share_keys(a, units, MOST_BLOCKS);
    const Task task(a, block.request);
    const int length = block.exists ? task.length() : 0;
    // The scan lets this kernel start when it has itself waited for the kernel that wrote the queries.
    if (block.exists) memory.queries.prepare(task.queries(a), a.signs);
    const Share share((length + UNIT_KEYS - 1) / UNIT_KEYS, block.parts, block.part);
    Share own(share.last - share.first, CHOOSE_WARPS, threadIdx.x / WARP);
    own.first += share.first, own.last += share.first;
    const long long list = list_of(blockIdx.x);
    int* places = a.places + list * a.capacity;
    await_earlier_kernels();
    allow_later_kernels();
    if (!block.exists) return;
    fetch_totals(a, task, memory);
    Scores scores;
    scores.load(a, task, own.first, own.last);
    const Border border = find_border(a, task, memory);
    const int count = collect(a, task, memory, border, scores, own, share.first, places);
    estimate(a, task, memory, count, places, a.estimates + list * a.capacity * LANES, a.normalisers + list * LANES);
    if (threadIdx.x == 0) a.counts[list] = count;
    if (!arrive_last(a.finished + task.number, block.parts)) return;
    rank(a, task, block, memory);
    for (int i = threadIdx.x; i < BINS / 4; i += CHOOSE_THREADS)
        reinterpret_cast<int4*>(a.totals + task.number * BINS)[i] = make_int4(0, 0, 0, 0);
}
