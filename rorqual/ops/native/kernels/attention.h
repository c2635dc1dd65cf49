// Causal attention of a flat batch over the paged cache, without gathering it.
//
// A task is a KV head and up to sixteen of its query rows ("lanes"): the query heads of one token, then of the next
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
    struct part *parts;
} attention_t;

typedef struct {
    int64_t seq, head;
    int64_t lanes, first;     // query rows, counted from the sequence's first token in the batch
    int64_t token, position;  // of that first token: its place in the batch and in its sequence
    int64_t begin, end;       // keys that any lane sees
} task_t;

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
    t.first = 16 * (number - a->first_task[low]);
    t.lanes = min64(16, length * a->group - t.first);
    t.token = a->cu_seqlens[low];
    t.position = a->context_lens[low] - length;
    const int64_t lowest = t.position + t.first / a->group;
    t.begin = a->window ? max64(0, lowest - a->window + 1) : 0;
    t.end = t.position + (t.first + t.lanes - 1) / a->group + 1;
    return t;
}

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

// Positions of the lanes' tokens. A lane without a query repeats the last one's, so that it asks for no mask.
INLINE i32x16 lane_positions(const attention_t *a, const task_t *t) {
    i32x16 positions;
    for (int lane = 0; lane < 16; lane++)
        positions[lane] = (int32_t)(t->position + (t->first + min64(lane, t->lanes - 1)) / a->group);
    return positions;
}

// What a span of keys gives: per lane, the largest score, the sum of the weights 2^(scale (score - largest)) and of the
// values times them.
typedef struct part {
    float top[16], total[16];
    float sums[MAX_HEAD_DIM][16];
} __attribute__((aligned(64))) part_t;

// Hides scores [count][16 lanes] of the keys from `first` on where a lane does not see them; returns the largest.
INLINE f32x16 top_of(float *scores, int64_t first, int64_t count, i32x16 positions, int64_t window) {
    f32x16 best = splat(HIDDEN);
    // Lanes are in the order of their positions. Keys that all of them see need no mask.
    if (first + count - 1 > positions[0] || (window && first <= positions[15] - window)) {
        for (int64_t i = 0; i < count; i++) {
            const i32x16 at = (int32_t)(first + i) - (i32x16){0};
            i32x16 hidden = at > positions;
            if (window) hidden |= at <= positions - (int32_t)window;
            const f32x16 s = blend(hidden, splat(HIDDEN), load(scores + 16 * i));
            store(scores + 16 * i, s);
            best = max16(best, s);
        }
    } else {
        for (int64_t i = 0; i < count; i++) best = max16(best, load(scores + 16 * i));
    }
    return best;
}

// What a key counts: 0 where it is hidden. In a span of which a lane sees no key its top is HIDDEN too and hidden keys
// count 1: add_part's factor for such a part is 0 beside one with a key, which every lane has in the end.
INLINE f32x16 weight_of(const float *score, f32x16 top, float scale) { return exp2_16((load(score) - top) * scale); }

// Pairs of channels of all lanes side by side.
INLINE void gather_query(const attention_t *a, const task_t *t, uint32_t (*query)[16]) {
    __builtin_memset(query, 0, 32 * a->head_dim);
    for (int64_t lane = 0; lane < t->lanes; lane++) {
        const bf16 *q = a->query + lane_offset(a, t, lane, a->query_token_stride, a->query_head_stride);
        for (int64_t i = 0; i < a->head_dim / 2; i++) __builtin_memcpy(&query[i][lane], q + 2 * i, sizeof(uint32_t));
    }
}

#ifdef USE_AMX

INLINE void attention_tiles(void) {
    // 0-3 sums; 4 keys [16][32]; 5 queries [16 pairs][16 lanes]; 6 values [16][16]; 7 weights [8 pairs][16 lanes]
    tile_config_t config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = tile == 7 ? 8 : 16;
        config.bytes[tile] = tile == 6 ? 32 : 64;
    }
    _tile_loadconfig(&config);
}

static void attend(const attention_t *a, const task_t *t, int64_t span, part_t *part) {
    const int64_t dim = a->head_dim, size = a->block_size;
    const float scale = a->scale * LOG2_E;
    uint32_t query[MAX_HEAD_DIM / 2][16] __attribute__((aligned(64)));
    float scores[SPAN][16] __attribute__((aligned(64)));
    uint32_t weights[SPAN / 2][16] __attribute__((aligned(64)));
    bf16 last[MAX_HEAD_DIM][16] __attribute__((aligned(64)));
    gather_query(a, t, query);
    const int64_t context = a->context_lens[t->seq];
    const int64_t begin = max64(span, t->begin / 16 * 16), end = min64(span + SPAN, (t->end + 15) / 16 * 16);
    for (int64_t key = begin; key < end; key += 16) {
        const bf16 *keys = page_of(a, a->key_cache, t, key) + key % size * dim;
        _tile_zero(0);
        for (int64_t i = 0; i < dim; i += 32) {
            _tile_loadd(4, keys + i, 2 * dim);
            _tile_loadd(5, query[i / 2], 64);
            _tile_dpbf16ps(0, 4, 5);
        }
        _tile_stored(0, scores[key - begin], 64);
    }
    const int64_t count = end - begin;
    const f32x16 top = top_of(scores[0], begin, count, lane_positions(a, t), a->window);
    f32x16 total = {0};
    for (int64_t i = 0; i < count; i += 2) {
        const f32x16 even = weight_of(scores[i], top, scale), odd = weight_of(scores[i + 1], top, scale);
        total += even;
        total += odd;
        *(u32x16 *)weights[i / 2] = pair_bf16(even, odd);
    }
    store(part->top, top);
    store(part->total, total);
    for (int64_t i = 0; i < dim; i += 64) {
        const int tiles = (int)min64(4, (dim - i) / 16);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t key = begin; key < end; key += 16) {
            const bf16 *values = page_of(a, a->value_cache, t, key) + i * size + key % size;
            int64_t stride = size;
            if (key + 16 > context) {  // nobody wrote behind the context: whatever is there must not be multiplied
                for (int64_t d = 0; d < 16 * tiles; d++)
                    for (int64_t j = 0; j < 16; j++) last[d][j] = key + j < context ? values[d * size + j] : 0;
                values = last[0];
                stride = 16;
            }
            _tile_loadd(7, weights[(key - begin) / 2], 64);
            _tile_loadd(6, values, 2 * stride);
            _tile_dpbf16ps(0, 6, 7);
            if (tiles > 1) {
                _tile_loadd(6, values + 16 * stride, 2 * stride);
                _tile_dpbf16ps(1, 6, 7);
            }
            if (tiles > 2) {
                _tile_loadd(6, values + 32 * stride, 2 * stride);
                _tile_dpbf16ps(2, 6, 7);
            }
            if (tiles > 3) {
                _tile_loadd(6, values + 48 * stride, 2 * stride);
                _tile_dpbf16ps(3, 6, 7);
            }
        }
        _tile_stored(0, part->sums[i], 64);
        if (tiles > 1) _tile_stored(1, part->sums[i + 16], 64);
        if (tiles > 2) _tile_stored(2, part->sums[i + 32], 64);
        if (tiles > 3) _tile_stored(3, part->sums[i + 48], 64);
    }
}

#else

INLINE void attention_tiles(void) {}

#define AT_ONCE 8  // keys or channels, each with a register
#define VALUES_AT_ONCE 32

// The scores of a few keys: for each channel (or pair of them), the lanes' queries times one number of the key.
INLINE void score_keys(const bf16 *const *keys, const uint32_t (*query)[16], int64_t dim, float (*scores)[16],
                       const int count) {
#ifndef __AVX512BF16__
    float wide[AT_ONCE][MAX_HEAD_DIM] __attribute__((aligned(64)));
    for (int j = 0; j < count; j++)
        for (int64_t i = 0; i < dim; i += 16) store(wide[j] + i, load_bf16(keys[j] + i));
#endif
    for (int lane = 0; lane < 16; lane += LANES) {
        lanes_t sums[AT_ONCE];
#pragma GCC unroll 8
        for (int j = 0; j < count; j++) sums[j] = (lanes_t){0};
        for (int64_t i = 0; i < dim / 2; i++) {
            const bits_t pair = *(const bits_mem *)(query[i] + lane);
#ifdef __AVX512BF16__
#pragma GCC unroll 8
            for (int j = 0; j < count; j++) {
                int32_t key;
                __builtin_memcpy(&key, keys[j] + 2 * i, sizeof key);
                sums[j] = (lanes_t)_mm512_dpbf16_ps((__m512)sums[j], (__m512bh)pair, (__m512bh)_mm512_set1_epi32(key));
            }
#else
            const lanes_t first = (lanes_t)(pair << 16), second = (lanes_t)(pair & 0xffff0000);
#pragma GCC unroll 8
            for (int j = 0; j < count; j++) sums[j] += first * wide[j][2 * i];
#pragma GCC unroll 8
            for (int j = 0; j < count; j++) sums[j] += second * wide[j][2 * i + 1];
#endif
        }
#pragma GCC unroll 8
        for (int j = 0; j < count; j++) *(lanes_mem *)(scores[j] + lane) = sums[j];
    }
}

// Adds weights [count][16] times values [count][dim] to sums [dim][16], in the order of the keys.
INLINE void add_values(const float (*weights)[16], const float (*values)[MAX_HEAD_DIM], int64_t count, int64_t dim,
                       float (*to)[16]) {
    for (int64_t i = 0; i < dim; i += AT_ONCE)
        for (int lane = 0; lane < 16; lane += LANES) {
            lanes_t sums[AT_ONCE];
#pragma GCC unroll 8
            for (int c = 0; c < AT_ONCE; c++) sums[c] = *(const lanes_mem *)(to[i + c] + lane);
            for (int64_t j = 0; j < count; j++) {
                const lanes_t weight = *(const lanes_mem *)(weights[j] + lane);
#pragma GCC unroll 8
                for (int c = 0; c < AT_ONCE; c++) sums[c] += weight * values[j][i + c];
            }
#pragma GCC unroll 8
            for (int c = 0; c < AT_ONCE; c++) *(lanes_mem *)(to[i + c] + lane) = sums[c];
        }
}

// The same sums without tiles.
static void attend(const attention_t *a, const task_t *t, int64_t span, part_t *part) {
    const int64_t dim = a->head_dim;
    const float scale = a->scale * LOG2_E;
    uint32_t query[MAX_HEAD_DIM / 2][16] __attribute__((aligned(64)));
    float scores[SPAN][16] __attribute__((aligned(64)));
    float values[VALUES_AT_ONCE][MAX_HEAD_DIM] __attribute__((aligned(64)));
    gather_query(a, t, query);
    const int64_t begin = max64(span, t->begin), end = min64(span + SPAN, t->end);
    int64_t key = begin;
    for (; key + AT_ONCE <= end; key += AT_ONCE) {
        const bf16 *keys[AT_ONCE];
        for (int j = 0; j < AT_ONCE; j++)
            keys[j] = page_of(a, a->key_cache, t, key + j) + (key + j) % a->block_size * dim;
        score_keys(keys, (const uint32_t (*)[16])query, dim, scores + (key - begin), AT_ONCE);
    }
    for (; key < end; key++) {
        const bf16 *last = page_of(a, a->key_cache, t, key) + key % a->block_size * dim;
        score_keys(&last, (const uint32_t (*)[16])query, dim, scores + (key - begin), 1);
    }
    const f32x16 top = top_of(scores[0], begin, end - begin, lane_positions(a, t), a->window);
    f32x16 total = {0};
    for (key = begin; key < end; key++) {
        const f32x16 weight = weight_of(scores[key - begin], top, scale);
        total += weight;
        store(scores[key - begin], weight);
    }
    store(part->top, top);
    store(part->total, total);
    for (int64_t i = 0; i < dim; i++) store(part->sums[i], (f32x16){0});
    for (key = begin; key < end; key += VALUES_AT_ONCE) {
        const int64_t count = min64(VALUES_AT_ONCE, end - key);
        for (int64_t j = 0; j < count; j++) {
            const bf16 *value = page_of(a, a->value_cache, t, key + j) + (key + j) % a->block_size * dim;
            for (int64_t i = 0; i < dim; i += 16) store(values[j] + i, load_bf16(value + i));
        }
        add_values((const float (*)[16])(scores + (key - begin)), (const float (*)[MAX_HEAD_DIM])values, count, dim,
                   part->sums);
    }
}

#endif

// Adds the next span's part; one function, so that all who call it round alike.
__attribute__((noinline)) static void add_part(const attention_t *a, part_t *into, const part_t *part) {
    const float scale = a->scale * LOG2_E;
    const f32x16 old = load(into->top), top = max16(old, load(part->top));
    const f32x16 kept = exp2_16((old - top) * scale), counted = exp2_16((load(part->top) - top) * scale);
    store(into->top, top);
    store(into->total, load(into->total) * kept + load(part->total) * counted);
    for (int64_t i = 0; i < a->head_dim; i++)
        store(into->sums[i], load(into->sums[i]) * kept + load(part->sums[i]) * counted);
}

static void finish(const attention_t *a, const task_t *t, part_t *part) {
    const int64_t dim = a->head_dim;
    const f32x16 share = 1.0f / load(part->total);
    for (int64_t i = 0; i < dim; i++) store(part->sums[i], load(part->sums[i]) * share);
    for (int64_t lane = 0; lane < t->lanes; lane++) {
        bf16 *out = a->out + lane_offset(a, t, lane, a->heads, 1) * dim;
        for (int64_t i = 0; i < dim; i++) out[i] = narrow(part->sums[i][lane]);
    }
}

// One task, span by span.
static void attend_alone(const attention_t *a, const task_t *t) {
    part_t sum, part;
    const int64_t first = t->begin / SPAN * SPAN;
    attend(a, t, first, &sum);
    for (int64_t span = first + SPAN; span < t->end; span += SPAN) {
        attend(a, t, span, &part);
        add_part(a, &sum, &part);
    }
    finish(a, t, &sum);
}

// Span by span, then the sums of each task.
static void share_parts(const attention_t *a) {
    const int64_t num_parts = a->first_part[a->num_tasks];
    for (int64_t number; (number = phase_take(a->attending)) < num_parts;) {
        int64_t task = 0;
        while (a->first_part[task + 1] <= number) task++;
        const task_t t = find_task(a, task);
        attend(a, &t, (t.begin / SPAN + number - a->first_part[task]) * SPAN, a->parts + number);
        phase_finish(a->attending);
    }
    phase_wait(a->attending, num_parts);
    for (int64_t task; (task = phase_take(a->adding)) < a->num_tasks;) {
        const task_t t = find_task(a, task);
        part_t *sum = a->parts + a->first_part[task];
        for (int64_t i = a->first_part[task] + 1; i < a->first_part[task + 1]; i++) add_part(a, sum, a->parts + i);
        finish(a, &t, sum);
        phase_finish(a->adding);
    }
}

static void attention_region(const void *arg) {
    const attention_t *a = arg;
    attention_tiles();
    if (a->parts) share_parts(a);
    else
        // Later tasks of a chunk see more keys: hand those out first, so that threads end together.
        for (int64_t taken; (taken = phase_take(a->adding)) < a->num_tasks;) {
            const task_t task = find_task(a, a->num_tasks - 1 - taken);
            attend_alone(a, &task);
            phase_finish(a->adding);
        }
#ifdef USE_AMX
    _tile_release();
#endif
}

// What a call needs beside its arguments, to be freed by `end_attention`.
typedef struct {
    int64_t *first_task, *first_part;
    part_t *parts;
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
        plan->first_task[i + 1] = plan->first_task[i] + (length * a->group + 15) / 16;
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
    for (int64_t i = 0; i < a->num_tasks; i++) {
        const task_t t = find_task(a, i);
        plan->first_part[i + 1] = plan->first_part[i] + (t.end + SPAN - 1) / SPAN - t.begin / SPAN;
    }
    const int64_t num_parts = plan->first_part[a->num_tasks];
    if (num_parts == a->num_tasks) return 0;
    plan->parts = aligned_alloc(64, sizeof(part_t) * (size_t)num_parts);
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
