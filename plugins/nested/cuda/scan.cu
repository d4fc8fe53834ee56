// Nested codes, first kernel of a selection: score every key of the region by the 2 highest bits, and count the scores.
//
// A key's score is the largest over the lanes (query heads) of s <h, q> / ‖q‖. Codes h and the rotated query q are
// integers, so tensor cores multiply them exactly: 16 keys are the rows of a product, lanes are its columns. Which
// channel stands in which column of the keys' operand is free as long as the query's operand agrees. So a mask makes an
// operand of a word of the plane: of fields 0 and 2 the codes themselves, of fields 1 and 3 four times the codes, which
// are therefore summed apart. (Shifting each field to its place would take half as many instructions again.)
#include "select.cuh"

namespace kvseek {
namespace nested {

constexpr int SCAN_THREADS = 256;
constexpr int SCAN_WARPS = SCAN_THREADS / WARP;
constexpr int TILE = 16;        // keys of a product
constexpr int UNIT = 4 * TILE;  // keys that a warp has on their way
constexpr int PAIRS = UNIT / (2 * TILE);
constexpr int WORDS = FIELD / 16;  // words of a plane's row that a thread of a quad holds
// A thread ends up with two columns of a product. With up to 4 lanes only its first one is a lane's.
constexpr int EACH_LANES = LANES <= 4 ? 1 : 2;
constexpr int COLUMN_TILES = (LANES + 4 * EACH_LANES - 1) / (4 * EACH_LANES);
// An integer of this size as a float has units for its last bit: adding it makes a float of a small integer.
constexpr int AS_FLOAT = 0x4b400000;
constexpr float FLOAT_OFFSET = 12582912.0f;

// c += a b on tensor cores: a [16, 32] of unsigned bytes by rows, b [32, 8] of signed bytes by columns. With
// g = lane / 4 and t = lane % 4: a0 and a2 are row g, columns 4t .. 4t+3 and 16 more; a1 and a3 row g + 8; b0 and b1
// rows 4t .. 4t+3 and 16 more of column g; c0, c1 row g and columns 2t, 2t+1; c2, c3 row g + 8.
__device__ __forceinline__ void multiply_16x8x32(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct ScanMemory {
    int histogram[BINS];
    Queries queries;
};

// A thread's words of one key's plane of high bits.
struct Words {
    unsigned words[WORDS];

    __device__ __forceinline__ void load(const unsigned char* from) { copy(words, from); }

    // Operand 0 .. 2 * WORDS - 1 of the even fields (0 and 2, codes) or of the odd ones (1 and 3, four times the
    // codes).
    __device__ __forceinline__ unsigned operand(int number, bool odd) const {
        const unsigned word = words[number % WORDS], shifted = number < WORDS ? word : word >> 4;
        return shifted & (odd ? 0x0c0c0c0cu : 0x03030303u);
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

// What a warp has on its way: the words of UNIT keys, and the scales of those whose scores this thread ends up with.
struct Unit {
    Words keys[UNIT / TILE][2];
    unsigned short scales[PAIRS];
    unsigned row;  // of the unit's first key

    // The key of a pair of tiles whose score this thread ends up with.
    __device__ __forceinline__ static int own(int pair) {
        const int t = threadIdx.x % 4, g = threadIdx.x % WARP / 4;
        return pair * (2 * TILE) + t / 2 * TILE + t % 2 * 8 + g;
    }

    // Keys beyond the length are read too: an extent is allocated whole.
    __device__ __forceinline__ void load(const SelectArguments& a, const Task& task, int number) {
        row = task.row(a, number * UNIT);
        const int member = threadIdx.x % 4, line = threadIdx.x % WARP / 4;
        const unsigned char* from = a.high + static_cast<size_t>(row + line) * FIELD + member * (4 * WORDS);
#pragma unroll
        for (int tile = 0; tile < UNIT / TILE; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) keys[tile][half].load(from + (tile * TILE + half * 8) * FIELD);
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++)
            scales[pair] = __ldcs(reinterpret_cast<const unsigned short*>(a.scales) + row + own(pair));
    }
};

// The query's operands of this thread, and what its columns' sums are multiplied by.
struct Columns {
    unsigned even[COLUMN_TILES][2 * WORDS], odd[COLUMN_TILES][2 * WORDS];
    int start[COLUMN_TILES][EACH_LANES];  // of the sum of the odd fields
    float factor[COLUMN_TILES][EACH_LANES];
    float bias[COLUMN_TILES][EACH_LANES];  // -infinity in columns without a lane

    __device__ __forceinline__ explicit Columns(const Queries& queries) {
        const int member = threadIdx.x % 4, column = threadIdx.x % WARP / 4;
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++) {
            const int lane = EACH_LANES == 1 ? tile * 4 + column / 2 : tile * 8 + column;
            const bool used = lane < LANES && (EACH_LANES == 2 || column % 2 == 0);
#pragma unroll
            for (int i = 0; i < 2 * WORDS; i++) {
                const int channel = i / WORDS * (2 * FIELD) + member * (4 * WORDS) + i % WORDS * 4;
                even[tile][i] = used ? queries.four(lane, channel) : 0;
                odd[tile][i] = used ? queries.four(lane, channel + FIELD) : 0;
            }
#pragma unroll
            for (int i = 0; i < EACH_LANES; i++) {
                const int own = (tile * 4 + member) * EACH_LANES + i;
                start[tile][i] = AS_FLOAT - (own < LANES ? 6 * queries.sums[own] : 0);
                factor[tile][i] = own < LANES ? queries.inverses[own] : 0.0f;
                bias[tile][i] = own < LANES ? 0.0f : -INFINITE;
            }
        }
    }

    // 2 <2h - 3, q> / ‖q‖, the largest over the lanes that this thread has columns of, for rows g and g + 8 of a tile;
    // then over those of its neighbour: the even thread keeps row g, the odd one row g + 8.
    __device__ __forceinline__ float products(const Words (&keys)[2]) const {
        int evens[COLUMN_TILES][4] = {}, odds[COLUMN_TILES][4];
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) odds[tile][i] = i % 2 < EACH_LANES ? start[tile][i % 2 % EACH_LANES] : 0;
#pragma unroll
        for (int step = 0; step < WORDS; step++) {
            unsigned codes[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int parity = 0; parity < 2; parity++)
                    codes[parity][i] = keys[i % 2].operand(2 * step + i / 2, parity == 1);
#pragma unroll
            for (int tile = 0; tile < COLUMN_TILES; tile++) {
                multiply_16x8x32(evens[tile], codes[0], even[tile][2 * step], even[tile][2 * step + 1]);
                multiply_16x8x32(odds[tile], codes[1], odd[tile][2 * step], odd[tile][2 * step + 1]);
            }
        }
        float best[2] = {-INFINITE, -INFINITE};
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < EACH_LANES; i++) {
                    const int sum = 4 * evens[tile][2 * half + i] + odds[tile][2 * half + i];
                    const float product = __int_as_float(sum) - FLOAT_OFFSET;
                    best[half] = fmaxf(best[half], fmaf(product, factor[tile][i], bias[tile][i]));
                }
        const bool later = threadIdx.x % 2;
        const float kept = later ? best[1] : best[0], given = later ? best[0] : best[1];
        return fmaxf(kept, __shfl_xor_sync(EVERYONE, given, 1));
    }

    // The same of this thread's own key of a pair of tiles.
    __device__ __forceinline__ float own_product(const Words (&first)[2], const Words (&second)[2]) const {
        const float low = products(first), high = products(second);
        const bool later = threadIdx.x % 4 >= 2;
        const float kept = later ? high : low, given = later ? low : high;
        return fmaxf(kept, __shfl_xor_sync(EVERYONE, given, 2));
    }
};

// 16 bits that are ordered as the scores are: a float16, turned if it is negative.
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
    memory.queries.prepare(task.queries(a), a.signs);
    const Columns columns(memory.queries);
    for (; number < units.last; number += SCAN_WARPS) {
        const Unit unit = next;
        if (number + SCAN_WARPS < units.last) next.load(a, task, number + SCAN_WARPS);
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const float product = columns.own_product(unit.keys[2 * pair], unit.keys[2 * pair + 1]);
            const unsigned score = ordered_half(product * __half2float(__ushort_as_half(unit.scales[pair])));
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
