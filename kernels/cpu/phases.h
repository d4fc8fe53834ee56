// Work in phases over several tasks, such as the selection of each (request, KV head): the parts of a phase may run on
// any thread, and a task's next phase begins when all parts of the last one are done.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace kvseek {
namespace {

// How far a task of PHASES phases is; all zero at first.
template <int PHASES>
struct Progress {
    int phase;
    int done[PHASES];
    Counter taken[PHASES];
};

// Do parts of the task's phases for as long as some are free; false if there was none.
template <int PHASES, class Parts, class Run>
bool advance(Progress<PHASES>& progress, const Parts& parts_of, const Run& run_part) {
    bool advanced = false;
    for (int phase = __atomic_load_n(&progress.phase, __ATOMIC_ACQUIRE); phase < PHASES;) {
        const int64_t parts = parts_of(phase), part = progress.taken[phase].take();
        if (part >= parts) break;
        run_part(phase, part);
        advanced = true;
        if (__atomic_add_fetch(&progress.done[phase], 1, __ATOMIC_ACQ_REL) == parts)
            __atomic_store_n(&progress.phase, phase + 1, __ATOMIC_RELEASE);
        phase = __atomic_load_n(&progress.phase, __ATOMIC_ACQUIRE);
    }
    return advanced;
}

// Run all phases of tasks [count], which have a `progress`: parts_of(task, phase) >= 1 says how many parts a phase has,
// run_part(task, phase, part) runs one. Threads go from task to task and wait for each other only where nothing is left
// to start: a barrier after each phase would cost a time slice whenever some other process has one of the cores.
template <int PHASES, class Task, class Parts, class Run>
void run_phases(Task* tasks, int64_t count, int threads, const Parts& parts_of, const Run& run_part) {
    parallel(threads, [&] {
        Patience patience;
        for (int64_t unfinished = 1; unfinished > 0;) {
            unfinished = 0;
            bool advanced = false;
            for (int64_t i = 0; i < count; i++) {
                Task& task = tasks[i];
                advanced |= advance<PHASES>(
                    task.progress, [&](int phase) { return parts_of(task, phase); },
                    [&](int phase, int64_t part) { run_part(task, phase, part); });
                unfinished += __atomic_load_n(&task.progress.phase, __ATOMIC_ACQUIRE) < PHASES;
            }
            if (!advanced && unfinished > 0) patience.wait();
        }
    });
}

// Hands out memory in cache lines; with no memory behind it, only measures.
class Arena {
  public:
    explicit Arena(char* memory) : memory_(memory) {}
    template <class T>
    T* take(int64_t count) {
        char* start = memory_ == nullptr ? nullptr : memory_ + used;
        used += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return reinterpret_cast<T*>(start);
    }
    int64_t used = 0;

  private:
    char* memory_;
};

// A phase: parts(task) >= 1 is how many parts it may be divided into, run(task, part) does one of them.
template <class Parts, class Run>
struct Phase {
    Parts parts;
    Run run;
};

template <class Parts, class Run>
Phase<Parts, Run> divided(Parts parts, Run run) {
    return {parts, run};
}

// A phase that run(task) does as a whole.
template <class Run>
auto whole(Run run) {
    return divided([](const auto&) { return INT64_C(1); }, [run](auto& task, int64_t) { run(task); });
}

// Run phases of tasks [count], one after another of each task, on up to `threads` threads, no more than the phase with
// the number `widest` has parts. lay_out(task, arena) takes a task's intermediate results from an arena, at first only
// to measure.
template <class Task, class LayOut, class... Phases>
void run_tasks(Task* tasks, int64_t count, int64_t threads, int widest, const LayOut& lay_out,
               const Phases&... phases) {
    static thread_local Scratch memory;
    const auto parts_of = [&](const Task& task, int phase) {
        int64_t parts = 1;
        int number = 0;
        ((number++ == phase ? void(parts = phases.parts(task)) : void()), ...);
        return parts;
    };
    const auto run_part = [&](Task& task, int phase, int64_t part) {
        int number = 0;
        ((number++ == phase ? void(phases.run(task, part)) : void()), ...);
    };
    Arena measured(nullptr);
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) lay_out(tasks[i], measured), most += parts_of(tasks[i], widest);
    Arena arena(static_cast<char*>(memory.reserve(measured.used)));
    for (int64_t i = 0; i < count; i++) lay_out(tasks[i], arena);
    run_phases<sizeof...(Phases)>(tasks, count, static_cast<int>(threads < most ? threads : most), parts_of, run_part);
}

}  // namespace
}  // namespace kvseek
