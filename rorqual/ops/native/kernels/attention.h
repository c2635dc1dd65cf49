// Causal attention of a flat batch over the paged cache, without gathering it.
//
// A task is a KV head and up to TASK_ROWS of its query rows ("lanes"): the query heads of one token, then of the next
// token of the same sequence, and so on. Keys are cut in spans of SPAN at fixed positions; every lane sums alone, each
// span for itself, and spans are added up in their order. So the answer for a query depends neither on the batch around
// it, nor on how its prompt was cut, nor on which threads had which spans: where there are few tasks and long contexts,
// threads share the spans of a task.

#define SPAN 512
#define HIDDEN (-1e30f)
#define MAX_HEAD_DIM 256

typedef struct {
    const bf16 *query;
    int64_t query_token_stride, query_head_stride;
    const bf16 *key_cache, *value_cache;
    const int32_t *cu_seqlens, *context_lens, *block_tables;
    int64_t max_blocks, num_seqs, heads, kv_heads, head_dim, block_size;
    float scale;
    int64_t window;  // 0: none
    bf16 *out;       // [tokens, heads, head_dim]
    // Worked out here
    int64_t group, num_tasks;
    const int64_t *first_task;  // [num_seqs + 1], of one KV head
    phase_t *attending, *adding;
    // Where threads share spans: of each task, its first part of all; parts are spans. Otherwise NULL.
    const int64_t *first_part;  // [num_tasks + 1]
    uint8_t *parts;
    size_t part_bytes;
} attention_t;

typedef struct {
    int64_t seq, head;
    int64_t lanes, first;     // query rows, counted from the sequence's first token in the batch
    int64_t token, position;  // of that first token: its place in the batch and in its sequence
    int64_t begin, end;       // keys that any lane sees
} task_t;

// Where a lane's query begins, counted in [tokens, heads] with these strides.
INLINE int64_t lane_offset(const attention_t *a, const task_t *t, int64_t lane, int64_t token_stride,
                           int64_t head_stride) {
    const int64_t row = t->first + lane;
    return (t->token + row / a->group) * token_stride + (t->head * a->group + row % a->group) * head_stride;
}

INLINE const bf16 *page_of(const attention_t *a, const bf16 *cache, const task_t *t, int64_t key) {
    const int64_t block = a->block_tables[t->seq * a->max_blocks + key / a->block_size];
    return cache + (block * a->kv_heads + t->head) * a->block_size * a->head_dim;
}

#ifdef USE_AMX
#include "attention_tiles.h"
#else
#include "attention_rows.h"
#endif

INLINE task_t find_task(const attention_t *a, int64_t number) {
    task_t t;
    t.head = number % a->kv_heads;
    number /= a->kv_heads;
    int64_t low = 0, high = a->num_seqs;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (a->first_task[middle] <= number) low = middle;
        else high = middle;
    }
    t.seq = low;
    const int64_t length = a->cu_seqlens[low + 1] - a->cu_seqlens[low];
    t.first = TASK_ROWS * (number - a->first_task[low]);
    t.lanes = min64(TASK_ROWS, length * a->group - t.first);
    t.token = a->cu_seqlens[low];
    t.position = a->context_lens[low] - length;
    const int64_t lowest = t.position + t.first / a->group;
    t.begin = a->window ? max64(0, lowest - a->window + 1) : 0;
    t.end = t.position + (t.first + t.lanes - 1) / a->group + 1;
    return t;
}

// One task, span by span.
static void attend_alone(const attention_t *a, const task_t *t, const attention_room_t *room) {
    const int64_t first = t->begin / SPAN * SPAN;
    attend(a, t, first, room, room->sum);
    for (int64_t span = first + SPAN; span < t->end; span += SPAN) {
        attend(a, t, span, room, room->part);
        add_part(a, t, room->sum, room->part);
    }
    finish(a, t, room->sum);
}

INLINE part_t *part_of(const attention_t *a, int64_t number) {
    return (part_t *)(a->parts + (size_t)number * a->part_bytes);
}

// Span by span, then the sums of each task.
static void share_parts(const attention_t *a, const attention_room_t *room) {
    const int64_t num_parts = a->first_part[a->num_tasks];
    for (int64_t number; (number = phase_take(a->attending)) < num_parts;) {
        int64_t task = 0;
        while (a->first_part[task + 1] <= number) task++;
        const task_t t = find_task(a, task);
        attend(a, &t, (t.begin / SPAN + number - a->first_part[task]) * SPAN, room, part_of(a, number));
        phase_finish(a->attending);
    }
    phase_wait(a->attending, num_parts);
    for (int64_t task; (task = phase_take(a->adding)) < a->num_tasks;) {
        const task_t t = find_task(a, task);
        part_t *sum = part_of(a, a->first_part[task]);
        for (int64_t i = a->first_part[task] + 1; i < a->first_part[task + 1]; i++) add_part(a, &t, sum, part_of(a, i));
        finish(a, &t, sum);
        phase_finish(a->adding);
    }
}

static void attention_region(const void *arg) {
    const attention_t *a = arg;
    const attention_room_t room = attention_room(a);
#ifdef USE_AMX
    attention_tiles();
#endif
    if (a->parts) share_parts(a, &room);
    else
        // Later tasks of a chunk see more keys: hand those out first, so that threads end together.
        for (int64_t taken; (taken = phase_take(a->adding)) < a->num_tasks;) {
            const task_t task = find_task(a, a->num_tasks - 1 - taken);
            attend_alone(a, &task, &room);
            phase_finish(a->adding);
        }
#ifdef USE_AMX
    _tile_release();
#endif
}

// What a call needs beside its arguments, to be freed by `end_attention`.
typedef struct {
    int64_t *first_task, *first_part;
    uint8_t *parts;
    phase_t attending, adding;
} attention_plan_t;

// Fills in what is worked out: returns 0, or 1 where there is no memory. `plan` stays until `end_attention`.
static int begin_attention(attention_t *a, attention_plan_t *plan, int threads) {
    *plan = (attention_plan_t){0};
    a->group = a->heads / a->kv_heads;
    plan->first_task = malloc(sizeof(int64_t) * (size_t)(a->num_seqs + 1));
    if (plan->first_task == NULL) return 1;
    plan->first_task[0] = 0;
    for (int64_t i = 0; i < a->num_seqs; i++) {
        const int64_t length = a->cu_seqlens[i + 1] - a->cu_seqlens[i];
        plan->first_task[i + 1] = plan->first_task[i] + (length * a->group + TASK_ROWS - 1) / TASK_ROWS;
    }
    a->first_task = plan->first_task;
    a->num_tasks = plan->first_task[a->num_seqs] * a->kv_heads;
    a->attending = &plan->attending;
    a->adding = &plan->adding;
    // Several times as many tasks as threads keep all of them busy until the end, and need no room for parts.
    if (threads == 1 || a->num_tasks >= 8 * threads) return 0;
    plan->first_part = malloc(sizeof(int64_t) * (size_t)(a->num_tasks + 1));
    if (plan->first_part == NULL) return 1;
    plan->first_part[0] = 0;
    int64_t most_rows = 0;
    for (int64_t i = 0; i < a->num_tasks; i++) {
        const task_t t = find_task(a, i);
        most_rows = max64(most_rows, t.lanes);
        plan->first_part[i + 1] = plan->first_part[i] + (t.end + SPAN - 1) / SPAN - t.begin / SPAN;
    }
    const int64_t num_parts = plan->first_part[a->num_tasks];
    if (num_parts == a->num_tasks) return 0;
    a->part_bytes = part_bytes(a, most_rows);
    plan->parts = aligned_alloc(64, a->part_bytes * (size_t)num_parts);
    if (plan->parts == NULL) return 1;
    a->first_part = plan->first_part;
    a->parts = plan->parts;
    return 0;
}

static void end_attention(attention_plan_t *plan) {
    free(plan->first_task);
    free(plan->first_part);
    free(plan->parts);
}

// Returns 0, or 1 where there is no memory for the list of tasks.
int ISA(attention)(const bf16 *query, int64_t query_token_stride, int64_t query_head_stride, const bf16 *key_cache,
                   const bf16 *value_cache, const int32_t *cu_seqlens, const int32_t *context_lens,
                   const int32_t *block_tables, int64_t max_blocks, int64_t num_seqs, int64_t heads, int64_t kv_heads,
                   int64_t head_dim, int64_t block_size, float scale, int64_t window, bf16 *out, int threads) {
    attention_t a = {
        .query = query,
        .query_token_stride = query_token_stride,
        .query_head_stride = query_head_stride,
        .key_cache = key_cache,
        .value_cache = value_cache,
        .cu_seqlens = cu_seqlens,
        .context_lens = context_lens,
        .block_tables = block_tables,
        .max_blocks = max_blocks,
        .num_seqs = num_seqs,
        .heads = heads,
        .kv_heads = kv_heads,
        .head_dim = head_dim,
        .block_size = block_size,
        .scale = scale,
        .window = window,
        .out = out,
    };
    attention_plan_t plan;
    const int failed = begin_attention(&a, &plan, threads);
    if (!failed) rorqual_region(attention_region, &a, threads);
    end_attention(&plan);
    return failed;
}
