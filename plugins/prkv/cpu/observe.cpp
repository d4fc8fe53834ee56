// What the observation window attends to (observation_scores in plugins/prkv/static.py defines the result): one pass
// over the keys finds what each query's softmax divides by, a second adds up the weights of each key. Products are
// taken anew in the second pass: to write them down would take as long.
//
// A vector lane is a query, so that softmaxes need no shuffles. How keys are cut depends on their number alone, so the
// result does not depend on threads.
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/phases.h"
#include "kernels/cpu/products.h"

namespace kvseek {

// Strides are in numbers.
struct PrkvObserveArguments {
    const void* queries;   // [kv_heads, rows, dim], contiguous: those of a KV head
    const void* keys;      // [kv_heads, n, dim], contiguous but for the first two dimensions
    const uint8_t* valid;  // [kv_heads, n], which keys count; null: all
    float* scores;         // [kv_heads, n] out; -1 for keys that do not count
    int64_t kv_heads, rows, n, dim;
    int64_t head_stride, key_stride;
    int64_t bfloat16;  // queries and keys are bfloat16, else float32
    int64_t threads;
    double scaling;
};

namespace {

constexpr int64_t UNIT_KEYS = 1024;   // of a unit of work
constexpr int BLOCK_KEYS = 8 * ROWS;  // whose products stay in the cache
constexpr float NOT_COUNTED = -1.0f;

// Numbers as Words multiplies them, with zeros beyond the last.
inline void to_words(const float* numbers, int64_t count, float* words) {
    std::memcpy(words, numbers, count * sizeof(float));
}
inline void to_words(const Bfloat16* numbers, int64_t count, float* words) {
    for (int64_t i = 0; i < count; i++) words[i] = to_float(numbers[i]);
}
inline void to_words(const Bfloat16* numbers, int64_t count, Bfloat16* words) {
    std::memcpy(words, numbers, count * sizeof(Bfloat16));
    if (count % 2 != 0) words[count] = {0};
}

// What the units of all heads share.
template <class Words, class T>
struct Observation {
    using Number = typename Words::Number;
    const PrkvObserveArguments& a;
    int64_t steps, columns;  // words of a key; queries, rounded up
    int64_t units;           // of a head
    uint32_t* queries;       // [kv_heads, steps, columns] words
    float* highest;          // [kv_heads, units, columns] largest exponent of a unit
    float* totals;           // the same: sum of e^(exponent - largest)
    float* divisors;  // [kv_heads, columns] log of what the softmax divides by; infinite for a column without a query

    Observation(const PrkvObserveArguments& given, Scratch& memory)
        : a(given),
          steps((given.dim + Words::PAIR - 1) / Words::PAIR),
          columns((given.rows + COLUMNS - 1) / COLUMNS * COLUMNS),
          units((given.n + UNIT_KEYS - 1) / UNIT_KEYS) {
        Arena measured(nullptr);
        lay_out(measured);
        Arena arena(static_cast<char*>(memory.reserve(measured.used)));
        lay_out(arena);
        for (int64_t head = 0; head < a.kv_heads; head++) pack_queries(head);
    }

    void lay_out(Arena& arena) {
        queries = arena.take<uint32_t>(a.kv_heads * steps * columns);
        highest = arena.take<float>(a.kv_heads * units * columns);
        totals = arena.take<float>(a.kv_heads * units * columns);
        divisors = arena.take<float>(a.kv_heads * columns);
    }

    void pack_queries(int64_t head) {
        static thread_local Scratch memory;
        uint32_t *row = static_cast<uint32_t*>(memory.reserve(steps * sizeof(uint32_t))),
                 *to = queries + head * steps * columns;
        std::memset(to, 0, steps * columns * sizeof(uint32_t));
        for (int64_t q = 0; q < a.rows; q++) {
            const T* query = static_cast<const T*>(a.queries) + (head * a.rows + q) * a.dim;
            to_words(query, a.dim, reinterpret_cast<Number*>(row));
            for (int64_t step = 0; step < steps; step++) to[step * columns + q] = row[step];
        }
    }

    // body(products, keys, count) for blocks of keys first .. last - 1 of a head that count: products [count, columns],
    // and the keys' numbers.
    template <class Body>
    void for_each_block(int64_t head, int64_t first, int64_t last, const Body& body) const {
        static thread_local Scratch memory;
        Arena arena(static_cast<char*>(memory.reserve((steps + columns) * BLOCK_KEYS * sizeof(float) + 128)));
        uint32_t* words = arena.take<uint32_t>(BLOCK_KEYS * steps);
        float* products = arena.take<float>(BLOCK_KEYS * columns);
        const T* keys = static_cast<const T*>(a.keys) + head * a.head_stride;
        int64_t numbers[BLOCK_KEYS];
        for (int64_t key = first; key < last;) {
            int count = 0;
            for (; key < last && count < BLOCK_KEYS; key++) {
                if (a.valid != nullptr && a.valid[head * a.n + key] == 0) continue;
                to_words(keys + key * a.key_stride, a.dim, reinterpret_cast<Number*>(words + count * steps));
                numbers[count++] = key;
            }
            for (int row = 0; row < count; row += ROWS) {  // rows beyond the count hold what was there
                multiply<Words>({words + row * steps, steps, queries + head * steps * columns, columns, steps,
                                 products + row * columns, columns, nullptr},
                                columns);
            }
            if (count > 0) body(products, numbers, count);
        }
    }

    // First pass: largest exponent and sum of a unit's keys, for each query.
    void sum_unit(int64_t head, int64_t first, int64_t last) const {
        const int64_t at = (head * units + first / UNIT_KEYS) * columns;
        float *most = highest + at, *sums = totals + at;
        const float scaling = static_cast<float>(a.scaling);
        for (int64_t c = 0; c < columns; c++) most[c] = -INFINITE, sums[c] = 0.0f;
        for_each_block(head, first, last, [&](const float* products, const int64_t*, int count) {
            for (int64_t c = 0; c < columns; c += LANES) {
                const Vec before = load(most + c);
                Vec largest = before;
                for (int k = 0; k < count; k++) largest = maximum(largest, load(products + k * columns + c) * scaling);
                Vec sum = load(sums + c) * exponential(before - largest);
                for (int k = 0; k < count; k++)
                    sum += exponential(load(products + k * columns + c) * scaling - largest);
                store(most + c, largest), store(sums + c, sum);
            }
        });
    }

    void merge_units(int64_t head) const {
        for (int64_t c = 0; c < columns; c += LANES) {
            const float *most = highest + head * units * columns + c, *sums = totals + head * units * columns + c;
            Vec largest = splat(-INFINITE), sum = {};
            for (int64_t u = 0; u < units; u++) largest = maximum(largest, load(most + u * columns));
            for (int64_t u = 0; u < units; u++)
                sum += load(sums + u * columns) * exponential(load(most + u * columns) - largest);
            store(divisors + head * columns + c, largest + logarithm(sum));
        }
        for (int64_t c = a.rows; c < columns; c++) divisors[head * columns + c] = INFINITE;
    }

    // Second pass: the mean weight of each of a unit's keys.
    void weigh_unit(int64_t head, int64_t first, int64_t last) const {
        float* scores = a.scores + head * a.n;
        const float *divisor = divisors + head * columns, scaling = static_cast<float>(a.scaling);
        for (int64_t key = first; key < last; key++) scores[key] = NOT_COUNTED;
        for_each_block(head, first, last, [&](const float* products, const int64_t* keys, int count) {
            for (int k = 0; k < count; k++) {
                Vec sum = {};
                for (int64_t c = 0; c < columns; c += LANES)
                    sum += exponential(load(products + k * columns + c) * scaling - load(divisor + c));
                scores[keys[k]] = kvseek::sum(sum) / static_cast<float>(a.rows);
            }
        });
    }
};

template <class Words, class T>
void observe_keys(const PrkvObserveArguments& a) {
    static thread_local Scratch memory;
    const Observation<Words, T> all(a, memory);
    for_each_chunk(a.threads, a.kv_heads, a.n, UNIT_KEYS,
                   [&](int64_t head, int64_t first, int64_t last) { all.sum_unit(head, first, last); });
    for (int64_t head = 0; head < a.kv_heads; head++) all.merge_units(head);
    for_each_chunk(a.threads, a.kv_heads, a.n, UNIT_KEYS,
                   [&](int64_t head, int64_t first, int64_t last) { all.weigh_unit(head, first, last); });
}

void observe(const PrkvObserveArguments& a) {
    if (!a.bfloat16) return observe_keys<Floats, float>(a);
#if KVSEEK_LEVEL == 4
    if (kvseek_processor_extends(KVSEEK_BF16)) return observe_keys<Pairs, Bfloat16>(a);
#endif
    observe_keys<Floats, Bfloat16>(a);
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_prkv_observe, kvseek::PrkvObserveArguments, kvseek::observe)
