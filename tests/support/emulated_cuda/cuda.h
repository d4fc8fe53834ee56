// Runs CUDA kernels on the CPU, one block after another: the threads of a block are fibers that take turns, and meet at
// barriers and where the threads of a warp exchange values. It stands in for CUDA's headers and for
// kernels/cuda/instructions.cuh, whose machine instructions it computes in plain C++
// (tests/support/emulated_kernels.py).
//
// It finds wrong results, wrong indexes and barriers that not all threads reach. It does not find races: threads take
// turns only where they meet. Memory of a block is not cleared between blocks, as on a GPU.
#pragma once

#include <immintrin.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
using std::max, std::min;

struct Index3 {
    unsigned x, y, z;
};
inline Index3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
inline int4 make_int4(int x, int y, int z, int w) {
    return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

namespace emulated {

constexpr int WARP = 32;
constexpr size_t STACK = 256 << 10;  // bytes of a thread
constexpr long MOST_TURNS = 1 << 20;

// What the threads of a warp show each other. Two generations: the slow ones may still look at the last one.
struct Warp {
    int arrived = 0;
    unsigned generation = 0;
    uint64_t shown[WARP], results[2][WARP];
};

// A thread. It begins with its context; then it is left and entered by jumps, which ask nothing of the kernel.
struct Fiber {
    ucontext_t start;
    jmp_buf place;
    bool begun, ended;
};

inline std::function<void()> work;
inline ucontext_t beginning;
inline jmp_buf scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline int current, running, arrived;
inline unsigned generation;  // of the block's barrier

// Let the other threads go on.
inline void pause() {
    if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

inline void resume(int thread) {
    Fiber& fiber = fibers[thread];
    current = thread, threadIdx = {static_cast<unsigned>(thread), 0, 0};
    if (_setjmp(scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    swapcontext(&beginning, &fiber.start);
}

// A thread that has ended is waited for by nobody.
inline void run_thread() {
    work();
    fibers[current].ended = true;
    if (--running > 0 && arrived == running) arrived = 0, generation++;
    pause();
}

inline void barrier() {
    const unsigned own = generation;
    if (++arrived == running)
        arrived = 0, generation++;
    else
        while (generation == own) pause();
}

// Show the other threads of the warp a value; returns those of all. The whole warp has to come here.
inline const uint64_t* exchange(uint64_t value) {
    Warp& warp = warps[current / WARP];
    const unsigned own = warp.generation;
    warp.shown[current % WARP] = value;
    if (++warp.arrived == WARP) {
        warp.arrived = 0;
        std::memcpy(warp.results[own % 2], warp.shown, sizeof(warp.shown));
        warp.generation++;
    } else {
        while (warp.generation == own) pause();
    }
    return warp.results[own % 2];
}

inline void run_block(int threads) {
    static std::unique_ptr<char[]> stacks;
    static int room = 0;
    if (room < threads) stacks.reset(new char[STACK * threads]), room = threads;
    fibers.resize(threads), warps.assign((threads + WARP - 1) / WARP, {});
    running = threads, arrived = 0, generation = 0;
    for (int thread = 0; thread < threads; thread++) {
        Fiber& fiber = fibers[thread];
        fiber.begun = fiber.ended = false;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = stacks.get() + STACK * thread, fiber.start.uc_stack.ss_size = STACK;
        makecontext(&fiber.start, run_thread, 0);
    }
    for (long turns = 0; running > 0; turns++) {
        if (turns == MOST_TURNS) {
            std::fprintf(stderr, "emulated kernel: %d threads wait for others for ever\n", running);
            std::abort();
        }
        for (int thread = 0; thread < threads; thread++)
            if (!fibers[thread].ended) resume(thread);
    }
}

template <class Arguments>
void launch(void (*kernel)(Arguments), const void* arguments, Index3 grid, int threads) {
    blockDim = {static_cast<unsigned>(threads), 1, 1}, gridDim = grid;
    const Arguments& given = *static_cast<const Arguments*>(arguments);
    work = [&] { kernel(given); };
    for (unsigned z = 0; z < grid.z; z++) {
        for (unsigned y = 0; y < grid.y; y++) {
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                run_block(threads);
            }
        }
    }
}

template <class T>
uint64_t packed(T value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(value));
    return bits;
}
template <class T>
T unpacked(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}
template <class T>
T from_lane(T value, int lane) {
    return unpacked<T>(exchange(packed(value))[lane]);
}
inline int lane() {
    return current % WARP;
}

}  // namespace emulated

inline void __syncthreads() {
    emulated::barrier();
}
inline int __syncthreads_count(bool holds) {
    static int count;
    emulated::barrier();
    count = 0;
    emulated::barrier();
    count += holds;
    emulated::barrier();
    return count;
}
inline bool __syncthreads_or(bool holds) {
    return __syncthreads_count(holds) > 0;
}
inline void __syncwarp(unsigned = ~0u) {
    emulated::exchange(0);
}
inline void __threadfence() {}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return emulated::from_lane(value, lane & 31);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulated::from_lane(value, emulated::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
    return emulated::from_lane(value,
                               max(emulated::lane() - distance, emulated::lane() < distance ? emulated::lane() : 0));
}
template <class T>
T __shfl_down_sync(unsigned, T value, int distance) {
    const int from = emulated::lane() + distance;
    return emulated::from_lane(value, from < emulated::WARP ? from : emulated::lane());
}
inline unsigned __ballot_sync(unsigned, bool vote) {
    const uint64_t* votes = emulated::exchange(vote);
    unsigned mask = 0;
    for (int i = 0; i < emulated::WARP; i++) mask |= static_cast<unsigned>(votes[i]) << i;
    return mask;
}
inline bool __any_sync(unsigned all, bool vote) {
    return __ballot_sync(all, vote) != 0;
}
inline bool __all_sync(unsigned all, bool vote) {
    return __ballot_sync(all, vote) == ~0u;
}
inline int __reduce_add_sync(unsigned, int value) {
    const uint64_t* values = emulated::exchange(emulated::packed(value));
    int sum = 0;
    for (int i = 0; i < emulated::WARP; i++) sum += emulated::unpacked<int>(values[i]);
    return sum;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const uint64_t* values = emulated::exchange(value);
    return static_cast<unsigned>(*std::max_element(values, values + emulated::WARP));
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
    const uint64_t* values = emulated::exchange(value);
    return static_cast<unsigned>(*std::min_element(values, values + emulated::WARP));
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
    const uint64_t* values = emulated::exchange(value);
    unsigned bits = 0;
    for (int i = 0; i < emulated::WARP; i++) bits |= static_cast<unsigned>(values[i]);
    return bits;
}
template <class T, class U>
T atomicAdd(T* to, U value) {
    const T before = *to;
    *to += value;
    return before;
}
template <class T>
T atomicMax(T* to, T value) {
    const T before = *to;
    *to = max(*to, value);
    return before;
}
template <class T>
T atomicOr(T* to, T value) {
    const T before = *to;
    *to |= value;
    return before;
}
template <class T>
T __ldcg(const T* from) {
    return *from;
}
template <class T>
T __ldg(const T* from) {
    return *from;
}
template <class T>
T __ldcs(const T* from) {
    return *from;
}

inline int __popc(unsigned bits) {
    return __builtin_popcount(bits);
}
inline int __clz(int bits) {
    return bits == 0 ? 32 : __builtin_clz(bits);
}
inline int __ffs(int bits) {
    return __builtin_ffs(bits);
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16;
}
inline unsigned __float_as_uint(float x) {
    return emulated::unpacked<unsigned>(emulated::packed(x));
}
inline float __uint_as_float(unsigned x) {
    return emulated::unpacked<float>(x);
}
inline float __int_as_float(int x) {
    return __uint_as_float(static_cast<unsigned>(x));
}
inline float rsqrtf(float x) {
    return 1.0f / std::sqrt(x);
}
inline float __fdiv_rn(float x, float y) {
    return x / y;
}
inline float __fmul_rn(float x, float y) {
    return x * y;
}
inline float __fmaf_rn(float x, float y, float z) {
    return std::fma(x, y, z);
}
inline float __fsqrt_rn(float x) {
    return std::sqrt(x);
}
inline float __fdividef(float x, float y) {
    return x / y;
}
inline float __frcp_rn(float x) {
    return 1.0f / x;
}
inline int __float2int_rn(float x) {
    if (std::isnan(x)) return 0;
    return static_cast<int>(std::nearbyint(min(max(static_cast<double>(x), -2147483648.0), 2147483647.0)));
}
inline unsigned long long __float2ull_rn(float x) {
    return static_cast<unsigned long long>(std::nearbyint(static_cast<double>(x)));
}
inline int __dp4a(int a, int b, int sum) {
    for (int shift = 0; shift < 32; shift += 8)
        sum += static_cast<int>(static_cast<int8_t>(a >> shift)) * static_cast<int8_t>(b >> shift);
    return sum;
}

struct __half {
    uint16_t bits;
};
struct __nv_bfloat16 {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline float __half2float(__half x) {
    return _cvtsh_ss(x.bits);
}
inline __half __float2half_rn(float x) {
    return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
}
inline unsigned short __half_as_ushort(__half x) {
    return x.bits;
}
inline __half __ushort_as_half(unsigned short bits) {
    return {bits};
}
inline float __bfloat162float(__nv_bfloat16 x) {
    return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    const unsigned bits = __float_as_uint(x);
    if (std::isnan(x)) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline __half2 __floats2half2_rn(float x, float y) {
    return {__float2half_rn(x), __float2half_rn(y)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

inline __half2 __float2half2_rn(float x) {
    return __floats2half2_rn(x, x);
}
inline float2 __half22float2(__half2 x) {
    return {__half2float(x.x), __half2float(x.y)};
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    return {bits};
}
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) {
    return {x, y};
}
inline __half2 __hmul2(__half2 x, __half2 y) {
    return __floats2half2_rn(__half2float(x.x) * __half2float(y.x), __half2float(x.y) * __half2float(y.y));
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 x, __nv_bfloat162 y) {
    return __floats2bfloat162_rn(__bfloat162float(x.x) * __bfloat162float(y.x),
                                 __bfloat162float(x.y) * __bfloat162float(y.y));
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, int shift) {
    return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32) | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    unsigned found = 0;
    for (int i = 0; i < 4; i++) found |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}

// As kernels/cuda/instructions.cuh describes them.
namespace kvseek {

inline uint4 load_once_16(const void* from) {
    return *static_cast<const uint4*>(from);
}
inline uint2 load_once_8(const void* from) {
    return *static_cast<const uint2*>(from);
}
inline unsigned load_once_4(const void* from) {
    return *static_cast<const unsigned*>(from);
}
inline void prefetch_line(const void*) {}
inline void copy_async_16(void* to, const void* from) {
    std::memcpy(to, from, 16);
}
inline void copy_async_4_or_zeros(void* to, const void* from, bool exists) {
    if (exists)
        std::memcpy(to, from, 4);
    else
        std::memset(to, 0, 4);
}
inline void copy_once_16_or_zeros(void* to, const void* from, bool exists) {
    if (exists)
        std::memcpy(to, from, 16);
    else
        std::memset(to, 0, 16);
}
inline void close_copy_group() {}
template <int PENDING>
void await_copy_groups() {}
// Each lane's 32 bits of four matrices, whose rows' addresses the lanes give; `number` finds one of a row.
template <class Find>
void load_four(unsigned (&x)[4], const void* row, const Find& find) {
    const uint64_t* rows = emulated::exchange(reinterpret_cast<uint64_t>(row));
    const int g = emulated::lane() / 4, t = emulated::lane() % 4;
    for (int m = 0; m < 4; m++)
        x[m] = find(rows + 8 * m, g, 2 * t) | static_cast<unsigned>(find(rows + 8 * m, g, 2 * t + 1)) << 16;
}
inline void load_matrices(unsigned (&x)[4], const void* row) {
    load_four(x, row, [](const uint64_t* rows, int g, int number) {
        return reinterpret_cast<const uint16_t*>(rows[g])[number];
    });
}
inline void load_matrices_transposed(unsigned (&x)[4], const void* row) {
    load_four(x, row, [](const uint64_t* rows, int g, int number) {
        return reinterpret_cast<const uint16_t*>(rows[number])[g];
    });
}
inline float power_of_two(float x) {
    return std::exp2(x);
}
inline unsigned choose_bits(unsigned bits, unsigned mask, unsigned set) {
    return (bits & mask) | set;
}
inline unsigned to_e4m3(float x) {
    const float size = std::min(std::fabs(x), 448.0f), step = std::exp2(std::max(std::ilogb(size), -6) - 3);
    const float rounded = std::nearbyint(size / step) * step;
    const int exponent = std::max(std::ilogb(rounded), -6);
    // Below the least normal number, 2^-6, there is no leading one.
    const float fraction = rounded / std::exp2(exponent) - (rounded >= std::exp2(-6));
    const unsigned bits = (rounded >= std::exp2(-6) ? exponent + 7 : 0) << 3 | static_cast<unsigned>(fraction * 8);
    return std::signbit(x) << 7 | bits;
}
inline unsigned short to_e4m3(float first, float second) {
    return to_e4m3(first) | to_e4m3(second) << 8;
}

// Number `k` of row g or g + 8 of `a`, times number `k` of column 2t or 2t + 1 of `b`, added up: a register has EACH
// numbers, `number` makes one of a register.
template <int EACH, class Sum, class OfA, class OfB>
void multiply_tiles(Sum (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const OfA& of_a, const OfB& of_b) {
    unsigned shown[6][emulated::WARP];
    const unsigned own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    for (int i = 0; i < 6; i++) {
        const uint64_t* values = emulated::exchange(own[i]);
        for (int lane = 0; lane < emulated::WARP; lane++) shown[i][lane] = static_cast<unsigned>(values[lane]);
    }
    const int g = emulated::lane() / 4, t = emulated::lane() % 4;
    for (int i = 0; i < 4; i++) {
        const int column = 2 * t + i % 2;
        for (int k = 0; k < 8 * EACH; k++) {
            const int half = k / (4 * EACH), member = k % (4 * EACH) / EACH, inside = k % EACH;
            c[i] += of_a(shown[half * 2 + i / 2][g * 4 + member], inside) *
                    of_b(shown[4 + half][column * 4 + member], inside);
        }
    }
}

inline void multiply_16x8x32(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_tiles<4>(
        c, a, b0, b1, [](unsigned x, int i) { return static_cast<int>(x >> 8 * i & 255); },
        [](unsigned x, int i) { return static_cast<int>(static_cast<int8_t>(x >> 8 * i)); });
}

inline void begin_16x8x32(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int c0, int c1) {
    sum[0] = sum[2] = c0, sum[1] = sum[3] = c1;
    multiply_16x8x32(sum, a, b0, b1);
}

template <class Number>
void multiply_16x8x16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                      Number) {
    const auto number = [](unsigned x, int i) {
        const Number found = {static_cast<uint16_t>(x >> 16 * i)};
        if constexpr (std::is_same_v<Number, __half>)
            return __half2float(found);
        else
            return __bfloat162float(found);
    };
    multiply_tiles<2>(c, {a0, a1, a2, a3}, b0, b1, number, number);
}

}  // namespace kvseek
