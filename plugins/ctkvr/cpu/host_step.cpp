// CTkvr on host cores: rerank of the recalled keys of a batch, exact or by codes, and attention over the best rows
// (CTkvr paper, section 3.2), one call a layer. The call has the signature of a CUDA host function, so that a graph can
// hold it.
#include "host_attend.h"
#include "host_codes.h"
#include "host_pool.h"
#include "host_rank.h"
#include "kernels/cpu/kernel.h"

namespace kvseek {
namespace {

// Count a unit of a task as scored; whoever scored the last one ranks the keys.
void count_scored(const Job& job, Task& task) {
    if (__atomic_sub_fetch(&task.unscored, 1, __ATOMIC_ACQ_REL) != 0) return;
    rank(job, task);
    __atomic_store_n(&task.ranked, 1, __ATOMIC_RELEASE);
}

// The units of a step with codes.
template <class T>
void take_coded_units(Job& job) {
    for (int unit = job.taken.take(); unit < job.unit_count; unit = job.taken.take()) {
        Task& task = job.tasks[job.unit_tasks[unit]];
        estimate_unit<T>(job, task, unit - task.first_unit);
        count_scored(job, task);
    }
}

// A thread takes its next unit before it scores one, to ask for that one's keys in time.
template <class T>
void take_score_units(Job& job) {
    UnitKeys<T> found[2];
    auto find = [&job](UnitKeys<T>& keys, int unit) {
        if (unit >= job.unit_count) return false;
        const Task& task = job.tasks[job.unit_tasks[unit]];
        keys.find(job, task, unit - task.first_unit);
        return true;
    };
    int unit = job.taken.take();
    if (find(found[0], unit)) KeyRequests<T>(found[0], job.a.head_dim, 0).all();
    for (int turn = 0; unit < job.unit_count; turn ^= 1) {
        const int next = job.taken.take();
        const UnitKeys<T>& following = found[find(found[turn ^ 1], next) ? turn ^ 1 : turn];
        Task& task = job.tasks[job.unit_tasks[unit]];
        score_unit<T>(job, task, unit - task.first_unit, found[turn], following);
        count_scored(job, task);
        unit = next;
    }
}

// Units of a ranked task; the list for the centroid update is the first, for it takes longest.
template <class T>
void take_attend_units(Job& job, Task& task) {
    const int units = task.extra_units + task.attend_units;
    for (int unit = task.taken.take(); unit < units; unit = task.taken.take()) {
        if (unit < task.extra_units) {
            list_best(job, task);
            continue;
        }
        attend_unit<T>(job, task, unit - task.extra_units);
        if (__atomic_sub_fetch(&task.unattended, 1, __ATOMIC_ACQ_REL) == 0) merge<T>(job, task);
    }
}

// What every thread does. It waits only for tasks that other threads are scoring or ranking at that time.
template <class T>
void work(void* data) {
    Job& job = *static_cast<Job*>(data);
    if (job.a.high != nullptr)
        take_coded_units<T>(job);
    else
        take_score_units<T>(job);
    Patience patience;
    for (bool waiting = true; waiting;) {
        waiting = false;
        for (int i = 0; i < job.task_count; i++) {
            if (__atomic_load_n(&job.tasks[i].ranked, __ATOMIC_ACQUIRE))
                take_attend_units<T>(job, job.tasks[i]);
            else
                waiting = true;
        }
        if (waiting) patience.wait();
    }
}

// Results of requests [first, end) as if nothing had been recalled.
void clear(const HostStep& a, int64_t first, int64_t end) {
    const int64_t pairs = (end - first) * a.kv_heads, pair = first * a.kv_heads;
    if (a.out != nullptr) {
        std::memset(a.out + first * a.heads * a.head_dim, 0, sizeof(float) * (end - first) * a.heads * a.head_dim);
        for (int64_t head = first * a.heads; head < end * a.heads; head++) a.lse[head] = -INFINITE;
    }
    for (int64_t i = pair * a.top_k; a.selected != nullptr && i < (pair + pairs) * a.top_k; i++) a.selected[i] = -1;
    for (int64_t i = pair * a.rho; a.best != nullptr && i < (pair + pairs) * a.rho; i++) a.best[i] = -1;
}

void run_step(const HostStep& a) {
    static thread_local Memory task_memory, work_memory;
    Job job(a);
    for (int64_t request = 0; request < a.batch; request++) {
        bool all = true;
        for (int64_t head = 0; head < a.kv_heads; head++) all &= a.recalled_count[request * a.kv_heads + head] > 0;
        if (!all) clear(a, request, request + 1);
    }
    if (divide(job, task_memory, work_memory)) {
        void (*const body)(void*) = a.dtype == BFLOAT16  ? work<Bfloat16>
                                    : a.dtype == FLOAT16 ? work<Half>
                                                         : work<float>;
        if (job.task_count == 0) return;
        if (a.pool != nullptr)
            kvseek_ctkvr_pool_run(a.pool, body, &job);
        else
            parallel(a.threads, [&] { body(&job); });
    } else {
        job.fail(NO_MEMORY);
    }
    if (job.error == NO_ERROR) return;
    clear(a, 0, a.batch);
    *a.error = job.error;
}

// Codes rank keys for a selection alone: as weights of an attention, estimates would not do.
bool codes_hold(const HostStep& a) {
    if (a.high == nullptr) return true;
    const bool power = a.padded_dim >= FIELDS && (a.padded_dim & (a.padded_dim - 1)) == 0;
    return power && a.padded_dim >= a.head_dim && a.padded_dim <= MAX_PADDED_DIM && a.out == nullptr;
}

bool shape_holds(const HostStep& a) {
    const bool sizes = a.batch >= 0 && a.kv_heads >= 1 && a.heads >= 1 && a.capacity >= 0 && a.top_k >= 1 && a.rho >= 0;
    if (!sizes || a.heads % a.kv_heads != 0 || a.heads / a.kv_heads > MAX_HOST_GROUP) return false;
    if (a.head_dim < HOST_DIM_STEP || a.head_dim > MAX_HOST_DIM || a.head_dim % HOST_DIM_STEP != 0) return false;
    if ((a.out == nullptr) != (a.lse == nullptr)) return false;
    if ((a.best != nullptr && a.rho < 1) || !codes_hold(a)) return false;
    return a.dtype >= FLOAT32 && a.dtype <= FLOAT16 && (a.pool != nullptr || a.threads >= 1);
}

int check(const HostStep& a) {
    if (!shape_holds(a)) return BAD_SHAPE;
    for (int64_t i = 0; i < int64_t{a.batch} * a.kv_heads; i++) {
        const int32_t count = a.recalled_count[i], slot = a.slots[i / a.kv_heads];
        if (count < 0 || count > a.capacity) return BAD_COUNT;
        if (count > 0 && (slot < 0 || slot >= a.table_slots)) return BAD_SLOT;
    }
    return NO_ERROR;
}

// Sizes that are wrong leave the results unwritten; every other error leaves them cleared.
void step(const HostStep& a) {
    const int error = check(a);
    if (error == NO_ERROR) return run_step(a);
    if (error != BAD_SHAPE) clear(a, 0, a.batch);
    *a.error = error;
}

}  // namespace
}  // namespace kvseek

KVSEEK_KERNEL(kvseek_ctkvr_host_step, kvseek::HostStep, kvseek::step)
