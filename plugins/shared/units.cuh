// Hands out the work of a batch to the blocks of a launch.
//
// A launch in a captured graph has the same blocks at every replay, and requests of other lengths. So work is cut into
// units that are numbered over the whole batch, in the order of its requests; how many a request has is computed from
// its numbers by every block, and a block finds out whose its unit is. Requests that have none cost nothing. KV heads
// have the same units, and rows of blocks of their own: blockIdx.y.
#pragma once

#include "batch.cuh"
#include "warp.cuh"

namespace kvseek {

constexpr int MOST_REQUESTS = 64;  // of a batch (BUCKETS of plugins/batch.py)

// One unit: a part of the work of a request and KV head.
struct Unit {
    int request;
    int part, parts;  // of the request
    int first;        // number of the unit that is the request's part 0
    bool exists;      // false: there are fewer units; the other numbers are then those of some request
};

// Units of all requests of a batch, in shared memory.
struct Units {
    int ends[MOST_REQUESTS];  // units of each request and of those before it

    __device__ __forceinline__ int total() const { return ends[MOST_REQUESTS - 1]; }
    __device__ __forceinline__ int first_of(int request) const { return request ? ends[request - 1] : 0; }
    __device__ __forceinline__ int parts_of(int request) const { return ends[request] - first_of(request); }

    // A request has parts(request) units. Warps call this whole, one of them with `counts`; a barrier must follow.
    template <class Parts>
    __device__ __forceinline__ void count(const Request* requests, int batch, bool counts, const Parts& parts) {
        if (!counts) return;
        const Pair pair(requests, batch);
        if (batch == 1)
            fill(parts(pair.low));
        else
            store(pair.has_low ? parts(pair.low) : 0, pair.has_high ? parts(pair.high) : 0);
    }

    // Divide work that a request has amount(request) of among `blocks` units, as evenly as whole units allow. A request
    // has at least one unit, if there is anything to do, and at most `most`; there must be as many blocks as requests.
    // All threads of the block call this; a barrier must follow.
    template <class Amount>
    __device__ __forceinline__ void divide(const Request* requests, int batch, int blocks, int most,
                                           const Amount& amount) {
        if (threadIdx.x >= WARP) return;
        const Pair pair(requests, batch);
        if (batch == 1) {
            fill(amount(pair.low) > 0 ? min(most, blocks) : 0);
            return;
        }
        const int low = pair.has_low ? amount(pair.low) : 0, high = pair.has_high ? amount(pair.high) : 0;
        const float all = sum_of_warp(static_cast<float>(low) + static_cast<float>(high));
        const int busy = sum_of_warp((low > 0) + (high > 0));
        // With units of this size there are fewer than busy + all / size of them, as each request rounds up.
        const float each =
            __fdividef(static_cast<float>(blocks - busy + 1), fmaxf(all, 1.0f)) * 0.9999f;  // a size's inverse
        store(min(most, static_cast<int>(ceilf(low * fminf(each, 1.0f)))),
              min(most, static_cast<int>(ceilf(high * fminf(each, 1.0f)))));
    }

    // The unit of this number. Warps call it whole.
    __device__ __forceinline__ Unit find(int number) const {
        const int lane = threadIdx.x % WARP;
        const int request = __popc(__ballot_sync(EVERYONE, ends[lane] <= number)) +
                            __popc(__ballot_sync(EVERYONE, ends[WARP + lane] <= number));
        if (request == MOST_REQUESTS) return {0, 0, 1, 0, false};
        const int first = first_of(request);
        return {request, number - first, ends[request] - first, first, true};
    }

  private:
    // The requests `lane` and WARP + lane, read whole and at once: one number after the other would take longer.
    struct Pair {
        Request low, high;
        bool has_low, has_high;

        __device__ __forceinline__ Pair(const Request* requests, int batch) {
            const int lane = threadIdx.x % WARP;
            has_low = lane < batch, has_high = WARP + lane < batch;
            read(requests + min(lane, batch - 1), low);
            high = low;
            if (batch > WARP) read(requests + min(WARP + lane, batch - 1), high);
        }
        __device__ __forceinline__ static void read(const Request* from, Request& to) {
            uint4 parts[sizeof(Request) / sizeof(uint4)];
#pragma unroll
            for (int i = 0; i < static_cast<int>(sizeof(Request) / sizeof(uint4)); ++i)
                parts[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
            memcpy(&to, parts, sizeof(Request));
        }
    };

    // One request has all units, by one warp.
    __device__ __forceinline__ void fill(int all) {
        const int lane = threadIdx.x % WARP;
        ends[lane] = all, ends[WARP + lane] = all;
    }
    // Units of requests `lane` and WARP + lane, by one warp.
    __device__ __forceinline__ void store(int low, int high) {
        const int lane = threadIdx.x % WARP, low_sum = sum_up_to_here(low, lane), high_sum = sum_up_to_here(high, lane);
        ends[lane] = low_sum;
        ends[WARP + lane] = __shfl_sync(EVERYONE, low_sum, WARP - 1) + high_sum;
    }
};

}  // namespace kvseek
