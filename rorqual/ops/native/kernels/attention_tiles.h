// What a task's query rows see of a span of keys, by AMX: a row is a lane, as columns of tiles are.

// Positions of the lanes' tokens. A lane without a query repeats the last one's, so that it asks for no mask.
INLINE i32x16 lane_positions(const attention_t *a, const task_t *t) {
    i32x16 positions;
    for (int lane = 0; lane < 16; lane++)
        positions[lane] = (int32_t)(t->position + (t->first + min64(lane, t->lanes - 1)) / a->group);
    return positions;
}

#define TASK_ROWS 16

// What a span of keys gives: per lane, the largest score, the sum of the weights 2^(scale (score - largest)) and of the
// values times them.
typedef struct {
    float top[16], total[16];
    float sums[MAX_HEAD_DIM][16];
} __attribute__((aligned(64))) part_t;

INLINE size_t part_bytes(const attention_t *a, int64_t rows) { return sizeof(part_t); }

// A thread's memory.
typedef struct {
    part_t *sum, *part;
} attention_room_t;

INLINE attention_room_t attention_room(const attention_t *a) {
    part_t *parts = thread_scratch(SCRATCH_ATTENTION, 2 * sizeof(part_t));
    return (attention_room_t){parts, parts + 1};
}

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

INLINE void attention_tiles(void) {
    // 0-3 sums; 4 keys [16][32]; 5 queries [16 pairs][16 lanes]; 6 values [16][16]; 7 weights [8 pairs][16 lanes]
    tile_config_t config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = tile == 7 ? 8 : 16;
        config.bytes[tile] = tile == 6 ? 32 : 64;
    }
    _tile_loadconfig(&config);
}

static void attend(const attention_t *a, const task_t *t, int64_t span, const attention_room_t *room, part_t *part) {
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

// Adds the next span's part; one function, so that all who call it round alike.
__attribute__((noinline)) static void add_part(const attention_t *a, const task_t *t, part_t *into,
                                               const part_t *part) {
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
