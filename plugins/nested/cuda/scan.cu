// Nested codes, first kernel of a selection: score every key of the region by its first bits, and count the scores.
//
// A score is the largest over the lanes (query heads) of s <v, q>: products of codes, integers, with the rotated query,
// integers as well, so tensor cores compute them exactly. 16 keys are the rows of a product and two columns belong to a
// lane, one for the high bytes of its integers and one for the low bytes. Which channel stands in which column of the
// keys' operand is free as long as the query's agrees: a mask, and for half of the fields a shift, makes an operand of a
// word of a plane. Fields 1 and 3 are not shifted down to their value: they count four times, for which the query's
// integers there are divided by four.
#include "select.cuh"

namespace kvseek {
namespace nested {

constexpr int SCAN_THREADS = 256;
constexpr int SCAN_WARPS = SCAN_THREADS / WARP;
constexpr int TILE = 16;             // keys of a product
constexpr int UNIT = 4 * TILE;       // keys that a warp has in flight
constexpr int PAIRS = UNIT / (2 * TILE);
constexpr int WORDS = FIELD / 16;    // words of a plane's row that a thread of a quad holds
constexpr int PLANES = FIRST_BITS / 2;
constexpr int STEPS = 2 * WORDS;     // products of 32 channels
constexpr int COLUMN_TILES = (2 * LANES + 7) / 8;  // of 8 columns: two a lane
constexpr bool QUARTERED = FIRST_BITS == 2;        // fields 1 and 3 count four times
constexpr int NO_LANE = -(1 << 30);                // an integer product that never is the largest

// c += a b on tensor cores: a [16, 32] of unsigned bytes by rows, b [32, 8] of signed bytes by columns. With
// g = lane / 4 and t = lane % 4: a0 and a2 are row g, columns 4t .. 4t+3 and 16 more; a1 and a3 row g + 8; b0 and b1
// rows 4t .. 4t+3 and 16 more of column g; c0, c1 row g and columns 2t, 2t+1; c2, c3 row g + 8.
__device__ __forceinline__ void multiply_16x8x32(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                 unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

struct ScanMemory {
    int histogram[BINS];
    alignas(16) signed char integers[LANES][2][DIM];
    int offsets[LANES];
    float largest[LANES];
};

// The rotated query of a lane, EACH channels a thread of the warp; the mean of the group if that is the only lane.
__device__ __forceinline__ void load_lane(const SelectArguments& a, int lane, float (&x)[EACH]) {
    const Number* queries = a.queries + static_cast<long long>(blockIdx.y) * GROUP * HEAD_DIM;
    codes::load_vector(queries + lane * HEAD_DIM, x);
    if constexpr (REDUCTION == MEAN) {
        for (int q = 1; q < GROUP; q++) {
            float other[EACH];
            codes::load_vector(queries + q * HEAD_DIM, other);
#pragma unroll
            for (int i = 0; i < EACH; i++) x[i] += other[i];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = __fdiv_rn(x[i], static_cast<float>(GROUP));
    }
    codes::rotate(x, a.signs);
}

// Rotate the task's queries and write their integers to shared memory, as the scan multiplies them, and, in the first
// block of a task, to global memory, as the choice does. Returns what an integer stands for.
__device__ __forceinline__ float prepare_queries(const SelectArguments& a, const Task& task, ScanMemory& memory) {
    constexpr int ROUNDS = (LANES + SCAN_WARPS - 1) / SCAN_WARPS;
    const int warp = threadIdx.x / WARP, thread = threadIdx.x % WARP;
    float x[ROUNDS][EACH];
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const int lane = round * SCAN_WARPS + warp;
        if (lane >= LANES) continue;
        load_lane(a, lane, x[round]);
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) largest = fmaxf(largest, fabsf(x[round][i]));
        largest = codes::largest_of_warp(largest);
        if (thread == 0) memory.largest[lane] = largest;
    }
    __syncthreads();
    float largest = 0.0f;
#pragma unroll
    for (int lane = 0; lane < LANES; lane++) largest = fmaxf(largest, memory.largest[lane]);
    const float factor = largest > 0.0f ? codes::LARGEST_INTEGER / largest : 0.0f;
    const bool quartered = QUARTERED && thread * EACH / FIELD % 2 == 1;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const int lane = round * SCAN_WARPS + warp;
        if (lane >= LANES) continue;
        int sum = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int channel = thread * EACH + i;
            const int number = __float2int_rn(x[round][i] * factor);
            if (blockIdx.x == 0) {
                signed char* to = a.integers + (static_cast<long long>(task.number) * LANES + lane) * (2 * DIM) + channel;
                to[0] = static_cast<signed char>(codes::high_byte(number));
                to[DIM] = static_cast<signed char>(codes::low_byte(number));
            }
            const int scanned = quartered ? (number + 2) >> 2 : number;
            memory.integers[lane][0][channel] = static_cast<signed char>(codes::high_byte(scanned));
            memory.integers[lane][1][channel] = static_cast<signed char>(codes::low_byte(scanned));
            sum += quartered ? 4 * scanned : scanned;
        }
        sum = sum_of_warp(sum);
        // Levels lie around the middle between two codes: 1.5 of 0 .. 3, or 7.5 of 0 .. 15.
        if (thread == 0) memory.offsets[lane] = ((1 << FIRST_BITS) - 1) * sum / 2;
    }
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) a.steps[task.number] = largest / codes::LARGEST_INTEGER;
    return largest / codes::LARGEST_INTEGER;
}

// A thread's words of one key in the planes that are read.
struct Words {
    unsigned words[PLANES][WORDS];

    __device__ __forceinline__ void load(const SelectArguments& a, unsigned row, int member) {
        copy(words[0], a.high + static_cast<size_t>(row) * FIELD + member * (4 * WORDS));
        if constexpr (PLANES == 2) copy(words[1], a.low + static_cast<size_t>(row) * FIELD + member * (4 * WORDS));
    }

    // Operand 0 .. FIELDS * WORDS - 1: four codes of one field.
    __device__ __forceinline__ unsigned operand(int number) const {
        const int field = number / WORDS, word = number % WORDS;
        if constexpr (PLANES == 2) return codes::four_codes(words[0][word], words[1][word], field);
        const unsigned shifted = field >= 2 ? words[0][word] >> 4 : words[0][word];
        return shifted & (field % 2 == 0 ? 0x03030303u : 0x0c0c0c0cu);
    }

  private:
    template <int N>
    __device__ __forceinline__ static void copy(unsigned (&to)[N], const unsigned char* from) {
        if constexpr (N == 4) {
            const uint4 four = load_once_16(from);
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        } else if constexpr (N == 2) {
            const uint2 two = load_once_8(from);
            to[0] = two.x, to[1] = two.y;
        } else {
            static_assert(N == 1, "a thread holds 1, 2 or 4 words");
            to[0] = load_once_4(from);
        }
    }
};

// What a warp has in flight: the words of UNIT keys, and each thread's own scales (ScanUnit::own).
struct Unit {
    Words keys[UNIT / TILE][2];
    unsigned short scales[PAIRS];
    unsigned row;  // of the unit's first key

    // The key of a pair of tiles whose score this thread ends up with.
    __device__ __forceinline__ static int own(int pair) {
        const int t = threadIdx.x % 4, g = threadIdx.x % WARP / 4;
        return pair * (2 * TILE) + t / 2 * TILE + t % 2 * 8 + g;
    }

    // Units beyond the length are read too: an extent is allocated whole.
    __device__ __forceinline__ void load(const SelectArguments& a, const Task& task, int number) {
        row = task.row(a, number * UNIT);
        const int member = threadIdx.x % 4, line = threadIdx.x % WARP / 4;
#pragma unroll
        for (int tile = 0; tile < UNIT / TILE; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) keys[tile][half].load(a, row + tile * TILE + half * 8 + line, member);
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++)
            scales[pair] = __ldcs(reinterpret_cast<const unsigned short*>(a.scales) + row + own(pair));
    }
};

// The query's operands of this thread, and where its accumulators start.
struct Query {
    unsigned operands[COLUMN_TILES][FIELDS * WORDS];
    int start[COLUMN_TILES];

    __device__ __forceinline__ explicit Query(const ScanMemory& memory) {
        const int member = threadIdx.x % 4, column = threadIdx.x % WARP / 4;
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++) {
            const int lane = tile * 4 + column / 2, part = column % 2;
#pragma unroll
            for (int i = 0; i < FIELDS * WORDS; i++) {
                const int channel = i / WORDS * FIELD + member * (4 * WORDS) + i % WORDS * 4;
                operands[tile][i] =
                    lane < LANES ? *reinterpret_cast<const unsigned*>(&memory.integers[lane][part][channel]) : 0;
            }
            start[tile] = tile * 4 + member < LANES ? -memory.offsets[tile * 4 + member] : NO_LANE;
        }
    }

    // The largest products over the lanes that this thread has columns of, for rows g and g + 8 of a tile; then over
    // those of its neighbour: the even thread keeps row g, the odd one row g + 8.
    __device__ __forceinline__ int products(const Words (&keys)[2]) const {
        int best[2] = {2 * NO_LANE, 2 * NO_LANE};
        int sums[COLUMN_TILES][4];
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++) {
            sums[tile][0] = sums[tile][2] = 0;
            sums[tile][1] = sums[tile][3] = start[tile];
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const unsigned a0 = keys[0].operand(2 * step), a1 = keys[1].operand(2 * step);
            const unsigned a2 = keys[0].operand(2 * step + 1), a3 = keys[1].operand(2 * step + 1);
#pragma unroll
            for (int tile = 0; tile < COLUMN_TILES; tile++)
                multiply_16x8x32(sums[tile], a0, a1, a2, a3, operands[tile][2 * step], operands[tile][2 * step + 1]);
        }
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++) {
            best[0] = max(best[0], 256 * sums[tile][0] + sums[tile][1]);
            best[1] = max(best[1], 256 * sums[tile][2] + sums[tile][3]);
        }
        const bool odd = threadIdx.x % 2;
        const int kept = odd ? best[1] : best[0], given = odd ? best[0] : best[1];
        return max(kept, __shfl_xor_sync(EVERYONE, given, 1));
    }

    // The score's integer of this thread's own key of a pair of tiles.
    __device__ __forceinline__ int own_product(const Words (&first)[2], const Words (&second)[2]) const {
        const int low = products(first), high = products(second);
        const bool later = threadIdx.x % 4 >= 2;
        const int kept = later ? high : low, given = later ? low : high;
        return max(kept, __shfl_xor_sync(EVERYONE, given, 2));
    }
};

// 16 bits that are ordered as the scores are: a float16 whose sign decides whether its bits are turned.
__device__ __forceinline__ unsigned ordered_half(float score) {
    const float limited = fminf(fmaxf(score, -codes::LARGEST_HALF), codes::LARGEST_HALF);
    const unsigned bits = __half_as_ushort(__float2half_rn(limited));
    return bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
}

}  // namespace nested
}  // namespace kvseek

// grid: chunks, tasks
extern "C" __global__ void __launch_bounds__(kvseek::nested::SCAN_THREADS)
    kvseek_nested_scan(const __grid_constant__ kvseek::nested::SelectArguments a) {
    using namespace kvseek;
    using namespace kvseek::nested;
    __shared__ ScanMemory memory;
    const Task task(a);  // requests, table and codes are older than this step's kernels
    const int length = task.idle() ? 0 : task.length();
    const Share units((length + UNIT - 1) / UNIT, a.chunks, blockIdx.x);
    int number = units.first + static_cast<int>(threadIdx.x) / WARP;
    Unit next;
    if (number < units.last) next.load(a, task, number);
    for (int i = threadIdx.x; i < BINS; i += SCAN_THREADS) memory.histogram[i] = 0;
    await_earlier_kernels();
    allow_later_kernels();
    if (task.idle()) return;
    constexpr float LEVEL = FIRST_BITS == 2 ? 4 * codes::STEP : codes::STEP;  // between neighbouring levels
    const float factor = prepare_queries(a, task, memory) * a.scaling * LEVEL;
    const Query query(memory);
    for (; number < units.last; number += SCAN_WARPS) {
        const Unit unit = next;
        if (number + SCAN_WARPS < units.last) next.load(a, task, number + SCAN_WARPS);
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const int product = query.own_product(unit.keys[2 * pair], unit.keys[2 * pair + 1]);
            const float scale = __half2float(__ushort_as_half(unit.scales[pair])) * factor;
            const unsigned score = ordered_half(static_cast<float>(product) * scale);
            if (number * UNIT + Unit::own(pair) < length) {
                a.scores[unit.row + Unit::own(pair)] = static_cast<unsigned short>(score);
                atomicAdd(&memory.histogram[score >> BIN_SHIFT], 1);
            }
        }
    }
    __syncthreads();
    int* totals = a.totals + task.number * BINS;
    for (int i = threadIdx.x; i < BINS; i += SCAN_THREADS)
        if (const int count = memory.histogram[i]) atomicAdd(totals + i, count);
}
