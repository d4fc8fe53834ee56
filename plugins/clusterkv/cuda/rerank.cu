// ClusterKV with a rerank by codes, last kernel of a selection: of the rows of the best clusters, which `choose` has
// listed as candidates, the best top_k by estimates of q·k from nested key codes. They keep the order of the list.
//
// The blocks of a task share its candidates. Each estimates its own; the last one to finish ranks all of them.
#if CLUSTERKV_RERANK_BITS
#include "kernels/cuda/codes/rank.cuh"
#include "kernels/cuda/units.cuh"
#include "select.cuh"

namespace kvseek {
namespace clusterkv {
namespace reranking {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int HELD = 4096;       // candidates whose keys lie in shared memory; those of more are computed when needed
constexpr int DIGIT_BITS = 11;   // of nth_largest
constexpr int MOST_BLOCKS = 16;  // of a task (device.py); a warp adds up what they have
using Ranking = codes::Ranking<CLUSTERKV_RERANK_BITS, QUERY_LANES, THREADS>;

// A "task" is a request and a KV head: request * kv_heads + head.
struct RerankArguments {
    const Number* queries;      // [batch, kv_heads * GROUP_HEADS, KEY_DIM]
    const Request* requests;    // [batch]
    const int* table;           // [slots, max_extents]
    const unsigned char* high;  // [extents, kv_heads, 1024, FIELD]
    const unsigned char* low;   // the same; not read if codes have 2 bits
    const __half* scales;       // [extents, kv_heads, 1024]
    const signed char* means;   // as in codes::Means
    const float* mean_steps;
    const float* signs;     // [DIM]
    const int* candidates;  // [tasks, listed] places of the best clusters, as many as the region has at most
    float* estimates;       // [tasks, listed, QUERY_LANES]
    PowerSum* normalisers;  // [kv_heads, blocks, QUERY_LANES] sums of the powers
    int* finished;          // [tasks] blocks that are done; zeros between selections
    int* rows;              // [batch, kv_heads, top_k] result
    int batch, kv_heads, max_extents;
    int listed;  // candidates of a region that has as many
    int top_k;
    float exponent;  // softmax scale times log2(e)
    int block_bits;
};

using Task = TaskOf<RerankArguments>;

struct Memory {
    codes::Queries<QUERY_LANES> queries;
    PowerSum normalisers[WARPS][QUERY_LANES];
    float normaliser[QUERY_LANES];  // log2 of the sum of the exponentials
    unsigned keys[HELD];
    NthMemory<DIGIT_BITS> nth;
};

// What candidates are ranked by: no two are equal, for the earlier one of two with the same estimates is larger.
struct Keys {
    const Memory& memory;
    const float* estimates;
    float exponent;
    bool held;

    __device__ __forceinline__ unsigned compute(int i) const {
        return Ranking::key_of(estimates + static_cast<long long>(i) * QUERY_LANES, memory.normaliser, exponent);
    }
    __device__ __forceinline__ SortKey operator[](int i) const {
        return static_cast<SortKey>(held ? memory.keys[i] : compute(i)) << 32 | ~static_cast<unsigned>(i);
    }
};

// Write the best top_k of a task's candidates, and -1 where there are fewer.
__device__ __forceinline__ void rank(const RerankArguments& a, const Task& task, const Unit& block, Memory& memory,
                                     const int* candidates, const float* estimates, int count) {
    const PowerSum* parts = a.normalisers + (blockIdx.y * gridDim.x + block.first) * QUERY_LANES;
    for (int lane = threadIdx.x / WARP; lane < QUERY_LANES; lane += WARPS)
        Ranking::normalise(parts, block.parts, lane, memory.normaliser[lane]);
    __syncthreads();
    const Keys keys{memory, estimates, a.exponent, count <= HELD};
    if (keys.held)
        for (int i = threadIdx.x; i < count; i += THREADS) memory.keys[i] = keys.compute(i);
    const SortKey least = nth_largest<THREADS, DIGIT_BITS>(keys, count, a.top_k, memory.nth);
    int* rows = a.rows + static_cast<long long>(task.number) * a.top_k;
    int selected = 0;
    for (int base = 0; base < count; base += THREADS) {  // the same for the whole block
        const int i = base + static_cast<int>(threadIdx.x);
        const bool taken = i < count && keys[i] >= least;
        int total;
        const int order = selected + block_prefix_sum<THREADS>(taken, memory.nth.sums, total);
        if (taken) rows[order] = candidates[i];
        selected += total;
    }
    for (int i = selected + static_cast<int>(threadIdx.x); i < a.top_k; i += THREADS) rows[i] = -1;
}

}  // namespace reranking
}  // namespace clusterkv
}  // namespace kvseek

// grid: as many blocks as requests at least, kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::clusterkv::reranking::THREADS)
    kvseek_clusterkv_rerank(const __grid_constant__ kvseek::clusterkv::reranking::RerankArguments a) {
    using namespace kvseek;
    using namespace kvseek::clusterkv;
    using namespace kvseek::clusterkv::reranking;
    __shared__ Memory memory;
    __shared__ Units units;
    // A region's clusters hold all of its places.
    const Unit block = units.divide(
        a.requests, a.batch, gridDim.x, MOST_BLOCKS,
        [&](const Request& request) { return request.dense ? 0 : min(request.length, a.listed); }, blockIdx.x);
    const reranking::Task task(a, block.request);
    // `choose` lets this kernel start when `score` has ended, which had waited for the kernel that wrote the queries.
    if (block.exists)
        memory.queries.prepare(a.queries + static_cast<long long>(task.number) * GROUP_HEADS * KEY_DIM, a.signs);
    await_earlier_kernels();
    allow_later_kernels();
    if (!block.exists) return;
    const int count = min(task.length(), a.listed);
    const int first = count * block.part / block.parts, last = count * (block.part + 1) / block.parts;
    const long long listed = static_cast<long long>(task.number) * a.listed;
    const int* candidates = a.candidates + listed;
    float* estimates = a.estimates + listed * QUERY_LANES;
    PowerSum* normalisers = a.normalisers + (blockIdx.y * gridDim.x + blockIdx.x) * QUERY_LANES;
    auto row_of = [&](int entry) { return task.row(a, candidates[first + entry]); };
    Ranking::estimate(a.high, a.low, a.scales, codes::Means(a), memory.queries, last - first, row_of, a.exponent,
                      memory.normalisers, estimates + static_cast<long long>(first) * QUERY_LANES, normalisers);
    if (!arrive_last(a.finished + task.number, block.parts)) return;
    rank(a, task, block, memory, candidates, estimates, count);
}
#endif
