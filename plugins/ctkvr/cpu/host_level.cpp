// Finds out whether bfloat16 dot products and AMX tiles work, before a kernel depends on them.
//
// Some virtual machines advertise AMX, let programs request it, and then answer its instructions with SIGILL. So a tile
// product is tried, and a signal handler leads out of it. It acts for the trying thread alone; elsewhere, and
// afterwards, SIGILL means what it meant before.
#include "host_level.h"

#if KVSEEK_LEVEL == 0

#if defined(__x86_64__)
#include <immintrin.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstring>

#include "host_step.h"

namespace kvseek {
namespace {

#if defined(__x86_64__)

constexpr long REQUEST_STATE_PERMISSION = 0x1023;  // ARCH_REQ_XCOMP_PERM of arch_prctl
constexpr long TILE_STATE = 18;                    // XFEATURE_XTILEDATA

thread_local sigjmp_buf* way_out = nullptr;  // of the trying thread
struct sigaction action_before;

void leave(int) {
    if (way_out != nullptr) siglongjmp(*way_out, 1);
    sigaction(SIGILL, &action_before, nullptr);  // the instruction is tried again, under the former action
}

// One product of 16 x 32 ones by 32 x 16 ones; whether every sum is 32.
__attribute__((target("amx-tile,amx-bf16"), noinline)) bool tiles_multiply() {
    alignas(64) uint8_t shapes[64] = {1};
    alignas(64) uint16_t ones[512];
    alignas(64) float sums[256] = {};
    const uint16_t row_bytes = 64;
    for (int tile = 0; tile < 3; tile++) {
        std::memcpy(shapes + 16 + 2 * tile, &row_bytes, sizeof(row_bytes));
        shapes[48 + tile] = 16;
    }
    for (uint16_t& one : ones) one = 0x3f80;
    _tile_loadconfig(shapes);
    _tile_zero(0);
    _tile_loadd(1, ones, 64);
    _tile_loadd(2, ones, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, sums, 64);
    _tile_release();
    for (const float total : sums)
        if (total != 32.0f) return false;
    return true;
}

bool tiles_work() {
    if (!(__builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16"))) return false;
    if (syscall(SYS_arch_prctl, REQUEST_STATE_PERMISSION, TILE_STATE) != 0) return false;
    struct sigaction attempt = {};
    attempt.sa_handler = leave;
    sigemptyset(&attempt.sa_mask);
    sigjmp_buf start;
    volatile bool works = false;
    if (sigaction(SIGILL, &attempt, &action_before) != 0) return false;
    if (sigsetjmp(start, 1) == 0) {
        way_out = &start;
        works = tiles_multiply();
    }
    way_out = nullptr;
    sigaction(SIGILL, &action_before, nullptr);
    return works;
}

int detect() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bf16")) return AVX512;
    return tiles_work() ? AMX : AVX512_BF16;
}

int detected = AVX512;
pthread_once_t detection = PTHREAD_ONCE_INIT;

#endif

}  // namespace
}  // namespace kvseek

int kvseek_ctkvr_best_level() {
    const int level = kvseek_processor_level();
#if defined(__x86_64__)
    if (level < kvseek::AVX512) return level;
    pthread_once(&kvseek::detection, [] { kvseek::detected = kvseek::detect(); });
    return kvseek::detected;
#else
    return level;
#endif
}

// AUTOMATIC stops below AMX: with 4 queries a key, tiles are as fast as dot products on rows in memory, which both wait
// for, and slower on rows in caches, for keys must be laid side by side first.
void kvseek_ctkvr_host_level(void* out) {
    const int best = kvseek_ctkvr_best_level();
    static_cast<int32_t*>(out)[0] = best;
    static_cast<int32_t*>(out)[1] = best < kvseek::AVX512_BF16 ? best : kvseek::AVX512_BF16;
}

#endif
