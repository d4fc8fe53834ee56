// ParisKV: retrieve rows for the queries of a batch (ParisKV paper, section 4; plugins/pariskv/reference.py defines the
// result). One call a layer for all requests and KV heads; threads share even a single head's work.
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/selection.h"
#include "rerank.h"
#include "tiers.h"
#include "votes.h"

namespace kvseek {

struct SelectArguments {
    const void* queries;      // [batch, kv_heads * group, dim], contiguous
    int32_t* rows;            // [batch, kv_heads, top_k] out
    const Request* requests;  // [batch]; method_fields: keys that earn tiers, keys to rerank, top_k to length
    const uint8_t* ids;       // [extents, kv_heads, 1024, blocks]
    const uint8_t* codes;     // [extents, kv_heads, 1024, padded_dim / 2]
    const uint16_t* weights;  // [extents, kv_heads, 1024, blocks]
    const int32_t* counts;    // [slots, kv_heads, blocks, 256]
    const int32_t* table;     // [slots, max_extents]
    const float* signs;       // [padded_dim]
    const float* levels;      // [8]
    int64_t batch, kv_heads, group, dim, padded_dim, max_extents, top_k;
    int64_t mean;      // the mean of the queries ranks, or else the mean of their softmax weights
    int64_t bfloat16;  // queries are bfloat16, else float32
    int64_t threads;
    double scaling;
};

namespace {

constexpr int64_t RERANK_KEYS = 256;   // candidates of a unit of work
constexpr int64_t PREFETCH_KEYS = 12;  // candidates asked for ahead, one by one
constexpr int64_t REQUESTED = 32;      // the same, of those estimated several at a time

// One (request, KV head): how far it is, and where its index and its intermediate results are.
struct Task {
    Progress<6> progress;
    int64_t request, head, length, candidate_count, stride;
    const int32_t* extents;
    float* lanes;      // [lanes, padded_dim] rotated queries
    float* shuffled;   // the same with coordinates at shuffled_index()
    uint8_t* ballots;  // votes of centroids (votes.h)
    uint8_t* votes;    // [length]
    int32_t* places;   // [candidate_count]
    float* estimates;  // [lanes, stride]
    int32_t* ranks;    // [stride]
};

struct Job {
    const SelectArguments& a;
    int64_t blocks;
    int lanes, packs;
};

void lay_out(const Job& job, Task& task, Arena& arena) {
    task.lanes = arena.take<float>(job.packs * PACK * job.a.padded_dim);
    task.shuffled = arena.take<float>(job.packs * PACK * job.a.padded_dim);
    task.ballots = arena.take<uint8_t>(job.packs * PACK * job.blocks * CENTROIDS);
    task.votes = arena.take<uint8_t>(task.length);
    task.places = arena.take<int32_t>(task.candidate_count);
    task.estimates = arena.take<float>(job.lanes * task.stride);
    task.ranks = arena.take<int32_t>(task.stride);
}

template <class T>
void load_lanes(const Job& job, const Task& task) {
    const SelectArguments& a = job.a;
    const T* queries = static_cast<const T*>(a.queries) + (task.request * a.kv_heads + task.head) * a.group * a.dim;
    std::memset(task.lanes, 0, sizeof(float) * job.lanes * a.padded_dim);
    for (int64_t q = 0; q < a.group; q++) {
        float* lane = task.lanes + (a.mean ? 0 : q * a.padded_dim);
        for (int64_t d = 0; d < a.dim; d++) lane[d] += to_float(queries[q * a.dim + d]);
    }
    if (a.mean)
        for (int64_t d = 0; d < a.dim; d++) task.lanes[d] /= static_cast<float>(a.group);
}

// Where a coordinate of a query stands for the rerank.
int shuffled_index(int lane, int coordinate, int size) {
    if (reranks_keys(size)) return (lane / PACK * size + coordinate) * PACK + lane % PACK;
    return lane * size + index_of(coordinate, size);
}

void prepare(const Job& job, const Task& task) {
    const int size = static_cast<int>(job.a.padded_dim);
    if (job.a.bfloat16)
        load_lanes<Bfloat16>(job, task);
    else
        load_lanes<float>(job, task);
    for (int lane = 0; lane < job.lanes; lane++) {
        float* query = task.lanes + lane * size;
        rotate(query, job.a.signs, size);
        for (int d = 0; d < size; d++) task.shuffled[shuffled_index(lane, d, size)] = query[d];
    }
}

void vote(const Job& job, const Task& task, int64_t block) {
    const SelectArguments& a = job.a;
    const Request& request = a.requests[task.request];
    const int32_t* counts = a.counts + ((request.slot * a.kv_heads + task.head) * job.blocks + block) * CENTROIDS;
    const Limits limits(request.method_fields[0]);
    for (int lane = 0; lane < job.lanes; lane++) {
        uint8_t votes[CENTROIDS];
        vote_block(task.lanes + lane * a.padded_dim + block * BLOCK, counts, limits, votes);
        cast_votes(votes, lane, block, job.blocks, task.ballots);
    }
}

void scan(const Job& job, const Task& task, int64_t extent) {
    const int64_t first = extent * INDEX_EXTENT, left = task.length - first;
    const int count = static_cast<int>(left < INDEX_EXTENT ? left : INDEX_EXTENT);
    const uint8_t* ids = job.a.ids + row_of(task.extents, job.a.kv_heads, task.head, first) * job.blocks;
    sum_votes(ids, count, job.blocks, task.ballots, job.lanes, task.votes + first);
}

// Estimates of candidates [first, last). SIZE is padded_dim, or 0 for one without a copy of its own.
template <int SIZE>
void estimate(const Job& job, const Task& task, const Levels& levels, int64_t first, int64_t last) {
    const SelectArguments& a = job.a;
    const int size = SIZE == 0 ? static_cast<int>(a.padded_dim) : SIZE;
    const int64_t blocks = size / BLOCK;
    alignas(64) float key[MAX_PADDED_DIM];
    for (int64_t c = first; c < last; c++) {
        if (c + PREFETCH_KEYS < last) {  // candidates lie too far apart for the processor to guess
            const int64_t ahead = row_of(task.extents, a.kv_heads, task.head, task.places[c + PREFETCH_KEYS]);
            __builtin_prefetch(a.codes + ahead * (size / 2));
            __builtin_prefetch(a.weights + ahead * blocks);
        }
        const int64_t row = row_of(task.extents, a.kv_heads, task.head, task.places[c]);
        decode(a.codes + row * (size / 2), a.weights + row * blocks, size, levels, key);
        for (int lane = 0; lane < job.lanes; lane += PACK)
            dot_lanes(key, task.shuffled + lane * size, job.lanes - lane, size, task.estimates + lane * task.stride + c,
                      task.stride);
    }
}

// What `estimate` does, several keys at a time; lanes beyond the last candidate repeat it.
void estimate_groups(const Job& job, const Task& task, const Levels& levels, int64_t first, int64_t last) {
    const SelectArguments& a = job.a;
    const int size = static_cast<int>(a.padded_dim);
    const int64_t count = rounded_up(last - first);
    int64_t rows[RERANK_KEYS];
    const auto request = [&](int64_t key) {  // candidates lie too far apart for the processor to guess
        __builtin_prefetch(a.codes + rows[key] * (size / 2));
        __builtin_prefetch(a.weights + rows[key] * job.blocks);
    };
    for (int64_t key = 0; key < count; key++) {
        const int64_t candidate = first + key < last ? first + key : last - 1;
        rows[key] = row_of(task.extents, a.kv_heads, task.head, task.places[candidate]);
        if (key < REQUESTED) request(key);
    }
    for (int64_t key = 0; key < count; key += LANES) {
        for (int64_t ahead = key + REQUESTED; ahead < key + REQUESTED + LANES && ahead < count; ahead++) request(ahead);
        for (int lane = 0; lane < job.lanes; lane += PACK)
            estimate_keys(a.codes, a.weights, rows + key, size, levels.of, task.shuffled + lane * size,
                          job.lanes - lane, task.estimates + lane * task.stride + first + key, task.stride);
    }
}

void rerank(const Job& job, const Task& task, const Levels& levels, int64_t chunk) {
    const int64_t first = chunk * RERANK_KEYS, end = first + RERANK_KEYS;
    const int64_t last = end < task.candidate_count ? end : task.candidate_count;
    if (reranks_keys(static_cast<int>(job.a.padded_dim))) return estimate_groups(job, task, levels, first, last);
    with_constant<64, 128, 0>(job.a.padded_dim, [&](auto size) { estimate<size>(job, task, levels, first, last); });
}

void select(const SelectArguments& a) {
    static thread_local Scratch memory;
    const int lanes = a.mean ? 1 : static_cast<int>(a.group);
    const Job job = {a, a.padded_dim / BLOCK, lanes, (lanes + PACK - 1) / PACK};
    Task* tasks = static_cast<Task*>(memory.reserve(sizeof(Task) * a.batch * a.kv_heads));
    const int64_t count = describe_tasks(a, tasks, [](const Request& request) { return request.method_fields[1]; });
    const Levels levels(a.levels);
    const auto units_of = [](const Task& task) { return (task.candidate_count + RERANK_KEYS - 1) / RERANK_KEYS; };
    run_tasks(
        tasks, count, a.threads, 1, [&](Task& task, Arena& arena) { lay_out(job, task, arena); },
        whole([&](const Task& task) { prepare(job, task); }),
        divided([&](const Task&) { return job.blocks; },
                [&](const Task& task, int64_t block) { vote(job, task, block); }),
        divided(extents_of<Task>, [&](const Task& task, int64_t extent) { scan(job, task, extent); }),
        whole([](const Task& t) { collect_candidates(t.votes, t.length, t.candidate_count, t.places); }),
        divided(units_of, [&](const Task& task, int64_t unit) { rerank(job, task, levels, unit); }),
        whole([&](const Task& task) { choose_rows(a, task, job.lanes, a.mean); }));
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_pariskv_select, kvseek::SelectArguments, kvseek::select)
