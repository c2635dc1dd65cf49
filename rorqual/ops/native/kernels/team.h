// Work shared between threads: a pool of our own, whose threads nobody waits for unless they hold a part of the work.
//
// On a machine that does other things too, a thread may be off its core for milliseconds, which is longer than a whole
// step of a small model. So nothing is assigned to a thread beforehand: whoever is there takes the next part, and only
// parts that were taken are waited for.
#pragma once

#include <stddef.h>
#include <stdint.h>

// Parts 0 .. count - 1 of some work, each for whoever takes it. Starts as zeros.
typedef struct {
    int32_t next, done;
} phase_t;

// The next part, or count and more when all are taken.
static inline int64_t phase_take(phase_t *phase) { return __atomic_fetch_add(&phase->next, 1, __ATOMIC_RELAXED); }

// To be called after each part that was taken.
static inline void phase_finish(phase_t *phase) { __atomic_fetch_add(&phase->done, 1, __ATOMIC_RELEASE); }

// Returns when all parts are done, and what they wrote can be seen.
void phase_wait(const phase_t *phase, int64_t count);

// fn(arg) on the calling thread, and meanwhile on up to threads - 1 others: as many as come before the first returns.
// Returns when all of them have. Inside another region, or beside one of another caller, there are no others.
void rorqual_region(void (*fn)(const void *arg), const void *arg, int threads);

// fn(arg, part, parts) once for each part, on up to `threads` threads.
void rorqual_parallel(void (*fn)(const void *arg, int part, int parts), const void *arg, int threads);

// How many parts there should be for so many threads: one that is slow or late then costs the others little.
static inline int parts_for(int threads) { return threads <= 1 ? 1 : 4 * threads; }

// Memory of the calling thread, aligned to 64 bytes, that stays until the thread asks for the same slot again.
enum { SCRATCH_INPUT, SCRATCH_WEIGHT, SCRATCH_ROWS, SCRATCH_ROOM, SCRATCH_ATTENTION, SCRATCH_SLOTS };
// NULL if there is none.
void *thread_memory(int slot, size_t bytes);

// The same where nobody could say so: ends the process if there is none.
void *thread_scratch(int slot, size_t bytes);
