// One pass over a row of logits: its log-sum-exp, and its largest logits with their places.
//
// Logits that beat the threshold gather in a buffer. When it would overflow, it is cut to the largest `rho` so far,
// whose smallest is the new threshold: later places must beat it, for ties go to the lowest place. In the order in
// which keys come, such a cut triples the row's share that is done, so a row of 128K logits needs about four.
#pragma once

#include <cuda_fp16.h>

#include "list_cut.cuh"
#include "plugins/common/instructions.cuh"
#include "plugins/common/numbers.cuh"

namespace kvseek {
namespace ctkvr {

constexpr int ROUNDS = 2;                 // 16-byte pieces of the row that a thread holds at once
constexpr int PIECE = 8;                  // logits of a piece
constexpr int VALUE_BITS = 16;            // of a logit's entry
constexpr unsigned LOWEST = 0xfc00fc00u;  // two logits of -infinity

// Bits of a logit that compare as unsigned integers; -0 is 0.
__device__ __forceinline__ unsigned ordered_half(unsigned bits) {
    bits &= 0xffffu;
    if (bits == 0x8000u) bits = 0;
    return (bits & 0x8000u ? ~bits : bits | 0x8000u) & 0xffffu;
}
__device__ __forceinline__ __half half_of(unsigned ordered) {
    return __ushort_as_half(static_cast<unsigned short>(ordered & 0x8000u ? ordered ^ 0x8000u : ~ordered));
}
__device__ __forceinline__ __half2 pair_of(unsigned word) {
    return *reinterpret_cast<const __half2*>(&word);
}

// Eight neighbouring logits; those from `tokens` on are -infinity.
struct Piece {
    unsigned words[4];

    __device__ __forceinline__ void load(const __half* row, int place, int tokens) {
        if (place >= tokens) {
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = LOWEST;
            return;
        }
        const uint4 bits = load_once_16(row + place);  // rows are padded to whole pieces
        words[0] = bits.x, words[1] = bits.y, words[2] = bits.z, words[3] = bits.w;
        if (place + PIECE <= tokens) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (place + 2 * i >= tokens)
                words[i] = LOWEST;
            else if (place + 2 * i + 1 >= tokens)
                words[i] = (words[i] & 0xffffu) | (LOWEST & 0xffff0000u);
        }
    }
    __device__ __forceinline__ int above(__half2 threshold) const {
        __half2 count = __float2half2_rn(0.0f);
#pragma unroll
        for (int i = 0; i < 4; ++i) count = __hadd2(count, __hgt2(pair_of(words[i]), threshold));
        return static_cast<int>(__low2float(count) + __high2float(count));
    }
    // Write those above the threshold to entries[at ...]; returns the end.
    __device__ __forceinline__ int append(__half2 threshold, int place, Entry* entries, int at) const {
        const __half bound = __low2half(threshold);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __half2 pair = pair_of(words[i]);
            if (__hgt(__low2half(pair), bound)) entries[at++] = make_entry(ordered_half(words[i]), place + 2 * i);
            if (__hgt(__high2half(pair), bound))
                entries[at++] = make_entry(ordered_half(words[i] >> 16), place + 2 * i + 1);
        }
        return at;
    }
};

// Sum of 2^(factor * logit) of the logits that a thread, and at last the block, has seen.
struct Softmax {
    float factor, largest = -INFINITE, sum = 0.0f;

    __device__ __forceinline__ explicit Softmax(float factor) : factor(factor) {}

    __device__ __forceinline__ void add(const Piece (&pieces)[ROUNDS]) {
        __half2 top = pair_of(pieces[0].words[0]);
#pragma unroll
        for (int i = 1; i < ROUNDS * 4; ++i) top = __hmax2(top, pair_of(pieces[i / 4].words[i % 4]));
        const float best = fmaxf(__low2float(top), __high2float(top));
        if (best == -INFINITE) return;  // all behind the row's end
        if (best > largest) {
            sum *= power_of_two((largest - best) * factor);
            largest = best;
        }
        const float bias = -largest * factor;
#pragma unroll
        for (int i = 0; i < ROUNDS * 4; ++i) {
            const float2 pair = __half22float2(pair_of(pieces[i / 4].words[i % 4]));
            sum += power_of_two(fmaf(pair.x, factor, bias)) + power_of_two(fmaf(pair.y, factor, bias));
        }
    }
    // Binary logarithm of the block's sum, the same in all threads. `scratch` has room for two numbers a warp.
    __device__ __forceinline__ float finish(float (&scratch)[2 * MOST_THREADS / WARP]) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
        __syncthreads();  // the last row's result has been read
        fold_warp();
        if (lane == 0) scratch[2 * warp] = largest, scratch[2 * warp + 1] = sum;
        __syncthreads();
        largest = lane < warps ? scratch[2 * lane] : -INFINITE;
        sum = lane < warps ? scratch[2 * lane + 1] : 0.0f;
        fold_warp();
        return fmaf(largest, factor, log2f(sum));
    }

  private:
    __device__ __forceinline__ void fold_warp() {
#pragma unroll
        for (int distance = WARP / 2; distance; distance /= 2) {
            const float other = __shfl_xor_sync(EVERYONE, largest, distance);
            const float other_sum = __shfl_xor_sync(EVERYONE, sum, distance);
            const float best = fmaxf(largest, other);
            if (best > -INFINITE)  // else neither has seen anything
                sum = sum * power_of_two((largest - best) * factor) + other_sum * power_of_two((other - best) * factor);
            largest = best;
        }
    }
};

// The buffer of a row's largest logits.
struct Stream {
    Entry* entries;  // [rho + slack + logits of a round], in shared memory
    int capacity, rho, slack, place_bits;
    int held = 0;
    __half2 threshold = __half2half2(__ushort_as_half(0xfc00));

    // The counters take turns, so that none is cleared while it is read: one wait for the block a batch.
    int (&wanted)[3];
    int turn = 0;
    CutShared& shared;

    __device__ __forceinline__ Stream(Entry* entries, int capacity, int rho, int slack, int place_bits,
                                      int (&wanted)[3], CutShared& shared)
        : entries(entries),
          capacity(capacity),
          rho(rho),
          slack(slack),
          place_bits(place_bits),
          wanted(wanted),
          shared(shared) {
        __syncthreads();  // the last row's counters have been read
        if (threadIdx.x == 0) wanted[0] = 0;
        __syncthreads();
    }

    // Take the next round of the row; `first` is the place of this thread's first piece, `step` that of the next one.
    __device__ __forceinline__ void add(const Piece (&pieces)[ROUNDS], int first, int step) {
        int count = 0, base;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) count += pieces[i].above(threshold);
        const int total = claim(count, base);
        if (held + total <= capacity) {
            if (count) {
                int at = held + base;
#pragma unroll
                for (int i = 0; i < ROUNDS; ++i) at = pieces[i].append(threshold, first + i * step, entries, at);
            }
            held += total;
            return;
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) add_piece(pieces[i], first + i * step);
    }

    // Cut to at most `keep + most_more` entries, the largest; those that there are if they are fewer.
    __device__ __forceinline__ void cut(int keep, int most_more) {
        if (held <= keep + most_more) return;
        const Entry bound = find_cut(entries, held, keep, most_more, 32 + VALUE_BITS, place_bits, shared);
        held = keep_entries(entries, held, bound, entries, shared);
        threshold = __half2half2(half_of(static_cast<unsigned>(bound >> 32)));
    }

  private:
    // Claim room for `count` entries of this thread: `base` is where they start among the block's, which it returns.
    __device__ __forceinline__ int claim(int count, int& base) {
        const int up_to_lane = sum_up_to_lane(count), next = turn == 2 ? 0 : turn + 1;
        base = 0;
        if (threadIdx.x % WARP == WARP - 1 && up_to_lane) base = atomicAdd(&wanted[turn], up_to_lane);
        base = __shfl_sync(EVERYONE, base, WARP - 1) + up_to_lane - count;
        if (threadIdx.x == 0) wanted[next] = 0;
        __syncthreads();
        const int total = wanted[turn];
        turn = next;
        return total;
    }
    // One piece of each thread fits when the buffer has been cut.
    __device__ __forceinline__ void add_piece(const Piece& piece, int place) {
        int count = piece.above(threshold), base;
        int total = claim(count, base);
        if (held + total > capacity) {
            cut(rho, slack);
            count = piece.above(threshold);
            total = claim(count, base);
        }
        if (count) piece.append(threshold, place, entries, held + base);
        held += total;
    }
};

}  // namespace ctkvr
}  // namespace kvseek
