// Attention of one decode step over the window and the retrieval rows, read where they lie, in one launch.
//
// The rows of a list, a (request, KV head) and a tile of its query heads, are cut into units by what the request alone
// says: so a list is summed in the same order in any batch. The CTAs of the launch, as many as the GPU holds, take the
// units of all lists in turn. The last CTA of a list merges its partial results. kernels/cuda/attention/README.md says
// why it is built so.
#include "kernels/cuda/attention/attend_merge.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/units.cuh"
#if KVSEEK_DTYPE == 0
#if KVSEEK_ROUNDED_ROWS
#error "KVSEEK_ROUNDED_ROWS needs 16-bit numbers"
#endif
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
static_assert(sizeof(Shared) == SHARED_BYTES, "attend.py asks for as much");

struct Range {
    int begin, end;
    __device__ bool empty() const { return begin >= end; }
};

// Rows of a list, cut into parts of `size` rows.
struct Cut {
    int rows, size;

    __device__ __forceinline__ int parts() const { return (rows + size - 1) / size; }
    __device__ __forceinline__ Range part(int number) const { return {number * size, min(number * size + size, rows)}; }
};

// The least multiple of `unit` that is at least `rows` divided by `parts`.
__device__ __forceinline__ int share_of(int rows, int parts, int unit) {
    return ((rows + parts - 1) / parts + unit - 1) / unit * unit;
}

__device__ __forceinline__ Cut cut_window(const Request& request) {
    const int rows = request.sink_rows + request.ring_rows;
    return {rows, max(WINDOW_ROWS, share_of(rows, MAX_WINDOW_SPLITS, PASS))};
}

__device__ __forceinline__ bool is_dense(const AttendArguments& a, const Request& request) {
    return request.dense || !a.selected || !request.length;
}

__device__ __forceinline__ Cut cut_retrieval(const AttendArguments& a, const Request& request) {
    if (!is_dense(a, request)) return {a.entries, a.selected_rows};
    return {request.length, max(a.dense_rows, share_of(request.length, a.dense_splits, PASS))};
}

// The units of a batch: those of all windows, then those of all retrieval rows. A list has one in its window at least,
// so that one without any row has its output written.
struct Work {
    Units window, retrieval;

    __device__ __forceinline__ void count(const AttendArguments& a) {
        const int warp = threadIdx.x / WARP;
        window.count(a.requests, a.batch, warp == 0, [](const Request& r) { return max(1, cut_window(r).parts()); });
        retrieval.count(a.requests, a.batch, warp == 1, [&](const Request& r) { return cut_retrieval(a, r).parts(); });
        __syncthreads();
    }
    __device__ __forceinline__ int total() const { return window.total() + retrieval.total(); }
};

}  // namespace attention
}  // namespace kvseek

// grid: any number of CTAs for each list of a request
extern "C" __global__ void __launch_bounds__(kvseek::attention::THREADS, kvseek::attention::RESIDENT_CTAS)
    kvseek_attend(const __grid_constant__ kvseek::AttendArguments a) {
    using namespace kvseek;
    using namespace kvseek::attention;
    extern __shared__ __align__(16) unsigned char dynamic_memory[];
    __shared__ Work work;
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_memory);
    work.count(a);  // requests were uploaded before the step
    allow_later_kernels();
    // The windows' units are the smaller ones, and come last, unless rows are selected: a selection lets this kernel
    // start when it has itself waited for the kernel that wrote queries and window, so that windows need not wait for
    // the selected rows. They wait before they write; a second wait costs nothing.
    for (int turn = 0;; ++turn) {
        // The larger units come first: who had one of the last of them in a turn has one of the last in the next.
        const bool backwards = !a.selected && turn % 2 != 0;
        const int number = static_cast<int>(turn * gridDim.x + (backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x));
        if (number >= work.total()) break;
        const int place_in_windows = a.selected ? number : number - work.retrieval.total();
        const bool in_window = place_in_windows >= 0 && place_in_windows < work.window.total();
        const Unit unit = in_window ? work.window.find(place_in_windows)
                                    : work.retrieval.find(a.selected ? number - work.window.total() : number);
        const Request& request = a.requests[unit.request];
        const int list = blockIdx.y, retrieval_units = work.retrieval.parts_of(unit.request);
        Place place{unit.request, request.slot, list / TILES, list % TILES, request.length};
        place.units = work.window.parts_of(unit.request) + retrieval_units;
        place.first = list * a.most_units + work.window.first_of(unit.request) + work.retrieval.first_of(unit.request);
        place.unit = place.first + unit.part + (in_window ? retrieval_units : 0);
        const Range range = (in_window ? cut_window(request) : cut_retrieval(a, request)).part(unit.part);
        if (!in_window || !a.selected) await_earlier_kernels();

        bool has_rows = false;
        if (!range.empty()) {
            Warp warp(a, place);
            if (in_window)
                warp.stream(WindowRows(a, request, place.kv_head), range.begin, range.end, a.scale, shared.rings);
            else if (is_dense(a, request))
                warp.stream(PoolRows(a, place), range.begin, range.end, a.scale, shared.rings);
            else
                warp.gather(SelectedRows(a, request, place), range.begin, range.end, a.scale, shared.rings);
            await_earlier_kernels();
            has_rows = __syncthreads_or(warp.has_rows());
            if (has_rows) publish(a, place, warp, shared.outputs);
        }
        await_earlier_kernels();
        if (!has_rows) publish_nothing(a, place);
        // True in one CTA of a list: the one that publishes last.
        int* arrivals = a.arrivals + (place.request * a.kv_heads + place.kv_head) * TILES + place.tile;
        if (arrive_last(arrivals, place.units)) merge_partials(a, place, shared.weights);
        __syncthreads();  // before the next unit's rows replace what this one has in shared memory
    }
    await_earlier_kernels();
}
