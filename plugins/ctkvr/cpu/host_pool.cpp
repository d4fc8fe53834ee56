// The pool of host_pool.h. Its threads watch for work a little while and then sleep on a futex.
//
// A thread joins a piece of work only while it is open, so one that wakes late neither delays it nor touches it. Waking
// a thread costs the waker a microsecond or two: the caller wakes two, and each of those two more.
#include "host_pool.h"

#if KVSEEK_LEVEL == 0

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <cstring>

namespace kvseek {
namespace {

// Longer than what lies between two layers of a decode step: waking the threads costs more than their share of a layer.
constexpr int64_t WATCH_NANOSECONDS = 1'000'000;
constexpr int PAUSES_PER_LOOK = 16;  // at the clock
constexpr int WOKEN_BY_ONE = 2;
constexpr uint32_t OPEN = 1u << 31;

struct Worker {
    struct HostPool* pool;
    pthread_t thread;
    int core;  // negative: any
};

struct HostPool {
    alignas(64) uint32_t state;  // OPEN while work may be joined, plus the threads that have joined
    alignas(64) uint32_t epoch;  // pieces of work so far; sleepers wait for it to change
    alignas(64) uint32_t sleepers;
    uint32_t stopping;
    alignas(64) void (*body)(void*);
    void* data;
    pthread_mutex_t one_at_a_time;
    uint64_t number;  // tells pools apart, also at the same address
    int caller_core;  // negative: any
    int workers;
    Worker* worker;
};

uint64_t pools_made = 0;

void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

void futex(uint32_t* word, int operation, uint32_t value) {
    syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

void wake(HostPool& pool, uint32_t count) {
    if (__atomic_load_n(&pool.sleepers, __ATOMIC_SEQ_CST) > 0) futex(&pool.epoch, FUTEX_WAKE, count);
}

bool bind_to(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    return sched_setaffinity(0, sizeof(cores), &cores) == 0;
}

// Wait until the epoch differs from `seen`; returns it.
uint32_t await_epoch(HostPool& pool, uint32_t seen) {
    const int64_t end = nanoseconds() + WATCH_NANOSECONDS;
    do {
        for (int i = 0; i < PAUSES_PER_LOOK; i++) {
            const uint32_t epoch = __atomic_load_n(&pool.epoch, __ATOMIC_ACQUIRE);
            if (epoch != seen) return epoch;
            pause_core();
        }
    } while (nanoseconds() < end);
    for (;;) {
        // Counted as a sleeper before the kernel looks at the epoch: whoever changes it afterwards sees the sleeper.
        __atomic_add_fetch(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
        futex(&pool.epoch, FUTEX_WAIT, seen);
        __atomic_sub_fetch(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
        const uint32_t epoch = __atomic_load_n(&pool.epoch, __ATOMIC_SEQ_CST);
        if (epoch != seen) {
            wake(pool, WOKEN_BY_ONE);
            return epoch;
        }
    }
}

bool join(HostPool& pool) {
    uint32_t state = __atomic_load_n(&pool.state, __ATOMIC_RELAXED);
    while (state & OPEN)
        if (__atomic_compare_exchange_n(&pool.state, &state, state + 1, true, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return true;
    return false;
}

void* serve(void* argument) {
    const Worker& worker = *static_cast<Worker*>(argument);
    HostPool& pool = *worker.pool;
    if (worker.core >= 0) bind_to(worker.core);  // pool_create has tried that it may
    for (uint32_t seen = 0;;) {
        seen = await_epoch(pool, seen);
        if (__atomic_load_n(&pool.stopping, __ATOMIC_ACQUIRE)) return nullptr;
        if (!join(pool)) continue;
        pool.body(pool.data);
        __atomic_sub_fetch(&pool.state, 1, __ATOMIC_RELEASE);
    }
}

void announce(HostPool& pool) {
    __atomic_add_fetch(&pool.epoch, 1, __ATOMIC_SEQ_CST);
}

void destroy(HostPool* pool) {
    __atomic_store_n(&pool->stopping, 1u, __ATOMIC_RELEASE);
    announce(*pool);
    futex(&pool->epoch, FUTEX_WAKE, INT_MAX);
    for (int i = 0; i < pool->workers; i++) pthread_join(pool->worker[i].thread, nullptr);
    pthread_mutex_destroy(&pool->one_at_a_time);
    std::free(pool->worker);
    std::free(pool);
}

// Give workers their cores; returns 0 or an errno. The calling thread's own cores are as before afterwards.
int assign_cores(HostPool& pool) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return errno;
    int cores[CPU_SETSIZE], count = 0;
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &allowed)) cores[count++] = core;
    const bool may = bind_to(cores[0]);
    const int error = may ? 0 : errno;
    if (may && sched_setaffinity(0, sizeof(allowed), &allowed) != 0) return errno;
    for (int i = 0; i < pool.workers; i++) pool.worker[i].core = cores[(i + 1) % count];
    pool.caller_core = cores[0];
    return error;
}

int start(HostPool& pool) {
    const int wanted = pool.workers;
    pool.workers = 0;  // so that `destroy` joins those that run
    for (int i = 0; i < wanted; i++) {
        pool.worker[i].pool = &pool;
        const int error = pthread_create(&pool.worker[i].thread, nullptr, serve, &pool.worker[i]);
        if (error != 0) return error;
        pool.workers++;
    }
    return 0;
}

void create(HostPoolArguments& a) {
    a.pool = nullptr;
    a.error = EINVAL;
    if (a.threads < 1 || a.threads > MAX_HOST_THREADS) return;
    a.error = ENOMEM;
    void* memory = std::aligned_alloc(alignof(HostPool), sizeof(HostPool));
    if (memory == nullptr) return;
    HostPool* pool = static_cast<HostPool*>(std::memset(memory, 0, sizeof(HostPool)));
    pool->workers = a.threads - 1;
    pool->caller_core = -1;
    pool->number = __atomic_add_fetch(&pools_made, 1, __ATOMIC_RELAXED);
    pool->worker = static_cast<Worker*>(std::calloc(a.threads, sizeof(Worker)));
    pthread_mutex_init(&pool->one_at_a_time, nullptr);
    if (pool->worker != nullptr) {
        for (int i = 0; i < pool->workers; i++) pool->worker[i].core = -1;
        a.error = a.pinned ? assign_cores(*pool) : 0;
        if (a.error != 0) pool->workers = 0;  // none runs yet
        if (a.error == 0) a.error = start(*pool);
    } else {
        pool->workers = 0;
    }
    if (a.error == 0)
        a.pool = pool;
    else
        destroy(pool);
}

void bind_caller(const HostPool& pool) {
    static thread_local uint64_t bound = 0;  // number of the pool that this thread was last bound for
    if (pool.caller_core >= 0 && bound != pool.number && bind_to(pool.caller_core)) bound = pool.number;
}

void run(HostPool& pool, void (*body)(void*), void* data) {
    pthread_mutex_lock(&pool.one_at_a_time);
    bind_caller(pool);
    pool.body = body;
    pool.data = data;
    __atomic_store_n(&pool.state, OPEN, __ATOMIC_RELEASE);
    announce(pool);
    wake(pool, WOKEN_BY_ONE);
    body(data);
    __atomic_and_fetch(&pool.state, ~OPEN, __ATOMIC_RELAXED);
    for (int looks = 0; __atomic_load_n(&pool.state, __ATOMIC_ACQUIRE) != 0; looks++) {
        pause_core();
        if (looks % 256 == 255) sched_yield();  // a thread that is still in may need this very core
    }
    pthread_mutex_unlock(&pool.one_at_a_time);
}

}  // namespace
}  // namespace kvseek

void kvseek_ctkvr_pool_create(void* arguments) {
    kvseek::create(*static_cast<kvseek::HostPoolArguments*>(arguments));
}

// No call may be running or follow.
void kvseek_ctkvr_pool_destroy(void* pool) {
    kvseek::destroy(static_cast<kvseek::HostPool*>(pool));
}

void kvseek_ctkvr_pool_run(void* pool, void (*body)(void*), void* data) {
    kvseek::run(*static_cast<kvseek::HostPool*>(pool), body, data);
}

#endif
