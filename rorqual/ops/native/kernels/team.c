#include "team.h"

#include <stddef.h>

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
