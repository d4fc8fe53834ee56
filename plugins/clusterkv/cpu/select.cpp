// ClusterKV: retrieve rows for the queries of a batch (plugins/clusterkv/reference.py defines the result). One call a
// layer for all requests and KV heads; threads share even a single head's work.
#include "clusters.h"
#include "kernels/cpu/codes/rerank.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/selection.h"

namespace kvseek {

struct ClusterkvSelectArguments {
    const void* queries;      // [batch, kv_heads * group, dim], contiguous
    int32_t* rows;            // [batch, kv_heads, top_k] out
    const Request* requests;  // [batch]
    const int32_t* table;     // [slots, max_extents]
    const int32_t* clusters;  // [slots]
    const void* centroids;    // [extents, kv_heads, clusters_per_extent, dim], of the queries' type
    const int32_t* sizes;     // [extents, kv_heads, clusters_per_extent]
    const int32_t* starts;    // the same
    const float* spreads;     // the same; not read if spread_weight is 0
    const int32_t* places;    // [extents, kv_heads, 1024]
    const uint8_t* high;      // [extents, kv_heads, 1024, padded_dim / 4]; null: clusters are taken whole
    const uint8_t* low;       // the same; null if codes have 2 bits
    const uint16_t* scales;   // [extents, kv_heads, 1024]
    const int8_t* means;      // [extents, kv_heads, 1024 / block, 2, padded_dim]
    const float* mean_steps;  // [extents, kv_heads, 1024 / block]
    const float* signs;       // [padded_dim]
    int64_t batch, kv_heads, group, dim, padded_dim, max_extents, top_k;
    int64_t listed;  // rows that the best clusters are taken for
    int64_t clusters_per_extent;
    int64_t block;     // neighbouring places that share a mean
    int64_t bfloat16;  // queries and centroids are bfloat16, else float32
    int64_t threads;
    double scaling;
    double step;  // width of a code's cell
    double spread_weight;
};

namespace {

// One (request, KV head): how far it is, and where its index and its intermediate results are.
struct Task {
    Progress<5> progress;
    int64_t request, head, length, candidate_count, stride;
    int64_t clusters, cluster_stride;
    const int32_t* extents;
    float* wide;             // [lanes, dim] queries that rank on their own
    float* bonuses;          // [lanes] what a spread of 1 adds to a score
    float* scores;           // [lanes, cluster_stride]
    int32_t* sizes;          // [cluster_stride] of the clusters, then 0
    int32_t* cluster_ranks;  // [cluster_stride]
    RoundedQuery* queries;   // [lanes]
    int32_t* places;         // [stride] of the best clusters
    float* estimates;        // [lanes, stride]
    int32_t* ranks;          // [stride]
};

struct Job {
    const ClusterkvSelectArguments& a;
    int lanes;
};

bool has_codes(const Job& job) {
    return job.a.high != nullptr;
}

void lay_out(const Job& job, Task& task, Arena& arena) {
    const int64_t with_codes = has_codes(job) ? 1 : 0;
    task.wide = arena.take<float>(job.lanes * job.a.dim);
    task.bonuses = arena.take<float>(job.lanes);
    task.scores = arena.take<float>(job.lanes * task.cluster_stride);
    task.sizes = arena.take<int32_t>(task.cluster_stride);
    task.cluster_ranks = arena.take<int32_t>(task.cluster_stride);
    task.places = arena.take<int32_t>(task.stride);
    task.queries = arena.take<RoundedQuery>(with_codes * job.lanes);
    task.estimates = arena.take<float>(with_codes * job.lanes * task.stride);
    task.ranks = arena.take<int32_t>(with_codes * task.stride);
}

template <class T>
void widen_queries(const Job& job, const Task& task) {
    const ClusterkvSelectArguments& a = job.a;
    const T* queries = static_cast<const T*>(a.queries) + (task.request * a.kv_heads + task.head) * a.group * a.dim;
    for (int lane = 0; lane < job.lanes; lane++, queries += a.dim) {
        float square = 0.0f;
        for (int64_t d = 0; d < a.dim; d++) {
            const float value = to_float(queries[d]);
            task.wide[lane * a.dim + d] = value, square += value * value;
        }
        task.bonuses[lane] = static_cast<float>(a.spread_weight) * __builtin_sqrtf(square);
    }
}

void prepare(const Job& job, const Task& task) {
    if (job.a.bfloat16)
        widen_queries<Bfloat16>(job, task);
    else
        widen_queries<float>(job, task);
    if (has_codes(job)) round_queries(job.a, task.request, task.head, task.queries);
}

// Score the clusters of an extent. Those without keys are -infinity; what follows the last one is overwritten when
// clusters are ranked.
template <class T>
void score(const Job& job, const Task& task, int64_t extent) {
    const ClusterkvSelectArguments& a = job.a;
    const int64_t first = extent * a.clusters_per_extent, left = task.clusters - first;
    const int64_t entry = (task.extents[extent] * a.kv_heads + task.head) * a.clusters_per_extent;
    const int64_t count = left < a.clusters_per_extent ? left : a.clusters_per_extent;
    const T* centroids = static_cast<const T*>(a.centroids) + entry * a.dim;
    std::memcpy(task.sizes + first, a.sizes + entry, count * sizeof(int32_t));
    for (int64_t c = 0; c < count;
         c += MULTIPLIED_ROWS) {  // room is for a multiple (Config.clusters_per_extent: of 16)
        const T* rows[MULTIPLIED_ROWS];
        for (int i = 0; i < MULTIPLIED_ROWS; i++) rows[i] = centroids + (c + i) * a.dim;
        multiply_rows(task.wide, job.lanes, rows, a.dim, task.scores + first + c, task.cluster_stride);
        for (int lane = 0; lane < job.lanes; lane++) {
            float* scores = task.scores + lane * task.cluster_stride + first + c;
            for (int64_t i = 0; i < MULTIPLIED_ROWS && c + i < count; i++) {
                if (a.spread_weight > 0) scores[i] += task.bonuses[lane] * a.spreads[entry + c + i];
                if (task.sizes[first + c + i] == 0) scores[i] = -INFINITE;
            }
        }
    }
}

// List the rows of the best clusters, in the order of the clusters' numbers.
void list(const Job& job, const Task& task) {
    const ClusterkvSelectArguments& a = job.a;
    for (int64_t c = task.clusters; c < task.cluster_stride; c++) task.sizes[c] = 0;
    rank_scores(a, task.scores, job.lanes, task.cluster_stride, task.clusters, task.cluster_ranks);
    ClusterCut cut = cut_clusters(task.cluster_ranks, task.sizes, task.clusters, task.candidate_count);
    int32_t* to = task.places;
    for (int64_t c = 0; c < task.clusters; c++) {
        const int64_t taken = rows_taken(cut, task.cluster_ranks, task.sizes, c);
        if (taken == 0) continue;
        const int64_t extent = task.extents[c / a.clusters_per_extent];
        const int64_t entry = (extent * a.kv_heads + task.head) * a.clusters_per_extent + c % a.clusters_per_extent;
        copy_entries(a.places, task.extents, a.kv_heads, task.head, a.starts[entry], taken, to);
        to += taken;
    }
}

void finish(const Job& job, const Task& task) {
    const ClusterkvSelectArguments& a = job.a;
    if (has_codes(job) && task.candidate_count > a.top_k) return choose_rows(a, task, job.lanes);
    int32_t* rows = a.rows + (task.request * a.kv_heads + task.head) * a.top_k;
    std::memcpy(rows, task.places, a.top_k * sizeof(int32_t));  // the list has as many, for the region is longer
}

void select(const ClusterkvSelectArguments& a) {
    static thread_local Scratch memory;
    const Job job = {a, static_cast<int>(a.group)};
    Task* tasks = static_cast<Task*>(memory.reserve(sizeof(Task) * a.batch * a.kv_heads));
    const int64_t count = describe_tasks(
        a, tasks, [&](const Request& request) { return request.length < a.listed ? request.length : a.listed; });
    for (Task* task = tasks; task < tasks + count; task++) {
        task->clusters = a.clusters[a.requests[task->request].slot];
        task->cluster_stride = rounded_up(task->clusters);
    }
    const auto scored = [&](const Task& task) {  // extents: a region has clusters
        return (task.clusters + a.clusters_per_extent - 1) / a.clusters_per_extent;
    };
    run_tasks(
        tasks, count, a.threads, 1, [&](Task& task, Arena& arena) { lay_out(job, task, arena); },
        whole([&](const Task& task) { prepare(job, task); }),
        divided(scored,
                [&](const Task& task, int64_t extent) {
                    return a.bfloat16 ? score<Bfloat16>(job, task, extent) : score<float>(job, task, extent);
                }),
        whole([&](const Task& task) { list(job, task); }),
        divided([&](const Task& task) { return has_codes(job) ? candidate_units(task) : 1; },
                [&](const Task& task, int64_t unit) {
                    if (has_codes(job)) estimate_candidates(a, task, job.lanes, unit);
                }),
        whole([&](const Task& task) { finish(job, task); }));
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_clusterkv_select, kvseek::ClusterkvSelectArguments, kvseek::select)
