#include "team.h"

#include <sched.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// GOMP_parallel(fn, data, num_threads, flags), omp_get_thread_num and omp_get_num_threads.
static void (*team_parallel)(void (*)(void *), void *, unsigned, unsigned) = NULL;
static int (*team_thread)(void) = NULL;
static int (*team_size)(void) = NULL;

void rorqual_set_team(void *parallel, void *thread, void *size) {
    team_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    team_thread = (int (*)(void))thread;
    team_size = (int (*)(void))size;
}

typedef struct {
    void (*fn)(const void *, int, int);
    const void *arg;
} job_t;

static void run(void *data) {
    const job_t *job = data;
    job->fn(job->arg, team_thread(), team_size());
}

void rorqual_parallel(void (*fn)(const void *, int, int), const void *arg, int threads) {
    if (threads <= 1 || team_parallel == NULL) {
        fn(arg, 0, 1);
        return;
    }
    job_t job = {fn, arg};
    team_parallel(run, &job, (unsigned)threads, 0);
}

// Threads that run arrive within microseconds of each other. One that does not run needs the core of one that spins.
#define SPINS 4000

void team_barrier(barrier_t *barrier, int num_threads) {
    if (num_threads == 1) return;
    const int32_t round = __atomic_load_n(&barrier->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&barrier->waiting, 1, __ATOMIC_ACQ_REL) == num_threads) {
        __atomic_store_n(&barrier->waiting, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&barrier->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&barrier->round, __ATOMIC_ACQUIRE) == round; spins++) {
        if (spins >= SPINS) sched_yield();
#if defined(__x86_64__)
        else _mm_pause();
#endif
    }
}

void *thread_scratch(int slot, size_t bytes) {
    static __thread void *memory[SCRATCH_SLOTS];
    static __thread size_t sizes[SCRATCH_SLOTS];
    if (bytes > sizes[slot]) {
        free(memory[slot]);
        sizes[slot] = (bytes + 4095) / 4096 * 4096;
        memory[slot] = aligned_alloc(64, sizes[slot]);
        if (memory[slot] == NULL) abort();
    }
    return memory[slot];
}
