// A decode step of a Gated DeltaNet layer between its products: convolution, change and reading of the state, gated
// norm. delta_step of kernels/reference/delta_net.py says what is correct; kernels/cuda/layer/layer.py launches it.
//
// A block has one value head of one slot. Its threads keep the state of the head in registers: thread t has column
// t % columns and `rows` rows of it, so the state is read and written once, in whole lines. The state is loaded before
// the wait for earlier kernels: the last step wrote it, of which every kernel has ended.
//
// Tokens pass one after the other, in one loop, so that each is applied by the same instructions whenever that is:
// those of the last step's draft that were accepted, whose inputs that step has kept; the slot's next token, behind
// which the state is written; and the tokens of its draft, which change registers alone.
#include "kernels/cuda/batch.cuh"
#include "kernels/cuda/layer/activation.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/warp.cuh"

#if KVSEEK_DELTA_NET
namespace kvseek {

struct DeltaStepArguments {
    const void* qkvz;  // Number [batch, 2 keys + 2 values]: queries, keys, values and gates; null: only what was kept
                       // is applied, of the tokens before each request's position
    const void* ba;    // Number [batch, 2 * value_heads]: write strengths and decays, before their functions
    const void* requests;  // Request [batch]
    const void* weight;    // Number [2 keys + values, kernel], of the convolution
    const void* a_log;     // float [value_heads]
    const void* dt;        // float [value_heads]
    const void* norm;      // Number [value_dim]
    void* conv;            // Number [slots, ring, 2 keys + values]: that of position p in row p % ring
    void* gates;           // Number [slots, ring, 2 * value_heads]: those of `ba`
    void* recurrent;       // float [slots, value_heads, key_dim, value_dim]
    void* tokens;          // int [slots, value_heads]: how many the recurrent state has had
    void* out;             // Number [batch, values]
    int key_heads;
    int value_heads;
    int key_dim;
    int value_dim;
    int kernel;
    int ring;     // DeltaNetConfig.ring_rows: at least `kernel`, and a row for each token of two drafts
    int columns;  // value_dim, rounded up to whole warps
    int rows;     // of the state of a head that a thread has, at most 32; threads / columns * rows >= key_dim
    float epsilon;
};

namespace delta {

constexpr int THREADS = 512, ROWS = 32;
constexpr float LENGTH_EPSILON = 1e-6f;

// What the convolution gives for a channel of a slot at a position, whose input is `given`, or was kept if that is
// null. Blocks that share a key head write the same to the same places. One of them may be at the end of its draft
// while another applies the last step's: the ring has room for both, so that each reads what itself or an earlier step
// wrote.
__device__ __forceinline__ float convolve(const DeltaStepArguments& a, Number* ring, const Number* given, int position,
                                          int channels, int channel) {
    const Number* weight = static_cast<const Number*>(a.weight) + static_cast<long long>(channel) * a.kernel;
    int row = (position + 1 - a.kernel + a.ring) % a.ring;  // that of the oldest one
    float sum = 0.0f;
    for (int n = 0; n < a.kernel - 1; ++n) {
        sum += to_float(ring[static_cast<long long>(row) * channels + channel]) * to_float(weight[n]);
        row = row + 1 == a.ring ? 0 : row + 1;
    }
    Number* own = ring + static_cast<long long>(row) * channels + channel;
    const Number latest = given == nullptr ? *own : given[channel];
    if (given != nullptr) *own = latest;
    return silu(sum + to_float(latest) * to_float(weight[a.kernel - 1]));
}

// The sum of squares of numbers in shared memory, known to every thread of each warp.
__device__ __forceinline__ float squares(const float* numbers, int count) {
    float sum = 0.0f;
    for (int i = threadIdx.x % WARP; i < count; i += WARP) sum += numbers[i] * numbers[i];
    return sum_of_warp(sum);
}

// The sum of a column over all threads that have rows of it.
__device__ __forceinline__ float sum_of_column(float (&parts)[THREADS], float own, int column, int columns) {
    parts[threadIdx.x] = own;
    __syncthreads();
    float sum = 0.0f;
    for (int at = column; at < static_cast<int>(blockDim.x); at += columns) sum += parts[at];
    return sum;
}

// Whether a row of the batch is of the token behind that of the row before: the next one of a draft.
__device__ __forceinline__ bool is_drafted(const Request* row) {
    return row[0].slot == row[-1].slot && row[0].position == row[-1].position + 1;
}

}  // namespace delta
}  // namespace kvseek

extern "C" __global__ void __launch_bounds__(kvseek::delta::THREADS)
    kvseek_delta_step(const __grid_constant__ kvseek::DeltaStepArguments a) {
    using namespace kvseek;
    using namespace kvseek::delta;
    __shared__ float mixed[2 * THREADS + THREADS];  // query, key and value of the head
    __shared__ float found[THREADS], read[THREADS], outputs[THREADS];
    const int head = blockIdx.x, key_head = head / (a.value_heads / a.key_heads);
    const int column = threadIdx.x % a.columns, first = threadIdx.x / a.columns * a.rows;
    const int keys = a.key_heads * a.key_dim, values = a.value_heads * a.value_dim, channels = 2 * keys + values;
    const long long numbers = channels + values;
    const Request* requests = static_cast<const Request*>(a.requests) + blockIdx.y;
    if (blockIdx.y > 0 && is_drafted(requests)) return;  // the block of the slot's first row has this one, too
    const Request& request = requests[0];
    int count = a.qkvz == nullptr ? 0 : 1;  // rows of the slot
    while (count > 0 && blockIdx.y + count < gridDim.y && is_drafted(requests + count)) ++count;
    const long long at = static_cast<long long>(request.slot) * a.value_heads + head;
    float* state = static_cast<float*>(a.recurrent) + at * a.key_dim * a.value_dim + column;
    float own[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const bool is_there = i < a.rows && first + i < a.key_dim && column < a.value_dim;
        own[i] = is_there ? __ldcg(state + (first + i) * a.value_dim) : 0.0f;
    }
    int* tokens = static_cast<int*>(a.tokens) + at;
    const int position = request.position, had = min(__ldcg(tokens), position);
    await_earlier_kernels();
    allow_later_kernels();

    float *query = mixed, *key = mixed + a.key_dim, *value = mixed + 2 * a.key_dim;
    const long long first_row = static_cast<long long>(request.slot) * a.ring;
    Number* ring = static_cast<Number*>(a.conv) + first_row * channels;
    Number* gates = static_cast<Number*>(a.gates) + first_row * 2 * a.value_heads + head;
    const int behind = count > 0 ? position + 1 : position;  // tokens of the state that is written
#pragma unroll 1
    for (int now = had; now < position + count; ++now) {
        const bool is_kept = now < position;
        const long long row = blockIdx.y + (is_kept ? 0 : now - position);
        const Number* given = is_kept ? nullptr : static_cast<const Number*>(a.qkvz) + row * numbers;
        for (int i = threadIdx.x; i < 2 * a.key_dim + a.value_dim; i += blockDim.x) {
            const int part = i / a.key_dim;  // 0 query, 1 key, else value
            const int channel = part < 2 ? part * keys + key_head * a.key_dim + i - part * a.key_dim
                                         : 2 * keys + head * a.value_dim + i - 2 * a.key_dim;
            mixed[i] = convolve(a, ring, given, now, channels, channel);
        }
        __syncthreads();
        const float query_scale = rsqrtf(squares(query, a.key_dim) + LENGTH_EPSILON) * rsqrtf(a.key_dim);
        const float key_scale = rsqrtf(squares(key, a.key_dim) + LENGTH_EPSILON);

        Number* kept = gates + static_cast<long long>(now % a.ring) * 2 * a.value_heads;
        const Number* ba = is_kept ? kept : static_cast<const Number*>(a.ba) + row * 2 * a.value_heads + head;
        const float strength = 1.0f / (1.0f + expf(-to_float(ba[0])));
        const float beyond = to_float(ba[a.value_heads]) + static_cast<const float*>(a.dt)[head];
        const float softplus = beyond > 20.0f ? beyond : log1pf(expf(beyond));
        const float decay = expf(-expf(static_cast<const float*>(a.a_log)[head]) * softplus);
        if (!is_kept && threadIdx.x < 2) kept[threadIdx.x * a.value_heads] = ba[threadIdx.x * a.value_heads];

        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (i >= a.rows || first + i >= a.key_dim) continue;
            own[i] *= decay;
            sum += own[i] * (key[first + i] * key_scale);
        }
        sum = sum_of_column(found, sum, column, a.columns);
        const float change = column < a.value_dim ? strength * (value[column] - sum) : 0.0f;
        const bool is_written = now + 1 == behind && column < a.value_dim;
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (i >= a.rows || first + i >= a.key_dim) continue;
            own[i] += key[first + i] * key_scale * change;
            sum += own[i] * (query[first + i] * query_scale);
            if (is_written) state[(first + i) * a.value_dim] = own[i];
        }
        if (is_written && threadIdx.x == 0) *tokens = behind;
        sum = sum_of_column(read, sum, column, a.columns);
        if (threadIdx.x < a.value_dim) outputs[column] = sum;
        __syncthreads();
        if (is_kept) continue;
        const float scale = rsqrtf(squares(outputs, a.value_dim) / a.value_dim + a.epsilon);
        if (threadIdx.x >= a.value_dim) continue;
        const int place = head * a.value_dim + column;
        const float gate = to_float(given[channels + place]);
        const float normed = sum * scale * to_float(static_cast<const Number*>(a.norm)[column]);
        static_cast<Number*>(a.out)[row * values + place] = from_float<Number>(normed * silu(gate));
    }
}
#endif
