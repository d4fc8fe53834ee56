// Causal attention from the last tokens of a sequence to the whole sequence (flash attention).
//
// A unit of work is a block of query tokens of one KV head. The query heads that share the KV head are further rows,
// token by token, so that each block of keys and values is packed once for all of them. Blocks of keys begin at
// multiples of a size that depends on head size and dtype alone, and the sums of a row go through them in order. So
// what is computed for a row depends neither on the other rows of its unit, nor on the chunk that it is in, nor on
// threads.
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/packing.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/phases.h"
#include "softmax.h"

namespace kvseek {

// Strides are in elements; the last dimension is contiguous.
struct CausalAttentionArguments {
    const void* queries;  // [kv_heads * group, q, dim]
    const void* keys;     // [kv_heads, n, dim], n >= q
    const void* values;   // as the keys
    void* out;            // [q, kv_heads * group, dim], contiguous
    int64_t query_head_stride, query_stride;
    int64_t key_head_stride, key_stride;
    int64_t value_head_stride, value_stride;
    int64_t kv_heads, group, q, n, dim;  // dim is even
    int64_t window;                      // latest keys that a query attends to, its own included; 0: all
    int64_t bfloat16;                    // else float32
    int64_t threads;
    double scaling;  // > 0
};

namespace {

constexpr int64_t BLOCK_WORDS =
    8192;  // of a block of packed keys: it and the block of values fit the second-level cache
constexpr int64_t MAX_BLOCK_KEYS = 256;
// Large units pack keys less often, and small ones spread more evenly over threads.
constexpr int64_t MIN_UNIT_ROWS = 48, MAX_UNIT_ROWS = 768, UNITS_OF_A_THREAD = 4;

inline int64_t round_up(int64_t value, int64_t step) {
    return (value + step - 1) / step * step;
}
inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}
inline int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

struct Sizes {
    Sizes(const CausalAttentionArguments& a, int pair)
        : steps(a.dim / pair),
          channels(round_up(a.dim, COLUMNS)),
          keys(round_up(smaller(BLOCK_WORDS / steps, MAX_BLOCK_KEYS), WIDE * LANES)) {
        const int64_t share = a.q * a.kv_heads * a.group / (UNITS_OF_A_THREAD * a.threads);
        const int64_t wanted = smaller(larger(share, MIN_UNIT_ROWS), MAX_UNIT_ROWS);
        tokens = smaller(larger(wanted / a.group, 1), a.q);
        rows = round_up(tokens * a.group, ROWS);
        units = (a.q + tokens - 1) / tokens;
    }
    int64_t steps;         // words of a query or key
    int64_t channels;      // columns of the values
    int64_t keys;          // of a block
    int64_t tokens, rows;  // of a unit; rows are rounded up
    int64_t units;         // of a KV head
};

// Memory of a unit. A row is the query of one token and head.
struct Memory {
    Memory(const Sizes& sizes, Arena arena)
        : queries(arena.take<uint32_t>(sizes.rows * sizes.steps)),
          keys(arena.take<uint32_t>(sizes.steps * sizes.keys)),
          values(arena.take<uint32_t>(sizes.keys * sizes.channels)),
          scores(arena.take<float>(ROWS * sizes.keys)),
          sums(arena.take<float>(sizes.rows * sizes.channels)),
          softmax(arena.take<Softmax>(sizes.rows)),
          ends(arena.take<int64_t>(sizes.rows)),
          bytes(arena.used) {}
    uint32_t *queries, *keys, *values;
    float* scores;     // [ROWS, keys], then the weights
    float* sums;       // [rows, channels] of weighted values
    Softmax* softmax;  // [rows]
    int64_t* ends;     // [rows] the row attends to keys before this one; beyond the last row: as the last
    int64_t bytes;
};

template <class Words, class T>
class Unit {
  public:
    Unit(const CausalAttentionArguments& a, const Sizes& sizes, const Memory& memory, int64_t head, int64_t number)
        : a_(a),
          sizes_(sizes),
          memory_(memory),
          scale_(static_cast<float>(a.scaling * 1.4426950408889634)),
          head_(head),
          first_(number * sizes.tokens),
          rows_(smaller(sizes.tokens, a.q - first_) * a.group) {}

    void run() {
        load_queries();
        const T* keys = static_cast<const T*>(a_.keys) + head_ * a_.key_head_stride;
        const T* values = static_cast<const T*>(a_.values) + head_ * a_.value_head_stride;
        const int64_t end = memory_.ends[rows_ - 1];
        for (int64_t start = begin(0) / sizes_.keys * sizes_.keys; start < end; start += sizes_.keys) {
            const int64_t count = smaller(sizes_.keys, end - start);
            pack_columns<Words>(Rows<T>{keys + start * a_.key_stride, a_.key_stride, count, a_.dim}, sizes_.keys,
                                memory_.keys);
            pack_summed<Words>(Rows<T>{values + start * a_.value_stride, a_.value_stride, count, a_.dim},
                               sizes_.channels, memory_.values);
            for (int64_t row = 0; row < rows_; row += ROWS)
                if (memory_.ends[row + ROWS - 1] > start && begin(row) < start + sizes_.keys) attend(row, start);
        }
        write();
    }

  private:
    int64_t token(int64_t row) const { return first_ + row / a_.group; }
    // The first key that a row attends to.
    int64_t begin(int64_t row) const { return a_.window ? larger(memory_.ends[row] - a_.window, 0) : 0; }
    int64_t query_head(int64_t row) const { return head_ * a_.group + row % a_.group; }

    void load_queries() const {
        const T* queries = static_cast<const T*>(a_.queries);
        std::memset(memory_.queries, 0, sizeof(uint32_t) * sizes_.rows * sizes_.steps);
        std::memset(memory_.sums, 0, sizeof(float) * sizes_.rows * sizes_.channels);
        for (int64_t row = 0; row < sizes_.rows; row++) {
            memory_.softmax[row] = {-INFINITE, 0.0f};
            memory_.ends[row] = a_.n - a_.q + token(smaller(row, rows_ - 1)) + 1;
            if (row < rows_)
                pack_row<Words>(queries + query_head(row) * a_.query_head_stride + token(row) * a_.query_stride, a_.dim,
                                memory_.queries + row * sizes_.steps);
        }
    }

    // Attend from ROWS rows to the packed block of keys.
    void attend(int64_t row, int64_t start) const {
        const int64_t* ends = memory_.ends + row;
        const int64_t visible = smaller(sizes_.keys, ends[ROWS - 1] - start);
        multiply<Words>({memory_.queries + row * sizes_.steps, sizes_.steps, memory_.keys, sizes_.keys, sizes_.steps,
                         memory_.scores, sizes_.keys, nullptr},
                        round_up(visible, COLUMNS));
        float shrink[ROWS];
        for (int r = 0; r < ROWS; r++) {
            float* scores = memory_.scores + r * sizes_.keys;
            const int64_t first = begin(row + r) - start, width = round_up(visible, LANES);
            if (first >= smaller(visible, ends[r] - start)) {  // the row sees no key of the block: its sums stay
                std::memset(scores, 0, sizeof(float) * width);
                shrink[r] = 1.0f;
                continue;
            }
            for (int64_t key = 0; key < first; key++) scores[key] = -INFINITE;
            shrink[r] =
                soften<typename Words::Number>(scores, ends[r] - start, width, scale_, memory_.softmax[row + r]);
        }
        multiply<Words>(
            {reinterpret_cast<uint32_t*>(memory_.scores), sizes_.keys, memory_.values, sizes_.channels,
             (visible + Words::PAIR - 1) / Words::PAIR, memory_.sums + row * sizes_.channels, sizes_.channels, shrink},
            sizes_.channels);
    }

    void write() const {
        for (int64_t row = 0; row < rows_; row++) {
            T* out = static_cast<T*>(a_.out) + (token(row) * a_.kv_heads * a_.group + query_head(row)) * a_.dim;
            const float* sums = memory_.sums + row * sizes_.channels;
            for (int64_t d = 0; d < a_.dim; d++) from_float(sums[d] / memory_.softmax[row].total, out + d);
        }
    }

    const CausalAttentionArguments& a_;
    const Sizes& sizes_;
    const Memory& memory_;
    float scale_;
    int64_t head_, first_, rows_;  // KV head; token of the first row; rows that there are
};

template <class Words, class T>
void attend_units(const CausalAttentionArguments& a) {
    const Sizes sizes(a, Words::PAIR);
    const int64_t units = sizes.units * a.kv_heads, bytes = Memory(sizes, Arena(nullptr)).bytes;
    Counter counter;
    parallel(static_cast<int>(smaller(a.threads, units)), [&] {
        static thread_local Scratch scratch;
        const Memory memory(sizes, Arena(static_cast<char*>(scratch.reserve(bytes))));
        // The last tokens first: they attend to most keys.
        for (int64_t unit = counter.take(); unit < units; unit = counter.take())
            Unit<Words, T>(a, sizes, memory, unit % a.kv_heads, sizes.units - 1 - unit / a.kv_heads).run();
    });
}

void causal_attention(const CausalAttentionArguments& a) {
    if (!a.bfloat16) return attend_units<Floats, float>(a);
#if KVSEEK_LEVEL == 4
    if (kvseek_processor_extends(KVSEEK_BF16)) return attend_units<Pairs, Bfloat16>(a);
#endif
    attend_units<Floats, Bfloat16>(a);
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_causal_attention, kvseek::CausalAttentionArguments, kvseek::causal_attention)
