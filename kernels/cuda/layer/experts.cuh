// Products of a decode step with the experts that its rows have chosen: products.cu includes this in its namespace, and
// kernels/cuda/layer/experts.py launches the kernels. Weights of experts that no row has chosen are not read. What a
// row gets depends to the bit on no other row: on the order of its own sums alone.
//
// Both kernels take what kvseek_route has written: the slots, an expert each, and the pairs of a slot, each a row and
// the place of the expert among those of the row.

struct ExpertGateUpArguments {
    const void* x;       // Number [rows, hidden]
    const void* weight;  // Number [experts, 2 * intermediate, hidden]: gates first
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
    const void* weight;   // Number [experts, hidden, intermediate]
    const void* weights;  // float [rows, chosen]: the router's
    const void* slots;    // as in RouteArguments, and likewise starts and pairs
    const void* starts;
    const void* pairs;
    void* out;  // Number [rows, hidden]: sums of a row's experts, times their weights, in the order of their places
    int rows;
    int chosen;
    int slot_count;
    int hidden;        // multiple of 8
    int intermediate;  // multiple of 8
};

namespace experts {

constexpr int ROWS = 8;  // of x that are multiplied at once; an expert with more rows is read again, from the L2 cache
constexpr int OUTPUTS = 16;  // of a tile
constexpr int PARTS = 2;     // of a row's blocks in kvseek_expert_down: two warps add theirs, and a + b is b + a

// The rows of x of up to ROWS pairs of a slot. A lane multiplies row g, as in Columns.
template <class S>
class PairRows {
  public:
    __device__ __forceinline__ PairRows(const void* x, int inputs, int row)
        : x_(static_cast<const Number*>(x) + static_cast<long long>(row) * inputs), inputs_(inputs) {}

    // As Columns::load.
    __device__ __forceinline__ RowEights<S> load(int block, int eight) const {
        const int piece = eight / S::PIECE_EIGHTS * 4 + threadIdx.x % 4;
        const int input = block * S::BLOCK + piece * S::PIECE + eight % S::PIECE_EIGHTS * 8;
        RowEights<S> loaded;
        loaded.rows[0] = *reinterpret_cast<const uint4*>(x_ + min(input, inputs_ - 8));
        return loaded;
    }

  private:
    const Number* x_;
    int inputs_;
};

// Multiply blocks first, first + STEP, ... of `count`; the first is on its way in stage 0.
template <class S, int STEP>
__device__ __forceinline__ void multiply_blocks(Sums<S>& sums, Blocks<S>& blocks, const PairRows<S>& x, int first,
                                                int count, unsigned zero) {
    RowEights<S> ahead[S::AHEAD];
#pragma unroll
    for (int eight = 0; eight < S::AHEAD; ++eight) ahead[eight] = x.load(first, eight);
    for (int block = first, stage = 0; block < count; block += STEP, stage ^= 1) {
        blocks.await();
        blocks.start(block + STEP, stage ^ 1);
#pragma unroll
        for (int eight = 0; eight < S::EIGHTS; ++eight) {
            const RowEights<S> current = ahead[eight % S::AHEAD];
            const int later = eight + S::AHEAD;
            ahead[eight % S::AHEAD] = x.load(block + later / S::EIGHTS * STEP, later % S::EIGHTS);
            multiply<S>(sums, blocks, stage, eight, current, zero);
        }
    }
    blocks.await();  // zeros, which would be written over what comes next
}

// What Blocks needs to know of the matrix of an expert.
__device__ __forceinline__ LinearArguments matrix(const void* weight, int expert, int rows, int outputs, int inputs) {
    LinearArguments own = {};
    own.weight = static_cast<const Number*>(weight) + static_cast<long long>(expert) * rows * inputs;
    own.outputs = outputs, own.inputs = inputs;
    return own;
}

// Channels blockIdx.x * 8 and the next seven of the expert of slot blockIdx.y.
template <class S>
__device__ __forceinline__ void gate_up(const ExpertGateUpArguments& a) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared<S>& shared = *reinterpret_cast<Shared<S>*>(memory);
    await_earlier_kernels();
    allow_later_kernels();
    const int expert = static_cast<const int*>(a.slots)[blockIdx.y];
    if (expert < 0) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int start = static_cast<const int*>(a.starts)[blockIdx.y];
    const int stop = static_cast<const int*>(a.starts)[blockIdx.y + 1];
    const int* pairs = static_cast<const int*>(a.pairs);
    const LinearArguments own = matrix(a.weight, expert, 2 * a.intermediate, a.intermediate, a.hidden);
    const int count = (a.hidden + S::BLOCK - 1) / S::BLOCK;
    Blocks<S> blocks(own, shared);
    for (int at = start; at < stop; at += ROWS) {
        blocks.start(warp, 0);
        const int pair = pairs[min(at + lane / 4, stop - 1)];  // what is beyond the last is not stored
        const PairRows<S> x(a.x, a.hidden, pair / a.chosen);
        Sums<S> sums = {};
        multiply_blocks<S, S::SPLIT>(sums, blocks, x, warp, count, static_cast<unsigned>(a.chosen) >> 31);
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
                const float gate = to_float(from_float<Number>(total[i]));
                const float up = to_float(from_float<Number>(total[2 + i]));
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
    Shared<S>& shared = *reinterpret_cast<Shared<S>*>(memory);
    float* products = reinterpret_cast<float*>(memory + sizeof(shared.blocks));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pair_count = a.rows * a.chosen;
    for (int i = threadIdx.x; i < pair_count * OUTPUTS; i += S::SPLIT * 32) products[i] = 0;
    // kvseek_route has ended: the kernel before this one, which waited for it, let this one start after its wait.
    const int* slots = static_cast<const int*>(a.slots);
    const int* starts = static_cast<const int*>(a.starts);
    const int* pairs = static_cast<const int*>(a.pairs);
    const int count = (a.intermediate + S::BLOCK - 1) / S::BLOCK, tile = blockIdx.x * OUTPUTS;
    if (warp < a.slot_count * PARTS && slots[warp / PARTS] >= 0) {  // what the warp will read first
        const LinearArguments own = matrix(a.weight, slots[warp / PARTS], a.hidden, a.hidden, a.intermediate);
        const Number* weight = static_cast<const Number*>(own.weight);
        for (int i = lane; i < OUTPUTS * ((count - warp % PARTS + PARTS - 1) / PARTS); i += 32) {
            const int output = tile + i % OUTPUTS, input = (i / OUTPUTS * PARTS + warp % PARTS) * S::BLOCK;
            if (output < a.hidden) prefetch_line(weight + static_cast<long long>(output) * a.intermediate + input);
        }
    }
    await_earlier_kernels();
    allow_later_kernels();
    __syncthreads();
    for (int task = warp; task < a.slot_count * PARTS; task += S::SPLIT) {
        const int slot = task / PARTS, part = task % PARTS, expert = slots[slot];
        if (expert < 0) break;
        const LinearArguments own = matrix(a.weight, expert, a.hidden, a.hidden, a.intermediate);
        Blocks<S> blocks(own, shared);
        const int stop = starts[slot + 1];
        for (int at = starts[slot]; at < stop; at += ROWS) {
            blocks.start(part, 0);
            const PairRows<S> x(a.x, a.intermediate, pairs[min(at + lane / 4, stop - 1)]);
            Sums<S> sums = {};
            multiply_blocks<S, PARTS>(sums, blocks, x, part, count, static_cast<unsigned>(a.chosen) >> 31);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = at + lane % 4 * 2 + i % 2, output = lane / 4 + i / 2 * 8;
                if (column < stop) atomicAdd(&products[pairs[column] * OUTPUTS + output], sums[0][0][i]);
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

extern "C" __global__ void __launch_bounds__(128, 8)
    kvseek_expert_gate_up(const __grid_constant__ kvseek::products::ExpertGateUpArguments a) {
    experts::gate_up<Shape<Number, 4, 1, 1, 2, true>>(a);
}

// With fewer warps there is room for more products.
extern "C" __global__ void __launch_bounds__(512, 1)
    kvseek_expert_down_16(const __grid_constant__ kvseek::products::ExpertDownArguments a) {
    experts::down<Shape<Number, 16, 1, 1, 2, false>>(a);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    kvseek_expert_down_8(const __grid_constant__ kvseek::products::ExpertDownArguments a) {
    experts::down<Shape<Number, 8, 1, 1, 2, false>>(a);
}
