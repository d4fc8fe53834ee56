// Lists of the centroids, from their logits: attention weights, the maximum over the group, the largest rho keys
// (CTkvr paper, algorithm 1). One block a centroid and KV head; every logit is read once.
//
// A key among the best rho of the group's maximum is among the best rho of the head that gives it the maximum. So each
// head's row is cut to its own best rho first, in one pass that also sums its softmax, and the heads' bests are merged.
#include "list_stream.cuh"

namespace kvseek {
namespace ctkvr {

struct ListArguments {
    const __half* logits;  // [GROUP, centroids, row_stride]; a row is padded to a multiple of 8
    const float* factors;  // [GROUP]: a logit times this is the binary logarithm of its weight, up to the row's sum
    int* lists;            // [centroids, rho]
    long long row_stride;
    int centroids, tokens, rho;  // tokens > rho
    int capacity, slack;         // of the buffer: capacity >= rho + slack + a piece of each thread
    int slots;                   // of the table of merged entries: > 2 rho
};

constexpr int GROUP = KVSEEK_GROUP;
constexpr int WEIGHT_BITS = 32;
constexpr int MOST_HELD = 10;  // entries that a thread holds while the table is rebuilt: rho <= 10 x threads

struct Shared {
    CutShared cut;
    float softmax[2 * MOST_THREADS / WARP];
    int wanted[3];
};

// Insert an entry into the table, open addressing by place; of two with one place the larger stays.
__device__ __forceinline__ void insert(Entry* table, int slots, Entry entry) {
    const unsigned key = static_cast<unsigned>(entry);
    int slot = static_cast<int>(__umulhi(key * 2654435769u, static_cast<unsigned>(slots)));  // 2^32 / golden ratio
    while (true) {
        const Entry there = atomicCAS(&table[slot], NO_ENTRY, entry);
        if (there == NO_ENTRY) return;
        if (static_cast<unsigned>(there) == key) {
            atomicMax(&table[slot], entry);
            return;
        }
        slot = slot + 1 == slots ? 0 : slot + 1;
    }
}

// One pass over a row: leaves its best entries in the buffer, by logarithm of their weight, and returns how many.
__device__ __forceinline__ int best_of_row(const ListArguments& a, int head, Entry* buffer, Shared& shared) {
    const __half* row = a.logits + (static_cast<long long>(head) * a.centroids + blockIdx.x) * a.row_stride;
    const int step = blockDim.x * PIECE, place_bits = 32 - __clz(a.tokens);
    Softmax softmax(a.factors[head]);
    Stream stream(buffer, a.capacity, a.rho, a.slack, place_bits, shared.wanted, shared.cut);
    Piece next[ROUNDS];
    int first = threadIdx.x * PIECE;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) next[i].load(row, first + i * step, a.tokens);
    for (int start = 0; start < a.tokens; start += ROUNDS * step, first += ROUNDS * step) {
        Piece pieces[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            pieces[i] = next[i];
            next[i].load(row, first + (ROUNDS + i) * step, a.tokens);
        }
        softmax.add(pieces);
        stream.add(pieces, first, step);
    }
    stream.cut(a.rho, 0);
    const float logarithm = softmax.finish(shared.softmax);  // waits: all entries are written
    if (GROUP > 1) {
        for (int i = threadIdx.x; i < stream.held; i += blockDim.x) {
            const float logit = __half2float(half_of(static_cast<unsigned>(buffer[i] >> 32)));
            const unsigned value = ordered_bits(fmaf(logit, softmax.factor, -logarithm));
            buffer[i] = make_entry(value, place_of(buffer[i]));
        }
    }
    __syncthreads();
    return stream.held;
}

// Merge a head's best entries in the buffer with the best of the heads before it, table[0 .. best), and leave the best
// rho of both there. Returns how many.
__device__ __forceinline__ int merge_head(const ListArguments& a, Entry* buffer, int held, Entry* table, int best,
                                          Shared& shared) {
    const int threads = blockDim.x, place_bits = 32 - __clz(a.tokens);
    Entry before[MOST_HELD];
#pragma unroll
    for (int i = 0; i < MOST_HELD; ++i) {
        const int at = i * threads + static_cast<int>(threadIdx.x);
        before[i] = at < best ? table[at] : NO_ENTRY;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.slots; i += threads) table[i] = NO_ENTRY;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MOST_HELD; ++i)
        if (before[i] != NO_ENTRY) insert(table, a.slots, before[i]);
    for (int i = threadIdx.x; i < held; i += threads) insert(table, a.slots, buffer[i]);
    __syncthreads();
    const int keep = min(a.rho, max(best, held));  // the table has at least so many
    Entry bound = 1;
    if (keep > 0) bound = find_cut(table, a.slots, keep, 0, 32 + WEIGHT_BITS, place_bits, shared.cut);
    const int kept = keep_entries(table, a.slots, bound, buffer, shared.cut);
    for (int i = threadIdx.x; i < kept; i += threads) table[i] = buffer[i];
    __syncthreads();
    return kept;
}

}  // namespace ctkvr
}  // namespace kvseek

extern "C" __global__ void __launch_bounds__(512, 2)
    kvseek_ctkvr_list(const __grid_constant__ kvseek::ctkvr::ListArguments a) {
    using namespace kvseek::ctkvr;
    extern __shared__ __align__(16) unsigned long long dynamic[];
    __shared__ Shared shared;
    Entry *buffer = dynamic, *table = dynamic + a.capacity;
    int best = best_of_row(a, 0, buffer, shared);
    const Entry* chosen = buffer;
    if (GROUP > 1) {
        for (int i = threadIdx.x; i < best; i += blockDim.x) table[i] = buffer[i];
        __syncthreads();
        for (int head = 1; head < GROUP; ++head) {
            const int held = best_of_row(a, head, buffer, shared);
            best = merge_head(a, buffer, held, table, best, shared);
        }
        chosen = table;
    }
    int* list = a.lists + static_cast<long long>(blockIdx.x) * a.rho;
    // Fewer than rho are chosen if keys are not finite alone.
    for (int i = threadIdx.x; i < a.rho; i += blockDim.x) list[i] = i < best ? place_of(chosen[i]) : -1;
}
