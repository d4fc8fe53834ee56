// How a kernel becomes a function of the shared library.
//
// Each source is compiled once per instruction level (builder/compile/cpu.py): KVSEEK_LEVEL is 4 (x86-64-v4, AVX-512),
// 3 (x86-64-v3, AVX2 and FMA) or 0 (whatever the architecture guarantees). The level-0 object also defines the public
// symbol, which picks the best level that the processor runs. Kernels take one pointer to a struct of arguments, so
// that dispatch needs no knowledge of them.
//
// Code outside KVSEEK_KERNEL must have internal linkage: the linker keeps one copy of an inline function or of a
// template instance, and the copy could be one that this processor cannot run.
// tests/kernels/cpu/attention/test_attend.py checks it.
#pragma once

#define KVSEEK_HIDDEN extern "C" __attribute__((visibility("hidden")))
#define KVSEEK_PUBLIC extern "C" __attribute__((visibility("default")))

#if KVSEEK_LEVEL == 4
#define KVSEEK_KERNEL(name, Arguments, run)                      \
    KVSEEK_HIDDEN void name##_x86_64_v4(const void* arguments) { \
        run(*static_cast<const Arguments*>(arguments));          \
    }
#elif KVSEEK_LEVEL == 3
#define KVSEEK_KERNEL(name, Arguments, run)                      \
    KVSEEK_HIDDEN void name##_x86_64_v3(const void* arguments) { \
        run(*static_cast<const Arguments*>(arguments));          \
    }
#elif defined(__x86_64__)
#define KVSEEK_KERNEL(name, Arguments, run)                            \
    KVSEEK_HIDDEN void name##_x86_64_v4(const void* arguments);        \
    KVSEEK_HIDDEN void name##_x86_64_v3(const void* arguments);        \
    KVSEEK_PUBLIC void name(const void* arguments) {                   \
        switch (kvseek_processor_level()) {                            \
            case 4:                                                    \
                return name##_x86_64_v4(arguments);                    \
            case 3:                                                    \
                return name##_x86_64_v3(arguments);                    \
            default:                                                   \
                return run(*static_cast<const Arguments*>(arguments)); \
        }                                                              \
    }
#else
#define KVSEEK_KERNEL(name, Arguments, run)             \
    KVSEEK_PUBLIC void name(const void* arguments) {    \
        run(*static_cast<const Arguments*>(arguments)); \
    }
#endif

// Instructions beyond level 4 that some kernels use where the processor has them: byte products, 64 table look-ups at
// once, dot products of bfloat16.
constexpr int KVSEEK_VNNI = 1, KVSEEK_VBMI = 2, KVSEEK_BF16 = 4;

// Defined in kernels/cpu/level.cpp.
KVSEEK_PUBLIC int kvseek_processor_level();
// Whether level 5, which is level 4 with such instructions, may use one of them.
KVSEEK_HIDDEN bool kvseek_processor_extends(int extension);
KVSEEK_PUBLIC void kvseek_limit_level(const void* limit);
