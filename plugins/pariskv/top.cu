// ParisKV, last kernel of a selection: the top k candidates by the reduced estimates (paper, section 4.3).
//
// A histogram of the keys' first 12 bits splits them into those that are in, those that are out, and a few at the border,
// which are ranked by comparing all pairs. Should too many lie at the border, or the block have too many keys for its
// registers, digits are sorted out one after another. The blocks of a task select the top k of their shares, the last
// one to finish the top k among those.
#include "select.cuh"

namespace kvseek {
namespace pariskv {

constexpr int TOP_THREADS = 512;
constexpr int TOP_WARPS = TOP_THREADS / WARP;
constexpr int KEYS_EACH = 8;                          // that a thread holds in registers
constexpr int HELD_KEYS = KEYS_EACH * TOP_THREADS;    // with more, a block reads keys again and again
constexpr int SMALLEST_SHARE = HELD_KEYS / 2;         // candidates of a block: with less, the second round has more to do
constexpr int DIGITS = 256;
constexpr int BINS = 4096;         // of the first histogram: 12 bits
constexpr int BIN_SHIFT = 20;
constexpr int BORDER_KEYS = 1024;  // that are ranked by comparing all pairs
constexpr int QUICK_TOP_K = 2048;  // larger ones take the slow way

struct TopMemory {
    int histogram[BINS];
    unsigned border_keys[BORDER_KEYS];
    int border[BORDER_KEYS];
    int taken[QUICK_TOP_K];
    int partial[TOP_WARPS];
    int digit, above, last, taken_count, border_count;
    float normaliser[LANES];  // log2 of the sum of the exponentials
};

// Bits in the order of the numbers they stand for.
__device__ __forceinline__ unsigned ordered(float number) {
    const unsigned bits = __float_as_uint(number);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// log2 of the sum over a task's candidates of 2 to the scaled estimates, for each lane.
__device__ __forceinline__ void normalise(const SelectArguments& a, TopMemory& memory) {
    const int lane = threadIdx.x % WARP;
    const float2* parts = a.normalisers + static_cast<long long>(blockIdx.y) * a.chunks * LANES;
    for (int query = threadIdx.x / WARP; query < LANES; query += TOP_WARPS) {
        float largest = -INFINITE, sum = 0.0f;
        for (int i = lane; i < a.chunks; i += WARP) largest = fmaxf(largest, parts[i * LANES + query].x);
#pragma unroll
        for (int mask = 1; mask < WARP; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(EVERYONE, largest, mask));
        for (int i = lane; i < a.chunks; i += WARP) {
            const float2 part = parts[i * LANES + query];
            sum += part.y * power_of_two(part.x - largest);  // 2 to -infinity is 0: a block without candidates
        }
#pragma unroll
        for (int mask = 1; mask < WARP; mask *= 2) sum += __shfl_xor_sync(EVERYONE, sum, mask);
        if (lane == 0) memory.normaliser[query] = largest + log2f(sum);
    }
    __syncthreads();
}

// The estimates of a candidate, which lie next to each other.
__device__ __forceinline__ void load_estimates(const float* from, float (&estimates)[LANES]) {
    if constexpr (LANES % 4 == 0) {
#pragma unroll
        for (int i = 0; i < LANES / 4; i++) {
            const float4 four = reinterpret_cast<const float4*>(from)[i];
            estimates[4 * i] = four.x, estimates[4 * i + 1] = four.y;
            estimates[4 * i + 2] = four.z, estimates[4 * i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < LANES; i++) estimates[i] = from[i];
    }
}

// What a candidate is ranked by: its estimate, or the mean or the largest of its softmax weights.
__device__ __forceinline__ unsigned rank_key(const SelectArguments& a, const TopMemory& memory, const float (&estimates)[LANES]) {
    if constexpr (REDUCTION == MEAN) return ordered(estimates[0]);
    float value = 0.0f;
#pragma unroll
    for (int lane = 0; lane < LANES; lane++) {
        const float weight = power_of_two(estimates[lane] * (a.scaling * LOG2_E) - memory.normaliser[lane]);
        value = REDUCTION == MAX ? fmaxf(value, weight) : value + weight;
    }
    return ordered(value);
}

// Count a digit. Neighbouring keys often agree in their first digits: then one thread adds for the warp.
__device__ __forceinline__ void count_digit(int* histogram, unsigned digit, bool counts) {
    const unsigned counting = __ballot_sync(EVERYONE, counts);
    if (counting == 0) return;
    const int leader = __ffs(counting) - 1;
    const unsigned common = __shfl_sync(EVERYONE, digit, leader);
    if (__all_sync(EVERYONE, !counts || digit == common)) {
        if (threadIdx.x % WARP == leader) atomicAdd(&histogram[common], __popc(counting));
    } else if (counts) {
        atomicAdd(&histogram[digit], 1);
    }
}

// Find the digit that the `wanted`-th largest key has, among keys that were counted; all threads get it, and how many
// keys have a larger one.
__device__ __forceinline__ void find_digit(TopMemory& memory, int wanted) {
    if (threadIdx.x < WARP) {  // lane l holds digits 8 l .. 8 l + 7
        int sums[DIGITS / WARP], total = 0;
#pragma unroll
        for (int i = DIGITS / WARP - 1; i >= 0; i--) {
            total += memory.histogram[threadIdx.x * (DIGITS / WARP) + i];
            sums[i] = total;  // of this lane's digits from i on
        }
        int from_here = total;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_down_sync(EVERYONE, from_here, step);
            if (threadIdx.x + step < WARP) from_here += other;
        }
        const int above = from_here - total;  // keys of later lanes' digits
        if (above < wanted && from_here >= wanted) {
            int found = 0, larger = above;
#pragma unroll
            for (int i = 0; i < DIGITS / WARP; i++) {
                if (above + sums[i] < wanted) continue;
                found = i;
                larger = above + (i + 1 < DIGITS / WARP ? sums[i + 1] : 0);
            }
            memory.digit = threadIdx.x * (DIGITS / WARP) + found;
            memory.above = larger;
        }
    }
    __syncthreads();
}

// What take_largest does, for any keys: find the digits of the `wanted`-th largest one after another.
template <class Key, class Emit>
__device__ __forceinline__ void take_by_digits(TopMemory& memory, int count, int wanted, const Key& key, const Emit& emit) {
    unsigned prefix = 0, mask = 0;
    int left = wanted;  // still to take among keys that begin with `prefix`
    const bool all = count <= wanted;
    for (int shift = 24; shift >= 0 && !all; shift -= 8) {
        for (int i = threadIdx.x; i < DIGITS; i += TOP_THREADS) memory.histogram[i] = 0;
        __syncthreads();
        for (int first = 0; first < count; first += TOP_THREADS) {
            const int i = first + threadIdx.x;
            const unsigned own = i < count ? key(i) : 0;
            count_digit(memory.histogram, own >> shift & 255, i < count && (own & mask) == prefix);
        }
        __syncthreads();
        find_digit(memory, left);
        prefix |= static_cast<unsigned>(memory.digit) << shift;
        mask |= 255u << shift;
        left -= memory.above;
        __syncthreads();
    }
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int taken = 0, ties = 0;
    for (int first = 0; first < count; first += TOP_THREADS) {
        const int i = first + threadIdx.x;
        const unsigned own = i < count ? key(i) : 0;
        const bool better = i < count && (all || own > prefix), equal = i < count && !all && own == prefix;
        const unsigned betters = __ballot_sync(EVERYONE, better), equals = __ballot_sync(EVERYONE, equal);
        if (lane == 0) memory.partial[warp] = __popc(betters) + (__popc(equals) << 16);
        __syncthreads();
        const unsigned before = (1u << lane) - 1;
        int offset = __popc(betters & before) + (__popc(equals & before) << 16), sum = 0;
#pragma unroll
        for (int w = 0; w < TOP_WARPS; w++) {
            if (w < warp) offset += memory.partial[w];
            sum += memory.partial[w];
        }
        const int ties_here = ties + (offset >> 16);
        if (better || (equal && ties_here < left)) emit(taken + (offset & 0xffff) + min(ties_here, left), i);
        taken += sum & 0xffff, ties += sum >> 16;
        __syncthreads();
    }
}

// Sum over this thread and all later ones; all threads of the block call it.
__device__ __forceinline__ int sum_from_here(TopMemory& memory, int value) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int sum = value;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_down_sync(EVERYONE, sum, step);
        if (lane + step < WARP) sum += other;
    }
    if (lane == 0) memory.partial[warp] = sum;
    __syncthreads();
    int later = lane > warp && lane < TOP_WARPS ? memory.partial[lane] : 0;
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) later += __shfl_xor_sync(EVERYONE, later, mask);
    return sum + later;
}

// The bin of the histogram that the `wanted`-th largest key lies in, and how many keys lie in higher ones.
__device__ __forceinline__ void find_bin(TopMemory& memory, int wanted) {
    constexpr int EACH_BINS = BINS / TOP_THREADS;
    int bins[EACH_BINS], own = 0;
#pragma unroll
    for (int i = EACH_BINS - 1; i >= 0; i--) {
        own += memory.histogram[threadIdx.x * EACH_BINS + i];
        bins[i] = own;  // of this thread's bins from i on
    }
    const int from_here = sum_from_here(memory, own), above = from_here - own;
    if (above < wanted && from_here >= wanted) {
#pragma unroll
        for (int i = 0; i < EACH_BINS; i++) {
            if (above + bins[i] < wanted) continue;
            memory.digit = threadIdx.x * EACH_BINS + i;
            memory.above = above + (i + 1 < EACH_BINS ? bins[i + 1] : 0);
        }
    }
    __syncthreads();
}

// Append to a list in shared memory those indexes whose thread says so; the order is arbitrary.
__device__ __forceinline__ int append(int* count, bool wanted) {
    const unsigned threads = __ballot_sync(EVERYONE, wanted);
    const int lane = threadIdx.x % WARP;
    int start = 0;
    if (lane == 0 && threads != 0) start = atomicAdd(count, __popc(threads));
    return __shfl_sync(EVERYONE, start, 0) + __popc(threads & ((1u << lane) - 1));
}

// Keys of a block, KEYS_EACH a thread: key i of the block is key i / TOP_THREADS of thread i % TOP_THREADS.
struct Held {
    unsigned keys[KEYS_EACH];

    template <class Key>
    __device__ __forceinline__ Held(int count, const Key& key) {
#pragma unroll
        for (int k = 0; k < KEYS_EACH; k++) {
            const int i = k * TOP_THREADS + threadIdx.x;
            keys[k] = i < count ? key(k, i) : 0;
        }
    }
};

// Emit (rank, index) of the `wanted` largest of `count` held keys, ties by lowest index; ranks ascend with the index.
template <class Emit>
__device__ __forceinline__ void take_largest(TopMemory& memory, int count, int wanted, const Held& held, const Emit& emit) {
    if (count <= wanted) {
        for (int i = threadIdx.x; i < count; i += TOP_THREADS) emit(i, i);
        return;
    }
    for (int i = threadIdx.x; i < BINS / 4; i += TOP_THREADS)
        reinterpret_cast<int4*>(memory.histogram)[i] = make_int4(0, 0, 0, 0);
    if (threadIdx.x == 0) memory.taken_count = memory.border_count = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < KEYS_EACH; k++)
        if (k * TOP_THREADS + threadIdx.x < count) atomicAdd(&memory.histogram[held.keys[k] >> BIN_SHIFT], 1);
    __syncthreads();
    find_bin(memory, wanted);
    const int border = memory.digit, left = wanted - memory.above;
    if (memory.histogram[border] > BORDER_KEYS || wanted > QUICK_TOP_K) {
        __syncthreads();
        take_by_digits(memory, count, wanted, [&](int i) {
            unsigned found = 0;
#pragma unroll
            for (int k = 0; k < KEYS_EACH; k++)
                if (i / TOP_THREADS == k) found = held.keys[k];  // a thread asks for its own keys only
            return found;
        }, emit);
        return;
    }
#pragma unroll
    for (int k = 0; k < KEYS_EACH; k++) {
        const int i = k * TOP_THREADS + threadIdx.x;
        const int bin = i < count ? static_cast<int>(held.keys[k] >> BIN_SHIFT) : -1;
        if (!__any_sync(EVERYONE, bin >= border)) continue;
        const int place = append(&memory.taken_count, bin > border);
        if (bin > border) memory.taken[place] = i;
        const int at_border = append(&memory.border_count, bin == border);
        if (bin == border) memory.border[at_border] = i, memory.border_keys[at_border] = held.keys[k];
    }
    __syncthreads();
    const int border_count = memory.border_count;
    for (int first = 0; first < border_count; first += TOP_THREADS) {
        const int e = first + threadIdx.x;
        bool in = false;
        if (e < border_count) {
            const unsigned own = memory.border_keys[e];
            const int index = memory.border[e];
            int better = 0;
#pragma unroll 4
            for (int f = 0; f < border_count; f++)
                better += memory.border_keys[f] > own || (memory.border_keys[f] == own && memory.border[f] < index);
            in = better < left;
        }
        const int place = append(&memory.taken_count, in);
        if (in) memory.taken[place] = memory.border[e];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < wanted; e += TOP_THREADS) {
        const int index = memory.taken[e];
        int rank = 0;
#pragma unroll 4
        for (int f = 0; f < wanted; f++) rank += memory.taken[f] < index;
        emit(rank, index);
    }
    __syncthreads();
}

}  // namespace pariskv
}  // namespace kvseek

// grid: top_blocks, tasks
extern "C" __global__ void __launch_bounds__(kvseek::pariskv::TOP_THREADS, 1)
    kvseek_pariskv_top(const __grid_constant__ kvseek::pariskv::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::pariskv;
    __shared__ TopMemory memory;
    const Task task(a);
    await_earlier_kernels();
    if (task.idle()) return;
    const int count = task.candidates(), top_k = a.top_k;
    const int share = max((count + a.top_blocks - 1) / a.top_blocks, SMALLEST_SHARE);
    const int active = (count + share - 1) / share;  // blocks with work: at least one, as a task has candidates
    if (blockIdx.x >= active) return;
    const int first = blockIdx.x * share, here = min(share, count - first);
    const bool few = share <= HELD_KEYS;
    float estimates[KEYS_EACH][LANES];
    if (few) {  // before they are needed
#pragma unroll
        for (int k = 0; k < KEYS_EACH; k++) {
            const int i = first + min(k * TOP_THREADS + static_cast<int>(threadIdx.x), here - 1);
            if (k * TOP_THREADS < here) load_estimates(a.estimates + task.row(a, i) * LANES, estimates[k]);
        }
    }
    if (REDUCTION != MEAN) normalise(a, memory);
    auto position = [&](int i) { return a.candidates[task.row(a, first + i)]; };
    int* rows = a.rows + static_cast<long long>(task.number) * top_k;
    if (blockIdx.x == 0)
        for (int i = min(count, top_k) + threadIdx.x; i < top_k; i += TOP_THREADS) rows[i] = -1;
    const long long start = static_cast<long long>(task.number) * a.top_blocks * top_k;
    const int each = min(share, top_k);  // of every block; the last one may have fewer
    unsigned* best_keys = a.best_keys + start;
    int* best_positions = a.best_positions + start;
    auto take = [&](int place, unsigned key, int found) {
        if (active == 1) {
            rows[place] = found;
        } else {
            best_keys[blockIdx.x * each + place] = key;
            best_positions[blockIdx.x * each + place] = found;
        }
    };
    if (few) {
        const Held held(here, [&](int k, int) { return rank_key(a, memory, estimates[k]); });
        for (int k = 0; k < KEYS_EACH; k++)
            if (k * TOP_THREADS + threadIdx.x < here) a.keys[task.row(a, first + k * TOP_THREADS + threadIdx.x)] = held.keys[k];
        take_largest(memory, here, top_k, held, [&](int rank, int i) { take(rank, a.keys[task.row(a, first + i)], position(i)); });
    } else {
        for (int i = threadIdx.x; i < here; i += TOP_THREADS) {
            const long long row = task.row(a, first + i);
            float own[LANES];
            load_estimates(a.estimates + row * LANES, own);
            a.keys[row] = rank_key(a, memory, own);
        }
        __syncthreads();
        auto key = [&](int i) { return a.keys[task.row(a, first + i)]; };
        take_by_digits(memory, here, top_k, key, [&](int rank, int i) { take(rank, key(i), position(i)); });
    }
    if (active == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) memory.last = atomicAdd(a.finished + task.number, 1) == active - 1;
    __syncthreads();
    if (!memory.last) return;
    __threadfence();
    const int listed = (active - 1) * each + min(count - (active - 1) * share, each);
    auto listed_key = [&](int i) { return __ldcg(best_keys + i); };
    auto take_listed = [&](int rank, int i) { rows[rank] = __ldcg(best_positions + i); };
    if (listed <= HELD_KEYS)
        take_largest(memory, listed, top_k, Held(listed, [&](int, int i) { return listed_key(i); }), take_listed);
    else
        take_by_digits(memory, listed, top_k, listed_key, take_listed);
    if (threadIdx.x == 0) a.finished[task.number] = 0;
}
