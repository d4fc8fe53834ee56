// PRKV with codes: choose pages for the queries of a batch (plugins/prkv/reference.py and Codes in summaries.py define
// the result). One call a layer for all requests and KV heads; threads share even a single head's work.
#include "../../codes/cpu/estimate.h"
#include "../../shared/candidates.h"
#include "../../shared/kernel.h"
#include "../../shared/selection.h"
#include "pages.h"

namespace kvseek {

// Mirrored field by field in native.py.
struct PrkvSelectArguments {
    const void* queries;         // [batch, kv_heads * group, dim], contiguous
    int32_t* rows;               // [batch, kv_heads, top_k / page] out: pages
    const Request* requests;     // [batch]
    const uint8_t* high;         // [extents, kv_heads, 1024, padded_dim / 4]
    const uint16_t* scales;      // [extents, kv_heads, 1024]
    const int8_t* means;         // [extents, kv_heads, 1024 / block, 2, padded_dim]
    const float* mean_steps;     // [extents, kv_heads, 1024 / block]
    const int32_t* table;        // [slots, max_extents]
    const float* signs;          // [padded_dim]
    const int32_t* static_rows;  // [slots]
    int32_t* picked;             // [extents, kv_heads, 1024 / page], counted up
    void* recent;                // [slots, window_queries, kv_heads * group, dim], one query a request is written
    int64_t* received;           // [slots] queries that `recent` has received, counted up
    int64_t batch, kv_heads, group, dim, padded_dim, max_extents, top_k;
    int64_t page, window_queries;
    int64_t block;     // neighbouring places that share a mean
    int64_t bfloat16;  // queries are bfloat16, else float32
    int64_t threads;
    double scaling;
    double step;  // width of a code's cell
};

namespace {

constexpr int CODE_BITS = 2;
constexpr int64_t WHOLE = 32;  // keys whose products are taken together (plane_sums)
constexpr int AHEAD = 2048;    // bytes of a plane that are asked for ahead, as in nested

enum Phase { PREPARE, SCAN, FINISH, PHASES };

// One (request, KV head): how far it is, and where its index and its intermediate results are.
struct Task {
    Progress<PHASES> progress;
    int64_t request, head, length;
    int64_t static_pages, pages;  // pages: those that are not static
    int64_t stride;               // of the scores of a query, with room for whole vectors
    const int32_t* extents;
    RoundedQuery* queries;  // [lanes]
    float* scores;          // [lanes, stride]
    CandidateLists lists;
    int32_t* places;  // [pages]
};

struct Job {
    const PrkvSelectArguments& a;
    int lanes, row;  // row: bytes of a plane's row
};

int64_t size_of_number(const PrkvSelectArguments& a) {
    return a.bfloat16 ? sizeof(Bfloat16) : sizeof(float);
}

Task describe(const PrkvSelectArguments& a, int64_t number) {
    Task task = {};
    task.request = number / a.kv_heads, task.head = number % a.kv_heads;
    const Request& request = a.requests[task.request];
    task.length = request.length, task.extents = a.table + request.slot * a.max_extents;
    task.static_pages = a.static_rows[request.slot] / a.page;
    task.pages = (task.length + a.page - 1) / a.page - task.static_pages, task.stride = rounded_up(task.pages);
    return task;
}

void lay_out(const Job& job, Task& task, Arena& arena) {
    task.queries = arena.take<RoundedQuery>(job.lanes);
    task.scores = arena.take<float>(job.lanes * task.stride);
    task.lists = {arena.take<int32_t>(task.stride), arena.take<int32_t>(task.stride)};
    task.places = arena.take<int32_t>(task.stride);
}

// Extents that have rows of pages that are not static.
int64_t first_extent(const Job& job, const Task& task) {
    return task.static_pages * job.a.page / INDEX_EXTENT;
}

int64_t scanned_extents(const Job& job, const Task& task) {
    return (task.length + INDEX_EXTENT - 1) / INDEX_EXTENT - first_extent(job, task);
}

// Score the pages of an extent that are not static.
void scan(const Job& job, const Task& task, int64_t extent) {
    const PrkvSelectArguments& a = job.a;
    alignas(64) int32_t sums[MAX_QUERIES * INDEX_EXTENT];
    alignas(64) float exponents[INDEX_EXTENT], scores[INDEX_EXTENT], offsets[INDEX_EXTENT];
    const int64_t start = extent * INDEX_EXTENT, static_rows = task.static_pages * a.page;
    const int64_t first = static_rows > start ? static_rows / WHOLE * WHOLE : start;
    const int64_t end = task.length < start + INDEX_EXTENT ? task.length : start + INDEX_EXTENT;
    const int64_t row = row_of(task.extents, a.kv_heads, task.head, first);
    const int64_t skipped = (static_rows > first ? static_rows - first : 0) / a.page;
    const int count = static_cast<int>(end - first);
    for (int key = 0; key < count; key += 32) __builtin_prefetch(a.scales + row + key);
    plane_sums({a.high + row * job.row, nullptr, AHEAD}, job.row, count, task.queries, job.lanes, sums, INDEX_EXTENT);
    for (int lane = 0; lane < job.lanes; lane++) {
        const RoundedQuery& query = task.queries[lane];
        const float worth = query.step * static_cast<float>(a.step / 2), scaling = static_cast<float>(a.scaling);
        means_of(a).products(row, count, query, query.step, offsets);
        for (int key = 0; key < count; key += LANES) {
            const int32_t* of_lane = sums + lane * INDEX_EXTENT + key;
            const Vec scales = load_half(a.scales + row + key);
            const Vec estimates = scale_sums(of_lane, scales, CODE_BITS, query.sum, worth, offsets + key);
            store(exponents + key, estimates * scaling);
        }
        for (int key = count; key % LANES != 0; key++) exponents[key] = -INFINITE;
        const int64_t pages = score_pages(exponents, count, a.page, scores) - skipped;
        float* to = task.scores + lane * task.stride + first / a.page + skipped - task.static_pages;
        std::memcpy(to, scores + skipped, pages * sizeof(float));
    }
}

// Choose the best pages and count them; the static ones come first.
void finish(const Job& job, const Task& task) {
    const PrkvSelectArguments& a = job.a;
    const int64_t entries = a.top_k / a.page, pages_of_extent = INDEX_EXTENT / a.page;
    const int64_t left = entries - task.static_pages, wanted = left < task.pages ? left : task.pages;
    int32_t* rows = a.rows + (task.request * a.kv_heads + task.head) * entries;
    for (int lane = 0; lane < job.lanes; lane++) softmax(task.scores + lane * task.stride, task.pages, 1.0f);
    fold(task.scores, job.lanes, task.stride, task.pages);
    if (wanted > 0) take_candidates(task.scores, task.pages, wanted, task.lists, task.places);
    for (int64_t i = 0; i < task.static_pages; i++) rows[i] = static_cast<int32_t>(i);
    for (int64_t i = 0; i < left; i++) {
        int32_t* chosen = rows + task.static_pages + i;
        *chosen = -1;
        if (i >= wanted) continue;
        *chosen = static_cast<int32_t>(task.places[i] + task.static_pages);
        const int64_t extent = task.extents[*chosen / pages_of_extent];
        int32_t* times = a.picked + (extent * a.kv_heads + task.head) * pages_of_extent + *chosen % pages_of_extent;
        __atomic_fetch_add(times, 1, __ATOMIC_RELAXED);  // requests of a slot count the same pages
    }
}

int64_t parts_of(const Job& job, const Task& task, int phase) {
    const int64_t extents = scanned_extents(job, task);
    return phase == SCAN && extents > 1 ? extents : 1;
}

void run_part(const Job& job, const Task& task, int phase, int64_t part) {
    switch (phase) {
        case PREPARE:
            return round_queries(job.a, task.request, task.head, task.queries);
        case SCAN:
            return task.pages > 0 ? scan(job, task, first_extent(job, task) + part) : void();
        default:
            return finish(job, task);
    }
}

// Keep the queries of the requests as their slots' last.
void note_queries(const PrkvSelectArguments& a) {
    const int64_t bytes = a.kv_heads * a.group * a.dim * size_of_number(a);
    for (int64_t i = 0; i < a.batch; i++) {
        const int64_t slot = a.requests[i].slot, at = slot * a.window_queries + a.received[slot]++ % a.window_queries;
        std::memcpy(static_cast<char*>(a.recent) + at * bytes, static_cast<const char*>(a.queries) + i * bytes, bytes);
    }
}

void select(const PrkvSelectArguments& a) {
    static thread_local Scratch task_memory, work_memory;
    const Job job = {a, static_cast<int>(a.group), static_cast<int>(a.padded_dim / FIELDS)};
    const int64_t count = a.batch * a.kv_heads;
    Task* tasks = static_cast<Task*>(task_memory.reserve(sizeof(Task) * count));
    int64_t parts = 0;
    for (int64_t i = 0; i < count; i++) tasks[i] = describe(a, i), parts += parts_of(job, tasks[i], SCAN);
    lay_out_tasks(tasks, count, work_memory, [&](Task& task, Arena& arena) { lay_out(job, task, arena); });
    note_queries(a);
    run_phases<PHASES>(
        tasks, count, static_cast<int>(a.threads < parts ? a.threads : parts),
        [&](const Task& task, int phase) { return parts_of(job, task, phase); },
        [&](const Task& task, int phase, int64_t part) { run_part(job, task, phase, part); });
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_prkv_select, kvseek::PrkvSelectArguments, kvseek::select)
