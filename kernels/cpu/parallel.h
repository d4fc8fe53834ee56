// Threads, from the OpenMP runtime that PyTorch has loaded.
//
// A second runtime would spin on the cores that PyTorch's threads need. So nothing here asks the compiler for OpenMP
// (each compiler would link its own runtime): the entry points that GNU and LLVM runtimes both offer are called by name
// and resolved, when the library is loaded, against the runtime that libtorch brought into the process.
#pragma once

#include <sched.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
}

namespace kvseek {
namespace {

// Work items handed out one at a time, so that a thread that loses its core for a while holds nobody up.
struct Counter {
    int next = 0;
    int take() { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }
};

// Run body() once on each of `threads` threads.
template <class Body>
void parallel(int threads, const Body& body) {
    if (threads <= 1) return body();
    GOMP_parallel([](void* data) { (*static_cast<const Body*>(data))(); }, const_cast<Body*>(&body),
                  static_cast<unsigned>(threads), 0);
}

// Run body(head, first, last) for all chunks of at most `size` tokens of every head, on up to `threads` threads.
template <class Body>
void for_each_chunk(int64_t threads, int64_t heads, int64_t tokens, int64_t size, const Body& body) {
    const int64_t chunks = (tokens + size - 1) / size, units = chunks * heads;
    Counter counter;
    parallel(static_cast<int>(threads < units ? threads : units), [&] {
        for (int64_t unit = counter.take(); unit < units; unit = counter.take()) {
            const int64_t first = unit % chunks * size, last = first + size;
            body(unit / chunks, first, last < tokens ? last : tokens);
        }
    });
}

// How to wait for another thread: a few microseconds on the core, then leaving it to whoever needs it.
class Patience {
  public:
    void wait() {
        if (++rounds_ > SPINS) sched_yield();
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

  private:
    static constexpr int SPINS = 256;
    int rounds_ = 0;
};

// Scratch memory of the calling thread, kept between calls: fresh pages cost more than the kernels that use them.
class Scratch {
  public:
    // At least `bytes` bytes, aligned to a cache line, valid until the next call.
    void* reserve(size_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = (bytes + bytes / 2 + 63) / 64 * 64;
            data_ = std::aligned_alloc(64, size_);
            if (data_ == nullptr) {
                std::fprintf(stderr, "kvseek: no memory for %zu bytes of kernel scratch\n", size_);
                std::abort();
            }
        }
        return data_;
    }
    ~Scratch() { std::free(data_); }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace
}  // namespace kvseek
