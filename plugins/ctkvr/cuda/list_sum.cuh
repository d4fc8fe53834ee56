// Sums of the softmax of each query over all keys, in one pass over the products.
#pragma once

#include "list_products.cuh"

namespace kvseek {
namespace ctkvr {

// Sums of 2^(factor x product) of a lane's rows, each relative to the largest product that it has seen.
struct Softmax {
    float factors[LANE_ROWS], largest[LANE_ROWS], sums[LANE_ROWS];

    __device__ __forceinline__ explicit Softmax(const ListArguments& a) {
#pragma unroll
        for (int row = 0; row < LANE_ROWS; ++row) {
            factors[row] = row_exists(a, row) ? a.factors[blockIdx.y * GROUP + row_head(row)] : 1.0f;
            largest[row] = -INFINITE;
            sums[row] = 0.0f;
        }
    }

    // Products of samples first ...
    __device__ __forceinline__ void add(Products& products, int first, int samples) {
        if (first + PART_KEYS > samples) {
#pragma unroll
            for (int column = 0; column < LANE_KEYS; ++column)
                if (first + column_key(column) >= samples)
#pragma unroll
                    for (int row = 0; row < LANE_ROWS; ++row) product(products, row, column) = -INFINITE;
        }
#pragma unroll
        for (int row = 0; row < LANE_ROWS; ++row) {
            float best = largest[row];
#pragma unroll
            for (int column = 0; column < LANE_KEYS; ++column) best = fmaxf(best, product(products, row, column));
            const float bias = -finite(best) * factors[row];
            float sum = sums[row] * power_of_two((largest[row] - finite(best)) * factors[row]);  // 1 if nothing changed
#pragma unroll
            for (int column = 0; column < LANE_KEYS; ++column)
                sum += power_of_two(fmaf(product(products, row, column), factors[row], bias));
            sums[row] = sum;
            largest[row] = best;
        }
    }

    // Write the sums of this block's keys: four lanes have a row's.
    __device__ __forceinline__ void finish(const ListArguments& a) {
        const long long rows = static_cast<long long>(gridDim.y) * GROUP * a.centroids;
#pragma unroll
        for (int row = 0; row < LANE_ROWS; ++row) {
#pragma unroll
            for (int distance = 1; distance < 4; distance *= 2) {
                const float other = __shfl_xor_sync(EVERYONE, largest[row], distance);
                const float other_sum = __shfl_xor_sync(EVERYONE, sums[row], distance);
                const float best = fmaxf(largest[row], other);
                sums[row] = sums[row] * power_of_two((largest[row] - finite(best)) * factors[row]) +
                            other_sum * power_of_two((other - finite(best)) * factors[row]);
                largest[row] = best;
            }
            // One lane writes: the four may differ in the last bit, for a product and a sum are rounded together.
            if (threadIdx.x % 4 || !row_exists(a, row)) continue;
            float* to = a.sums + 2 * (blockIdx.z * rows + row_number(a, row));
            to[0] = largest[row] * factors[row];
            to[1] = sums[row];
        }
    }

  private:
    // -infinity is what a lane has seen none but keys behind the last with.
    static __device__ __forceinline__ float finite(float best) { return best == -INFINITE ? 0.0f : best; }
};

// Binary logarithm of a row's whole sum, from those of `parts`. `row` is its number in the first of `rows`.
__device__ __forceinline__ float sum_logarithm(const float* sums, int parts, long long rows, long long row) {
    float best = -INFINITE, sum = 0.0f;
    for (int part = 0; part < parts; ++part) best = fmaxf(best, sums[2 * (part * rows + row)]);
    for (int part = 0; part < parts; ++part) {
        const float* one = sums + 2 * (part * rows + row);
        sum = fmaf(one[1], power_of_two(one[0] - best), sum);
    }
    return best + log2f(sum);
}

}  // namespace ctkvr
}  // namespace kvseek
