// Partial results: the warps of a CTA become one partial, the partials of a head tile one output.
//
// A partial is a sum of weighted values, the largest score m and the sum of weights, both relative to 2^m. A CTA
// without rows leaves m = -infinity and nothing else, so what its place in the scratch memory holds is never read.
#pragma once

#include "kernels/cuda/attention/attend_arguments.cuh"
#include "kernels/cuda/instructions.cuh"

namespace kvseek {
namespace attention {

constexpr float LN_2 = 0.693147180559945f;
constexpr int MERGED_AT_ONCE = 16;  // partials that are on their way together
constexpr int LANE_STRIDE = 33;     // floats from one output register to the next in shared memory: no bank conflicts

__device__ __forceinline__ void publish_nothing(const AttendArguments& a, const Place& place) {
    if (threadIdx.x < TILE)
        a.statistics[static_cast<long long>(place.unit) * TILE + threadIdx.x] = make_float2(minus_infinity(), 0.0f);
}

// Add the warps up, one after the other, and write the sum as this CTA's partial.
template <class Warp>
__device__ __forceinline__ void publish(const AttendArguments& a, const Place& place, const Warp& warp,
                                        float* outputs) {
    __shared__ float maxima[WARPS][TILE], sums[WARPS][TILE], factors[WARPS][TILE];
    const int own = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long partial = place.unit;
    warp.statistics(maxima[own], sums[own]);
    __syncthreads();
    if (threadIdx.x < TILE) {
        const int head = threadIdx.x;
        float highest = minus_infinity(), total = 0.0f;
        for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, maxima[w][head]);
        for (int w = 0; w < WARPS; ++w) {
            const bool rows = maxima[w][head] > minus_infinity();  // infinity less infinity is NaN
            factors[w][head] = rows ? power_of_two(maxima[w][head] - highest) : 0.0f;
            total += factors[w][head] * sums[w][head];
        }
        a.statistics[partial * TILE + head] = make_float2(highest, total);
    }
    __syncthreads();
    for (int w = 0; w < WARPS; ++w) {
        if (w == own) {
#pragma unroll
            for (int i = 0; i < Warp::REGISTERS; ++i) {
                float* sum = outputs + i * LANE_STRIDE + lane;
                *sum = (w ? *sum : 0.0f) + warp.output(i) * factors[own][warp.output_head(i)];
            }
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < place.heads() * DIM; i += THREADS) {
        const int2 from = Warp::output_place(i / DIM, i % DIM);
        a.partials[partial * KEPT_HEADS * DIM + i] = outputs[from.x * LANE_STRIDE + from.y];
    }
}

// The tile's first query head, counted over the batch.
__device__ __forceinline__ long long first_query(const AttendArguments& a, const Place& place) {
    return static_cast<long long>(place.request) * a.kv_heads * GROUP + place.query_head();
}

// Share of each partial in the result, weights[split][head], from its statistics; zeros if no partial has rows. Writes
// the log-sum-exp of the heads.
__device__ __forceinline__ void weigh_partials(const AttendArguments& a, const Place& place, float* weights) {
    const int splits = place.units, lane = threadIdx.x % 32;
    const float2* statistics = a.statistics + static_cast<long long>(place.first) * TILE;
    for (int head = threadIdx.x / 32; head < place.heads(); head += WARPS) {
        float2 own[MAX_SPLITS / 32];
        float highest = minus_infinity(), total = 0.0f;
#pragma unroll
        for (int i = 0; i < MAX_SPLITS / 32; ++i) {
            const int split = lane + 32 * i;
            own[i] = split < splits ? __ldcg(statistics + split * TILE + head) : make_float2(minus_infinity(), 0.0f);
            highest = fmaxf(highest, own[i].x);
        }
#pragma unroll
        for (int distance = 16; distance; distance /= 2)
            highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, distance));
#pragma unroll
        for (int i = 0; i < MAX_SPLITS / 32; ++i) {
            own[i].x = own[i].x > minus_infinity() ? power_of_two(own[i].x - highest) : 0.0f;
            total += own[i].x * own[i].y;
        }
#pragma unroll
        for (int distance = 16; distance; distance /= 2) total += __shfl_xor_sync(ALL_LANES, total, distance);
#pragma unroll
        for (int i = 0; i < MAX_SPLITS / 32; ++i)
            if (lane + 32 * i < splits)
                weights[(lane + 32 * i) * TILE + head] = own[i].x > 0.0f ? own[i].x / total : 0.0f;
        if (a.lse && lane == 0)
            a.lse[first_query(a, place) + head] = total > 0.0f ? (highest + log2f(total)) * LN_2 : minus_infinity();
    }
    __syncthreads();
}

// Add the partials of a head tile up, each times its share, and write the outputs.
__device__ __forceinline__ void merge_partials(const AttendArguments& a, const Place& place, float* weights) {
    const int splits = place.units;
    weigh_partials(a, place, weights);
    const float* partials = a.partials + static_cast<long long>(place.first) * (KEPT_HEADS * DIM);
    for (int i = threadIdx.x * 4; i < place.heads() * DIM; i += THREADS * 4) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int first = 0; first < splits; first += MERGED_AT_ONCE) {
            float4 parts[MERGED_AT_ONCE];
            float shares[MERGED_AT_ONCE];
#pragma unroll
            for (int s = 0; s < MERGED_AT_ONCE; ++s) {  // all loads first: each takes as long as many additions
                const int split = first + s;
                shares[s] = split < splits ? weights[split * TILE + i / DIM] : 0.0f;
                parts[s] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (shares[s] != 0.0f)
                    parts[s] = __ldcg(reinterpret_cast<const float4*>(partials + split * KEPT_HEADS * DIM + i));
            }
#pragma unroll
            for (int s = 0; s < MERGED_AT_ONCE; ++s) {
                sum.x += shares[s] * parts[s].x, sum.y += shares[s] * parts[s].y;
                sum.z += shares[s] * parts[s].z, sum.w += shares[s] * parts[s].w;
            }
        }
        Number* out = a.out + first_query(a, place) * DIM + i;
        out[0] = from_float<Number>(sum.x), out[1] = from_float<Number>(sum.y);
        out[2] = from_float<Number>(sum.z), out[3] = from_float<Number>(sum.w);
    }
}

}  // namespace attention
}  // namespace kvseek
