// Products of 16 rows (keys or centroids) with queries, by one warp. Lane 4 * line + part multiplies rows `line` and
// `line + 8`: of each 32 numbers of a row, a quarter, 8 numbers that lie together. Four lanes read 32 numbers in a row,
// so rows may lie anywhere.
//
// 16-bit numbers go through the tensor cores, with sums in float32. Which number of a row stands in which place of the
// product is free as long as rows and queries agree, so what a lane has loaded is an operand as it is.
#pragma once

#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/warp.cuh"

namespace kvseek {
namespace ctkvr {
namespace decode {

constexpr int DIM = KVSEEK_HEAD_DIM;
constexpr int GROUP = KVSEEK_GROUP;  // query heads of a KV head
static_assert(DIM % 32 == 0 && DIM <= 256, "KVSEEK_HEAD_DIM must be a multiple of 32 up to 256");
static_assert(GROUP >= 1 && GROUP <= 16, "KVSEEK_GROUP must be 1 to 16");

constexpr int TILE = 16;                 // rows that a warp multiplies at once
constexpr int HALVES = (GROUP + 7) / 8;  // tiles of 8 query heads
constexpr int PARTS = DIM / 32;          // of a row, of which a lane multiplies 8 numbers each

__device__ __forceinline__ int line_of_lane() {
    return threadIdx.x % WARP / 4;
}
__device__ __forceinline__ int part_of_lane() {
    return threadIdx.x % 4;
}
// First of the numbers of a row that this lane multiplies in part i.
__device__ __forceinline__ int first_number(int i) {
    return 32 * i + 8 * part_of_lane();
}

#if KVSEEK_DTYPE == 0

// Float32 rows are read while they are multiplied: tensor cores would round them to 10 bits.
struct RowTile {
    const float* rows[2];

    __device__ __forceinline__ void load(const float* first, const float* second) { rows[0] = first, rows[1] = second; }

    // Products with HEADS neighbouring queries; every lane of a row's four gets them.
    template <int HEADS>
    __device__ __forceinline__ void multiply(const float* queries, float (&products)[HEADS][2]) const {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) products[h][0] = products[h][1] = 0.0f;
#pragma unroll 1
        for (int i = 0; i < PARTS; ++i) {
            Eight<float> first, second;
            first.load(rows[0] + first_number(i)), second.load(rows[1] + first_number(i));
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                Eight<float> query;
                query.load(queries + h * DIM + first_number(i));
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    products[h][0] += first[j] * query[j], products[h][1] += second[j] * query[j];
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                products[h][row] += __shfl_xor_sync(EVERYONE, products[h][row], 1);
                products[h][row] += __shfl_xor_sync(EVERYONE, products[h][row], 2);
            }
        }
    }

    // As for 16-bit numbers, below.
    __device__ __forceinline__ void multiply_one(const float* query, float (&products)[2]) const {
        float all[1][2];
        multiply<1>(query, all);
        products[0] = all[0][0], products[1] = all[0][1];
    }
    __device__ __forceinline__ void multiply_group(const float* queries, float (&products)[HALVES][4]) const {
        float all[GROUP][2];
        multiply<GROUP>(queries, all);
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
#pragma unroll
            for (int i = 0; i < 4; ++i) products[half][i] = 0.0f;
#pragma unroll
        for (int h = 0; h < GROUP; ++h) {  // with constant indexes: arrays that are indexed at run time lie in memory
            if (h % 8 / 2 != part_of_lane()) continue;
            products[h / 8][h % 2] = all[h][0], products[h / 8][2 + h % 2] = all[h][1];
        }
    }
};

#else

struct RowTile {
    uint4 rows[2][PARTS];

    // Start to read two rows; they must not change while the kernel runs.
    __device__ __forceinline__ void load(const Number* first, const Number* second) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            rows[0][i] = load_once_16(first + first_number(i));
            rows[1][i] = load_once_16(second + first_number(i));
        }
    }

    // Products of rows `line` and `line + 8` with one query; every lane of a row's four gets them.
    __device__ __forceinline__ void multiply_one(const Number* query, float (&products)[2]) const {
        float sums[4] = {};
        multiply(query, sums);  // the same query in all columns
        products[0] = sums[0], products[1] = sums[2];
    }

    // Products with the queries of a group, which lie one after the other. Of heads 8 half + 2 part and the next one:
    // products[half][0 and 1] with row `line`, [2 and 3] with row `line + 8`. Those of heads beyond the group mean
    // nothing.
    __device__ __forceinline__ void multiply_group(const Number* queries, float (&products)[HALVES][4]) const {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
#pragma unroll
            for (int i = 0; i < 4; ++i) products[half][i] = 0.0f;
            multiply(queries + min(8 * half + line_of_lane(), GROUP - 1) * DIM, products[half]);
        }
    }

  private:
    // `query` is that of column `line`.
    __device__ __forceinline__ void multiply(const Number* query, float (&sums)[4]) const {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const uint4 first = rows[0][i], second = rows[1][i];
            const uint4 column = *reinterpret_cast<const uint4*>(query + first_number(i));
            multiply_16x8x16(sums, first.x, second.x, first.y, second.y, column.x, column.y, Number());
            multiply_16x8x16(sums, first.z, second.z, first.w, second.w, column.z, column.w, Number());
        }
    }
};

#endif

// A query less the mean of its head; a warp holds it together, a lane each 32nd number.
struct Difference {
    float numbers[PARTS];

    __device__ __forceinline__ Difference(const Number* query, const float* mean) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const int number = threadIdx.x % WARP + WARP * i;
            numbers[i] = to_float(query[number]) - mean[number];
        }
    }

    // 1 for a zero.
    __device__ __forceinline__ float positive_norm() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) sum += numbers[i] * numbers[i];
        sum = sum_of_warp(sum);
        return sum > 0.0f ? sqrtf(sum) : 1.0f;
    }
};

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek
