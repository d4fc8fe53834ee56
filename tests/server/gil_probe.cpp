// Preloaded into a Python process: reports objects that are freed by a thread without Python's interpreter lock.
//
// The file named by KVSEEK_GIL_PROBE gets a line "PID watched" from every Python process, and a line "PID unsafe" for
// each such object, at most LINES of them: the first is reason enough.

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>

namespace {

constexpr int LINES = 100;

template <typename Function>
Function python(const char* name, void* where) {
    return reinterpret_cast<Function>(dlsym(where, name));
}

void report(const char* word) {
    const char* path = getenv("KVSEEK_GIL_PROBE");
    const int file = path ? open(path, O_CREAT | O_WRONLY | O_APPEND, 0600) : -1;
    if (file < 0) return;
    dprintf(file, "%d %s\n", static_cast<int>(getpid()), word);
    close(file);
}

}  // namespace

// CPython's own function, in front of which this one stands: called when an object's reference count falls to zero.
extern "C" void _Py_Dealloc(void* object) {
    static const auto deallocate = python<void (*)(void*)>("_Py_Dealloc", RTLD_NEXT);
    static const auto has_lock = python<int (*)()>("PyGILState_Check", RTLD_DEFAULT);
    static const bool watched = (report("watched"), true);
    static std::atomic<int> lines{0};
    if (watched && !has_lock() && lines++ < LINES) report("unsafe");
    deallocate(object);
}
