// What a task's query rows see of a span of keys, in registers: both products, queries by keys and weights by values,
// are [rows][steps] by [steps][width], where a step is a channel or a key, or a pair of them (PER_FACTOR) where one
// instruction multiplies pairs of bfloat16. Keys, or channels of values, lie side by side in a register, so that no
// lane is idle however few rows there are. Each key's page is laid out once for all rows of the task.
//
// Every sum has one order: of a score that of the channels, of an answer that of the keys from the span's beginning.
// What a row does not see counts zero there, and changes nothing.

#define TASK_ROWS 64
#define TILE_KEYS 64  // laid out at once

#ifdef __AVX512BF16__
#define PER_FACTOR 2
typedef uint32_t factor_t;
typedef bits_t factors_t;
INLINE lanes_t add_product(lanes_t sum, factor_t left, factors_t right) {
    return (lanes_t)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int32_t)left), (__m512bh)right);
}
#else
#define PER_FACTOR 1
typedef float factor_t;
typedef lanes_t factors_t;
INLINE lanes_t add_product(lanes_t sum, factor_t left, factors_t right) { return sum + left * right; }
#endif
typedef factor_t factor_mem __attribute__((aligned(2), may_alias));

typedef struct {
    float top[TASK_ROWS], total[TASK_ROWS];
    float sums[];  // [rows][head_dim]
} __attribute__((aligned(64))) part_t;

INLINE size_t part_bytes(const attention_t *a, int64_t rows) {
    return sizeof(part_t) + sizeof(float) * (size_t)(rows * a->head_dim);
}

// A thread's memory.
typedef struct {
    factor_t *query;   // [rows][head_dim / PER_FACTOR], where queries have to be widened
    factor_t *keys;    // [head_dim / PER_FACTOR][TILE_KEYS]
    factor_t *values;  // [TILE_KEYS / PER_FACTOR][head_dim]
    float *scores;     // [rows][SCORES_STRIDE], and in their place the weights [rows][SCORES_STRIDE] of factors
    part_t *sum, *part;
} attention_room_t;

// A span that begins within a tile's keys, as a window may have it, ends within a further tile.
#define SCORES_STRIDE (SPAN + TILE_KEYS)

INLINE attention_room_t attention_room(const attention_t *a) {
    const size_t dim = (size_t)a->head_dim, part = part_bytes(a, TASK_ROWS);
    const size_t query = TASK_ROWS * dim * sizeof(float), tile = TILE_KEYS * dim * sizeof(float);
    uint8_t *at = thread_scratch(SCRATCH_ATTENTION, query + 2 * tile + TASK_ROWS * SCORES_STRIDE * 4 + 2 * part);
    attention_room_t room;
    room.query = (factor_t *)at;
    room.keys = (factor_t *)(at + query);
    room.values = (factor_t *)(at + query + tile);
    room.scores = (float *)(at + query + 2 * tile);
    room.sum = (part_t *)(room.scores + TASK_ROWS * SCORES_STRIDE);
    room.part = (part_t *)((uint8_t *)room.sum + part);
    return room;
}

// --- products

#define VECTORS_AT_ONCE 4
#if LANES == 16
#define MOST_LEFT_ROWS 4
#else
#define MOST_LEFT_ROWS 2
#endif

// Adds to (or, without `adds`, makes) out [rows][vectors * LANES].
INLINE void add_products(const factor_mem *const *left, const factor_t *right, int64_t width, int64_t steps, float *out,
                         int64_t out_stride, const int adds, const int vectors, const int rows) {
    lanes_t sums[MOST_LEFT_ROWS][VECTORS_AT_ONCE];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            sums[r][v] = (lanes_t){0};
            if (adds) sums[r][v] = *(const lanes_mem *)(out + r * out_stride + v * LANES);
        }
    for (int64_t i = 0; i < steps; i++) {
        factors_t factors[VECTORS_AT_ONCE];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) factors[v] = *(const factors_t *)(right + i * width + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[r][v] = add_product(sums[r][v], left[r][i], factors[v]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) *(lanes_mem *)(out + r * out_stride + v * LANES) = sums[r][v];
}

INLINE void multiply_columns(const factor_mem *const *left, int64_t rows, const factor_t *right, int64_t width,
                             int64_t steps, float *out, int64_t out_stride, const int adds, const int vectors) {
    int64_t r = 0;
    if (MOST_LEFT_ROWS >= 4)
        for (; r + 4 <= rows; r += 4)
            add_products(left + r, right, width, steps, out + r * out_stride, out_stride, adds, vectors, 4);
    if (MOST_LEFT_ROWS >= 4 && r + 3 == rows) {
        add_products(left + r, right, width, steps, out + r * out_stride, out_stride, adds, vectors, 3);
        return;
    }
    for (; r + 2 <= rows; r += 2)
        add_products(left + r, right, width, steps, out + r * out_stride, out_stride, adds, vectors, 2);
    if (r < rows) add_products(left + r, right, width, steps, out + r * out_stride, out_stride, adds, vectors, 1);
}

// left [rows][steps], a pointer for each row, by right [steps][width]; width is a multiple of 32.
INLINE void multiply_tile(const factor_mem *const *left, int64_t rows, const factor_t *right, int64_t width,
                          int64_t steps, float *out, int64_t out_stride, const int adds) {
    int64_t column = 0;
    for (; column + VECTORS_AT_ONCE * LANES <= width; column += VECTORS_AT_ONCE * LANES)
        multiply_columns(left, rows, right + column, width, steps, out + column, out_stride, adds, VECTORS_AT_ONCE);
    if (column < width) multiply_columns(left, rows, right + column, width, steps, out + column, out_stride, adds, 2);
}

// --- layout

#if defined(__AVX512F__)
// Rows become columns: to [16][TILE_KEYS] from 16 registers.
INLINE void store_transposed(__m512i *r, factor_t *to) {
    __m512i pairs[16], fours[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    // fours[4 j + c] holds, in each quarter q, column 4 q + c of rows 4 j .. 4 j + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0x44),
                      high = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0xee),
                      low2 = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0x44),
                      high2 = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0xee);
        _mm512_store_si512(to + c * TILE_KEYS, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_store_si512(to + (4 + c) * TILE_KEYS, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_store_si512(to + (8 + c) * TILE_KEYS, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_store_si512(to + (12 + c) * TILE_KEYS, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}
#endif

// Sixteen keys [16][dim] as columns of to [dim / PER_FACTOR][TILE_KEYS].
INLINE void lay_out_keys(const bf16 *keys, int64_t dim, factor_t *to) {
#if defined(__AVX512F__)
    for (int64_t i = 0; i < dim; i += 16 * PER_FACTOR) {
        __m512i rows[16];
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            rows[j] = PER_FACTOR == 2 ? _mm512_loadu_si512(keys + j * dim + i) : (__m512i)load_bf16(keys + j * dim + i);
        store_transposed(rows, to + i / PER_FACTOR * TILE_KEYS);
    }
#else
    for (int64_t i = 0; i < dim; i++)
        for (int j = 0; j < 16; j++) to[i * TILE_KEYS + j] = widen(keys[j * dim + i]);
#endif
}

// Sixteen keys' values [16][dim], of which `count` were written, to [16 / PER_FACTOR][dim]. Whatever else is there must
// not be multiplied.
INLINE void lay_out_values(const bf16 *values, int64_t dim, int64_t count, factor_t *to) {
#ifdef __AVX512BF16__
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0),
                  behind = _mm512_add_epi16(order, _mm512_set1_epi16(16)), nothing = _mm512_setzero_si512();
    for (int64_t j = 0; j < 16; j += 2)
        for (int64_t i = 0; i < dim; i += 32) {
            const __m512i even = j < count ? _mm512_loadu_si512(values + j * dim + i) : nothing,
                          odd = j + 1 < count ? _mm512_loadu_si512(values + (j + 1) * dim + i) : nothing;
            _mm512_store_si512(to + j / 2 * dim + i, _mm512_permutex2var_epi16(even, order, odd));
            _mm512_store_si512(to + j / 2 * dim + i + 16, _mm512_permutex2var_epi16(even, behind, odd));
        }
#else
    for (int64_t j = 0; j < 16; j++)
        for (int64_t i = 0; i < dim; i += 16)
            store(to + j * dim + i, j < count ? load_bf16(values + j * dim + i) : splat(0.0f));
#endif
}

INLINE const bf16 *page_at(const attention_t *a, const bf16 *cache, const task_t *t, int64_t key) {
    return page_of(a, cache, t, key) + key % a->block_size * a->head_dim;
}

// --- a span

// Sixteen keys of some pages, to be read soon: where a page ends, so does what the processor foresees.
INLINE void fetch(const bf16 *page, int64_t dim) {
    for (int64_t i = 0; i < 16 * dim; i += 32) __builtin_prefetch(page + i);
}

// Scores [SCORES_STRIDE] of a row's `count` keys from the one at `first` on become weights, in the same place. The row
// sees the keys above `before`, up to `last`. A row that sees none of the span has HIDDEN for its largest score, and
// keys count 1: add_part's factor for such a part is 0 beside one with a key, which every row has in the end.
INLINE void weigh(float *scores, int64_t first, int64_t count, int64_t before, int64_t last, float scale, float *top,
                  float *total) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 best = splat(HIDDEN), sum = {0};
    for (int64_t i = 0; i < count; i += 16) {
        f32x16 s = load(scores + i);
        if (first + i <= before || first + i + 15 > last) {
            const i32x16 at = lanes + (int32_t)(first + i);
            s = blend((at <= (int32_t)before) | (at > (int32_t)last), splat(HIDDEN), s);
            store(scores + i, s);
        }
        best = max16(best, s);
    }
    float largest = best[0];
    for (int i = 1; i < 16; i++) largest = best[i] > largest ? best[i] : largest;
    for (int64_t i = 0; i < count; i += 16) {
        const f32x16 weight = exp2_16((load(scores + i) - largest) * scale);
        sum += weight;
#if PER_FACTOR == 2
        store_bf16((bf16 *)scores + i, weight);  // never beyond what was read
#else
        store(scores + i, weight);
#endif
    }
    *top = largest;
    *total = sum16(sum);
}

static void attend(const attention_t *a, const task_t *t, int64_t span, const attention_room_t *room, part_t *part) {
    const int64_t dim = a->head_dim, rows = t->lanes, context = a->context_lens[t->seq];
    const int64_t begin = max64(span, t->begin / 16 * 16), end = min64(span + SPAN, (t->end + 15) / 16 * 16);
    const factor_mem *left[TASK_ROWS];
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *query = a->query + lane_offset(a, t, r, a->query_token_stride, a->query_head_stride);
#if PER_FACTOR == 2
        left[r] = (const factor_mem *)query;
#else
        for (int64_t i = 0; i < dim; i += 16) store(room->query + r * dim + i, load_bf16(query + i));
        left[r] = room->query + r * dim;
#endif
    }
    for (int64_t tile = begin; tile < end; tile += TILE_KEYS) {
        const int64_t stop = min64(tile + TILE_KEYS, end);
        for (int64_t key = tile; key < stop; key += 16) {
            if (key + TILE_KEYS < end) fetch(page_at(a, a->key_cache, t, key + TILE_KEYS), dim);
            else fetch(page_at(a, a->value_cache, t, begin + key - tile), dim);
            lay_out_keys(page_at(a, a->key_cache, t, key), dim, room->keys + (key - tile));
        }
        multiply_tile(left, rows, room->keys, TILE_KEYS, dim / PER_FACTOR, room->scores + (tile - begin), SCORES_STRIDE,
                      0);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t position = t->position + (t->first + r) / a->group;
        float *scores = room->scores + r * SCORES_STRIDE;
        weigh(scores, begin, end - begin, a->window ? position - a->window : -1, position, a->scale * LOG2_E,
              part->top + r, part->total + r);
    }
    __builtin_memset(part->sums, 0, sizeof(float) * (size_t)(rows * dim));
    for (int64_t tile = begin; tile < end; tile += TILE_KEYS) {
        const int64_t stop = min64(tile + TILE_KEYS, end);
        for (int64_t key = tile; key < stop; key += 16) {
            if (key + TILE_KEYS < end) fetch(page_at(a, a->value_cache, t, key + TILE_KEYS), dim);
            lay_out_values(page_at(a, a->value_cache, t, key), dim, context - key,
                           room->values + (key - tile) / PER_FACTOR * dim);
        }
        for (int64_t r = 0; r < rows; r++)
            left[r] = (const factor_mem *)(room->scores + r * SCORES_STRIDE) + (tile - begin) / PER_FACTOR;
        multiply_tile(left, rows, room->values, dim, (stop - tile) / PER_FACTOR, part->sums, dim, 1);
    }
}

// Adds the next span's part; one function, so that all who call it round alike.
__attribute__((noinline)) static void add_part(const attention_t *a, const task_t *t, part_t *into,
                                               const part_t *part) {
    const int64_t dim = a->head_dim;
    const float scale = a->scale * LOG2_E;
    for (int64_t r = 0; r < t->lanes; r++) {
        const float old = into->top[r], top = part->top[r] > old ? part->top[r] : old;
        const f32x16 kept = exp2_16(splat((old - top) * scale)), counted = exp2_16(splat((part->top[r] - top) * scale));
        into->top[r] = top;
        into->total[r] = into->total[r] * kept[0] + part->total[r] * counted[0];
        float *sums = into->sums + r * dim;
        for (int64_t i = 0; i < dim; i += 16)
            store(sums + i, load(sums + i) * kept + load(part->sums + r * dim + i) * counted);
    }
}

static void finish(const attention_t *a, const task_t *t, const part_t *part) {
    const int64_t dim = a->head_dim;
    for (int64_t r = 0; r < t->lanes; r++) {
        const float share = 1.0f / part->total[r];
        bf16 *out = a->out + lane_offset(a, t, r, a->heads, 1) * dim;
        for (int64_t i = 0; i < dim; i += 16) store_bf16(out + i, load(part->sums + r * dim + i) * share);
    }
}
