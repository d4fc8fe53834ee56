"""Compilers of the kernels: C++ for processors, CUDA C++ for GPUs."""
