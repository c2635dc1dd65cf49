// Work shared between threads. The threads are PyTorch's own OpenMP team, reached through pointers that Python hands
// over after it has imported torch: one pool in the process, whatever OpenMP library PyTorch was built with.
#pragma once

#include <stddef.h>
#include <stdint.h>

// fn(arg, thread, num_threads) on up to `threads` threads; on the calling thread alone where there is no team.
void rorqual_parallel(void (*fn)(const void *arg, int thread, int num_threads), const void *arg, int threads);

// Where the threads of one parallel region meet, as often as they like. Starts as zeros.
typedef struct {
    int32_t waiting, round;
} barrier_t;

// Returns once all `num_threads` threads have come; what each wrote before is seen by all of them afterwards.
void team_barrier(barrier_t *barrier, int num_threads);

// Memory of the calling thread, aligned to 64 bytes, that stays until the thread asks for the same slot again.
enum { SCRATCH_INPUT, SCRATCH_WEIGHT, SCRATCH_OUTPUT, SCRATCH_SLOTS };
void *thread_scratch(int slot, size_t bytes);
