// What the parts of PRKV's selection share: its arguments, and one (request, KV head) of it.
#pragma once

#include "kernels/cuda/power_sum.cuh"
#include "kernels/cuda/task.cuh"
#include "kernels/cuda/units.cuh"
#include "layout.cuh"

namespace kvseek {
namespace prkv {

// A "task" is a request and a KV head: request * kv_heads + head.
struct SelectArguments {
    const Number* queries;      // [batch, kv_heads * GROUP, HEAD_DIM]
    const Request* requests;    // [batch]
    const int* table;           // [slots, max_extents]
    const unsigned char* high;  // [extents, kv_heads, 1024, codes::FIELD] codes of 2 bits. This to signs: PRKV_CODES
    const __half* scales;       // [extents, kv_heads, 1024]
    const signed char* means;   // as in codes::Means
    const float* mean_steps;
    const float* signs;      // [codes::DIM]
    const int* statics;      // [slots, kv_heads, most_static] static tokens, ascending
    const int* static_rows;  // [slots] their number
    float* scores;           // [extents, kv_heads, PAGES_OF_EXTENT, LANES] of the pages
    PowerSum* normalisers;   // [kv_heads, CTAs, LANES] sums of the powers
    int* finished;           // [tasks] CTAs that are done; 0 between launches
    int* picked;             // [extents, kv_heads, PAGES_OF_EXTENT] selections of each page
    Number* recent;          // [slots, recent_queries, kv_heads * GROUP, HEAD_DIM] last queries
    int* rows;               // [batch, kv_heads, top_k] result
    int batch, kv_heads, max_extents, top_k, recent_queries, most_static;
    float scaling;  // softmax scale
    int block_bits;
    // Last, so that the kernel is the same with PRKV_CODES whether these fields exist or not.
    float near, far;      // (1 ± box_radius) / 2: what q times a box's nearer and farther number counts
    const Number* boxes;  // [extents, kv_heads, PAGES_OF_EXTENT, 2, HEAD_DIM]; not read with PRKV_CODES
};

#ifdef PRKV_CODES
// Whether a row is static, by the bits of its scale (CudaCodes in device.py).
__device__ __forceinline__ bool is_static(unsigned short scale) {
    return scale & 0x8000;
}
#endif

struct Task : TaskOf<SelectArguments> {
    using TaskOf::TaskOf;

    __device__ __forceinline__ int pages() const { return (request.length + PAGE - 1) / PAGE; }
    __device__ __forceinline__ int static_rows(const SelectArguments& a) const { return a.static_rows[request.slot]; }
    __device__ __forceinline__ const int* statics(const SelectArguments& a) const {
        return a.statics + (static_cast<long long>(request.slot) * a.kv_heads + head) * a.most_static;
    }
#ifdef PRKV_CODES
    // The first page, and the token at a place of a page, or -1 for none that counts. Places are tokens, of which the
    // static ones are marked.
    __device__ __forceinline__ int first_page(const SelectArguments&) const { return 0; }
    __device__ __forceinline__ int token(const SelectArguments& a, int place) const {
        if (place >= request.length) return -1;
        return is_static(reinterpret_cast<const unsigned short*>(a.scales)[row(a, place)]) ? -1 : place;
    }
#else
    // The same. Static tokens have the first places, the others follow.
    __device__ __forceinline__ int first_page(const SelectArguments& a) const { return static_rows(a) / PAGE; }
    __device__ __forceinline__ int token(const SelectArguments& a, int place) const {
        if (place >= request.length) return -1;
        const int* list = statics(a);
        const int behind = place - static_rows(a);
        int low = 0, high = static_rows(a);  // static tokens before the token: those with list[i] - i <= behind
        while (low < high) {
            const int middle = (low + high) / 2;
            if (list[middle] - middle <= behind)
                low = middle + 1;
            else
                high = middle;
        }
        return behind + low;
    }
#endif
    __device__ __forceinline__ long long entry(const SelectArguments& a, int page) const {
        return page_entry(table, a.kv_heads, head, page);
    }
    // Query of the group's first head.
    __device__ __forceinline__ const Number* queries(const SelectArguments& a) const {
        return a.queries + static_cast<long long>(number) * GROUP * DIM;
    }
};

// Sum of powers of two of several numbers, relative to the largest: what a softmax divides by.
struct RelativeSum {
    float largest = -INFINITE, sum = 0.0f;

    __device__ __forceinline__ void add(float other_largest, float other_sum) {
        const float both = fmaxf(fmaxf(largest, other_largest), -1e30f);  // no number yet: -infinity
        sum = sum * power_of_two(largest - both) + other_sum * power_of_two(other_largest - both);
        largest = both;
    }
    // With that of the lane whose number differs by `mask`.
    __device__ __forceinline__ void add_lane(int mask) {
        const float other = __shfl_xor_sync(EVERYONE, largest, mask);
        const float other_sum = __shfl_xor_sync(EVERYONE, sum, mask);
        add(other, other_sum);
    }
};

}  // namespace prkv
}  // namespace kvseek
