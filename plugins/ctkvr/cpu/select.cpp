// CTkvr: recall the places that the nearest centroids of a batch's queries list, rank their keys, and take the best
// (plugins/ctkvr/reference.py defines the result). One call a layer for all requests and KV heads.
//
// Engines on a GPU whose rows lie in host memory recall there: host cores rank keys, and attend to the best rows too
// (CTkvr paper, section 3.2). That call has the signature of a CUDA host function, so that a graph can hold it.
#include "kernels/cpu/attention/rows.h"
#include "kernels/cpu/codes/rerank.h"
#include "kernels/cpu/inner_products.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/selection.h"

namespace kvseek {

struct CtkvrSelectArguments {
    const void* queries;      // [batch, kv_heads * group, dim], contiguous
    int32_t* rows;            // [batch, kv_heads, top_k] out: the best places, ascending, -1 fills up
    int32_t* best;            // [batch, kv_heads, width] out: the lists of the queries as centroids; null: not wanted
    const Request* requests;  // [batch]
    const int32_t* table;     // [slots, max_extents]
    const void* pool;         // [extents, kv_heads, 1024, 2, dim], contiguous but for the extent stride
    const int32_t* lists;     // [slots, kv_heads, ring, width] places of each centroid; negative: none
    const int32_t* probed;    // [batch, kv_heads, probes] centroids; negative: none
    const int32_t* listed;    // [slots] first place that no prompt list holds
    const int32_t* recalled;  // [batch, kv_heads, capacity] what a GPU has recalled, ascending; null: not yet recalled
    const int32_t* counts;    // [batch, kv_heads] of them; 0: nothing is done for the request
    const uint8_t* high;      // [extents, kv_heads, 1024, padded_dim / 4]; null: keys rank by themselves
    const uint8_t* low;       // the same
    const uint16_t* scales;   // [extents, kv_heads, 1024]
    const int8_t* means;      // [extents, kv_heads, 1024 / block, 2, padded_dim]
    const float* mean_steps;  // [extents, kv_heads, 1024 / block]
    const float* signs;       // [padded_dim]
    int64_t batch, kv_heads, group, dim, padded_dim, max_extents, top_k;
    int64_t ring, width, probes, capacity, recent;
    int64_t extent_stride;      // numbers from one extent of the pool to the next
    int64_t block;              // neighbouring places that share a mean
    int64_t bfloat16, float16;  // type of queries and pool; neither: float32
    int64_t threads;
    double scaling;
    double step;  // width of a code's cell
};

// One layer's work of a step for the host cores of an engine on a GPU. The requests of both parts are made here.
struct CtkvrHostStep {
    CtkvrSelectArguments select;
    AttendArguments attend;
    const int32_t* slots;  // [batch]
};

namespace {

constexpr int64_t WORD = 64;
constexpr int AHEAD = 16;  // keys that are asked for ahead

// One (request, KV head): how far it is, and where its intermediate results are.
struct Task {
    Progress<4> progress;
    int64_t request, head, length;
    int64_t candidate_count;  // recalled places; until they are, the most that there may be
    int64_t stride;
    const int32_t* extents;
    float* wide;            // [group, dim] queries that rank by keys
    RoundedQuery* queries;  // [group] those that rank by codes
    int32_t* places;        // [stride] recalled, ascending
    float* estimates;       // [group, stride] scores
    float* statistics;      // [units, 2, group] largest score of a unit, sum of e^(score - largest)
    int32_t* ranks;         // [stride]
};

void lay_out(const CtkvrSelectArguments& a, Task& task, Arena& arena) {
    task.wide = arena.take<float>(a.high == nullptr ? a.group * a.dim : 0);
    task.queries = arena.take<RoundedQuery>(a.high == nullptr ? 0 : a.group);
    task.places = arena.take<int32_t>(task.stride);
    task.estimates = arena.take<float>(a.group * task.stride);
    task.statistics = arena.take<float>(candidate_units(task) * 2 * a.group);
    task.ranks = arena.take<int32_t>(task.stride);
}

template <class T>
void widen_queries(const CtkvrSelectArguments& a, const Task& task) {
    const T* queries = static_cast<const T*>(a.queries) + (task.request * a.kv_heads + task.head) * a.group * a.dim;
    for (int64_t i = 0; i < a.group * a.dim; i++) task.wide[i] = to_float(queries[i]);
}

// The places of the probed lists and the newest ones, none twice; of a short region all. A bit a place, then the bits
// in order. Returns how many they are.
int64_t recall(const CtkvrSelectArguments& a, const Task& task) {
    static thread_local Scratch memory;
    const int64_t slot = a.requests[task.request].slot, words = (task.length + WORD - 1) / WORD;
    uint64_t* bits = static_cast<uint64_t*>(memory.reserve(sizeof(uint64_t) * words));
    std::memset(bits, 0, sizeof(uint64_t) * words);
    const int32_t* probed = a.probed + (task.request * a.kv_heads + task.head) * a.probes;
    for (int64_t probe = 0; probe < a.probes; probe++) {
        if (probed[probe] < 0) continue;
        const int32_t* list = a.lists + ((slot * a.kv_heads + task.head) * a.ring + probed[probe]) * a.width;
        for (int64_t i = 0; i < a.width; i++)
            if (list[i] >= 0 && list[i] < task.length) bits[list[i] / WORD] |= uint64_t{1} << list[i] % WORD;
    }
    int64_t newest = task.length - a.recent > a.listed[slot] ? task.length - a.recent : a.listed[slot];
    if (task.length <= a.top_k) newest = 0;
    for (; newest < task.length; newest++) bits[newest / WORD] |= uint64_t{1} << newest % WORD;
    int64_t count = 0;
    for (int64_t word = 0; word < words; word++)
        if (bits[word] != 0) count += append_places(bits[word], static_cast<int32_t>(word * WORD), task.places + count);
    return count;
}

void prepare(const CtkvrSelectArguments& a, Task& task) {
    if (a.high != nullptr)
        round_queries(a, task.request, task.head, task.queries);
    else if (a.bfloat16)
        widen_queries<Bfloat16>(a, task);
    else if (a.float16)
        widen_queries<Half>(a, task);
    else
        widen_queries<float>(a, task);
    if (a.recalled == nullptr) {
        task.candidate_count = recall(a, task);
    } else {
        const int32_t* recalled = a.recalled + (task.request * a.kv_heads + task.head) * a.capacity;
        std::memcpy(task.places, recalled, sizeof(int32_t) * task.candidate_count);
    }
}

// Products of the queries with `count` keys of the recalled places from `first` on.
template <class T>
void multiply_keys(const CtkvrSelectArguments& a, const Task& task, int64_t first, int64_t count) {
    const T* keys[ESTIMATE_KEYS + AHEAD];
    for (int64_t i = 0; i < count; i++) {
        const int64_t place = task.places[first + i], inside = task.head * INDEX_EXTENT + place % INDEX_EXTENT;
        keys[i] =
            static_cast<const T*>(a.pool) + task.extents[place / INDEX_EXTENT] * a.extent_stride + inside * 2 * a.dim;
    }
    for (int64_t i = count; i < count + AHEAD; i++) keys[i] = keys[count - 1];
    const auto ask = [&](const T* key) {  // into the second-level cache, which takes more requests than the first
        for (int64_t d = 0; d < a.dim; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(key + d, 0, 2);
    };
    for (int64_t i = 0; i < AHEAD; i++) ask(keys[i]);
    for (int64_t key = 0; key < count; key += MULTIPLIED_ROWS) {
        for (int64_t i = key + AHEAD; i < key + AHEAD + MULTIPLIED_ROWS && i < count; i++) ask(keys[i]);
        multiply_rows(task.wide, a.group, keys + key, a.dim, task.estimates + first + key, task.stride);
    }
}

// Scale the scores [count] of one query; -infinity up to the next vector. Writes the largest and the sum of
// e^(score - it).
void soften(float* scores, int64_t count, float scaling, float* largest, float* total) {
    Vec best = splat(-INFINITE), sums = {};
    for (int64_t i = count; i % LANES != 0; i++) scores[i] = -INFINITE;
    for (int64_t i = 0; i < count; i += LANES) {
        const Vec scaled = load(scores + i) * scaling;
        store(scores + i, scaled);
        best = maximum(best, scaled);
    }
    *largest = maximum(best);
    for (int64_t i = 0; i < count; i += LANES) sums += exponential(load(scores + i) - *largest);
    *total = sum(sums);
}

// Score a unit of the recalled places.
void score(const CtkvrSelectArguments& a, const Task& task, int64_t unit) {
    const int64_t first = unit * ESTIMATE_KEYS, left = task.candidate_count - first;
    const int64_t count = left < ESTIMATE_KEYS ? left : ESTIMATE_KEYS;
    if (a.high != nullptr)
        estimate_candidates(a, task, static_cast<int>(a.group), unit);
    else if (a.bfloat16)
        multiply_keys<Bfloat16>(a, task, first, count);
    else if (a.float16)
        multiply_keys<Half>(a, task, first, count);
    else
        multiply_keys<float>(a, task, first, count);
    float* statistics = task.statistics + 2 * unit * a.group;
    for (int64_t q = 0; q < a.group; q++)
        soften(task.estimates + q * task.stride + first, count, static_cast<float>(a.scaling), statistics + q,
               statistics + a.group + q);
}

// Logarithm of the sum of e^score over all recalled keys of a query.
float log_sum(const CtkvrSelectArguments& a, const Task& task, int64_t q) {
    float largest = -INFINITE, total = 0.0f;
    const float* statistics = task.statistics + q;
    for (int64_t unit = 0; unit < candidate_units(task); unit++) {
        const float unit_largest = statistics[2 * unit * a.group];
        largest = unit_largest > largest ? unit_largest : largest;
    }
    for (int64_t unit = 0; unit < candidate_units(task); unit++, statistics += 2 * a.group)
        total += statistics[a.group] * exponential(statistics[0] - largest);
    return largest + __builtin_logf(total);
}

// Rank keys by the largest softmax weight that a head of the group gives them. Its logarithm, the largest of
// score - log-sum-exp, ranks alike and does not run out of small numbers.
void rank(const CtkvrSelectArguments& a, const Task& task) {
    float sums[MAX_QUERIES];
    for (int64_t q = 0; q < a.group; q++) sums[q] = log_sum(a, task, q);
    for (int64_t i = 0; i < task.candidate_count; i += LANES) {
        Vec value = load(task.estimates + i) - sums[0];
        for (int64_t q = 1; q < a.group; q++)
            value = maximum(value, load(task.estimates + q * task.stride + i) - sums[q]);
        store(task.estimates + i, value);
    }
    rank_values(task.estimates, task.candidate_count, task.ranks);
}

// Write the places of the `wanted` best keys, -1 behind them.
void choose(const Task& task, int64_t wanted, int32_t* places) {
    const int64_t count = task.candidate_count;
    if (wanted < count) return take_largest(task.ranks, task.places, count, wanted, places);
    std::memcpy(places, task.places, sizeof(int32_t) * count);
    for (int64_t i = count; i < wanted; i++) places[i] = -1;
}

// Where no more places were recalled than are selected, nothing is ranked: lists are no shorter than selections.
bool is_ranked(const CtkvrSelectArguments& a, const Task& task) {
    return task.candidate_count > a.top_k;
}

// Describe the heads that have places; the others' rows are -1.
int64_t describe(const CtkvrSelectArguments& a, Task* tasks) {
    int64_t count = 0;
    for (int64_t pair = 0; pair < a.batch * a.kv_heads; pair++) {
        const Request& request = a.requests[pair / a.kv_heads];
        const int64_t most = request.length < a.capacity ? request.length : a.capacity;
        const int64_t places = a.recalled == nullptr ? most : a.counts[pair];
        for (int64_t i = 0; places == 0 && i < a.top_k; i++) a.rows[pair * a.top_k + i] = -1;
        if (places == 0) continue;
        Task& task = tasks[count++];
        task = {};
        task.request = pair / a.kv_heads, task.head = pair % a.kv_heads, task.length = request.length;
        task.candidate_count = places, task.stride = rounded_up(places);
        task.extents = a.table + request.slot * a.max_extents;
    }
    return count;
}

void select(const CtkvrSelectArguments& a) {
    static thread_local Scratch memory;
    Task* tasks = static_cast<Task*>(memory.reserve(sizeof(Task) * a.batch * a.kv_heads));
    const int64_t count = describe(a, tasks);
    run_tasks(
        tasks, count, a.threads, 1, [&](Task& task, Arena& arena) { lay_out(a, task, arena); },
        whole([&](Task& task) { prepare(a, task); }),
        divided([&](const Task& task) { return is_ranked(a, task) ? candidate_units(task) : 1; },
                [&](const Task& task, int64_t unit) {
                    if (is_ranked(a, task)) score(a, task, unit);
                }),
        whole([&](const Task& task) {
            if (is_ranked(a, task)) rank(a, task);
        }),
        divided([&](const Task&) { return INT64_C(1) + (a.best != nullptr); },
                [&](const Task& task, int64_t part) {
                    const int64_t pair = task.request * a.kv_heads + task.head;
                    part == 0 ? choose(task, a.top_k, a.rows + pair * a.top_k)
                              : choose(task, a.width, a.best + pair * a.width);
                }));
}

void run_host_step(const CtkvrHostStep& a) {
    static thread_local Scratch memory;
    CtkvrSelectArguments selection = a.select;
    AttendArguments attention = a.attend;
    Request* requests = static_cast<Request*>(memory.reserve(sizeof(Request) * selection.batch));
    for (int64_t i = 0; i < selection.batch; i++) {
        requests[i] = {};
        requests[i].slot = a.slots[i], requests[i].length = INT32_MAX;  // places are below the region's length
    }
    selection.requests = attention.requests = requests;
    select(selection);
    kvseek_attend(&attention);
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_ctkvr_select, kvseek::CtkvrSelectArguments, kvseek::select)
KVSEEK_KERNEL(kvseek_ctkvr_host_step, kvseek::CtkvrHostStep, kvseek::run_host_step)
