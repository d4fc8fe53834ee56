// The rows of the best clusters (ClusterKV paper, sections III-C and IV-C): score all centroids, then choose. Two
// kernels; rerank.cu has a third one for engines whose rows are chosen by codes.

#include "choose.cuh"
#include "score.cuh"

// grid: as many blocks as requests at least, kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::clusterkv::SCORE_THREADS)
    kvseek_clusterkv_score(const __grid_constant__ kvseek::clusterkv::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::clusterkv;
    __shared__ __align__(16) ScoreMemory memory;
    __shared__ float weights[SPREAD ? QUERY_LANES : 1];
    __shared__ Units shares;
    const Unit share = shares.divide(a.requests, a.batch, gridDim.x, a.units, SelectionLength(), blockIdx.x);
    const SelectTask task(a, share.request);
    const int clusters = share.exists ? task.clusters(a) : 0, units = (clusters + UNIT - 1) / UNIT;
    UnitRows rows;
    int unit = share.part;
    // Clusters were made before the step, so their first numbers may be on their way while the queries are computed.
    if (unit < units) rows.load(a, task, unit, clusters);
    await_earlier_kernels();
    allow_later_kernels();
    if (unit >= units) return;
    TaskQueries queries;
    queries.load(a, task, memory);
    if constexpr (SPREAD) weigh_spreads(a, queries, memory, weights);
    while (unit < units) {  // the same for the whole block
        const int following = unit + share.parts;
        UnitRows next;
        if (following < units) next.load(a, task, following, clusters);
        score_unit(a, rows, queries, memory, weights);
        __syncthreads();
        store_scores(a, task.first_unit(a) + unit, memory);
        store_statistics(a, task.first_unit(a) + unit, memory);
        __syncthreads();  // before the scores are replaced
        rows = next;
        unit = following;
    }
}

// grid: 1, kv_heads, requests; dynamic shared memory: ChooseArrays
extern "C" __global__ void __launch_bounds__(kvseek::clusterkv::CHOOSE_THREADS)
    kvseek_clusterkv_choose(const __grid_constant__ kvseek::clusterkv::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::clusterkv;
    extern __shared__ __align__(16) unsigned char dynamic_memory[];
    __shared__ ChooseMemory memory;
    const ChooseArrays arrays(a, dynamic_memory);
    const SelectTask task(a, blockIdx.z);
    const int clusters = task.idle() ? 0 : task.clusters(a);
    if (!task.idle()) load_sizes(a, task, clusters, arrays, memory);
    await_earlier_kernels();
    allow_later_kernels();
    if (task.idle()) return;
    merge_statistics(a, task, clusters, memory);
    __syncthreads();
    value_clusters(a, task, clusters, arrays, memory);
    const Cut cut = find_cut(a, clusters, arrays, memory);
    const int count = list_taken(cut, clusters, arrays, memory);
    const int selected = place_taken(a, task, cut, count, arrays, memory);
    write_rows(a, task, count, selected, arrays);
}
