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

constexpr int MOST_REQUESTS = 64;  // of a batch (BUCKETS of core/batch.py)

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
    float of_amount;          // units for each piece of work, by `divide`; 1 at most

    __device__ __forceinline__ int total() const { return ends[MOST_REQUESTS - 1]; }
    __device__ __forceinline__ int first_of(int request) const { return request ? ends[request - 1] : 0; }
    __device__ __forceinline__ int parts_of(int request) const { return ends[request] - first_of(request); }

    // A request has parts(request) units. Warps call this whole, one of them with `counts`; a barrier must follow.
    template <class Parts>
    __device__ __forceinline__ void count(const Request* requests, int batch, bool counts, const Parts& parts) {
        if (!counts) return;
        const int lane = threadIdx.x % WARP;
        int before = 0;
#pragma unroll 1
        for (int first = 0; first < MOST_REQUESTS;
             first += WARP) {  // instructions are fetched anew: few of them are faster
            int sum = before;
            if (first < batch) {
                const Request request = read(requests + min(first + lane, batch - 1));
                sum += sum_up_to_here(first + lane < batch ? parts(request) : 0, lane);
                before = __shfl_sync(EVERYONE, sum, WARP - 1);
            }
            ends[first + lane] = sum;
        }
    }

    // Divide work that a request has amount(request) of among `blocks` units, as evenly as whole units allow. A request
    // has at least one unit, if there is anything to do, and at most `most`; there must be as many blocks as requests.
    // All threads of the block call this; a barrier must follow.
    template <class Amount>
    __device__ __forceinline__ void divide(const Request* requests, int batch, int blocks, int most,
                                           const Amount& amount) {
        divide_two(requests, batch, blocks, most, amount, [](const Request&) { return 0; });
    }

    // The same of two kinds of work, amount(request) and other(request): units of the first kind come first, and there
    // must be as many blocks as requests have kinds of work.
    template <class Amount, class Other>
    __device__ __forceinline__ void divide_two(const Request* requests, int batch, int blocks, int most,
                                               const Amount& amount, const Other& other) {
        if (threadIdx.x >= WARP) return;
        const int lane = threadIdx.x;
        const Request request = read(requests + min(lane, batch - 1));
        const int low = lane < batch ? amount(request) : 0, low_other = lane < batch ? other(request) : 0;
        int high = 0, high_other = 0;
        if (batch > WARP) {
            const Request later = read(requests + min(WARP + lane, batch - 1));
            if (WARP + lane < batch) high = amount(later), high_other = other(later);
        }
        const int all = sum_of_warp(low + high + low_other + high_other);
        const int busy = sum_of_warp((low > 0) + (high > 0) + (low_other > 0) + (high_other > 0));
        // With units of this size there are fewer than busy + all / size of them, as each request rounds up.
        const float inverse =
            __fdividef(0.9999f * static_cast<float>(blocks - busy + 1), static_cast<float>(max(all, 1)));
        const float each = fminf(inverse, 1.0f);
        of_amount = each;
        const int parts = units_of(low, most, each) + units_of(low_other, most, each);
        const int later_parts = units_of(high, most, each) + units_of(high_other, most, each);
        const int sums = sum_up_to_here(parts | later_parts << 16, lane);  // at most 65,535 units
        ends[lane] = sums & 0xffff;
        ends[WARP + lane] = (__shfl_sync(EVERYONE, sums, WARP - 1) & 0xffff) + (sums >> 16);
    }

    // Units of an amount of one kind, with units for each piece of it as `divide` found.
    __device__ __forceinline__ static int units_of(int amount, int most, float of_amount) {
        return min(most, static_cast<int>(ceilf(static_cast<float>(amount) * of_amount)));
    }

    // The same of all threads, and the unit of a number.
    template <class Amount>
    __device__ __forceinline__ Unit divide(const Request* requests, int batch, int blocks, int most,
                                           const Amount& amount, int number) {
        if (batch == 1) {
            const int parts = min(most, blocks);
            return {0, number, parts, 0, number < parts && amount(requests[0]) > 0};
        }
        divide(requests, batch, blocks, most, amount);
        __syncthreads();
        return find(number);
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
    // All numbers of a request at once: one after the other would take longer.
    __device__ __forceinline__ static Request read(const Request* from) {
        constexpr int PARTS = sizeof(Request) / sizeof(uint4);
        uint4 parts[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) parts[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
        Request request;
        memcpy(&request, parts, sizeof(Request));
        return request;
    }
};

// An amount for Units::divide: the rows that a request selects among.
struct SelectionLength {
    __device__ __forceinline__ int operator()(const Request& request) const {
        return request.dense ? 0 : request.length;
    }
};

// Parts first .. last - 1 of `count` that part `index` of `parts` has to do; sizes differ by one at most.
struct Share {
    int first, last;
    __device__ __forceinline__ Share(int count, int parts, int index)
        : first(static_cast<int>(static_cast<unsigned>(count) * static_cast<unsigned>(index) /
                                 static_cast<unsigned>(parts))),
          last(static_cast<int>(static_cast<unsigned>(count) * static_cast<unsigned>(index + 1) /
                                static_cast<unsigned>(parts))) {}
};

// Whether this block is the last of `parts` to come here, which all of them do: it sees what the others wrote, past the
// L1 cache, and `arrivals` is 0 again. All threads of the block call this.
__device__ __forceinline__ bool arrive_last(int* arrivals, int parts) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {  // one thread's fences pass on what the barriers before and after it order
        __threadfence();
        last = atomicAdd(arrivals, 1) == parts - 1;
        if (last) *arrivals = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

}  // namespace kvseek
