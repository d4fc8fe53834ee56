// Which keys of a chunk are candidates, and where in the list they go (paper, section 4.2).
//
// The blocks of the rerank share a task's extents as those of the scan do, so what the scan counted per chunk tells
// each block where its candidates go: the list ascends by place without a sort.
#pragma once

#include "select.cuh"

namespace kvseek {
namespace pariskv {

constexpr int UNIT_KEYS = 16 * WARP;              // keys whose votes a warp reads at a time
constexpr int UNITS = EXTENT_TOKENS / UNIT_KEYS;  // of an extent

// Candidates that lie before an entry of the list: keys above the threshold, and keys that just reach it.
struct Counts {
    int above, ties;
};

__device__ __forceinline__ Counts sum_of_warp(Counts counts) {
#pragma unroll
    for (int mask = 1; mask < WARP; mask *= 2) {
        counts.above += __shfl_xor_sync(EVERYONE, counts.above, mask);
        counts.ties += __shfl_xor_sync(EVERYONE, counts.ties, mask);
    }
    return counts;
}

// The votes of this thread's 16 keys: bit 7 of a byte is set if its key is above the threshold, or just reaches it.
struct Verdict {
    unsigned above[4], ties[4];

    // Packed: keys above in the low half, ties in the high half.
    __device__ __forceinline__ int count() const {
        unsigned high = 0, equal = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            high = __dp4a(above[i], 0x01010101u, high);
            equal = __dp4a(ties[i], 0x01010101u, equal);
        }
        return static_cast<int>(high >> 7 | equal << 9);
    }

    // One bit for each of the 16 keys. A product moves bits 7, 15, 23 and 31 of a word to bits 28 to 31.
    __device__ __forceinline__ static unsigned bits(const unsigned (&words)[4]) {
        unsigned all = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) all |= (words[i] >> 7) * 0x10204080u >> 28 << 4 * i;
        return all;
    }
};

// Which keys of a chunk are candidates, and their entries in the list.
struct Collector {
    const SelectArguments& a;
    const Task& task;
    int threshold, ties_wanted, first_unit;

    __device__ __forceinline__ int place(int unit) const {
        return (first_unit + unit) * UNIT_KEYS + threadIdx.x % WARP * 16;
    }

    __device__ __forceinline__ Verdict judge(int unit) const {
        const int first = place(unit);
        const uint4 votes = *reinterpret_cast<const uint4*>(a.scores + task.scratch_row(a, first));
        const unsigned words[4] = {votes.x, votes.y, votes.z, votes.w};
        Verdict verdict;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            unsigned above, reached;
            if constexpr (6 * BLOCKS < 128) {  // so a sum of votes and what is missing to 128 stays in its byte
                above = words[i] + (127 - threshold) * 0x01010101u;
                reached = words[i] + (128 - threshold) * 0x01010101u;
            } else {
                above = __vcmpgtu4(words[i], threshold * 0x01010101u);
                reached = __vcmpgeu4(words[i], threshold * 0x01010101u);
            }
            const int left = task.length() - first - 4 * i;
            const unsigned valid = left >= 4 ? 0x80808080u : left <= 0 ? 0 : 0x80808080u >> 8 * (4 - left);
            verdict.above[i] = above & valid;
            verdict.ties[i] = reached & ~above & valid;
        }
        return verdict;
    }

    // Counts of the warp's units first .. last - 1.
    __device__ __forceinline__ Counts count(int first, int last) const {
        int above = 0, ties = 0;
#pragma unroll 2
        for (int unit = first; unit < last; unit++) {
            const int both = judge(unit).count();
            above += both & 0xffff, ties += both >> 16;
        }
        return sum_of_warp(Counts{above, ties});
    }

    // Write the places of candidates among the warp's units, which begin at `before`.
    __device__ __forceinline__ void write(int first, int last, Counts before) const {
        const int lane = threadIdx.x % WARP;
        for (int unit = first; unit < last; unit++) {
            const Verdict verdict = judge(unit);
            const int own = verdict.count(), sum = sum_up_to_here(own, lane);
            int above = before.above + ((sum - own) & 0xffff), ties = before.ties + ((sum - own) >> 16);
            const unsigned better = verdict.bits(verdict.above);
            for (unsigned left = better | verdict.bits(verdict.ties); left != 0; left &= left - 1) {
                const int key = __ffs(left) - 1;
                const bool is_better = better >> key & 1;
                if (is_better || ties < ties_wanted)
                    a.candidates[static_cast<size_t>(task.scratch_row(a, above + min(ties, ties_wanted)))] =
                        place(unit) + key;
                above += is_better, ties += !is_better;
            }
            const int all = __shfl_sync(EVERYONE, sum, WARP - 1);
            before.above += all & 0xffff, before.ties += all >> 16;
        }
    }

    // Candidates among the keys that are counted.
    __device__ __forceinline__ int taken(Counts counts) const { return counts.above + min(counts.ties, ties_wanted); }
};

// Candidates in the chunks of a task before one, from what the scan counted; every thread gets it. `first` is the
// number of its first chunk.
__device__ __forceinline__ Counts count_before(const SelectArguments& a, int first, int before, int threshold) {
    const int* totals = a.chunk_totals + static_cast<long long>(first) * SCORES;
    int above = 0, reached = 0;
    for (int chunk = threadIdx.x % WARP; chunk < before; chunk += WARP) {
        above += totals[chunk * SCORES + threshold + 1];
        reached += totals[chunk * SCORES + threshold];
    }
    const Counts sums = sum_of_warp(Counts{above, reached});
    return {sums.above, sums.ties - sums.above};
}

}  // namespace pariskv
}  // namespace kvseek
