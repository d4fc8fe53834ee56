// Runs device code of one warp on the CPU: its 32 threads take turns, and meet where they exchange values. It stands in
// for CUDA's headers and for plugins/shared/instructions.cuh, whose machine instructions it computes in plain C++.
// `run_warp(work)` calls work() in each thread. Only code of a single warp that calls exchanges in the same order in
// all threads can run.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __shared__ static
#define __grid_constant__
#define __global__
#define __launch_bounds__(...)
using std::max, std::min;

struct Index3 {
    unsigned x = 0, y = 0, z = 0;
};
inline Index3 threadIdx, blockIdx, blockDim{32, 1, 1}, gridDim{1, 1, 1};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}

namespace warp {

constexpr int SIZE = 32, WORDS = 8;
inline ucontext_t scheduler, threads[SIZE];
inline std::function<void()> work;
inline unsigned board[2][SIZE][WORDS];  // what the threads show each other, at this meeting and the one before
inline int meetings[SIZE];
inline bool ended[SIZE];

inline void start() {
    work();
    ended[threadIdx.x] = true;
}

// Show the others some words, and let all of them come here.
inline unsigned (&meet(const unsigned* words, int count)) [SIZE][WORDS] {
    const unsigned own = threadIdx.x;
    auto& shown = board[meetings[own]++ % 2];
    std::copy(words, words + count, shown[own]);
    swapcontext(&threads[own], &scheduler);
    return shown;
}

inline void run_warp(const std::function<void()>& code) {
    static std::vector<std::vector<char>> stacks(SIZE, std::vector<char>(1 << 18));
    work = code;
    for (int i = 0; i < SIZE; i++) {
        meetings[i] = 0, ended[i] = false;
        getcontext(&threads[i]);
        threads[i].uc_stack.ss_sp = stacks[i].data();
        threads[i].uc_stack.ss_size = stacks[i].size();
        threads[i].uc_link = &scheduler;
        makecontext(&threads[i], start, 0);
    }
    while (std::count(ended, ended + SIZE, true) < SIZE)
        for (unsigned i = 0; i < SIZE; i++)
            if (!ended[i]) {
                threadIdx.x = i;
                swapcontext(&scheduler, &threads[i]);
            }
}

}  // namespace warp

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    unsigned word;
    std::memcpy(&word, &value, 4);
    const unsigned other = threadIdx.x ^ mask;
    std::memcpy(&value, warp::meet(&word, 1)[other], 4);
    return value;
}
inline int __reduce_add_sync(unsigned, int value) {
    const unsigned word = value;
    int sum = 0;
    for (const auto& shown : warp::meet(&word, 1)) sum += static_cast<int>(shown[0]);
    return sum;
}
template <class T>
T __shfl_up_sync(unsigned, T value, int) {
    std::abort();
}
template <class T>
T __shfl_down_sync(unsigned, T value, int) {
    std::abort();
}
inline void __syncthreads() {
    warp::meet(nullptr, 0);
}

inline float __fdiv_rn(float x, float y) {
    return x / y;
}
inline float __fmul_rn(float x, float y) {
    return x * y;
}
inline float __fsqrt_rn(float x) {
    return std::sqrt(x);
}
inline float __frcp_rn(float x) {
    return 1.0f / x;
}
inline int __float2int_rn(float x) {
    return std::isnan(x) ? 0 : static_cast<int>(std::nearbyint(x));
}
template <class To, class From>
To bits_as(From from) {
    To to;
    std::memcpy(&to, &from, 4);
    return to;
}
inline float __int_as_float(int x) {
    return bits_as<float>(x);
}
inline unsigned __float_as_uint(float x) {
    return bits_as<unsigned>(x);
}
template <class T>
T __ldcs(const T* from) {
    return *from;
}

struct __nv_bfloat16 {};
struct __half {
    unsigned short bits;
};
inline __half __ushort_as_half(unsigned short bits) {
    return {bits};
}
inline float __half2float(__half x) {
    _Float16 number;
    std::memcpy(&number, &x.bits, 2);
    return number;
}
float __bfloat162float(__nv_bfloat16);
__nv_bfloat16 __float2bfloat16_rn(float);
__half __float2half_rn(float);

namespace kvseek {

template <class T>
T loaded(const void* from) {
    T x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline uint4 load_once_16(const void* from) {
    return loaded<uint4>(from);
}
inline uint2 load_once_8(const void* from) {
    return loaded<uint2>(from);
}
inline unsigned load_once_4(const void* from) {
    return loaded<unsigned>(from);
}
inline float power_of_two(float x) {
    return std::exp2(x);
}

// As instructions.cuh describes the product.
inline void multiply_16x8x32(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned own[6] = {a[0], a[1], a[2], a[3], b0, b1}, g = threadIdx.x / 4, t = threadIdx.x % 4;
    const auto& shown = warp::meet(own, 6);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 32; k++) {  // row g or g + 8 of a, column 2t or 2t + 1 of b
            const unsigned member = k % 16 / 4, shift = 8 * (k % 4);
            const unsigned row = shown[g * 4 + member][k / 16 * 2 + i / 2] >> shift & 255;
            const auto column =
                static_cast<std::int8_t>(shown[(2 * t + i % 2) * 4 + member][4 + k / 16] >> shift & 255);
            c[i] += static_cast<int>(row) * column;
        }
}

}  // namespace kvseek
