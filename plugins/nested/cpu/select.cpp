// Nested: retrieve rows for the queries of a batch (plugins/nested/reference.py defines the result). One call a layer
// for all requests and KV heads; threads share even a single head's work.
#include "kernels/cpu/candidates.h"
#include "kernels/cpu/codes/rerank.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/selection.h"

namespace kvseek {

struct NestedSelectArguments {
    const void* queries;      // [batch, kv_heads * group, dim], contiguous
    int32_t* rows;            // [batch, kv_heads, top_k] out
    const Request* requests;  // [batch]; method_fields[0]: candidates, top_k to length
    const uint8_t* high;      // [extents, kv_heads, 1024, padded_dim / 4]
    const uint8_t* low;       // the same
    const uint16_t* scales;   // [extents, kv_heads, 1024]
    const int8_t* means;      // [extents, kv_heads, 1024 / block, 2, padded_dim]
    const float* mean_steps;  // [extents, kv_heads, 1024 / block]
    const int32_t* table;     // [slots, max_extents]
    const float* signs;       // [padded_dim]
    int64_t batch, kv_heads, group, dim, padded_dim, max_extents, top_k;
    int64_t block;     // neighbouring places that share a mean
    int64_t bfloat16;  // queries are bfloat16, else float32
    int64_t threads;
    double scaling;
    double step;  // width of a code's cell
};

namespace {

constexpr int AHEAD = 2048;  // bytes of a plane that are asked for ahead: processors do not look beyond a page's end

// One (request, KV head): how far it is, and where its index and its intermediate results are.
struct Task {
    Progress<5> progress;
    int64_t request, head, length, candidate_count, stride;
    const int32_t* extents;
    RoundedQuery* queries;  // [lanes]
    float* scores;          // [length], of the first bits
    CandidateLists lists;
    int32_t* places;   // [candidate_count]
    float* estimates;  // [lanes, stride]
    int32_t* ranks;    // [stride]
};

struct Job {
    const NestedSelectArguments& a;
    int lanes, row;  // row: bytes of a plane's row
};

void lay_out(const Job& job, Task& task, Arena& arena) {
    const int64_t scanned = rounded_up(task.length);
    task.queries = arena.take<RoundedQuery>(job.lanes);
    task.scores = arena.take<float>(scanned);
    task.lists = {arena.take<int32_t>(scanned), arena.take<int32_t>(scanned)};
    task.places = arena.take<int32_t>(task.candidate_count);
    task.estimates = arena.take<float>(job.lanes * task.stride);
    task.ranks = arena.take<int32_t>(task.stride);
}

// Scores of an extent's keys: the largest estimate of the 2 highest bits over the queries, each less the query's
// product with the mean of the first block, and divided by the query's length.
void score_extent(const Job& job, const Task& task, int64_t row, int count, const int32_t* sums, float* scores) {
    const float half_cell = static_cast<float>(job.a.step * (1 << (ALL_BITS - 2)) / 2);
    const Means means = means_of(job.a);
    const int64_t first_row = row_of(task.extents, job.a.kv_heads, task.head, 0);
    float worth[MAX_QUERIES], first[MAX_QUERIES];
    alignas(64) float offsets[MAX_QUERIES][INDEX_EXTENT];
    for (int lane = 0; lane < job.lanes; lane++) {
        const RoundedQuery& query = task.queries[lane];
        const float inverse = query.length > 0.0f ? 1.0f / query.length : 0.0f;
        worth[lane] = half_cell * inverse;
        first[lane] = means.product(first_row, query) * inverse;
        means.products(row, count, query, inverse, offsets[lane]);
    }
    for (int key = 0; key < count; key += LANES) {
        const Vec scales = load_half(job.a.scales + row + key);
        Vec best = splat(-INFINITE);
        for (int lane = 0; lane < job.lanes; lane++) {
            const int32_t* of_lane = sums + lane * INDEX_EXTENT + key;
            const int32_t query_sum = task.queries[lane].sum;
            const Vec estimates = scale_sums(of_lane, scales, 2, query_sum, worth[lane], offsets[lane] + key);
            best = maximum(best, estimates - splat(first[lane]));
        }
        store(scores + key, best);
    }
}

void scan(const Job& job, const Task& task, int64_t extent) {
    alignas(64) int32_t sums[MAX_QUERIES * INDEX_EXTENT];
    const NestedSelectArguments& a = job.a;
    const int64_t first = extent * INDEX_EXTENT, left = task.length - first;
    const int64_t row = row_of(task.extents, a.kv_heads, task.head, first);
    const int count = static_cast<int>(left < INDEX_EXTENT ? left : INDEX_EXTENT);
    const Planes planes = {a.high + row * job.row, nullptr, AHEAD};
    for (int key = 0; key < count; key += 32) __builtin_prefetch(a.scales + row + key);
    plane_sums(planes, job.row, count, task.queries, job.lanes, sums, INDEX_EXTENT);
    score_extent(job, task, row, count, sums, task.scores + first);
}

void collect(const Task& task) {
    if (task.candidate_count < task.length)
        return take_candidates(task.scores, task.length, task.candidate_count, task.lists, task.places);
    for (int64_t i = 0; i < task.length; i++) task.places[i] = static_cast<int32_t>(i);
}

void select(const NestedSelectArguments& a) {
    static thread_local Scratch memory;
    const Job job = {a, static_cast<int>(a.group), static_cast<int>(a.padded_dim / FIELDS)};
    Task* tasks = static_cast<Task*>(memory.reserve(sizeof(Task) * a.batch * a.kv_heads));
    const int64_t count = describe_tasks(a, tasks, [](const Request& request) { return request.method_fields[0]; });
    run_tasks(
        tasks, count, a.threads, 1, [&](Task& task, Arena& arena) { lay_out(job, task, arena); },
        whole([&](const Task& task) { round_queries(a, task.request, task.head, task.queries); }),
        divided(extents_of<Task>, [&](const Task& task, int64_t extent) { scan(job, task, extent); }), whole(collect),
        divided(candidate_units<Task>,
                [&](const Task& task, int64_t unit) { estimate_candidates(a, task, job.lanes, unit); }),
        whole([&](const Task& task) { choose_rows(a, task, job.lanes); }));
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_nested_select, kvseek::NestedSelectArguments, kvseek::select)
