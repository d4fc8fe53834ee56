// What a decoder layer computes besides matrix products, selection and attention: norms, rotation, activation. The
// kernels are those of kernels/cuda/layer/layer.cu, by name and by what each does. Arithmetic is in float32 and rounded
// once, where a value is stored. kernels/cpu/layer/layer.py calls them.
//
// A row is computed by one thread, in the same order whatever the batch is. So a request's numbers depend neither on
// the requests beside it nor on the number of threads. Threads share the rows of a prompt. Those of most decode steps
// take a microsecond, less than waking a second thread, so one thread computes them.
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"
#include "kernels/request.h"

namespace kvseek {

// Number is float or Bfloat16. D is even.
struct AddRmsNormArguments {
    void* x;             // Number [rows, hidden], changed in place
    const void* delta;   // Number [rows, hidden], or null
    const void* weight;  // Number [hidden]
    void* out;           // Number [rows, hidden]
    int64_t rows, hidden;
    int64_t bfloat16, threads;
    double epsilon;
    double centre;  // added to each weight
};

struct RopeAppendArguments {
    const void* qkv;          // Number [rows, numbers], of which the first (H + 2G) * D are read
    const Request* requests;  // [rows]
    const float* cosines;     // [rows, D/2]
    const float* sines;       // [rows, D/2]
    const void* q_norm;       // Number [D], or null
    const void* k_norm;       // Number [D], or null
    void* queries;            // Number [rows, H, D]
    void* window;             // Number [slots, G, window_rows, 2, D]
    int64_t rows, heads, kv_heads, dim, window_rows, numbers;
    int64_t bfloat16, threads;
    double epsilon;
    double centre;  // added to each weight of q_norm and k_norm
};

struct RopePromptArguments {
    const void* qkv;       // Number [rows, numbers], of which the first (H + 2G) * D are read
    const float* cosines;  // [rows, D/2]
    const float* sines;    // [rows, D/2]
    const void* q_norm;    // Number [D], or null
    const void* k_norm;    // Number [D], or null
    void* queries;         // Number [rows, H, D]
    void* keys;            // Number [G, tokens, D], from the first row's token on
    void* values;          // likewise
    int64_t rows, heads, kv_heads, dim, numbers;
    int64_t distance;  // tokens from one KV head to the next
    int64_t bfloat16, threads;
    double epsilon;
    double centre;  // added to each weight of q_norm and k_norm
};

struct SiluMulArguments {
    const void* gate_up;  // Number [rows, 2 * intermediate]
    void* out;            // Number [rows, intermediate]
    int64_t rows, intermediate;
    int64_t bfloat16, threads;
};

namespace {

constexpr int64_t UNIT_NUMBERS = 1 << 14;    // numbers of the rows that a thread takes at a time
constexpr int64_t SHARED_NUMBERS = 1 << 16;  // fewer, at most some 20 µs of work, are left to one thread

// How many lanes of a vector are numbers. All of them is a type of its own, so that the compiler knows.
struct AllLanes {};
struct FirstLanes {
    int64_t count;
};

template <class T>
inline Vec load(const T* from, AllLanes) {
    return load(from);
}
template <class T>
inline Vec load(const T* from, FirstLanes lanes) {  // zeros beyond
    T numbers[LANES] = {};
    std::memcpy(numbers, from, lanes.count * sizeof(T));
    return load(numbers);
}
template <class T>
inline void store(T* to, Vec values, AllLanes) {
    store(to, values);
}
template <class T>
inline void store(T* to, Vec values, FirstLanes lanes) {
    T numbers[LANES];
    store(numbers, values);
    std::memcpy(to, numbers, lanes.count * sizeof(T));
}

// body(at, lanes) for all vectors of `size` numbers, of which the last may be shorter.
template <class Body>
inline void for_each_vector(int64_t size, const Body& body) {
    int64_t at = 0;
    for (; at + LANES <= size; at += LANES) body(at, AllLanes{});
    if (at < size) body(at, FirstLanes{size - at});
}

// body(first, last) for parts of all rows, which have `numbers` numbers each.
template <class Body>
inline void for_each_part(int64_t threads, int64_t rows, int64_t numbers, const Body& body) {
    if (rows * numbers < SHARED_NUMBERS) return body(0, rows);
    const int64_t size = UNIT_NUMBERS > numbers ? UNIT_NUMBERS / numbers : 1;
    for_each_chunk(threads, 1, rows, size, [&](int64_t, int64_t first, int64_t last) { body(first, last); });
}

inline float inverse_rms(float squares, int64_t size, double epsilon) {
    return 1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + static_cast<float>(epsilon));
}

// x += delta; out = x / rms(x) * (weight + centre). What is squared is x as it was stored.
template <class T>
void add_rms_norm_row(T* x, const T* delta, const T* weight, T* out, int64_t hidden, double epsilon, float centre) {
    if (delta != nullptr) {
        for_each_vector(hidden, [&](int64_t at, auto lanes) {
            store(x + at, load(x + at, lanes) + load(delta + at, lanes), lanes);
        });
    }
    Vec squares = {};
    for_each_vector(hidden, [&](int64_t at, auto lanes) {
        const Vec value = load(x + at, lanes);
        squares += value * value;
    });
    const float scale = inverse_rms(sum(squares), hidden, epsilon);
    for_each_vector(hidden, [&](int64_t at, auto lanes) {
        store(out + at, load(x + at, lanes) * scale * (load(weight + at, lanes) + centre), lanes);
    });
}

template <class T>
void add_rms_norm_rows(const AddRmsNormArguments& a) {
    T *x = static_cast<T*>(a.x), *out = static_cast<T*>(a.out);
    const T *delta = static_cast<const T*>(a.delta), *weight = static_cast<const T*>(a.weight);
    for_each_part(a.threads, a.rows, a.hidden, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            const int64_t at = row * a.hidden;
            add_rms_norm_row(x + at, delta == nullptr ? nullptr : delta + at, weight, out + at, a.hidden, a.epsilon,
                             static_cast<float>(a.centre));
        }
    });
}

// Normalise a head's D numbers if there is a weight, rotate the pairs (i, i + D/2), store.
template <class T>
void rotate_head(const T* from, T* to, const float* cosines, const float* sines, const T* norm, int64_t dim,
                 double epsilon, float centre) {
    const int64_t pairs = dim / 2;
    float scale = 1.0f;
    if (norm != nullptr) {
        Vec squares = {};
        for_each_vector(dim, [&](int64_t at, auto lanes) {
            const Vec value = load(from + at, lanes);
            squares += value * value;
        });
        scale = inverse_rms(sum(squares), dim, epsilon);
    }
    for_each_vector(pairs, [&](int64_t at, auto lanes) {
        Vec a = load(from + at, lanes), b = load(from + at + pairs, lanes);
        if (norm != nullptr) {
            a *= scale * (load(norm + at, lanes) + centre);
            b *= scale * (load(norm + at + pairs, lanes) + centre);
        }
        const Vec cosine = load(cosines + at, lanes), sine = load(sines + at, lanes);
        store(to + at, a * cosine - b * sine, lanes);
        store(to + at + pairs, b * cosine + a * sine, lanes);
    });
}

// Split a row's qkv [(H + 2G) * D]: rotated queries to `queries` [H, D], rotated key and value of KV head g to
// key_of(g) and value_of(g).
template <class T, class Arguments, class KeyOf, class ValueOf>
void split_row(const Arguments& a, int64_t row, const KeyOf& key_of, const ValueOf& value_of) {
    const T* from = static_cast<const T*>(a.qkv) + row * a.numbers;
    const float centre = static_cast<float>(a.centre);
    const T *q_norm = static_cast<const T*>(a.q_norm), *k_norm = static_cast<const T*>(a.k_norm);
    const float *cosines = a.cosines + row * a.dim / 2, *sines = a.sines + row * a.dim / 2;
    T* queries = static_cast<T*>(a.queries) + row * a.heads * a.dim;
    for (int64_t head = 0; head < a.heads; head++, from += a.dim)
        rotate_head(from, queries + head * a.dim, cosines, sines, q_norm, a.dim, a.epsilon, centre);
    for (int64_t head = 0; head < a.kv_heads; head++, from += a.dim)
        rotate_head(from, key_of(head), cosines, sines, k_norm, a.dim, a.epsilon, centre);
    for (int64_t head = 0; head < a.kv_heads; head++, from += a.dim)
        std::memcpy(value_of(head), from, a.dim * sizeof(T));
}

// Queries to `queries`, key and value to the request's window row.
template <class T>
void rope_append_rows(const RopeAppendArguments& a) {
    for_each_part(a.threads, a.rows, (a.heads + 2 * a.kv_heads) * a.dim, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            const Request& request = a.requests[row];
            const auto window_row = [&](int64_t head) {
                const int64_t at = (request.slot * a.kv_heads + head) * a.window_rows + request.write_row;
                return static_cast<T*>(a.window) + at * 2 * a.dim;
            };
            split_row<T>(a, row, window_row, [&](int64_t head) { return window_row(head) + a.dim; });
        }
    });
}

// The same for a chunk of a prompt, whose keys and values go to arrays of the whole prompt.
template <class T>
void rope_prompt_rows(const RopePromptArguments& a) {
    T *keys = static_cast<T*>(a.keys), *values = static_cast<T*>(a.values);
    for_each_part(a.threads, a.rows, (a.heads + 2 * a.kv_heads) * a.dim, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            const auto place = [&](int64_t head) { return (head * a.distance + row) * a.dim; };
            split_row<T>(
                a, row, [&](int64_t head) { return keys + place(head); },
                [&](int64_t head) { return values + place(head); });
        }
    });
}

inline Vec silu(Vec gate) {
    const Vec power = exponential(gate < 0.0f ? gate : -gate);  // of a negative number, so that nothing overflows
    return gate * (gate < 0.0f ? power : splat(1.0f)) / (1.0f + power);
}

// out = silu(gate) * up
template <class T>
void silu_mul_rows(const SiluMulArguments& a) {
    for_each_part(a.threads, a.rows, a.intermediate, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            const T* gate = static_cast<const T*>(a.gate_up) + row * 2 * a.intermediate;
            T* out = static_cast<T*>(a.out) + row * a.intermediate;
            for_each_vector(a.intermediate, [&](int64_t at, auto lanes) {
                store(out + at, silu(load(gate + at, lanes)) * load(gate + a.intermediate + at, lanes), lanes);
            });
        }
    });
}

void add_rms_norm(const AddRmsNormArguments& a) {
    a.bfloat16 ? add_rms_norm_rows<Bfloat16>(a) : add_rms_norm_rows<float>(a);
}

void rope_append(const RopeAppendArguments& a) {
    a.bfloat16 ? rope_append_rows<Bfloat16>(a) : rope_append_rows<float>(a);
}

void rope_prompt(const RopePromptArguments& a) {
    a.bfloat16 ? rope_prompt_rows<Bfloat16>(a) : rope_prompt_rows<float>(a);
}

void silu_mul(const SiluMulArguments& a) {
    a.bfloat16 ? silu_mul_rows<Bfloat16>(a) : silu_mul_rows<float>(a);
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_add_rms_norm, kvseek::AddRmsNormArguments, kvseek::add_rms_norm)
KVSEEK_KERNEL(kvseek_rope_append, kvseek::RopeAppendArguments, kvseek::rope_append)
KVSEEK_KERNEL(kvseek_rope_prompt, kvseek::RopePromptArguments, kvseek::rope_prompt)
KVSEEK_KERNEL(kvseek_silu_mul, kvseek::SiluMulArguments, kvseek::silu_mul)
