// What the observation window attends to (PRKV paper, section 4.1): the softmax weight of each key, averaged over the
// window's queries and the heads of a group.
//
// Two passes over the keys, neither of which writes products: the first finds what each query's softmax divides by, the
// second adds up the weights of a key. The warps of a block hold the queries of a group in registers, and keys pass
// through shared memory, as in attention without values.
#include "select.cuh"

#include "window_rows.cuh"

namespace kvseek {
namespace prkv {

// A "row" is a query of the window: head of the group * window + query.
struct ObserveArguments {
    const Number* keys;         // [kv_heads, count, HEAD_DIM], strided
    const Number* queries;      // [kv_heads * GROUP, window, HEAD_DIM], strided
    const int* valid;           // [kv_heads] keys that count, the first ones; null: all
    float2* parts;              // [kv_heads, chunks, rows] largest exponent, sum of the powers relative to it
    float* scores;              // [kv_heads, count] result; -1 for keys that do not count
    long long key_head_stride;  // numbers from one KV head to the next
    long long key_stride;       // numbers from one key to the next
    long long query_head_stride;
    long long query_stride;
    int count, window;
    float scaling;  // softmax scale
};

// The keys that a block takes.
struct BlockKeys {
    int head, rows, limit, first, last;
    const Number* keys;

    __device__ __forceinline__ explicit BlockKeys(const ObserveArguments& a)
        : head(blockIdx.y), rows(GROUP * a.window), limit(a.valid ? a.valid[blockIdx.y] : a.count) {
        const int chunks = gridDim.x, even = (limit + chunks - 1) / chunks, share = (even + KEYS - 1) / KEYS * KEYS;
        first = min(static_cast<int>(blockIdx.x) * share, limit), last = min(first + share, limit);
        keys = a.keys + head * a.key_head_stride;
    }
    __device__ __forceinline__ float2* parts(const ObserveArguments& a, int chunk) const {
        return a.parts + (static_cast<long long>(head) * gridDim.x + chunk) * rows;
    }
};

struct ObserveMemory {
    KeyBlock blocks[2];
    float normalisers[BLOCK_ROWS];       // log2 of what the softmax of each row divides by
    float weights[OBSERVE_WARPS][KEYS];  // of each key, over a warp's rows
};

// Let the share's keys pass by in blocks: use(first key, products of 8 keys with the warp's rows, number of the eight),
// then after(first key of the block). Ends with a barrier.
template <class Use, class After>
__device__ __forceinline__ void pass_by(const ObserveArguments& a, const BlockKeys& share, const WindowRows& rows,
                                        ObserveMemory& memory, const Use& use, const After& after) {
    int current = 0;
    if (share.first < share.last) memory.blocks[0].load(share.keys, a.key_stride, share.first, share.last);
    close_copy_group();
    for (int first = share.first; first < share.last; first += KEYS) {
        if (first + KEYS < share.last)
            memory.blocks[1 - current].load(share.keys, a.key_stride, first + KEYS, share.last);
        close_copy_group();
        await_copy_groups<1>();
        __syncthreads();
#pragma unroll
        for (int eight = 0; eight < KEYS / 8; ++eight) {
            float products[ROW_TILES][4] = {};
            rows.multiply(products, memory.blocks[current], eight);
            use(first + 8 * eight, products, eight);
        }
        __syncthreads();
        after(first);
        current = 1 - current;
    }
    __syncthreads();
}

}  // namespace prkv
}  // namespace kvseek

// grid: chunks, kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::prkv::OBSERVE_THREADS)
    kvseek_prkv_normalise(const __grid_constant__ kvseek::prkv::ObserveArguments a) {
    using namespace kvseek;
    using namespace kvseek::prkv;
    __shared__ ObserveMemory memory;
    const BlockKeys share(a);
    const int t = threadIdx.x % 4;
    const float exponent_scale = a.scaling * LOG2_E;
    for (int first_row = 0; first_row < share.rows; first_row += BLOCK_ROWS) {
        const WindowRows rows(a.queries + static_cast<long long>(share.head) * GROUP * a.query_head_stride,
                              a.query_head_stride, a.query_stride, a.window, first_row, share.rows);
        RelativeSum sums[ROW_TILES][2];
        pass_by(
            a, share, rows, memory,
            [&](int key, const float (&products)[ROW_TILES][4], int) {
                const int left = share.last - key - 2 * t;  // of this thread's two keys
#pragma unroll
                for (int i = 0; i < 2 * ROW_TILES; ++i) {
                    const float* own = products[i / 2] + i % 2 * 2;
                    const float x = left > 0 ? own[0] * exponent_scale : -INFINITE;
                    const float y = left > 1 ? own[1] * exponent_scale : -INFINITE;
                    const float both = fmaxf(fmaxf(x, y), -1e30f);
                    sums[i / 2][i % 2].add(both, power_of_two(x - both) + power_of_two(y - both));
                }
            },
            [](int) {});
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {
            RelativeSum& sum = sums[i / 2][i % 2];
            sum.add_lane(1), sum.add_lane(2);
            const int row = first_row + WindowRows::row(i / 2, i % 2);
            if (t == 0 && row < share.rows) share.parts(a, blockIdx.x)[row] = make_float2(sum.largest, sum.sum);
        }
    }
}

// grid: chunks, kv_heads; as many chunks as before
extern "C" __global__ void __launch_bounds__(kvseek::prkv::OBSERVE_THREADS)
    kvseek_prkv_observe(const __grid_constant__ kvseek::prkv::ObserveArguments a) {
    using namespace kvseek;
    using namespace kvseek::prkv;
    __shared__ ObserveMemory memory;
    const BlockKeys share(a);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float exponent_scale = a.scaling * LOG2_E;
    float* scores = a.scores + static_cast<long long>(share.head) * a.count;
    for (int first_row = 0; first_row < share.rows; first_row += BLOCK_ROWS) {
        for (int i = threadIdx.x; i < BLOCK_ROWS; i += OBSERVE_THREADS) {
            RelativeSum sum;
            for (int chunk = 0; chunk < gridDim.x && first_row + i < share.rows; ++chunk) {
                const float2 part = share.parts(a, chunk)[first_row + i];
                sum.add(part.x, part.y);
            }
            memory.normalisers[i] = first_row + i < share.rows ? sum.largest + log2f(sum.sum) : INFINITE;
        }
        __syncthreads();
        const WindowRows rows(a.queries + static_cast<long long>(share.head) * GROUP * a.query_head_stride,
                              a.query_head_stride, a.query_stride, a.window, first_row, share.rows);
        float normalisers[ROW_TILES][2];
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i)
            normalisers[i / 2][i % 2] = memory.normalisers[WindowRows::row(i / 2, i % 2)];
        pass_by(
            a, share, rows, memory,
            [&](int, const float (&products)[ROW_TILES][4], int eight) {
                float weights[2] = {};
#pragma unroll
                for (int i = 0; i < 4 * ROW_TILES; ++i)
                    weights[i % 2] +=
                        power_of_two(__fmaf_rn(products[i / 4][i % 4], exponent_scale, -normalisers[i / 4][i % 4 / 2]));
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) {
                    weights[0] += __shfl_xor_sync(EVERYONE, weights[0], mask);
                    weights[1] += __shfl_xor_sync(EVERYONE, weights[1], mask);
                }
                if (lane < 4) {
                    memory.weights[warp][8 * eight + 2 * lane] = weights[0];
                    memory.weights[warp][8 * eight + 2 * lane + 1] = weights[1];
                }
            },
            [&](int first) {
                const int key = first + threadIdx.x;
                if (threadIdx.x >= KEYS || key >= share.last) return;
                float sum = first_row ? scores[key] : 0.0f;
#pragma unroll
                for (int i = 0; i < OBSERVE_WARPS; ++i) sum += memory.weights[i][threadIdx.x];
                scores[key] = first_row + BLOCK_ROWS < share.rows ? sum : sum / share.rows;
            });
    }
    for (int key = share.limit + blockIdx.x * OBSERVE_THREADS + threadIdx.x; key < a.count;
         key += gridDim.x * OBSERVE_THREADS)
        scores[key] = -1.0f;
}
