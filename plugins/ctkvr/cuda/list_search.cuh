// The slow way to a list: one block computes the values of all keys for one centroid, on ordinary cores. It is for the
// few lists whose bound, from a sample, let too few or too many candidates through: no list depends on the sample.
#pragma once

#include "list_sum.cuh"

namespace kvseek {
namespace ctkvr {

constexpr int LIST_THREADS = 256;

using EntryMemory = NthMemory<11>;

// The entry of rank n, from 1 on, of `count`; no two are equal. Barriers before and after.
__device__ __noinline__ Entry nth_entry(const Entry* entries, int count, int n, EntryMemory& memory) {
    return nth_largest<LIST_THREADS, 11, const Entry*>(entries, count, n, memory);
}

struct SearchShared {
    float queries[GROUP][DIM];
    float factors[GROUP], logarithms[GROUP];
    int held;
};

// Value of a key: the largest logarithm of its weight in the group; what is no number is the least.
__device__ __forceinline__ float value_of_key(const Operand* key, const SearchShared& shared) {
    float products[GROUP] = {};
#pragma unroll 1
    for (int i = 0; i < DIM; i += 8) {
        Eight<Operand> numbers;
        numbers.load(key + i);
#pragma unroll
        for (int head = 0; head < GROUP; ++head)
#pragma unroll
            for (int j = 0; j < 8; ++j) products[head] = fmaf(numbers[j], shared.queries[head][i + j], products[head]);
    }
    float value = -INFINITE;
#pragma unroll
    for (int head = 0; head < GROUP; ++head)
        value = fmaxf(value, fmaf(products[head], shared.factors[head], -shared.logarithms[head]));
    return value;
}

__device__ __forceinline__ void load_centroid(const ListArguments& a, SearchShared& shared) {
    const long long rows = static_cast<long long>(gridDim.y) * GROUP * a.centroids;
    for (int i = threadIdx.x; i < GROUP * DIM; i += blockDim.x) {
        const long long head = static_cast<long long>(blockIdx.y) * GROUP + i / DIM;
        const long long number = head * a.query_stride + static_cast<long long>(blockIdx.x) * DIM + i % DIM;
        shared.queries[i / DIM][i % DIM] = to_float(static_cast<const Operand*>(a.queries)[number]);
    }
    if (threadIdx.x < GROUP) {
        const long long head = static_cast<long long>(blockIdx.y) * GROUP + threadIdx.x;
        shared.factors[threadIdx.x] = a.factors[head];
        shared.logarithms[threadIdx.x] = sum_logarithm(a.sums, a.parts, rows, head * a.centroids + blockIdx.x);
    }
    if (threadIdx.x == 0) shared.held = 0;
    __syncthreads();
}

// Move the entries that reach `bound` to the front, in any order: what a round writes lies before what later rounds
// read. Starts and ends with a wait for the block.
__device__ __forceinline__ void keep_entries(Entry* entries, int count, Entry bound, SearchShared& shared) {
    __syncthreads();
    if (threadIdx.x == 0) shared.held = 0;
    for (int first = 0; first < count; first += LIST_THREADS) {
        const int at = first + static_cast<int>(threadIdx.x);
        const Entry own = at < count ? entries[at] : 0;
        __syncthreads();  // everyone has read this round's entries
        if (at < count && own >= bound) entries[atomicAdd(&shared.held, 1)] = own;
    }
    __syncthreads();
}

// Leave at least the best rho entries of all keys in the buffer; returns how many it holds.
__device__ __noinline__ int search_keys(const ListArguments& a, Entry* buffer, SearchShared& shared, EntryMemory& nth) {
    const Operand* keys = static_cast<const Operand*>(a.keys) + blockIdx.y * a.head_stride;
    load_centroid(a, shared);
    Entry bound = 0;
    int held = 0;
    for (int first = 0; first < a.tokens; first += LIST_THREADS) {
        if (held + LIST_THREADS > a.capacity) {
            bound = nth_entry(buffer, held, a.rho, nth);
            keep_entries(buffer, held, bound, shared);
            held = a.rho;
        }
        const int place = first + static_cast<int>(threadIdx.x);
        const float value = place < a.tokens ? value_of_key(keys + place * a.key_stride, shared) : 0.0f;
        const Entry entry = sort_key(value, place);
        const bool wanted = place < a.tokens && entry >= bound;
        __syncthreads();
        if (wanted) buffer[atomicAdd(&shared.held, 1)] = entry;
        __syncthreads();
        held = shared.held;
    }
    return held;
}

}  // namespace ctkvr
}  // namespace kvseek
