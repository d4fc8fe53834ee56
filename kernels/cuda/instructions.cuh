// Machine instructions that CUDA C++ has no function for, one wrapper each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace kvseek {

// For memory that a step uses once: the L1 cache leaves it alone, and the L2 cache gives it up before anything else, so
// that there is room for what is used again (docs/gpu.md, "Used once").
#define KVSEEK_USED_ONCE ".reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0; "
#define KVSEEK_LOAD_ONCE "{" KVSEEK_USED_ONCE "ld.global.nc.L1::no_allocate.L2::cache_hint."

// The address is a multiple of the size.
__device__ __forceinline__ uint4 load_once_16(const void* from) {
    uint4 x;
    asm volatile(KVSEEK_LOAD_ONCE "v4.u32 {%0, %1, %2, %3}, [%4], policy;}"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

__device__ __forceinline__ uint2 load_once_8(const void* from) {
    uint2 x;
    asm volatile(KVSEEK_LOAD_ONCE "v2.u32 {%0, %1}, [%2], policy;}" : "=r"(x.x), "=r"(x.y) : "l"(from));
    return x;
}

__device__ __forceinline__ unsigned load_once_4(const void* from) {
    unsigned x;
    asm volatile(KVSEEK_LOAD_ONCE "u32 %0, [%1], policy;}" : "=r"(x) : "l"(from));
    return x;
}

// Bring the 128 bytes around an address into the L2 cache; nothing waits for them.
__device__ __forceinline__ void prefetch_line(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Copy 16 bytes from global to shared memory, past the registers and the L1 cache. Copies are waited for in groups.
__device__ __forceinline__ void copy_async_16(void* to, const void* from) {
    asm volatile(
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
        "l"(from)
        : "memory");
}

// The same if `exists`; else 16 bytes of zeros arrive, and nothing is read.
__device__ __forceinline__ void copy_async_16_or_zeros(void* to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
}

// The same of memory that a step uses once.
__device__ __forceinline__ void copy_once_16_or_zeros(void* to, const void* from, bool exists) {
    asm volatile("{" KVSEEK_USED_ONCE
                 "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, policy;}" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
}

// Copy 4 bytes from global to shared memory if they exist; else zeros arrive, and nothing is read.
__device__ __forceinline__ void copy_async_4_or_zeros(void* to, const void* from, bool exists) {
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
        "l"(from), "r"(exists ? 4 : 0)
        : "memory");
}

__device__ __forceinline__ void close_copy_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until no more than `PENDING` of this thread's groups, the youngest, are under way.
template <int PENDING>
__device__ __forceinline__ void await_copy_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers from shared memory; lane i gives the address of row i % 8 of matrix i / 8. With
// g = lane / 4 and t = lane % 4, x[m] holds numbers (g, 2t) and (g, 2t+1) of matrix m.
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}

// The same, transposed: x[m] holds numbers (2t, g) and (2t+1, g) of matrix m.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&x)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}

// 2^x in one instruction, to 2 units in the last place; 2^-infinity is 0.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// (bits & mask) | set in one instruction, which the compiler makes of constants only if they are in registers.
__device__ __forceinline__ unsigned choose_bits(unsigned bits, unsigned mask, unsigned set) {
    unsigned chosen;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(chosen) : "r"(bits), "r"(mask), "r"(set));
    return chosen;
}

#if __CUDA_ARCH__ >= 890
// Two numbers rounded to e4m3, ties to even, and at most to its largest; the first is the lower byte.
__device__ __forceinline__ unsigned short to_e4m3(float first, float second) {
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    return both;
}

// Two numbers of e4m3, exactly.
__device__ __forceinline__ __half2 from_e4m3(unsigned short both) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(both));
    return *reinterpret_cast<const __half2*>(&halves);
}
#endif

// c += a b on tensor cores: a [16, 16] by rows, b [16, 8] by columns, c [16, 8] in float32. A register of a or b holds
// two numbers. With g = lane / 4 and t = lane % 4: a0..a3 are rows g, g+8, g, g+8 and columns 2t, 2t+1 (a0, a1) or
// 2t+8, 2t+9 (a2, a3); b0, b1 are rows 2t, 2t+1 and 2t+8, 2t+9 of column g; c0..c3 are row g (c0, c1) or g+8 (c2, c3)
// and columns 2t, 2t+1.
__device__ __forceinline__ void multiply_16x8x16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                 unsigned b0, unsigned b1, __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_16x8x16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                 unsigned b0, unsigned b1, __half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += a b on tensor cores: a [16, 32] of unsigned bytes by rows, b [32, 8] of signed bytes by columns. With
// g = lane / 4 and t = lane % 4: a0 and a2 are row g, columns 4t .. 4t+3 and 16 more; a1 and a3 row g + 8; b0 and b1
// rows 4t .. 4t+3 and 16 more of column g; c0, c1 row g and columns 2t, 2t+1; c2, c3 row g + 8.
__device__ __forceinline__ void multiply_16x8x32(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same that begins with c: its columns' numbers are c0 and c1 in every row.
__device__ __forceinline__ void begin_16x8x32(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int c0,
                                              int c1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %10, %11};"
        : "=r"(sum[0]), "=r"(sum[1]), "=r"(sum[2]), "=r"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1));
}

}  // namespace kvseek
