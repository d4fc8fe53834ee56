// Products of a decode step with the experts that its rows have chosen: products.cu, whose parts these are, includes it
// at its end, and kernels/cuda/layer/experts.py launches the kernels. Weights of experts that no row has chosen are not
// read. What a row gets depends to the bit on no other row: on the order of its own sums alone.
//
// Both kernels take what kvseek_route has written: the slots, an expert each, and the pairs of a slot, each a row and
// the place of the expert among those of the row.

namespace kvseek {

struct ExpertGateUpArguments {
    const void* x;       // Number [rows, hidden]
    const void* weight;  // [experts, 2 * intermediate, hidden]: gates first
    const void* scale;   // as in LinearArguments, of all experts
    const void* slots;   // as in RouteArguments, and likewise starts and pairs
    const void* starts;
    const void* pairs;
    void* out;  // Number [rows * chosen, intermediate], by pair
    int chosen;
    int hidden;        // multiple of 8
    int intermediate;  // multiple of 8
};

struct ExpertDownArguments {
    const void* x;        // Number [rows * chosen, intermediate], by pair
    const void* weight;   // [experts, hidden, intermediate]
    const void* scale;    // as in LinearArguments, of all experts
    const void* weights;  // float [rows, chosen]: the router's
    const void* slots;    // as in RouteArguments, and likewise starts and pairs
    const void* starts;
    const void* pairs;
    void* out;  // Number [rows, hidden]: sums of a row's experts, times their weights, in the order of their places
    int rows;
    int chosen;
    int slot_count;
    int warp_bytes;    // of shared memory for the blocks of a warp
    int hidden;        // multiple of 8
    int intermediate;  // multiple of 8
};

namespace products {
namespace experts {

constexpr int ROWS = 8;      // of x that are multiplied at once; for more an expert is read again, from the L2 cache
constexpr int OUTPUTS = 16;  // of a tile
constexpr int PARTS = 2;     // of a row's blocks in kvseek_expert_down: two warps add theirs, and a + b is b + a
constexpr int LINE = 128;    // bytes of a row that are a block

// The shape of a kernel for weights of a format, the bytes of `count` weights, and the bytes of the scales of a row.
#if KVSEEK_WEIGHT >= 3
template <class Format, int SPLIT, bool GATED>
using ShapeOf = groups::Shape<Format, SPLIT, 1, 2, 1, 2, GATED>;
template <class S>
using SharedOf = groups::Shared<S>;
template <class S>
__device__ __forceinline__ constexpr long long weight_bytes(long long count) {
    return count * S::Format::BITS / 8;
}
template <class S>
__device__ __forceinline__ constexpr long long scale_bytes(int inputs) {
    return inputs / S::Format::GROUP * static_cast<long long>(sizeof(typename S::Scale));
}
#else
template <class Weight, int SPLIT, bool GATED>
using ShapeOf = Shape<Weight, SPLIT, 1, 1, 4 / sizeof(Weight), GATED>;
template <class S>
using SharedOf = Shared<S>;
template <class S>
__device__ __forceinline__ constexpr long long weight_bytes(long long count) {
    return count * static_cast<long long>(sizeof(typename S::Weight));
}
template <class S>
__device__ __forceinline__ constexpr long long scale_bytes(int) {
    return sizeof(float);
}
#endif

// The rows of x of up to ROWS pairs of a slot. A lane multiplies row g, as in Columns.
template <class S>
class PairRows {
  public:
    __device__ __forceinline__ PairRows(const void* x, int inputs, int row)
        : x_(static_cast<const Number*>(x) + static_cast<long long>(row) * inputs), inputs_(inputs) {}

    // As Columns::load: eight channels of a block, or of a cell of it.
    __device__ __forceinline__ RowEights<S> load(int block, int eight) const {
        RowEights<S> loaded;
        const int input = S::input(block, eight);
        if constexpr (S::TWO_GROUPS) {
            const uint2 left = *reinterpret_cast<const uint2*>(x_ + min(input, inputs_ - 4));
            const uint2 right = *reinterpret_cast<const uint2*>(x_ + min(input + 16, inputs_ - 4));
            loaded.rows[0] = make_uint4(left.x, left.y, right.x, right.y);
        } else {
            loaded.rows[0] = *reinterpret_cast<const uint4*>(x_ + min(input, inputs_ - 8));
        }
        return loaded;
    }

  private:
    const Number* x_;
    int inputs_;
};

// Multiply blocks first, first + STEP, ... of the rows of a matrix. All copies have arrived at the end.
template <class S, int STEP>
__device__ __forceinline__ void multiply_blocks(Sums<S>& sums, const LinearArguments& own, SharedOf<S>& shared,
                                                const PairRows<S>& x, int first, unsigned zero) {
    const int count = (own.inputs + S::BLOCK - 1) / S::BLOCK;
    RowEights<S> ahead[S::AHEAD];
#if KVSEEK_WEIGHT >= 3
    static_assert(S::STAGES == 2, "one block is on its way");
    constexpr int EIGHTS = S::CELLS;
    groups::Blocks<S> blocks(own, shared);
    groups::GroupSums<S> group;
#else
    constexpr int EIGHTS = S::EIGHTS;
    Blocks<S> blocks(own, shared);
#endif
    blocks.start(first, 0);
#pragma unroll
    for (int eight = 0; eight < S::AHEAD; ++eight) ahead[eight] = x.load(first, eight);
    for (int block = first, stage = 0; block < count; block += STEP, stage ^= 1) {
        blocks.await();
        blocks.start(block + STEP, stage ^ 1);
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
            const RowEights<S> current = ahead[eight % S::AHEAD];
            const int later = eight + S::AHEAD;
            ahead[eight % S::AHEAD] = x.load(block + later / EIGHTS * STEP, later % EIGHTS);
#if KVSEEK_WEIGHT >= 3
            groups::multiply_cell<S>(sums, group, blocks, stage, eight, current);
#else
            multiply<S>(sums, blocks, stage, eight, current, zero);
#endif
        }
    }
    blocks.await();  // zeros, which would be written over what comes next
}

// The matrix of an expert, of so many rows, of which the first `outputs` are gates, or all.
template <class S>
__device__ __forceinline__ LinearArguments matrix(const void* weight, const void* scale, int expert, int rows,
                                                  int outputs, int inputs) {
    LinearArguments own = {};
    const long long before = static_cast<long long>(expert) * rows;
    own.weight = static_cast<const char*>(weight) + weight_bytes<S>(before * inputs);
    if (scale != nullptr) own.scale = static_cast<const char*>(scale) + before * scale_bytes<S>(inputs);
    own.outputs = outputs, own.inputs = inputs;
    return own;
}

// Channels blockIdx.x * 8 and the next seven of the expert of slot blockIdx.y.
template <class S>
__device__ __forceinline__ void gate_up(const ExpertGateUpArguments& a) {
    extern __shared__ __align__(16) unsigned char memory[];
    SharedOf<S>& shared = *reinterpret_cast<SharedOf<S>*>(memory);
    await_earlier_kernels();
    allow_later_kernels();
    const int expert = static_cast<const int*>(a.slots)[blockIdx.y];
    if (expert < 0) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int start = static_cast<const int*>(a.starts)[blockIdx.y];
    const int stop = static_cast<const int*>(a.starts)[blockIdx.y + 1];
    const int* pairs = static_cast<const int*>(a.pairs);
    const LinearArguments own = matrix<S>(a.weight, a.scale, expert, 2 * a.intermediate, a.intermediate, a.hidden);
    for (int at = start; at < stop; at += ROWS) {
        const int pair = pairs[min(at + lane / 4, stop - 1)];  // what is beyond the last is not stored
        const PairRows<S> x(a.x, a.hidden, pair / a.chosen);
        Sums<S> sums = {};
        multiply_blocks<S, S::SPLIT>(sums, own, shared, x, warp, static_cast<unsigned>(a.chosen) >> 31);
        __syncthreads();
        const float (&mine)[4] = sums[0][0];
        shared.sums[warp][0][lane] = make_float4(mine[0], mine[1], mine[2], mine[3]);
        __syncthreads();
        if (warp == 0) {
            float total[4] = {};
#pragma unroll
            for (int other = 0; other < S::SPLIT; ++other) {
                const float4 more = shared.sums[other][0][lane];
                total[0] += more.x, total[1] += more.y, total[2] += more.z, total[3] += more.w;
            }
            const int channel = blockIdx.x * 8 + lane / 4;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = at + lane % 4 * 2 + i;
                if (column >= stop || channel >= a.intermediate) continue;
                const float gate = finished<S>(own, total[i], channel);
                const float up = finished<S>(own, total[2 + i], a.intermediate + channel);
                Number* to = static_cast<Number*>(a.out) + static_cast<long long>(pairs[column]) * a.intermediate;
                to[channel] = from_float<Number>(silu(gate) * up);
            }
        }
        __syncthreads();  // the sums' memory is that of blocks
    }
}

// Channels blockIdx.x * OUTPUTS and the next ones of all experts that were chosen, and their sums. A warp takes a part
// of a slot's blocks at a time. In shared memory: the blocks of the warps, then float [rows * chosen, OUTPUTS].
template <class S>
__device__ __forceinline__ void down(const ExpertDownArguments& a) {
    extern __shared__ __align__(16) unsigned char memory[];
    SharedOf<S>& shared = *reinterpret_cast<SharedOf<S>*>(memory);
    float* products = reinterpret_cast<float*>(memory + S::SPLIT * a.warp_bytes);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pair_count = a.rows * a.chosen;
    for (int i = threadIdx.x; i < pair_count * OUTPUTS; i += S::SPLIT * 32) products[i] = 0;
    // kvseek_route has ended: the kernel before this one, which waited for it, let this one start after its wait.
    const int* slots = static_cast<const int*>(a.slots);
    const int* starts = static_cast<const int*>(a.starts);
    const int* pairs = static_cast<const int*>(a.pairs);
    const int count = (a.intermediate + S::BLOCK - 1) / S::BLOCK, tile = blockIdx.x * OUTPUTS;
    if (warp < a.slot_count * PARTS && slots[warp / PARTS] >= 0) {  // what the warp will read first
        const LinearArguments own =
            matrix<S>(a.weight, a.scale, slots[warp / PARTS], a.hidden, a.hidden, a.intermediate);
        const char* weight = static_cast<const char*>(own.weight);
        for (int i = lane; i < OUTPUTS * ((count - warp % PARTS + PARTS - 1) / PARTS); i += 32) {
            const int output = tile + i % OUTPUTS, block = i / OUTPUTS * PARTS + warp % PARTS;
            if (output < a.hidden)
                prefetch_line(weight + weight_bytes<S>(static_cast<long long>(output) * a.intermediate) + block * LINE);
        }
    }
    await_earlier_kernels();
    allow_later_kernels();
    __syncthreads();
    for (int task = warp; task < a.slot_count * PARTS; task += S::SPLIT) {
        const int slot = task / PARTS, part = task % PARTS, expert = slots[slot];
        if (expert < 0) break;
        const LinearArguments own = matrix<S>(a.weight, a.scale, expert, a.hidden, a.hidden, a.intermediate);
        const int stop = starts[slot + 1];
        for (int at = starts[slot]; at < stop; at += ROWS) {
            const PairRows<S> x(a.x, a.intermediate, pairs[min(at + lane / 4, stop - 1)]);
            Sums<S> sums = {};
            multiply_blocks<S, PARTS>(sums, own, shared, x, part, static_cast<unsigned>(a.chosen) >> 31);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = at + lane % 4 * 2 + i % 2, output = lane / 4 + i / 2 * 8;
                if (column >= stop || tile + output >= a.hidden) continue;
                float sum = sums[0][0][i];
                if (!S::GROUPED && own.scale != nullptr) sum *= static_cast<const float*>(own.scale)[tile + output];
                atomicAdd(&products[pairs[column] * OUTPUTS + output], sum);
            }
            __syncwarp();
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.rows * OUTPUTS; i += S::SPLIT * 32) {
        const int row = i / OUTPUTS, output = i % OUTPUTS;
        if (tile + output >= a.hidden) continue;
        float total = 0;
        for (int pair = row * a.chosen; pair < (row + 1) * a.chosen; ++pair)
            total += static_cast<const float*>(a.weights)[pair] * products[pair * OUTPUTS + output];
        Number* to = static_cast<Number*>(a.out) + static_cast<long long>(row) * a.hidden + tile;
        to[output] = from_float<Number>(total);
    }
}

}  // namespace experts
}  // namespace products
}  // namespace kvseek

// With fewer warps there is room for more products.
#define KVSEEK_EXPERT_DOWN(NAME, FORMAT, SPLIT)                                               \
    extern "C" __global__ void __launch_bounds__(SPLIT * 32, 1)                               \
        kvseek_##NAME##_down_##SPLIT(const __grid_constant__ kvseek::ExpertDownArguments a) { \
        using namespace kvseek::products;                                                     \
        experts::down<experts::ShapeOf<FORMAT, SPLIT, false>>(a);                             \
    }
#define KVSEEK_EXPERT(NAME, FORMAT)                                                        \
    extern "C" __global__ void __launch_bounds__(128, 8)                                   \
        kvseek_##NAME##_gate_up(const __grid_constant__ kvseek::ExpertGateUpArguments a) { \
        using namespace kvseek::products;                                                  \
        experts::gate_up<experts::ShapeOf<FORMAT, 4, true>>(a);                            \
    }                                                                                      \
    KVSEEK_EXPERT_DOWN(NAME, FORMAT, 16)                                                   \
    KVSEEK_EXPERT_DOWN(NAME, FORMAT, 8)                                                    \
    KVSEEK_EXPERT_DOWN(NAME, FORMAT, 4)

KVSEEK_EXPERT(expert, Layers)
#if KVSEEK_ASYMMETRIC && KVSEEK_WEIGHT != 6
KVSEEK_EXPERT(asymmetric_expert, Int8Asymmetric)
#endif
