// ParisKV, last kernel of a selection: the top k candidates by the reduced estimates (paper, section 4.3).
//
// The blocks of a task select the top k of their shares (kernels/cuda/largest.cuh), the last one to finish the top k
// among those.
#include "kernels/cuda/largest.cuh"
#include "select.cuh"

namespace kvseek {
namespace pariskv {

constexpr int TOP_THREADS = 1024;
constexpr int TOP_WARPS = TOP_THREADS / WARP;
constexpr int MOST_TOP_BLOCKS = 16;  // of a task (device.py)
constexpr int KEYS_EACH = 16;        // that a thread holds in registers
using Top = largest::Largest<TOP_THREADS, KEYS_EACH>;
constexpr int AT_ONCE = LANES <= 4 ? 4 : 1;         // estimates that are on their way together
constexpr int SMALLEST_SHARE = Top::HELD_KEYS / 2;  // of several blocks: a second round takes as long as 8,192 keys

struct Memory : Top::Memory {
    alignas(16) float normaliser[LANES];  // log2 of the sum of the exponentials
};

// log2 of the sum over a task's candidates of 2 to the scaled estimates, for each lane.
__device__ __forceinline__ void normalise(const PowerSum* parts, int chunks, Memory& memory) {
    const int lane = threadIdx.x % WARP;
    for (int query = threadIdx.x / WARP; query < LANES; query += TOP_WARPS) {
        PowerSum sum;
#pragma unroll 4
        for (int i = lane; i < chunks; i += WARP) sum.add(parts[i * LANES + query]);
        sum.add_lanes(WARP - 1);
        if (lane == 0) memory.normaliser[query] = sum.logarithm();
    }
    __syncthreads();
}

// The estimates of a candidate, which lie next to each other.
__device__ __forceinline__ void load_estimates(const float* from, float (&estimates)[LANES]) {
    if constexpr (LANES % 4 == 0) {
#pragma unroll
        for (int i = 0; i < LANES / 4; i++) {
            const float4 four = reinterpret_cast<const float4*>(from)[i];
            estimates[4 * i] = four.x, estimates[4 * i + 1] = four.y;
            estimates[4 * i + 2] = four.z, estimates[4 * i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < LANES; i++) estimates[i] = from[i];
    }
}

// What a candidate is ranked by: its estimate, or the sum of its softmax weights.
__device__ __forceinline__ unsigned rank_key(const SelectArguments& a, const Memory& memory,
                                             const float (&estimates)[LANES]) {
    if constexpr (MEAN) return ordered_bits(estimates[0]);
    float value = 0.0f;
#pragma unroll
    for (int lane = 0; lane < LANES; lane++) {
        value += power_of_two(estimates[lane] * (a.scaling * LOG2_E) - memory.normaliser[lane]);
    }
    return ordered_bits(value);
}

// Keys of a block, KEYS_EACH a thread: key i of the block is key i / TOP_THREADS of thread i % TOP_THREADS.
struct Held {
    unsigned keys[KEYS_EACH];

    __device__ __forceinline__ unsigned operator()(int k) const { return keys[k]; }

    // Keys of candidates first .. first + count - 1.
    __device__ __forceinline__ Held(const SelectArguments& a, const Task& task, const Memory& memory, int first,
                                    int count) {
#pragma unroll
        for (int k = 0; k < KEYS_EACH; k += AT_ONCE) {
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) keys[k + j] = 0;
            if (k * TOP_THREADS >= count) continue;
            float estimates[AT_ONCE][LANES];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {  // past the end: the last one again
                const int i = min((k + j) * TOP_THREADS + static_cast<int>(threadIdx.x), count - 1);
                load_estimates(a.estimates + static_cast<size_t>(task.scratch_row(a, first + i)) * LANES, estimates[j]);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) keys[k + j] = rank_key(a, memory, estimates[j]);
        }
    }

    // Keys of a list that other blocks have written.
    __device__ __forceinline__ Held(const unsigned* list, int count) {
#pragma unroll
        for (int k = 0; k < KEYS_EACH; k++) {
            const int i = k * TOP_THREADS + threadIdx.x;
            keys[k] = i < count ? __ldcg(list + i) : 0;
        }
    }
};

}  // namespace pariskv
}  // namespace kvseek

// grid: as many blocks as requests at least, kv_heads
extern "C" __global__ void __launch_bounds__(kvseek::pariskv::TOP_THREADS, 1)
    kvseek_pariskv_top(const __grid_constant__ kvseek::pariskv::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::pariskv;
    __shared__ Memory memory;
    __shared__ Units scan_units, units;
    const Unit block = units.divide(
        a.requests, a.batch, gridDim.x, MOST_TOP_BLOCKS,
        [](const Request& request) { return request.dense ? 0 : request.method_fields[1]; }, blockIdx.x);
    // The blocks of a request in the scan.
    Unit scanned = share_keys(a, scan_units, 0);
    if (a.batch > 1)
        scanned.first = scan_units.first_of(block.request), scanned.parts = scan_units.parts_of(block.request);
    const Task task(a, block.request);
    await_earlier_kernels();
    allow_later_kernels();
    if (!block.exists) return;
    const int count = task.candidates(), top_k = a.top_k;
    const int even = max((count + block.parts - 1) / block.parts, SMALLEST_SHARE);
    const int share = count <= Top::HELD_KEYS ? count : even;
    const int active = (count + share - 1) / share;  // blocks with work: at least one, as a task has candidates
    if (block.part >= active) return;
    const int first = block.part * share, here = min(share, count - first);
    if (!MEAN) {
        const int chunk = first_chunk(a, scanned.first);
        normalise(a.normalisers + static_cast<long long>(chunk) * LANES, scanned.parts * CHUNKS_OF_SCAN, memory);
    }
    int* rows = a.rows + static_cast<long long>(task.number) * top_k;
    if (block.part == 0)
        for (int i = min(count, top_k) + threadIdx.x; i < top_k; i += TOP_THREADS) rows[i] = -1;
    const int each = min(share, top_k);  // of every block; the last one may have fewer
    const long long list = static_cast<long long>(blockIdx.y * gridDim.x + block.first) * top_k;
    auto take = [&](int rank, int i, unsigned key) {
        const int place = a.candidates[static_cast<size_t>(task.scratch_row(a, first + i))];
        if (active == 1) {
            rows[rank] = place;
        } else {
            a.best_keys[list + block.part * each + rank] = key;
            a.best_places[list + block.part * each + rank] = place;
        }
    };
    if (share > Top::HELD_KEYS || !Top::take_largest(memory, here, top_k, Held(a, task, memory, first, here), take)) {
        for (int i = threadIdx.x; i < here; i += TOP_THREADS) {
            const size_t row = task.scratch_row(a, first + i);
            float own[LANES];
            load_estimates(a.estimates + row * LANES, own);
            a.keys[row] = rank_key(a, memory, own);
        }
        __syncthreads();
        Top::take_by_digits(
            memory, here, top_k, [&](int i) { return a.keys[static_cast<size_t>(task.scratch_row(a, first + i))]; },
            take);
    }
    if (active == 1 || !arrive_last(a.finished + task.number, active)) return;
    const int listed = (active - 1) * each + min(count - (active - 1) * share, each);
    auto take_listed = [&](int rank, int i, unsigned) { rows[rank] = __ldcg(a.best_places + list + i); };
    if (listed > Top::HELD_KEYS ||
        !Top::take_largest(memory, listed, top_k, Held(a.best_keys + list, listed), take_listed))
        Top::take_by_digits(memory, listed, top_k, [&](int i) { return __ldcg(a.best_keys + list + i); }, take_listed);
}
