// Products of the 2 highest bits of neighbouring keys' codes with rounded queries, on tensor cores, by a warp.
//
// Codes h and a rotated query q are integers, so tensor cores multiply them exactly: 16 keys are the rows of a product,
// lanes (query heads) are its columns. Which channel stands in which column of the keys' operand is free as long as the
// query's operand agrees. So a mask makes an operand of a word of the plane: of fields 0 and 2 the codes themselves, of
// fields 1 and 3 four times the codes, which are therefore summed apart. (Shifting each field to its place would take
// half as many instructions again.)
#pragma once

#include "kernels/cuda/instructions.cuh"
#include "nested_codes.cuh"
#include "queries.cuh"

namespace kvseek {
namespace codes {

constexpr int TILE = 16;           // keys of a product
constexpr int WORDS = FIELD / 16;  // words of a plane's row that a thread of a quad holds
// An integer of this size as a float has units for its last bit: adding it makes a float of a small integer.
constexpr int AS_FLOAT = 0x4b400000;
constexpr float FLOAT_OFFSET = 12582912.0f;

// A thread's words of one key's plane of high bits.
struct Words {
    unsigned words[WORDS];

    __device__ __forceinline__ void load(const unsigned char* from) { copy<false>(words, from); }
    // The same of memory that other blocks may read soon.
    __device__ __forceinline__ void load_again(const unsigned char* from) { copy<true>(words, from); }

    // Operand 0 .. 2 * WORDS - 1 of the even fields (0 and 2, codes) or of the odd ones (1 and 3, four times the
    // codes).
    __device__ __forceinline__ unsigned operand(int number, bool odd) const {
        const unsigned word = words[number % WORDS], shifted = number < WORDS ? word : word >> 4;
        return shifted & (odd ? 0x0c0c0c0cu : 0x03030303u);
    }

    // Word `number` of a field, its codes times four.
    __device__ __forceinline__ unsigned times_four(int field, int number) const {
        const unsigned word = words[number];
        return (field == 0 ? word << 2 : word >> (2 * field - 2)) & 0x0c0c0c0cu;
    }

  private:
    template <bool AGAIN, int N>
    __device__ __forceinline__ static void copy(unsigned (&to)[N], const unsigned char* from) {
        if constexpr (N == 4) {
            const uint4 four = AGAIN ? __ldcs(reinterpret_cast<const uint4*>(from)) : load_once_16(from);
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        } else if constexpr (N == 2) {
            const uint2 two = AGAIN ? __ldcs(reinterpret_cast<const uint2*>(from)) : load_once_8(from);
            to[0] = two.x, to[1] = two.y;
        } else {
            static_assert(N == 1, "a thread holds 1, 2 or 4 words");
            to[0] = AGAIN ? __ldcs(reinterpret_cast<const unsigned*>(from)) : load_once_4(from);
        }
    }
};

// A thread's words of TILES tiles of neighbouring keys: its quad has keys g and g + 8 of each tile.
template <int TILES>
struct WordTiles {
    Words keys[TILES][2];

    // From the key at `row` of the plane on. Keys beyond a region's length are read too: an extent is allocated whole.
    __device__ __forceinline__ void load(const unsigned char* high, unsigned row) {
        const int member = threadIdx.x % 4, line = threadIdx.x % WARP / 4;
        const unsigned char* from = high + static_cast<size_t>(row + line) * FIELD + member * (4 * WORDS);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) keys[tile][half].load(from + (tile * TILE + half * 8) * FIELD);
    }
};

// A warp's words of the mean of neighbouring keys' block, and its products with the queries.
struct MeanWords {
    static constexpr int EACH_WORDS = (DIM + 4 * WARP - 1) / (4 * WARP);
    int first[EACH_WORDS], second[EACH_WORDS];
    float step;

    __device__ __forceinline__ void load(const Means& means, unsigned row) {
        const int* mean = reinterpret_cast<const int*>(means.of_row(row));
        step = means.step_of_row(row);
#pragma unroll
        for (int i = 0; i < EACH_WORDS; i++) {
            const int word = threadIdx.x % WARP + i * WARP;
            first[i] = 4 * word < DIM ? mean[word] : 0;
            second[i] = 4 * word < DIM ? mean[DIM / 4 + word] : 0;
        }
    }

    // <M, integers> of a lane, times the mean's step, in all threads of the warp.
    template <int LANES>
    __device__ __forceinline__ float product(const Queries<LANES>& queries, int lane) const {
        int sum = 0, low = 0;
#pragma unroll
        for (int i = 0; i < EACH_WORDS; i++) {
            const int query = queries.four(lane, 4 * (threadIdx.x % WARP + i * WARP) % DIM);
            sum = __dp4a(first[i], query, sum), low = __dp4a(second[i], query, low);
        }
        return static_cast<float>(__reduce_add_sync(EVERYONE, 256 * sum + low)) * step;
    }
};

// The queries' operands of this thread. Of a product a thread ends up with two columns; with up to 4 lanes only the
// first of them is a lane's. EACH columns of it are lanes', of each of COLUMN_TILES products.
template <int LANES>
struct Columns {
    static constexpr int EACH = LANES <= 4 ? 1 : 2;
    static constexpr int COLUMN_TILES = (LANES + 4 * EACH - 1) / (4 * EACH);
    unsigned even[COLUMN_TILES][2 * WORDS], odd[COLUMN_TILES][2 * WORDS];
    int start[COLUMN_TILES][EACH];  // of the sum of the odd fields

    // The lane of column `i` of this thread in a product; LANES or more if there is none.
    __device__ __forceinline__ static int lane(int tile, int i) {
        const int member = threadIdx.x % 4;
        return (tile * 4 + member) * EACH + i;
    }

    Columns() = default;
    __device__ __forceinline__ explicit Columns(const Queries<LANES>& queries) {
        const int member = threadIdx.x % 4, column = threadIdx.x % WARP / 4;
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++) {
            const int lane_of_column = EACH == 1 ? tile * 4 + column / 2 : tile * 8 + column;
            const bool used = lane_of_column < LANES && (EACH == 2 || column % 2 == 0);
#pragma unroll
            for (int i = 0; i < 2 * WORDS; i++) {
                const int channel = i / WORDS * (2 * FIELD) + member * (4 * WORDS) + i % WORDS * 4;
                even[tile][i] = used ? queries.four(lane_of_column, channel) : 0;
                odd[tile][i] = used ? queries.four(lane_of_column, channel + FIELD) : 0;
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int own = lane(tile, i);
                start[tile][i] = AS_FLOAT - (own < LANES ? 6 * queries.sums[own] : 0);
            }
        }
    }

    // 2 <2h - 3, q>, a whole number: products[column tile][0 or 1 for key g or g + 8 of a tile][column].
    __device__ __forceinline__ void multiply(const Words (&keys)[2], float (&products)[COLUMN_TILES][2][EACH]) const {
        int evens[COLUMN_TILES][4] = {}, odds[COLUMN_TILES][4];
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) odds[tile][i] = i % 2 < EACH ? start[tile][i % 2 % EACH] : 0;
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
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    const int sum = 4 * evens[tile][2 * half + i] + odds[tile][2 * half + i];
                    products[tile][half][i] = __int_as_float(sum) - FLOAT_OFFSET;
                }
    }
};

constexpr int MOST_TOGETHER = 4;  // requests whose keys are read once (core/batch.py)

// The operands of this thread of the queries of up to MOST_TOGETHER requests. Thread t of a quad ends up with all lanes
// of request t: two of each column tile. The products are those of Columns, to the bit. Here the codes of a word are
// shifted to the same place once for all requests, and their sums need not be put together from two.
template <int LANES>
struct RequestColumns {
    static constexpr int TILES = (LANES + 1) / 2;
    static constexpr int CHUNKS = FIELDS * WORDS;  // words of a key's operand
    unsigned integers[TILES][CHUNKS];
    int start[TILES][2];

    // The queries of the requests one after another; there are MOST_TOGETHER of them.
    __device__ __forceinline__ explicit RequestColumns(const Queries<LANES>* queries) {
        const int member = threadIdx.x % 4, column = threadIdx.x % WARP / 4;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int lane = 2 * tile + column % 2;
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                const int channel = i / WORDS * FIELD + member * (4 * WORDS) + i % WORDS * 4;
                integers[tile][i] = lane < LANES ? queries[column / 2].four(lane, channel) : 0;
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                start[tile][i] = AS_FLOAT - (2 * tile + i < LANES ? 6 * queries[member].sums[2 * tile + i] : 0);
        }
    }

    // 2 <2h - 3, q>: products[0 or 1 for the keys][lane].
    __device__ __forceinline__ void multiply(const Words (&keys)[2], float (&products)[2][2 * TILES]) const {
        int sums[TILES][4];
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
            unsigned codes[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int own = chunk + i / 2;
                codes[i] = keys[i % 2].times_four(own / WORDS, own % WORDS);
            }
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const unsigned b0 = integers[tile][chunk], b1 = integers[tile][chunk + 1];
                if (chunk == 0)
                    begin_16x8x32(sums[tile], codes, b0, b1, start[tile][0], start[tile][1]);
                else
                    multiply_16x8x32(sums[tile], codes, b0, b1);
            }
        }
#pragma unroll
        for (int key = 0; key < 2; key++)
#pragma unroll
            for (int lane = 0; lane < 2 * TILES; lane++)
                products[key][lane] = __int_as_float(sums[lane / 2][2 * key + lane % 2]) - FLOAT_OFFSET;
    }
};

// Words of the mean of a block, an eighth of its channels for each of eight threads of a warp: those with the same
// threadIdx.x % 4, of which each multiplies with the queries of one request.
struct MeanEighths {
    static constexpr int EIGHTH = DIM / 32;  // words
    int first[EIGHTH], second[EIGHTH];
    float step;

    __device__ __forceinline__ void load(const Means& means, unsigned row) {
        const int* mean = reinterpret_cast<const int*>(means.of_row(row)) + threadIdx.x % WARP / 4 * EIGHTH;
        step = means.step_of_row(row);
#pragma unroll
        for (int i = 0; i < EIGHTH; i++) first[i] = mean[i], second[i] = mean[DIM / 4 + i];
    }

    // <M, integers> of a lane, times the mean's step: what MeanWords::product gives.
    template <int LANES>
    __device__ __forceinline__ float product(const Queries<LANES>& queries, int lane) const {
        int sum = 0, low = 0;
#pragma unroll
        for (int i = 0; i < EIGHTH; i++) {
            const int query = queries.four(lane, 4 * (threadIdx.x % WARP / 4 * EIGHTH + i));
            sum = __dp4a(first[i], query, sum), low = __dp4a(second[i], query, low);
        }
        sum = 256 * sum + low;
#pragma unroll
        for (int mask = 4; mask < WARP; mask *= 2) sum += __shfl_xor_sync(EVERYONE, sum, mask);
        return static_cast<float>(sum) * step;
    }
};

}  // namespace codes
}  // namespace kvseek
