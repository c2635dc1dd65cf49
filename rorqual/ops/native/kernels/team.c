#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static inline void pause_once(void) {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Threads that run are done within microseconds. One that does not run needs the core of one that spins.
#define SPINS 2000
// A worker without work looks for some so often, about a millisecond, before it sleeps: longer than it takes from one
// kernel to the next, and from one step to the next.
#define IDLE_SPINS 20000
#define MOST_WORKERS 1024

void phase_wait(const phase_t *phase, int64_t count) {
    for (int spins = 0; __atomic_load_n(&phase->done, __ATOMIC_ACQUIRE) < count; spins++) {
        if (spins >= SPINS) sched_yield();
        else pause_once();
    }
}

// --- the pool
//
// A job is announced by a new number in `gate`, beside the count of workers inside; a worker enters by raising the
// count while the gate is open and the number is the one that it saw. So one that comes late finds the gate closed, or
// another job, and never touches what belonged to the last one.

#define CLOSED (1ull << 31)
#define INSIDE (CLOSED - 1)

static uint64_t gate = CLOSED;
static void (*job_fn)(const void *);
static const void *job_arg;
static uint64_t job_limit;
static int busy;  // a caller has the pool
static int num_workers, num_sleeping;
static pthread_mutex_t sleep_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleep_ends = PTHREAD_COND_INITIALIZER;

static uint64_t number_of(uint64_t g) { return g >> 32; }

static uint64_t wait_for_job(uint64_t seen) {
    uint64_t g;
    for (int spins = 0; spins < IDLE_SPINS; spins++) {
        g = __atomic_load_n(&gate, __ATOMIC_ACQUIRE);
        if (number_of(g) != seen) return g;
        pause_once();
    }
    pthread_mutex_lock(&sleep_mutex);
    __atomic_fetch_add(&num_sleeping, 1, __ATOMIC_SEQ_CST);
    while (number_of(g = __atomic_load_n(&gate, __ATOMIC_SEQ_CST)) == seen)
        pthread_cond_wait(&sleep_ends, &sleep_mutex);
    __atomic_fetch_sub(&num_sleeping, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&sleep_mutex);
    return g;
}

static void *work(void *first) {
    uint64_t seen = (uint64_t)(uintptr_t)first;
    for (;;) {
        uint64_t g = wait_for_job(seen);
        seen = number_of(g);
        while (number_of(g) == seen && !(g & CLOSED) && (g & INSIDE) < __atomic_load_n(&job_limit, __ATOMIC_RELAXED)) {
            void (*fn)(const void *) = __atomic_load_n(&job_fn, __ATOMIC_RELAXED);
            const void *arg = __atomic_load_n(&job_arg, __ATOMIC_RELAXED);
            if (__atomic_compare_exchange_n(&gate, &g, g + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
                fn(arg);
                __atomic_fetch_sub(&gate, 1, __ATOMIC_RELEASE);
                break;
            }
        }
    }
    return NULL;
}

// In a child process there are no workers.
static void forget_workers(void) {
    gate = CLOSED;
    busy = num_workers = num_sleeping = 0;
    pthread_mutex_init(&sleep_mutex, NULL);
    pthread_cond_init(&sleep_ends, NULL);
}

static void hire(int wanted) {
    static int prepared = 0;
    if (!prepared) {
        prepared = 1;
        pthread_atfork(NULL, NULL, forget_workers);
    }
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the program
    while (num_workers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)(uintptr_t)number_of(gate))) break;  // do with fewer
        pthread_detach(thread);
        num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void rorqual_region(void (*fn)(const void *), const void *arg, int threads) {
    int free_pool = 0;
    if (threads <= 1 || !__atomic_compare_exchange_n(&busy, &free_pool, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        fn(arg);
        return;
    }
    const int wanted = threads - 1 < MOST_WORKERS ? threads - 1 : MOST_WORKERS;
    if (num_workers < wanted) hire(wanted);
    __atomic_store_n(&job_fn, fn, __ATOMIC_RELAXED);
    __atomic_store_n(&job_arg, arg, __ATOMIC_RELAXED);
    __atomic_store_n(&job_limit, (uint64_t)wanted, __ATOMIC_RELAXED);
    __atomic_store_n(&gate, (number_of(gate) + 1) << 32, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&num_sleeping, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&sleep_mutex);
        pthread_cond_broadcast(&sleep_ends);
        pthread_mutex_unlock(&sleep_mutex);
    }
    fn(arg);
    __atomic_fetch_or(&gate, CLOSED, __ATOMIC_ACQ_REL);
    for (int spins = 0; __atomic_load_n(&gate, __ATOMIC_ACQUIRE) & INSIDE; spins++) {
        if (spins >= SPINS) sched_yield();
        else pause_once();
    }
    __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
}

typedef struct {
    void (*fn)(const void *, int, int);
    const void *arg;
    int parts;
    phase_t *phase;
} shared_t;

static void take_parts(const void *arg) {
    const shared_t *shared = arg;
    for (int64_t part; (part = phase_take(shared->phase)) < shared->parts;)
        shared->fn(shared->arg, (int)part, shared->parts);
}

void rorqual_parallel(void (*fn)(const void *, int, int), const void *arg, int threads) {
    if (threads <= 1) {
        fn(arg, 0, 1);
        return;
    }
    phase_t phase = {0};
    const shared_t shared = {fn, arg, parts_for(threads), &phase};
    rorqual_region(take_parts, &shared, threads);
}

void *thread_memory(int slot, size_t bytes) {
    static __thread void *memory[SCRATCH_SLOTS];
    static __thread size_t sizes[SCRATCH_SLOTS];
    if (bytes > sizes[slot]) {
        free(memory[slot]);
        const size_t size = (bytes + 4095) / 4096 * 4096;
        memory[slot] = aligned_alloc(64, size);
        sizes[slot] = memory[slot] ? size : 0;
    }
    return memory[slot];
}

void *thread_scratch(int slot, size_t bytes) {
    void *memory = thread_memory(slot, bytes);
    if (memory == NULL) abort();
    return memory;
}
