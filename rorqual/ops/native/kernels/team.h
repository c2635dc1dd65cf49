// Work shared between threads. The threads are PyTorch's own OpenMP team, reached through pointers that Python hands
// over after it has imported torch: one pool in the process, whatever OpenMP library PyTorch was built with.
#pragma once

// fn(arg, thread, num_threads) on up to `threads` threads; on the calling thread alone where there is no team.
void rorqual_parallel(void (*fn)(const void *arg, int thread, int num_threads), const void *arg, int threads);
