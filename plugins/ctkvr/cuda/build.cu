// Lists of the centroids: attention weights, maximum over the group, largest rho keys (CTkvr paper, algorithm 1).
//
// Scores are computed twice and never stored. The first pass over the keys sums the softmax of each query. The second
// finds the keys whose value, the largest logarithm of their weight in the group, reaches a bound: an entry of a sample
// of the keys, which a short pass has listed before. Nearly twice as many keys reach it as a list holds.
#include "list_sum.cuh"

namespace kvseek {
namespace ctkvr {

// Candidates of a warp on their way to their centroids: 32 at a time, for each waits for its centroid's count.
struct Outbox {
    Entry entries[2 * WARP];
    int centroids[2 * WARP];
};

struct Sender {
    const ListArguments& a;
    Outbox& box;
    int held = 0;

    // Take the entries of the lanes that have one.
    __device__ __forceinline__ void add(bool sends, Entry entry, int centroid) {
        const unsigned senders = __ballot_sync(EVERYONE, sends), below = (1u << threadIdx.x % WARP) - 1;
        if (sends) {
            const int at = held + __popc(senders & below);
            box.entries[at] = entry, box.centroids[at] = centroid;
        }
        held += __popc(senders);
        if (held >= WARP) send(WARP);
    }
    // Write the last `count` <= 32 entries.
    __device__ __forceinline__ void send(int count) {
        const int lane = threadIdx.x % WARP;
        held -= count;
        __syncwarp();
        const bool sends = lane < count;
        const Entry entry = sends ? box.entries[held + lane] : 0;
        const long long centroid = sends ? box.centroids[held + lane] : 0;
        __syncwarp();
        if (!sends) return;
        const long long list = static_cast<long long>(blockIdx.y) * a.centroids + first_centroid() + centroid;
        const int at = atomicAdd(&a.counts[list], 1);
        if (at < a.capacity) a.candidates[list * a.capacity + at] = entry;
    }
};

// What a lane knows about its rows and centroids.
struct Values {
    float factors[LANE_ROWS], biases[LANE_ROWS];  // of a head that is padding, the bias is -infinity
    Entry bounds[LANE_CENTROIDS];
    float least[LANE_CENTROIDS];  // values of the bounds

    __device__ __forceinline__ explicit Values(const ListArguments& a) {
        const long long rows = static_cast<long long>(gridDim.y) * GROUP * a.centroids;
#pragma unroll
        for (int row = 0; row < LANE_ROWS; ++row) {
            const bool exists = row_exists(a, row);
            factors[row] = exists ? a.factors[blockIdx.y * GROUP + row_head(row)] : 0.0f;
            biases[row] = exists ? -sum_logarithm(a.sums, a.parts, rows, row_number(a, row)) : -INFINITE;
        }
#pragma unroll
        for (int i = 0; i < LANE_CENTROIDS; ++i) {
            const int centroid = first_centroid() + row_centroid(i * LANE_HEADS);
            // One line of lanes sends a centroid's candidates; the others have their part in the maximum alone.
            const bool sends = centroid < a.centroids && lane_line() % HEAD_LANES == 0;
            bounds[i] = ~Entry(0), least[i] = INFINITE;
            if (sends) bounds[i] = a.bounds[static_cast<long long>(blockIdx.y) * a.centroids + centroid];
            if (sends) least[i] = bounds[i] ? number_of(static_cast<unsigned>(bounds[i] >> 32)) : -INFINITE;
        }
    }
    // Largest logarithm of the weights of a key in the group of a centroid; what is no number is the least.
    __device__ __forceinline__ float largest(Products& products, int centroid, int column) const {
        float value = -INFINITE;
#pragma unroll
        for (int i = 0; i < LANE_HEADS; ++i) {
            const int row = centroid * LANE_HEADS + i;
            value = fmaxf(value, fmaf(product(products, row, column), factors[row], biases[row]));
        }
#pragma unroll
        for (int lanes = 1; lanes < HEAD_LANES; lanes *= 2)
            value = fmaxf(value, __shfl_xor_sync(EVERYONE, value, 4 * lanes));
        return value;
    }

  private:
    static __device__ __forceinline__ float number_of(unsigned ordered) {
        return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
    }
};

}  // namespace ctkvr
}  // namespace kvseek

// Sums of the softmax: grid (tiles of centroids, KV heads, parts of the keys).
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::PRODUCT_THREADS, 3)
    kvseek_ctkvr_sum(const __grid_constant__ kvseek::ctkvr::ListArguments a) {
    using namespace kvseek::ctkvr;
    extern __shared__ __align__(16) unsigned char dynamic_memory[];
    Softmax softmax(a);
    multiply_keys<false>(a, reinterpret_cast<Operand*>(dynamic_memory),
                         [&](Products& products, int first) { softmax.add(products, first, a.samples); });
    softmax.finish(a);
}

// Candidates among the sampled keys: grid (tiles of centroids, KV heads, parts of the keys, as many as one likes).
extern "C" __global__ void __launch_bounds__(kvseek::ctkvr::PRODUCT_THREADS, 3)
    kvseek_ctkvr_gather(const __grid_constant__ kvseek::ctkvr::ListArguments a) {
    using namespace kvseek::ctkvr;
    extern __shared__ __align__(16) unsigned char dynamic_memory[];
    __shared__ Outbox boxes[PRODUCT_WARPS];
    const Values values(a);
    Sender sender{a, boxes[threadIdx.x / WARP]};
    multiply_keys<true>(a, reinterpret_cast<Operand*>(dynamic_memory), [&](Products& products, int first) {
        float largest[LANE_CENTROIDS][LANE_KEYS];
        unsigned hits = 0;
#pragma unroll
        for (int i = 0; i < LANE_CENTROIDS; ++i)
#pragma unroll
            for (int column = 0; column < LANE_KEYS; ++column) {
                largest[i][column] = values.largest(products, i, column);
                hits |= static_cast<unsigned>(largest[i][column] >= values.least[i]) << (i * LANE_KEYS + column);
            }
        const unsigned wanted = __reduce_or_sync(EVERYONE, hits);
#pragma unroll
        for (int i = 0; i < LANE_CENTROIDS; ++i)
#pragma unroll
            for (int column = 0; column < LANE_KEYS; ++column) {
                const int bit = i * LANE_KEYS + column, sample = first + column_key(column);
                if ((wanted >> bit & 1) == 0) continue;
                const Entry entry = kvseek::sort_key(largest[i][column], sampled_place(a, sample));
                const bool sends = (hits >> bit & 1) != 0 && sample < a.samples && entry >= values.bounds[i];
                sender.add(sends, entry, row_centroid(i * LANE_HEADS));
            }
    });
    sender.send(sender.held);
}
