// What a decoder layer computes besides matrix products, selection and attention: norms, rotation, activation, and the
// first and last kernel of a decode step. Arithmetic is in float32 and rounded once, where a value is stored.
//
// These kernels move little: at batch 1 a launch is latency, not bandwidth. So one launch does all that can be done
// without leaving a row, and what a reduction needs later is loaded before it. kernels/cuda/layer/layer.py launches
// them.
#include "kernels/cuda/batch.cuh"
#include "kernels/cuda/layer/activation.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/overlap.cuh"

namespace kvseek {

struct AddRmsNormArguments {
    void* x;             // Number [rows, hidden], changed in place
    const void* delta;   // Number [rows, hidden], or null
    const void* weight;  // Number [hidden]
    void* out;           // Number [rows, hidden]
    int hidden;          // multiple of 8, at most NORM_THREADS * NORM_PIECES * 8
    float epsilon;
    float centre;  // added to each weight
};

struct SumAddRmsNormArguments {
    void* x;              // Number [rows, hidden], changed in place
    const void* part;     // Number [rows, hidden]: this rank's part of what is added
    const void* weight;   // Number [hidden]
    void* out;            // Number [rows, hidden]
    const void* inboxes;  // void* [ranks]: the inbox of each rank, as send_part describes it
    void* counts;         // unsigned [capacity]: sums of each row so far, the same on all ranks
    const void* stop;     // int: if it is not 0, nobody waits for other ranks any more
    int hidden;           // multiple of 8, at most NORM_THREADS * NORM_PIECES * 8
    float epsilon;
    float centre;  // added to each weight
    int rank;
    int ranks;
    int capacity;  // rows of an inbox, at least those of this launch
};

struct StepBeginArguments {
    const void* requests;     // Request [batch]
    const void* latest;       // int [slots], tokens that steps have drawn, or null: every token is given
    const void* embed;        // Number [tokens, hidden], of tokens first_token, first_token + 1, ...
    const void* frequencies;  // float [sets, D/2], angle per position
    void* x;                  // Number [batch, hidden]
    void* cosines;            // float [batch, D/2]
    void* sines;              // float [batch, D/2]
    int hidden;               // multiple of 8
    float factor;             // on cosines and sines of pairs that are rotated: with a frequency other than 0
    int short_reach;          // tokens of the longest sequence that the first set is for; the second is for longer ones
    int first_token;
    int tokens;  // other tokens' embeddings are zeros, as another rank has them
};

struct RopeAppendArguments {
    const void* qkv;       // Number [batch, numbers], of which the first (H + 2G) * D are read
    const void* requests;  // Request [batch]
    const void* cosines;   // float [batch, D/2]
    const void* sines;     // float [batch, D/2]
    const void* q_norm;    // Number [D], or null
    const void* k_norm;    // Number [D], or null
    void* queries;         // Number [batch, H, D]
    void* window;          // Number [slots, G, window_rows, 2, D]
    int heads;
    int kv_heads;
    int window_rows;
    int numbers;
    float epsilon;
    float centre;  // added to each weight of q_norm and k_norm
};

struct AppendArguments {
    const void* keys;      // Number [batch, G, D], rotated
    const void* values;    // Number [batch, G, D]
    const void* requests;  // Request [batch]
    void* window;          // Number [slots, G, window_rows, 2, D]
    int kv_heads;
    int window_rows;
};

struct RopePromptArguments {
    const void* qkv;      // Number [rows, numbers], of which the first (H + 2G) * D are read
    const void* cosines;  // float [rows, D/2]
    const void* sines;    // float [rows, D/2]
    const void* q_norm;   // Number [D], or null
    const void* k_norm;   // Number [D], or null
    void* queries;        // Number [rows, H, D]
    void* keys;           // Number [G, tokens, D], from the first row's token on
    void* values;         // likewise
    long long distance;   // tokens from one KV head to the next
    int heads;
    int kv_heads;
    int numbers;
    float epsilon;
    float centre;  // added to each weight of q_norm and k_norm
};

struct SiluMulArguments {
    const void* gate_up;  // Number [rows, 2 * intermediate]
    void* out;            // Number [rows, intermediate]
    int intermediate;     // multiple of 8
};

struct ArgmaxArguments {
    const void* logits;    // Number [batch, vocabulary]
    void* best;            // unsigned long long [batch], zero before and after
    void* arrived;         // unsigned [batch], zero before and after
    void* tokens;          // int [batch]: lowest index of the largest logit; -1 if that is not finite
    const void* requests;  // Request [batch]; read if there is `latest`
    void* latest;          // int [slots], which gets the tokens too, or null
    int vocabulary;
};

// Helpers and kernels share this namespace, so that no other file of the translation unit can shadow their names.
namespace layer {

constexpr int NORM_THREADS = 512;
constexpr int NORM_PIECES = 4;  // pieces of eight numbers that a thread may hold
constexpr int BEGIN_THREADS = 256;
constexpr int ROPE_WARPS = 4;  // heads per thread block
constexpr int APPEND_THREADS = 128;
constexpr int SILU_THREADS = 256;
constexpr int ARGMAX_THREADS = 256;

constexpr int DIM = KVSEEK_HEAD_DIM;
constexpr int PAIRS = DIM / 2;
constexpr int LANE_PAIRS = (PAIRS + 31) / 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
static_assert(DIM % 8 == 0, "rotation turns pairs of channels, and rows are copied in pieces of eight numbers");

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

// Sum over a thread block of whole warps, known to every thread.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float parts[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    value = warp_sum(value);
    if (lane == 0) parts[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? parts[lane] : 0.0f);
}

// Round eight values to numbers and store them; the values become what was stored.
__device__ __forceinline__ void store_eight(Number* to, float (&values)[8]) {
    alignas(16) Number rounded[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        rounded[i] = from_float<Number>(values[i]);
        values[i] = to_float(rounded[i]);
    }
    Eight<Number> packed;
    packed.load(rounded);
    packed.store(to);
}

// One warp: normalise a head's D numbers if there is a weight, rotate the pairs (i, i + D/2), store.
__device__ __forceinline__ void rotate_head(const Number* from, Number* to, const float* cosines, const float* sines,
                                            const Number* norm, float epsilon, float centre) {
    const int lane = threadIdx.x % 32;
    float first[LANE_PAIRS], second[LANE_PAIRS], squares = 0.0f;
#pragma unroll
    for (int p = 0; p < LANE_PAIRS; ++p) {
        const int pair = p * 32 + lane;
        first[p] = pair < PAIRS ? to_float(from[pair]) : 0.0f;
        second[p] = pair < PAIRS ? to_float(from[pair + PAIRS]) : 0.0f;
        squares += first[p] * first[p] + second[p] * second[p];
    }
    float scale = 1.0f;
    if (norm != nullptr) scale = rsqrtf(warp_sum(squares) / DIM + epsilon);
#pragma unroll
    for (int p = 0; p < LANE_PAIRS; ++p) {
        const int pair = p * 32 + lane;
        if (pair >= PAIRS) continue;
        float a = first[p], b = second[p];
        if (norm != nullptr) {
            a *= scale * (to_float(norm[pair]) + centre);
            b *= scale * (to_float(norm[pair + PAIRS]) + centre);
        }
        to[pair] = from_float<Number>(a * cosines[pair] - b * sines[pair]);
        to[pair + PAIRS] = from_float<Number>(b * cosines[pair] + a * sines[pair]);
    }
}

__device__ __forceinline__ void copy_head(const Number* from, Number* to) {
    for (int i = threadIdx.x % 32; i < DIM; i += 32) to[i] = from[i];
}

// Orders (score, index) pairs: larger scores first, of equal scores the lower index; NaN is larger than everything.
__device__ __forceinline__ unsigned long long order_key(float score, int index) {
    unsigned ordered = ordered_bits(score == 0.0f ? 0.0f : score);  // -0 equals 0
    if (score != score) ordered = 0xffffffffu;
    return (static_cast<unsigned long long>(ordered) << 32) | ~static_cast<unsigned>(index);
}

constexpr unsigned ORDERED_MINUS_INFINITY = ~0xff800000u;
constexpr unsigned ORDERED_INFINITY = 0x7f800000u | 0x80000000u;

__device__ __forceinline__ unsigned long long larger(unsigned long long a, unsigned long long b) {
    return a > b ? a : b;
}

// Largest key of a row's part, known to thread 0.
__device__ __forceinline__ unsigned long long block_largest(unsigned long long key) {
    __shared__ unsigned long long parts[ARGMAX_THREADS / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) key = larger(key, __shfl_xor_sync(ALL_LANES, key, offset));
    if (lane == 0) parts[warp] = key;
    __syncthreads();
    for (int w = 1; threadIdx.x == 0 && w < ARGMAX_THREADS / 32; ++w) key = larger(key, parts[w]);
    return key;
}

// Number of the p-th piece of a row that this thread has.
__device__ __forceinline__ int piece_of(int p) {
    return p * blockDim.x + threadIdx.x;
}

// The pieces of a row that this thread has.
__device__ __forceinline__ void load_pieces(Eight<Number> (&to)[NORM_PIECES], const void* from, int pieces) {
#pragma unroll
    for (int p = 0; p < NORM_PIECES; ++p)
        if (piece_of(p) < pieces) to[p].load(static_cast<const Number*>(from) + piece_of(p) * 8);
}

// Store out = values / rms(values) * weight of a row that the thread block has loaded.
__device__ __forceinline__ void store_normed(Number* out, float (&values)[NORM_PIECES][8],
                                             const Eight<Number> (&weight)[NORM_PIECES], int pieces, float epsilon,
                                             float centre) {
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < NORM_PIECES; ++p)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (piece_of(p) < pieces) squares += values[p][i] * values[p][i];
    const float scale = rsqrtf(block_sum(squares) / (pieces * 8) + epsilon);
#pragma unroll
    for (int p = 0; p < NORM_PIECES; ++p) {
        if (piece_of(p) >= pieces) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) values[p][i] *= scale * (weight[p][i] + centre);
        store_eight(out + piece_of(p) * 8, values[p]);
    }
}

// x += delta; out = x / rms(x) * (weight + centre). One thread block a row.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    kvseek_add_rms_norm(const __grid_constant__ kvseek::AddRmsNormArguments a) {
    const long long row = static_cast<long long>(blockIdx.x) * a.hidden;
    Number* x = static_cast<Number*>(a.x) + row;
    const Number* delta = a.delta == nullptr ? nullptr : static_cast<const Number*>(a.delta) + row;
    const int pieces = a.hidden / 8;
    float values[NORM_PIECES][8];
    Eight<Number> weight[NORM_PIECES];
    load_pieces(weight, a.weight, pieces);
    await_earlier_kernels();
    allow_later_kernels();
#pragma unroll
    for (int p = 0; p < NORM_PIECES; ++p) {
        if (piece_of(p) >= pieces) continue;
        Eight<Number> own, added;
        own.load(x + piece_of(p) * 8);
        if (delta != nullptr) added.load(delta + piece_of(p) * 8);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[p][i] = delta == nullptr ? own[i] : own[i] + added[i];
        if (delta != nullptr) store_eight(x + piece_of(p) * 8, values[p]);
    }
    store_normed(static_cast<Number*>(a.out) + row, values, weight, pieces, a.epsilon, a.centre);
}

// Ranks hand each other their parts of a sum through inboxes: unsigned long long [2, ranks, capacity, words of a row]
// in each rank's memory, which the others write to. An entry has 32 bits of a part and, above them, the number of the
// sum. It is written and read at once, so whoever finds the number has the bits, and no fence is needed (as in NCCL's
// protocol LL). Sums of even and odd numbers take turns: a rank sends its part of sum n + 2 when it has finished sum n
// + 1, for which every other rank has sent its part, and a rank sends that only after its kernel of sum n has ended.
constexpr int PIECE_WORDS = 8 * sizeof(Number) / 4;

__device__ __forceinline__ unsigned long long* inbox_row(const kvseek::SumAddRmsNormArguments& a, int of, int from,
                                                         unsigned number) {
    const long long row = static_cast<long long>((number & 1) * a.ranks + from) * a.capacity + blockIdx.x;
    return static_cast<unsigned long long* const*>(a.inboxes)[of] + row * (a.hidden / 8 * PIECE_WORDS);
}

__device__ __forceinline__ void send_part(unsigned long long* to, const Eight<Number>& part, unsigned number) {
    const unsigned* words = reinterpret_cast<const unsigned*>(&part);
    const unsigned long long high = static_cast<unsigned long long>(number) << 32;
#pragma unroll
    for (int w = 0; w < PIECE_WORDS; w += 2)
        asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to + w), "l"(high | words[w]),
                     "l"(high | words[w + 1])
                     : "memory");
}

// Wait for a piece of another rank's part; without it if the ranks are to stop.
__device__ __forceinline__ void receive_part(Eight<Number>& part, const unsigned long long* from, unsigned number,
                                             const void* stop) {
    unsigned* words = reinterpret_cast<unsigned*>(&part);
    bool here;
    int stopped;
    do {
        here = true;
#pragma unroll
        for (int w = 0; w < PIECE_WORDS; w += 2) {
            unsigned long long first, second;
            asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                         : "=l"(first), "=l"(second)
                         : "l"(from + w)
                         : "memory");
            words[w] = static_cast<unsigned>(first);
            words[w + 1] = static_cast<unsigned>(second);
            here = here && first >> 32 == number && second >> 32 == number;
        }
        asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(stopped) : "l"(stop) : "memory");
    } while (!here && stopped == 0);
}

// x += the sum of all ranks' parts, in the order of the ranks; out = x / rms(x) * (weight + centre). One thread block a
// row.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    kvseek_sum_add_rms_norm(const __grid_constant__ kvseek::SumAddRmsNormArguments a) {
    const long long row = static_cast<long long>(blockIdx.x) * a.hidden;
    Number* x = static_cast<Number*>(a.x) + row;
    const int pieces = a.hidden / 8;
    float values[NORM_PIECES][8];
    Eight<Number> weight[NORM_PIECES], part[NORM_PIECES];
    load_pieces(weight, a.weight, pieces);
    await_earlier_kernels();
    allow_later_kernels();
    unsigned* count = static_cast<unsigned*>(a.counts) + blockIdx.x;
    const unsigned number = *count + 1;
    load_pieces(part, static_cast<const Number*>(a.part) + row, pieces);
    for (int other = 0; other < a.ranks; ++other) {
        if (other == a.rank) continue;
        unsigned long long* to = inbox_row(a, other, a.rank, number);
#pragma unroll
        for (int p = 0; p < NORM_PIECES; ++p)
            if (piece_of(p) < pieces) send_part(to + piece_of(p) * PIECE_WORDS, part[p], number);
    }
#pragma unroll
    for (int p = 0; p < NORM_PIECES; ++p) {
        if (piece_of(p) >= pieces) continue;
        Eight<Number> own;
        own.load(x + piece_of(p) * 8);
        float sum[8] = {};
        for (int from = 0; from < a.ranks; ++from) {
            Eight<Number> received = part[p];
            if (from != a.rank)
                receive_part(received, inbox_row(a, a.rank, from, number) + piece_of(p) * PIECE_WORDS, number, a.stop);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] += received[i];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) values[p][i] = own[i] + sum[i];
        store_eight(x + piece_of(p) * 8, values[p]);
    }
    store_normed(static_cast<Number*>(a.out) + row, values, weight, pieces, a.epsilon, a.centre);
    if (threadIdx.x == 0) *count = number;  // every thread has read it: store_normed waits for all
}

// Gathers the embedding of each request's token and computes the rotation of its position, once for all layers.
extern "C" __global__ void __launch_bounds__(BEGIN_THREADS)
    kvseek_step_begin(const __grid_constant__ kvseek::StepBeginArguments a) {
    await_earlier_kernels();
    const Request& request = static_cast<const Request*>(a.requests)[blockIdx.x];
    const bool drawn = request.token < 0 && a.latest != nullptr;
    const int token = (drawn ? static_cast<const int*>(a.latest)[request.slot] : request.token) - a.first_token;
    const bool held = token >= 0 && token < a.tokens;
    const Number* from = static_cast<const Number*>(a.embed) + static_cast<long long>(token) * a.hidden;
    Number* to = static_cast<Number*>(a.x) + static_cast<long long>(blockIdx.x) * a.hidden;
    for (int piece = threadIdx.x; piece < a.hidden / 8; piece += BEGIN_THREADS) {
        Eight<Number> eight{};
        if (held) eight.load(from + piece * 8);
        eight.store(to + piece * 8);
    }
    const float position = static_cast<float>(request.position);
    // The token ends a sequence of position + 1 tokens.
    const float* frequencies =
        static_cast<const float*>(a.frequencies) + (request.position >= a.short_reach ? PAIRS : 0);
    for (int pair = threadIdx.x; pair < PAIRS; pair += BEGIN_THREADS) {
        const float angle = position * frequencies[pair], factor = frequencies[pair] == 0.0f ? 1.0f : a.factor;
        const long long at = static_cast<long long>(blockIdx.x) * PAIRS + pair;
        static_cast<float*>(a.cosines)[at] = cosf(angle) * factor;
        static_cast<float*>(a.sines)[at] = sinf(angle) * factor;
    }
}

// Row of a request's new token in a window [slots, kv_heads, window_rows, 2, D], counted in pairs of key and value.
__device__ __forceinline__ long long window_row(const Request& request, int kv_heads, int kv_head, int window_rows) {
    return (static_cast<long long>(request.slot) * kv_heads + kv_head) * window_rows + request.write_row;
}

// Splits a request's qkv: rotated queries to `queries`, rotated key and value to the request's window row.
extern "C" __global__ void __launch_bounds__(ROPE_WARPS * 32)
    kvseek_rope_append(const __grid_constant__ kvseek::RopeAppendArguments a) {
    await_earlier_kernels();
    allow_later_kernels();
    const int head = blockIdx.y * ROPE_WARPS + threadIdx.x / 32, heads = a.heads + 2 * a.kv_heads;
    if (head >= heads) return;
    const long long row = blockIdx.x;
    const Number* from = static_cast<const Number*>(a.qkv) + row * a.numbers + head * DIM;
    const float* cosines = static_cast<const float*>(a.cosines) + row * PAIRS;
    const float* sines = static_cast<const float*>(a.sines) + row * PAIRS;
    if (head < a.heads) {
        Number* to = static_cast<Number*>(a.queries) + (row * a.heads + head) * DIM;
        rotate_head(from, to, cosines, sines, static_cast<const Number*>(a.q_norm), a.epsilon, a.centre);
        return;
    }
    const Request& request = static_cast<const Request*>(a.requests)[row];
    const bool is_value = head >= a.heads + a.kv_heads;
    const int kv_head = head - a.heads - (is_value ? a.kv_heads : 0);
    const long long at = window_row(request, a.kv_heads, kv_head, a.window_rows);
    Number* to = static_cast<Number*>(a.window) + (at * 2 + is_value) * DIM;
    if (is_value) {
        copy_head(from, to);
    } else {
        rotate_head(from, to, cosines, sines, static_cast<const Number*>(a.k_norm), a.epsilon, a.centre);
    }
}

// Puts a request's key and value that something else rotated, such as a TensorRT plan, into its window row.
extern "C" __global__ void __launch_bounds__(APPEND_THREADS)
    kvseek_append(const __grid_constant__ kvseek::AppendArguments a) {
    constexpr int PIECES = DIM / 8;  // of a key, and of a value
    await_earlier_kernels();
    allow_later_kernels();
    const Request& request = static_cast<const Request*>(a.requests)[blockIdx.x];
    const long long first = static_cast<long long>(blockIdx.x) * a.kv_heads;
    for (int work = threadIdx.x; work < a.kv_heads * 2 * PIECES; work += APPEND_THREADS) {
        const int piece = work % PIECES, part = work / PIECES % 2, kv_head = work / (2 * PIECES);
        const void* source = part == 0 ? a.keys : a.values;
        const Number* from = static_cast<const Number*>(source) + (first + kv_head) * DIM;
        const long long row = window_row(request, a.kv_heads, kv_head, a.window_rows);
        Number* to = static_cast<Number*>(a.window) + (row * 2 + part) * DIM;
        Eight<Number> eight;
        eight.load(from + piece * 8);
        eight.store(to + piece * 8);
    }
}

// As rope_append for a chunk of a prompt, whose keys and values go to arrays of the whole prompt.
extern "C" __global__ void __launch_bounds__(ROPE_WARPS * 32)
    kvseek_rope_prompt(const __grid_constant__ kvseek::RopePromptArguments a) {
    await_earlier_kernels();
    const int head = blockIdx.y * ROPE_WARPS + threadIdx.x / 32, heads = a.heads + 2 * a.kv_heads;
    if (head >= heads) return;
    const long long row = blockIdx.x;
    const Number* from = static_cast<const Number*>(a.qkv) + row * a.numbers + head * DIM;
    const float* cosines = static_cast<const float*>(a.cosines) + row * PAIRS;
    const float* sines = static_cast<const float*>(a.sines) + row * PAIRS;
    if (head < a.heads) {
        Number* to = static_cast<Number*>(a.queries) + (row * a.heads + head) * DIM;
        rotate_head(from, to, cosines, sines, static_cast<const Number*>(a.q_norm), a.epsilon, a.centre);
    } else if (head < a.heads + a.kv_heads) {
        Number* to = static_cast<Number*>(a.keys) + ((head - a.heads) * a.distance + row) * DIM;
        rotate_head(from, to, cosines, sines, static_cast<const Number*>(a.k_norm), a.epsilon, a.centre);
    } else {
        copy_head(from, static_cast<Number*>(a.values) + ((head - a.heads - a.kv_heads) * a.distance + row) * DIM);
    }
}

// out = silu(gate) * up, eight numbers a thread.
extern "C" __global__ void __launch_bounds__(SILU_THREADS)
    kvseek_silu_mul(const __grid_constant__ kvseek::SiluMulArguments a) {
    await_earlier_kernels();
    allow_later_kernels();
    const int piece = blockIdx.y * SILU_THREADS + threadIdx.x;
    if (piece >= a.intermediate / 8) return;
    const long long row = blockIdx.x;
    const Number* gates = static_cast<const Number*>(a.gate_up) + row * 2 * a.intermediate;
    Eight<Number> gate, up;
    gate.load(gates + piece * 8);
    up.load(gates + a.intermediate + piece * 8);
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = silu(gate[i]) * up[i];
    store_eight(static_cast<Number*>(a.out) + row * a.intermediate + piece * 8, values);
}

// The greedy token of each request. grid.x thread blocks share a row; the last to finish writes the token.
extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS)
    kvseek_argmax(const __grid_constant__ kvseek::ArgmaxArguments a) {
    await_earlier_kernels();
    const int request = blockIdx.y, stride = gridDim.x * ARGMAX_THREADS;
    const int thread = blockIdx.x * ARGMAX_THREADS + threadIdx.x;
    const Number* logits = static_cast<const Number*>(a.logits) + static_cast<long long>(request) * a.vocabulary;
    // Rows of such a vocabulary are not 16-byte aligned beyond the first.
    const int pieces = a.vocabulary % 8 == 0 ? a.vocabulary / 8 : 0;
    unsigned long long key = 0;  // below every key
    for (int piece = thread; piece < pieces; piece += stride) {
        Eight<Number> eight;
        eight.load(logits + piece * 8);
#pragma unroll
        for (int i = 0; i < 8; ++i) key = larger(key, order_key(eight[i], piece * 8 + i));
    }
    for (int i = pieces * 8 + thread; i < a.vocabulary; i += stride)
        key = larger(key, order_key(to_float(logits[i]), i));
    key = block_largest(key);
    if (threadIdx.x != 0) return;
    unsigned long long* best = static_cast<unsigned long long*>(a.best) + request;
    unsigned* arrived = static_cast<unsigned*>(a.arrived) + request;
    atomicMax(best, key);
    __threadfence();
    if (atomicAdd(arrived, 1u) != gridDim.x - 1) return;
    __threadfence();
    const unsigned long long winner = atomicExch(best, 0ull);
    *arrived = 0u;  // the next launch finds both as this one did
    const unsigned ordered = static_cast<unsigned>(winner >> 32);
    const bool finite = ordered > ORDERED_MINUS_INFINITY && ordered < ORDERED_INFINITY;
    const int token = finite ? static_cast<int>(~static_cast<unsigned>(winner)) : -1;
    static_cast<int*>(a.tokens)[request] = token;
    if (a.latest != nullptr) static_cast<int*>(a.latest)[static_cast<const Request*>(a.requests)[request].slot] = token;
}

}  // namespace layer
}  // namespace kvseek
