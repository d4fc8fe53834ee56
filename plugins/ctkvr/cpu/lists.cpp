// The lists of a prompt's centroids on host cores (CTkvr paper, algorithm 1; build.py defines the result).
//
// The keys of some KV heads are packed, then threads take tiles of centroids: products of the tile's queries with all
// keys, the log-sum-exp of every query, each key's largest weight in the group, the best keys. Which keys a list holds
// depends on its own scores alone, not on its tile or thread.
#include "kernels/cpu/candidates.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/packing.h"
#include "kernels/cpu/parallel.h"

namespace kvseek {

// Strides are in numbers.
struct HostLists {
    const void* queries;  // [kv_heads * group, centroids, dim]; rows are contiguous
    const void* keys;     // [kv_heads, tokens, dim]; rows are contiguous
    int32_t* lists;       // [kv_heads, centroids, width] out, places ascending; rows are contiguous
    int64_t query_head_stride, query_stride, key_head_stride, key_stride, list_head_stride;
    int64_t kv_heads, group, centroids, tokens, dim, width;
    int64_t bfloat16;  // queries and keys are bfloat16, else float32
    int64_t threads;
    double scaling;
};

namespace {

constexpr int MAX_GROUP = 16;
constexpr int64_t PANEL = WIDE * LANES;     // keys that a product takes at a time, packed next to each other
constexpr int64_t PACKED_KEYS = 8 * PANEL;  // keys of a unit of packing
constexpr int64_t PACKED_BYTES = 64 << 20;  // most of packed keys, unless one KV head's take more
constexpr int64_t TILE_ROWS = 16 * ROWS;    // most queries of a tile, unless one centroid has more
constexpr int64_t TILE_BYTES = 16 << 20;    // most of a tile's scores, likewise

inline int64_t up_to(int64_t count, int64_t step) {
    return (count + step - 1) / step * step;
}

// Sizes of the work, which all threads share.
struct ListSizes {
    int64_t steps;      // words of a packed row
    int64_t padded;     // keys of a KV head with those that fill its last panel
    int64_t heads;      // KV heads whose keys are packed at once
    int64_t centroids;  // of a tile
    int64_t rows;       // queries of a tile, with those that fill its last product

    ListSizes(const HostLists& a, int64_t pair) : steps(a.dim / pair), padded(up_to(a.tokens, PANEL)) {
        const int64_t word = sizeof(uint32_t), fitting = PACKED_BYTES / (padded * steps * word);
        heads = fitting < 1 ? 1 : fitting < a.kv_heads ? fitting : a.kv_heads;
        const int64_t affordable = TILE_BYTES / (padded * word), most = affordable < TILE_ROWS ? affordable : TILE_ROWS;
        centroids = most < a.group ? 1 : most / a.group;
        rows = up_to(centroids * a.group, ROWS);
    }
    int64_t head_words() const { return padded * steps; }
};

// Memory of a thread for a tile.
struct TileMemory {
    explicit TileMemory(const ListSizes& sizes) : padded(sizes.padded) {
        const int64_t words = sizes.rows * sizes.steps + (sizes.rows + 2) * padded;
        queries = static_cast<uint32_t*>(scratch.reserve(words * sizeof(uint32_t)));
        scores = reinterpret_cast<float*>(queries + sizes.rows * sizes.steps);
        candidates.ranks = reinterpret_cast<int32_t*>(scores + sizes.rows * padded);
        candidates.places = candidates.ranks + padded;
    }
    Scratch scratch;
    int64_t padded;
    uint32_t* queries;          // [rows, steps]
    float* scores;              // [rows, padded]; a centroid's group is in consecutive rows
    CandidateLists candidates;  // [padded]
};

// One tile of centroids of a KV head.
template <class Words, class T>
struct Tile {
    const HostLists& a;
    const ListSizes& sizes;
    const TileMemory& memory;
    int64_t head, first, count;  // KV head; first centroid; centroids

    void pack_queries() const {
        const T* queries = static_cast<const T*>(a.queries) + head * a.group * a.query_head_stride;
        uint32_t* words = memory.queries;
        for (int64_t c = first; c < first + count; c++)
            for (int64_t q = 0; q < a.group; q++, words += sizes.steps)
                pack_row<Words>(queries + q * a.query_head_stride + c * a.query_stride, a.dim, words);
        const int64_t used = count * a.group;
        std::memset(words, 0, sizeof(uint32_t) * (up_to(used, ROWS) - used) * sizes.steps);
    }

    // `keys`: packed, [padded / PANEL, steps, PANEL].
    void multiply_keys(const uint32_t* keys) const {
        for (int64_t key = 0; key < sizes.padded; key += PANEL)
            for (int64_t row = 0; row < count * a.group; row += ROWS)
                Words::template multiply<WIDE>({memory.queries + row * sizes.steps, sizes.steps,
                                                keys + key * sizes.steps, PANEL, sizes.steps,
                                                memory.scores + row * sizes.padded + key, sizes.padded, nullptr});
    }

    // Scale a query's products, so that they are scores; returns their log-sum-exp.
    float scale(float* scores) const {
        const float factor = static_cast<float>(a.scaling);
        Vec best = splat(-INFINITE), total = {};
        for (int64_t i = a.tokens; i < sizes.padded; i++) scores[i] = -INFINITE;
        for (int64_t i = 0; i < a.tokens; i += LANES) {
            const Vec scaled = load(scores + i) * factor;
            store(scores + i, scaled);
            best = maximum(best, scaled);
        }
        const float highest = maximum(best);
        for (int64_t i = 0; i < a.tokens; i += LANES) total += exponential(load(scores + i) - highest);
        return highest + __builtin_logf(sum(total));
    }

    // Turn the scores [group, padded] of a centroid into the logarithms of the keys' largest weights, in the first row.
    void weigh(float* scores) const {
        float sums[MAX_GROUP];
        for (int64_t q = 0; q < a.group; q++) sums[q] = scale(scores + q * sizes.padded);
        for (int64_t i = 0; i < a.tokens; i += LANES) {
            Vec value = load(scores + i) - sums[0];
            for (int64_t q = 1; q < a.group; q++) value = maximum(value, load(scores + q * sizes.padded + i) - sums[q]);
            store(scores + i, value);
        }
    }

    void run(const uint32_t* keys) const {
        pack_queries();
        multiply_keys(keys);
        for (int64_t c = 0; c < count; c++) {
            float* scores = memory.scores + c * a.group * sizes.padded;
            weigh(scores);
            take_candidates(scores, a.tokens, a.width, memory.candidates,
                            a.lists + head * a.list_head_stride + (first + c) * a.width);
        }
    }
};

template <class Words, class T>
void pack_keys(const HostLists& a, const ListSizes& sizes, int64_t head, int64_t first, int64_t last, uint32_t* words) {
    const T* keys = static_cast<const T*>(a.keys) + head * a.key_head_stride;
    for (int64_t key = first; key < last; key += PANEL) {
        const int64_t left = last - key, count = left < PANEL ? left : PANEL;
        pack_columns<Words>(Rows<T>{keys + key * a.key_stride, a.key_stride, count, a.dim}, PANEL,
                            words + key * sizes.steps);
    }
}

template <class Words, class T>
void list_keys(const HostLists& a) {
    const ListSizes sizes(a, Words::PAIR);
    const int64_t tiles = (a.centroids + sizes.centroids - 1) / sizes.centroids;
    Scratch scratch;
    uint32_t* packed = static_cast<uint32_t*>(scratch.reserve(sizes.heads * sizes.head_words() * sizeof(uint32_t)));
    for (int64_t head = 0; head < a.kv_heads; head += sizes.heads) {
        const int64_t left = a.kv_heads - head, heads = left < sizes.heads ? left : sizes.heads;
        for_each_chunk(a.threads, heads, a.tokens, PACKED_KEYS, [&](int64_t next, int64_t first, int64_t last) {
            pack_keys<Words, T>(a, sizes, head + next, first, last, packed + next * sizes.head_words());
        });
        const int64_t units = heads * tiles;
        Counter counter;
        parallel(static_cast<int>(a.threads < units ? a.threads : units), [&] {
            const TileMemory memory(sizes);
            for (int64_t unit = counter.take(); unit < units; unit = counter.take()) {
                const int64_t first = unit % tiles * sizes.centroids, most = a.centroids - first;
                const int64_t count = most < sizes.centroids ? most : sizes.centroids, next = unit / tiles;
                Tile<Words, T>{a, sizes, memory, head + next, first, count}.run(packed + next * sizes.head_words());
            }
        });
    }
}

// Lists that have room for all keys.
void list_all(const HostLists& a) {
    for (int64_t head = 0; head < a.kv_heads; head++)
        for (int64_t c = 0; c < a.centroids; c++) {
            int32_t* list = a.lists + head * a.list_head_stride + c * a.width;
            for (int64_t i = 0; i < a.width; i++) list[i] = i < a.tokens ? static_cast<int32_t>(i) : -1;
        }
}

void build_lists(const HostLists& a) {
    if (a.tokens <= a.width) return list_all(a);
    if (!a.bfloat16) return list_keys<Floats, float>(a);
#if KVSEEK_LEVEL == 4
    if (kvseek_processor_extends(KVSEEK_BF16)) return list_keys<Pairs, Bfloat16>(a);
#endif
    list_keys<Floats, Bfloat16>(a);
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_ctkvr_host_lists, kvseek::HostLists, kvseek::build_lists)
