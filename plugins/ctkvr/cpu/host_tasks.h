// How a step on host cores is cut: tasks, units, and where their intermediate results lie.
//
// A task is a request and a KV head. Its recalled keys are scored in units; whoever scores the last one ranks the keys
// and opens the second part, whose units attend to the selected rows. Nobody waits for another task. How a task is cut
// depends on its own number of keys alone, so a result depends neither on the batch nor on threads.
#pragma once

#include "host_dot.h"
#include "host_step.h"
#include "kernels/cpu/candidates.h"
#include "kernels/cpu/extent_rows.h"
#include "kernels/cpu/phases.h"

namespace kvseek {
namespace {

constexpr int SCORE_UNIT = 256;   // keys
constexpr int ATTEND_UNIT = 128;  // rows
constexpr int LINE = 64;

struct Task {
    int64_t request, head;
    int count;   // recalled keys
    int chosen;  // rows to attend to
    int64_t stride;
    int first_unit, score_units, attend_units;
    int extra_units;  // 1: the list for the centroid update, taken before the others
    int unscored, unattended;
    int ranked;  // set once the second part is open
    Counter taken;
    const int32_t* places;
    const int32_t* extents;
    float* scores;         // [group, stride], scaled
    float* statistics;     // [score_units, 2, group]: largest score, sum of e^(score - largest)
    float* values;         // [stride], by which keys are ranked
    CandidateLists lists;  // [stride] of keys that may be among the best
    int32_t* rows;         // [stride] chosen keys, as indices of `places`
    int32_t* best_rows;    // [stride] the same for the centroid update
    float* partials;       // [attend_units, group, dim + 2]
};

struct Job {
    const HostStep& a;
    int group;
    Task* tasks;
    int task_count, unit_count;
    int* unit_tasks;  // [unit_count]
    Counter taken;
    int error;

    explicit Job(const HostStep& step)
        : a(step),
          group(step.heads / step.kv_heads),
          tasks(nullptr),
          task_count(0),
          unit_count(0),
          unit_tasks(nullptr),
          taken(),
          error(NO_ERROR) {}

    void fail(HostError reason) { __atomic_store_n(&error, static_cast<int>(reason), __ATOMIC_RELAXED); }
};

// Memory of the calling thread, kept between calls; unlike Scratch it says so if there is none.
class Memory {
  public:
    char* reserve(size_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = (bytes + bytes / 4 + LINE - 1) / LINE * LINE;
            data_ = static_cast<char*>(std::aligned_alloc(LINE, size_));
            if (data_ == nullptr) size_ = 0;
        }
        return data_;
    }
    ~Memory() { std::free(data_); }

  private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

void lay_out(const Job& job, Task& task, Arena& arena) {
    task.scores = arena.take<float>(job.group * task.stride);
    task.statistics = arena.take<float>(int64_t{2} * task.score_units * job.group);
    task.values = arena.take<float>(task.stride);
    task.lists = {arena.take<int32_t>(task.stride), arena.take<int32_t>(task.stride)};
    task.rows = arena.take<int32_t>(task.stride);
    task.best_rows = arena.take<int32_t>(task.extra_units * task.stride);
    task.partials = arena.take<float>(int64_t{task.attend_units} * job.group * (job.a.head_dim + 2));
}

Task describe(const Job& job, int64_t request, int64_t head) {
    const HostStep& a = job.a;
    const int64_t pair = request * a.kv_heads + head;
    Task task = {};
    task.request = request;
    task.head = head;
    task.count = a.recalled_count[pair];
    task.chosen = task.count < a.top_k ? task.count : a.top_k;
    task.stride = (task.count + LANES + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK;  // a vector may begin at any key
    task.first_unit = job.unit_count;
    task.score_units = (task.count + SCORE_UNIT - 1) / SCORE_UNIT;
    task.attend_units = a.out == nullptr ? 0 : (task.chosen + ATTEND_UNIT - 1) / ATTEND_UNIT;
    task.extra_units = a.best != nullptr;
    task.unscored = task.score_units;
    task.unattended = task.attend_units;
    task.places = a.recalled + pair * a.capacity;
    task.extents = a.table + int64_t{a.slots[request]} * a.max_extents;
    return task;
}

// Describe the tasks that have keys; false without memory for them.
bool divide(Job& job, Memory& task_memory, Memory& work_memory) {
    const HostStep& a = job.a;
    const int64_t pairs = int64_t{a.batch} * a.kv_heads;
    // A line more than needed, here and below: no memory at all would read as a lack of it.
    job.tasks = reinterpret_cast<Task*>(task_memory.reserve(sizeof(Task) * pairs + LINE));
    if (job.tasks == nullptr) return false;
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (a.recalled_count[pair] == 0) continue;
        Task& task = job.tasks[job.task_count++];
        task = describe(job, pair / a.kv_heads, pair % a.kv_heads);
        job.unit_count += task.score_units;
    }
    Arena measured(nullptr);
    measured.take<int>(job.unit_count);
    for (int i = 0; i < job.task_count; i++) lay_out(job, job.tasks[i], measured);
    char* memory = work_memory.reserve(measured.used + LINE);
    if (memory == nullptr) return false;
    Arena arena(memory);
    job.unit_tasks = arena.take<int>(job.unit_count);
    for (int i = 0; i < job.task_count; i++) {
        lay_out(job, job.tasks[i], arena);
        for (int unit = 0; unit < job.tasks[i].score_units; unit++) job.unit_tasks[job.tasks[i].first_unit + unit] = i;
    }
    return true;
}

}  // namespace
}  // namespace kvseek
