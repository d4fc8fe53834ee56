// Hands out the work of a batch to the blocks of a launch.
//
// A launch in a captured graph has the same blocks at every replay, and requests of other lengths. So work is cut into
// units that are numbered over the whole batch, in the order of its requests; how many a request has is computed from
// its numbers by every block, and a block finds out whose its unit is. Requests that have none cost nothing.
#pragma once

#include "batch.cuh"
#include "warp.cuh"

namespace kvseek {

constexpr int MOST_REQUESTS = 64;  // of a batch (BUCKETS of plugins/batch.py)

// One unit: a part of the work of a (request, KV head).
struct Unit {
    int request, head;
    int part, parts;  // of the request and KV head
    int first;        // number of the unit that is its part 0
    bool exists;      // false: there are fewer units; the other numbers are those of some request, without parts

    // The (request, KV head), as arrays [batch, kv_heads, ...] count them.
    __device__ __forceinline__ int task(int heads) const { return request * heads + head; }
};

// Units of all requests of a batch, in shared memory. Neighbouring numbers are parts of one KV head, then come the
// next head's.
struct Units {
    int ends[MOST_REQUESTS];  // units of each request and of those before it

    __device__ __forceinline__ int total() const { return ends[MOST_REQUESTS - 1]; }
    __device__ __forceinline__ int first_of(int request) const { return request ? ends[request - 1] : 0; }
    __device__ __forceinline__ int parts_of(int request, int heads) const {
        return (ends[request] - first_of(request)) / heads;
    }

    // A request has parts(request) units for each of `heads` heads. All threads of the block call this.
    template <class Parts>
    __device__ __forceinline__ void count(const Request* requests, int batch, int heads, const Parts& parts) {
        if (threadIdx.x < WARP) {
            const int lane = threadIdx.x;
            store(lane < batch ? heads * parts(requests[lane]) : 0,
                  WARP + lane < batch ? heads * parts(requests[WARP + lane]) : 0);
        }
        __syncthreads();
    }

    // Divide work that a request has amount(request) of, for each of `heads` heads, as evenly among `blocks` units as
    // whole units allow: all units but the last one of a head are of one size. A head has at least one unit, if there
    // is anything to do, and at most `most`; there must be as many blocks as heads of requests. All threads of the
    // block call this.
    template <class Amount>
    __device__ __forceinline__ void divide(const Request* requests, int batch, int heads, int blocks, int most,
                                           const Amount& amount) {
        if (threadIdx.x < WARP) {
            const int lane = threadIdx.x;
            const int low = lane < batch ? amount(requests[lane]) : 0;
            const int high = WARP + lane < batch ? amount(requests[WARP + lane]) : 0;
            const float all = sum_of_warp(static_cast<float>(low) + static_cast<float>(high)) * heads;
            const int busy = heads * sum_of_warp((low > 0) + (high > 0));
            // With units of this size there are fewer than busy + all / size of them, as each head rounds up.
            const float size = fmaxf(all / static_cast<float>(blocks - busy + 1), 1.0f) * 1.0001f;
            store(heads * min(most, static_cast<int>(ceilf(low / size))),
                  heads * min(most, static_cast<int>(ceilf(high / size))));
        }
        __syncthreads();
    }

    // The unit of this number. Warps call it whole.
    __device__ __forceinline__ Unit find(int number, int heads) const {
        const int lane = threadIdx.x % WARP;
        const int request = __popc(__ballot_sync(EVERYONE, ends[lane] <= number)) +
                            __popc(__ballot_sync(EVERYONE, ends[WARP + lane] <= number));
        if (request == MOST_REQUESTS) return {0, 0, 0, 1, 0, false};
        Unit unit = of(request, (number - first_of(request)) / parts_of(request, heads), heads);
        unit.part = number - unit.first;
        return unit;
    }

    // Part 0 of a head of a request that has any.
    __device__ __forceinline__ Unit of(int request, int head, int heads) const {
        const int parts = parts_of(request, heads);
        return {request, head, 0, parts, first_of(request) + head * parts, true};
    }

  private:
    // Units of requests `lane` and WARP + lane, by one warp.
    __device__ __forceinline__ void store(int low, int high) {
        const int lane = threadIdx.x, low_sum = sum_up_to_here(low, lane), high_sum = sum_up_to_here(high, lane);
        ends[lane] = low_sum;
        ends[WARP + lane] = __shfl_sync(EVERYONE, low_sum, WARP - 1) + high_sum;
    }
};

}  // namespace kvseek
