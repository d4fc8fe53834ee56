// Attention of one decode step over the window and the retrieval rows, read where they lie, in one launch.
//
// Grid: x = splits of the rows, y = KV head (and tile of its query heads), z = request. How the rows are split depends
// on what is fixed when a graph is captured; how many there are is read from the request. CTAs without rows leave at
// once. The last CTA of a head tile merges the partial results. kernels/cuda/attention/README.md says why it is built
// so.
#include "kernels/cuda/attention/attend_merge.cuh"
#include "kernels/cuda/overlap.cuh"
#if KVSEEK_DTYPE == 0
#include "kernels/cuda/attention/attend_scalar.cuh"
#else
#include "kernels/cuda/attention/attend_tensor.cuh"
#endif

namespace kvseek {
namespace attention {

#if KVSEEK_DTYPE == 0
using Warp = ScalarWarp;
constexpr int RESIDENT_CTAS = 2;
#else
using Warp = TensorWarp;
constexpr int RESIDENT_CTAS = DIM <= 128 ? 3 : 2;
#endif

// What the CTA's dynamic shared memory holds, in turn.
union Shared {
    Number rings[SHARED_BYTES / sizeof(Number)];
    float outputs[Warp::REGISTERS * LANE_STRIDE];
    float weights[MAX_SPLITS * TILE];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "splits.py asks for as much");

struct Range {
    int begin = 0, end = 0;
    __device__ bool empty() const { return begin >= end; }
};

// The part of `rows` rows that split `split` of `splits` takes, in whole multiples of `unit`.
__device__ __forceinline__ Range share_of(int rows, int split, int splits, int unit) {
    const int share = ((rows + splits - 1) / splits + unit - 1) / unit * unit;
    return {min(split * share, rows), min(split * share + share, rows)};
}

}  // namespace attention
}  // namespace kvseek

extern "C" __global__ void __launch_bounds__(kvseek::attention::THREADS, kvseek::attention::RESIDENT_CTAS)
    kvseek_attend(const __grid_constant__ kvseek::AttendArguments a) {
    using namespace kvseek;
    using namespace kvseek::attention;
    extern __shared__ __align__(16) unsigned char dynamic_memory[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_memory);
    const Request request = a.requests[blockIdx.z];  // was uploaded before the step
    const Place place{static_cast<int>(blockIdx.z), request.slot, static_cast<int>(blockIdx.y) / TILES,
                      static_cast<int>(blockIdx.y) % TILES, request.length};
    const int split = blockIdx.x, window_split = split - a.retrieval_splits;
    const int window_rows = request.sink_rows + request.ring_rows;
    const bool dense = request.dense || !a.selected || !request.length;
    // A selection lets this kernel start when it has itself waited for the kernel that wrote queries and window, so
    // that blocks of the window need not wait for the selected rows. They wait before they write; a second wait costs
    // nothing.
    if (!a.selected || window_split < 0) await_earlier_kernels();
    allow_later_kernels();

    Range range;
    if (window_split >= 0)
        range = share_of(window_rows, window_split, gridDim.x - a.retrieval_splits, PASS);
    else if (dense)
        range = share_of(request.length, split, a.retrieval_splits, PASS);
    else if (split < a.selected_splits)
        range = share_of(a.entries, split, a.selected_splits, TILE_ROWS);

    bool has_rows = false;
    if (!range.empty()) {
        Warp warp(a, place);
        if (window_split >= 0)
            warp.stream(WindowRows(a, request, place.kv_head), range.begin, range.end, a.scale, shared.rings);
        else if (dense)
            warp.stream(PoolRows(a, place), range.begin, range.end, a.scale, shared.rings);
        else
            warp.gather(SelectedRows(a, request, place), range.begin, range.end, a.scale, shared.rings);
        await_earlier_kernels();
        has_rows = __syncthreads_or(warp.has_rows());
        if (has_rows) publish(a, place, warp, shared.outputs);
    }
    await_earlier_kernels();
    if (!has_rows) publish_nothing(a, place);
    if (arrive_last(a, place)) merge_partials(a, place, shared.weights);
}
