// Which instruction level this processor runs, and a limit on it for tests that compare the levels.
#include "kernel.h"

#if KVSEEK_LEVEL == 0

namespace {

int detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))) return 0;
    const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    return v4 ? 4 : 3;
#else
    return 0;
#endif
}

int detect_extensions() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return (__builtin_cpu_supports("avx512vnni") ? KVSEEK_VNNI : 0) |
           (__builtin_cpu_supports("avx512vbmi") ? KVSEEK_VBMI : 0) |
           (__builtin_cpu_supports("avx512bf16") ? KVSEEK_BF16 : 0);
#else
    return 0;
#endif
}

constexpr int EXTENDED = 5;  // level 4 and its extensions
constexpr int UNLIMITED = 1 << 30;
int highest = UNLIMITED;

}  // namespace

int kvseek_processor_level() {
    static const int detected = detect();
    return detected < highest ? detected : highest;
}

// Sources are not compiled for level 5 as a whole: single functions of level 4 use its instructions.
bool kvseek_processor_extends(int extension) {
    static const int detected = detect() == 4 ? detect_extensions() : 0;
    return highest >= EXTENDED && (detected & extension) != 0;
}

// limit: const int*, the highest level to use from now on, in the whole process; null: no limit.
void kvseek_limit_level(const void* limit) {
    highest = limit == nullptr ? UNLIMITED : *static_cast<const int*>(limit);
}

#endif
