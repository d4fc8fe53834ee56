// Programmatic dependent launch (compute capability 9.0 and later): a kernel may start while the one before it ends.
//
// A kernel that is launched with overlap (CudaKernels.launch) must call await_earlier_kernels in every thread: what it
// waits for is the end of the kernel before it, which waited for the one before that. Before the wait it may touch only
// what no kernel touches that may still run: constants, what was written before the step, and work space whose last
// reader is known to have ended. Five kernels do more before their wait and say why they may: vote.cu (ParisKV) writes,
// and choose.cu (nested), rerank.cu (ClusterKV), coded.cu (CTkvr) and attend.cu read what a kernel of this step wrote.
// For attend.cu, every selection's last kernel must call allow_later_kernels, if it does, after its own wait.
//
// Blocks that start early start where there is room first. If a grid runs all at once and its blocks have equal work,
// an even launch may help: else one multiprocessor gets three blocks, and another one. It makes blocks wait for shared
// memory, so measure whether it gains.
#pragma once

namespace kvseek {

// Wait until the kernels before this one have ended and their results are visible.
__device__ __forceinline__ void await_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel's blocks start as soon as every block of this one has come here: they find room beside it.
__device__ __forceinline__ void allow_later_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace kvseek
