// PRKV with codes: choose pages for the queries of a batch (plugins/prkv/reference.py and Codes in summaries.py define
// the result). One call a layer for all requests and KV heads; threads share even a single head's work.
#include <algorithm>

#include "kernels/cpu/candidates.h"
#include "kernels/cpu/codes/estimate.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/selection.h"
#include "pages.h"

namespace kvseek {

struct PrkvSelectArguments {
    const void* queries;         // [batch, kv_heads * group, dim], contiguous
    int32_t* rows;               // [batch, kv_heads, top_k] out
    const Request* requests;     // [batch]
    const uint8_t* high;         // [extents, kv_heads, 1024, padded_dim / 4]
    const uint16_t* scales;      // [extents, kv_heads, 1024]
    const int8_t* means;         // [extents, kv_heads, 1024 / block, 2, padded_dim]
    const float* mean_steps;     // [extents, kv_heads, 1024 / block]
    const int32_t* table;        // [slots, max_extents]
    const float* signs;          // [padded_dim]
    const int32_t* statics;      // [slots, kv_heads, most_static] static rows, ascending
    const int32_t* static_rows;  // [slots] their number
    int32_t* picked;             // [extents, kv_heads, 1024 / page], counted up
    void* recent;                // [slots, recent_queries, kv_heads * group, dim], one query a request is written
    int64_t* received;           // [slots] queries that `recent` has received, counted up
    int64_t batch, kv_heads, group, dim, padded_dim, max_extents, top_k;
    int64_t page, recent_queries, most_static;
    int64_t block;     // neighbouring places that share a mean
    int64_t bfloat16;  // queries are bfloat16, else float32
    int64_t threads;
    double scaling;
    double step;  // width of a code's cell
};

namespace {

constexpr int CODE_BITS = 2;
constexpr int AHEAD = 2048;  // bytes of a plane that are asked for ahead, as in nested

// One (request, KV head): how far it is, and where its index and its intermediate results are.
struct Task {
    Progress<3> progress;
    int64_t request, head, length;
    int64_t pages;
    int64_t stride;  // of the scores of a query, with room for whole vectors
    const int32_t* extents;
    const int32_t *first_static, *last_static;  // static rows, the second behind the last one
    RoundedQuery* queries;                      // [group]
    float* scores;                              // [group, stride]
    CandidateLists lists;
    int32_t* places;  // [pages] selected pages, ascending
    int32_t* free;    // [pages] rows that are not static
    int64_t* ranked;  // [pages] the best page first: its rank, the largest one least, before its number
};

struct Job {
    const PrkvSelectArguments& a;
    int row;  // bytes of a plane's row
};

int64_t size_of_number(const PrkvSelectArguments& a) {
    return a.bfloat16 ? sizeof(Bfloat16) : sizeof(float);
}

Task describe(const PrkvSelectArguments& a, int64_t number) {
    Task task = {};
    task.request = number / a.kv_heads, task.head = number % a.kv_heads;
    const Request& request = a.requests[task.request];
    task.length = request.length, task.extents = a.table + request.slot * a.max_extents;
    task.first_static = a.statics + (request.slot * a.kv_heads + task.head) * a.most_static;
    task.last_static = task.first_static + a.static_rows[request.slot];
    task.pages = (task.length + a.page - 1) / a.page, task.stride = rounded_up(task.pages);
    return task;
}

void lay_out(const Job& job, Task& task, Arena& arena) {
    task.queries = arena.take<RoundedQuery>(job.a.group);
    task.scores = arena.take<float>(job.a.group * task.stride);
    task.lists = {arena.take<int32_t>(task.stride), arena.take<int32_t>(task.stride)};
    task.places = arena.take<int32_t>(task.stride);
    task.free = arena.take<int32_t>(task.stride);
    task.ranked = arena.take<int64_t>(task.stride);
}

// Score the pages of an extent from the sums [group, INDEX_EXTENT] of its `count` keys: static rows weigh nothing. A
// function of its own, because the compiler takes the products apart if it finds both in one.
__attribute__((noinline)) void score_extent(const PrkvSelectArguments& a, const Task& task, int64_t first, int count,
                                            const int32_t* sums) {
    alignas(64) float exponents[INDEX_EXTENT], offsets[INDEX_EXTENT], scores[INDEX_EXTENT];
    const int64_t row = row_of(task.extents, a.kv_heads, task.head, first);
    const int32_t* statics = std::lower_bound(task.first_static, task.last_static, first);
    for (int lane = 0; lane < a.group; lane++) {
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
        for (const int32_t* one = statics; one < task.last_static && *one < first + count; one++)
            exponents[*one - first] = -INFINITE;
        const int64_t pages = score_pages(exponents, count, a.page, scores);
        std::memcpy(task.scores + lane * task.stride + first / a.page, scores, pages * sizeof(float));
    }
}

void scan(const Job& job, const Task& task, int64_t extent) {
    const PrkvSelectArguments& a = job.a;
    alignas(64) int32_t sums[MAX_QUERIES * INDEX_EXTENT];
    const int64_t first = extent * INDEX_EXTENT, row = row_of(task.extents, a.kv_heads, task.head, first);
    const int count = static_cast<int>(std::min(task.length - first, static_cast<int64_t>(INDEX_EXTENT)));
    const int group = static_cast<int>(a.group);
    for (int key = 0; key < count; key += 32) __builtin_prefetch(a.scales + row + key);
    plane_sums({a.high + row * job.row, nullptr, AHEAD}, job.row, count, task.queries, group, sums, INDEX_EXTENT);
    score_extent(a, task, first, count, sums);
}

// Count the rows of each page that are not static.
void count_free(const PrkvSelectArguments& a, const Task& task) {
    for (int64_t i = 0; i < task.pages; i++) task.free[i] = static_cast<int32_t>(a.page);
    task.free[task.pages - 1] -= static_cast<int32_t>(task.pages * a.page - task.length);
    const int shift = __builtin_ctzll(a.page);  // a division takes much longer
    for (const int32_t* one = task.first_static; one < task.last_static; one++) task.free[*one >> shift]--;
}

// The pages that are taken, into task.places, ascending: the best ones, until the rows of the next one that are not
// static do not fit into `room`. Returns how many they are.
int64_t take_pages(const PrkvSelectArguments& a, const Task& task, int64_t room) {
    const int64_t most = std::min(a.top_k / a.page, task.pages);
    const auto key = [&](int64_t i) {  // the better the page, the smaller; ties: the first one
        const int64_t rank = rank_of(splat(task.scores[task.places[i]]))[0];
        return -rank * (INT64_C(1) << 32) + task.places[i];
    };
    int64_t count = std::min(most, room / a.page * 4 / 3 + 1);  // enough, unless many of their rows are static
    for (; room > 0; count = most) {
        take_candidates(task.scores, task.pages, count, task.lists, task.places);
        for (int64_t i = 0; i < count; i++) task.ranked[i] = key(i);
        // So many fit whatever is static: their order does not matter.
        const int64_t certain = std::min(count - 1, room / a.page);
        std::nth_element(task.ranked, task.ranked + certain, task.ranked + count);
        std::sort(task.ranked + certain, task.ranked + count);
        int64_t fitting = 0;
        for (int64_t left = room; fitting < count; fitting++) {
            left -= task.free[task.ranked[fitting] & INT32_MAX];
            if (left < 0) break;
        }
        if (fitting == count && count < most) continue;
        int64_t taken = 0;
        const int64_t first_left = fitting < count ? task.ranked[fitting] : INT64_MAX;
        for (int64_t i = 0; i < count; i++)
            if (key(i) < first_left) task.places[taken++] = task.places[i];
        return taken;
    }
    return 0;
}

// Choose the pages, and count them; the static rows come first, then those of pages that are not static.
void finish(const Job& job, const Task& task) {
    const PrkvSelectArguments& a = job.a;
    const int32_t pages_of_extent = static_cast<int32_t>(INDEX_EXTENT / a.page);
    int32_t* rows = a.rows + (task.request * a.kv_heads + task.head) * a.top_k;
    int32_t* const end = rows + a.top_k;
    rows = std::copy(task.first_static, task.last_static, rows);
    for (int lane = 0; lane < a.group; lane++) softmax(task.scores + lane * task.stride, task.pages, 1.0f);
    fold(task.scores, static_cast<int>(a.group), task.stride, task.pages);
    count_free(a, task);
    const int64_t taken = take_pages(a, task, end - rows);
    const int32_t* next = task.first_static;
    for (int64_t i = 0; i < taken; i++) {
        const int32_t page = task.places[i];
        if (task.free[page] == 0) continue;
        const int32_t first = page * static_cast<int32_t>(a.page);
        const int32_t last = static_cast<int32_t>(std::min(task.length, first + a.page));
        next = std::lower_bound(next, task.last_static, first);
        for (int32_t row = first; row < last; row++) {
            if (next < task.last_static && *next == row)
                next++;
            else
                *rows++ = row;
        }
        const int64_t extent = task.extents[page / pages_of_extent];
        int32_t* times = a.picked + (extent * a.kv_heads + task.head) * pages_of_extent + page % pages_of_extent;
        __atomic_fetch_add(times, 1, __ATOMIC_RELAXED);  // requests of a slot count the same pages
    }
    std::fill(rows, end, -1);
}

// Keep the queries of the requests as their slots' last.
void note_queries(const PrkvSelectArguments& a) {
    const int64_t bytes = a.kv_heads * a.group * a.dim * size_of_number(a);
    for (int64_t i = 0; i < a.batch; i++) {
        const int64_t slot = a.requests[i].slot, at = slot * a.recent_queries + a.received[slot]++ % a.recent_queries;
        std::memcpy(static_cast<char*>(a.recent) + at * bytes, static_cast<const char*>(a.queries) + i * bytes, bytes);
    }
}

void select(const PrkvSelectArguments& a) {
    static thread_local Scratch memory;
    const Job job = {a, static_cast<int>(a.padded_dim / FIELDS)};
    const int64_t count = a.batch * a.kv_heads;
    Task* tasks = static_cast<Task*>(memory.reserve(sizeof(Task) * count));
    for (int64_t i = 0; i < count; i++) tasks[i] = describe(a, i);
    note_queries(a);
    run_tasks(
        tasks, count, a.threads, 1, [&](Task& task, Arena& arena) { lay_out(job, task, arena); },
        whole([&](const Task& task) { round_queries(a, task.request, task.head, task.queries); }),
        divided(extents_of<Task>, [&](const Task& task, int64_t extent) { scan(job, task, extent); }),
        whole([&](const Task& task) { finish(job, task); }));
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_prkv_select, kvseek::PrkvSelectArguments, kvseek::select)
