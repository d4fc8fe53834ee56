// Threads that live as long as an engine and wait for short pieces of work, one piece at a time.
#pragma once

#include <cstdint>

#include "kernels/cpu/kernel.h"

namespace kvseek {

// Arguments of kvseek_ctkvr_pool_create.
struct HostPoolArguments {
    void* pool;       // out; null if `error` is set
    int32_t threads;  // in all: the one that calls, and threads - 1 more
    // Whether its own threads are bound to a core each, of those that the creating thread may run on, from the second
    // core on, and whoever calls to the first one, for good: for CUDA's host-function thread.
    int32_t pinned;
    int32_t error;  // out: 0, or the errno of what failed
};

constexpr int32_t MAX_HOST_THREADS = 1024;

}  // namespace kvseek

// Run body(data) on the calling thread and on every thread of the pool that comes in time; returns when all have left
// it. A call waits for the one before it. Defined in host_pool.cpp.
KVSEEK_HIDDEN void kvseek_ctkvr_pool_run(void* pool, void (*body)(void*), void* data);

KVSEEK_PUBLIC void kvseek_ctkvr_pool_create(void* arguments);
KVSEEK_PUBLIC void kvseek_ctkvr_pool_destroy(void* pool);
