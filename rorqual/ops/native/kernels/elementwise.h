// What a decoder does between its products, in bfloat16 with float32 inside. Rows are shared between threads.

typedef struct {
    const bf16 *x, *residual, *weight;  // residual may be NULL
    bf16 *out, *sum;
    int64_t rows, inner, size;  // rows = outer * inner
    int64_t outer_stride, inner_stride, residual_stride;
    float eps;
} rms_norm_t;

INLINE f32x16 load_some(const bf16 *p, int64_t count) {
    bf16 whole[16] = {0};
    for (int64_t i = 0; i < count; i++) whole[i] = p[i];
    return load_bf16(whole);
}

INLINE void store_some(bf16 *p, f32x16 v, int64_t count) {
    bf16 whole[16];
    store_bf16(whole, v);
    for (int64_t i = 0; i < count; i++) p[i] = whole[i];
}

static void rms_norm_rows(const void *arg, int thread, int num_threads) {
    const rms_norm_t *a = arg;
    const int64_t whole = a->size / 16 * 16, rest = a->size - whole;
    for (int64_t row = a->rows * thread / num_threads; row < a->rows * (thread + 1) / num_threads; row++) {
        const bf16 *x = a->x + row / a->inner * a->outer_stride + row % a->inner * a->inner_stride;
        bf16 *out = a->out + row * a->size;
        f32x16 squares = {0};
        if (a->residual) {
            const bf16 *residual = a->residual + row * a->residual_stride;
            bf16 *sum = a->sum + row * a->size;
            for (int64_t i = 0; i < whole; i += 16) store_bf16(sum + i, load_bf16(x + i) + load_bf16(residual + i));
            if (rest) store_some(sum + whole, load_some(x + whole, rest) + load_some(residual + whole, rest), rest);
            x = sum;
        }
        for (int64_t i = 0; i < whole; i += 16) {
            const f32x16 v = load_bf16(x + i);
            squares += v * v;
        }
        if (rest) {
            const f32x16 v = load_some(x + whole, rest);
            squares += v * v;
        }
        const float scale = 1.0f / __builtin_sqrtf(sum16(squares) / (float)a->size + a->eps);
        for (int64_t i = 0; i < whole; i += 16)
            store_bf16(out + i, load_bf16(x + i) * scale * load_bf16(a->weight + i));
        if (rest)
            store_some(out + whole, load_some(x + whole, rest) * scale * load_some(a->weight + whole, rest), rest);
    }
}

void ISA(rms_norm)(const bf16 *x, int64_t outer_stride, int64_t inner_stride, const bf16 *residual,
                   int64_t residual_stride, const bf16 *weight, bf16 *out, bf16 *sum, int64_t rows, int64_t inner,
                   int64_t size, float eps, int threads) {
    const rms_norm_t a = {
        x, residual, weight, out, sum, rows, inner, size, outer_stride, inner_stride, residual_stride, eps};
    rorqual_parallel(rms_norm_rows, &a, threads);
}

typedef struct {
    const bf16 *gate_up;
    bf16 *out;
    int64_t rows, size, stride;
    float limit;
} silu_and_mul_t;

INLINE f32x16 silu(f32x16 x) {
    // exp2_16 wants its argument below zero: silu(x) = x e / (1 + e) with e = exp(x), or x / (1 + exp(-x)).
    const i32x16 negative = x < 0.0f;
    const f32x16 e = exp2_16(blend(negative, x, -x) * LOG2_E);
    return x * blend(negative, e, splat(1.0f)) / (1.0f + e);
}

// silu(gate), rounded, times up: gate is at most the limit first, and up within plus and minus that. It may be
// infinity.
INLINE f32x16 gated(f32x16 gate, f32x16 up, float limit) {
    const f32x16 most = splat(limit), least = splat(-limit);
    gate = blend(gate > most, most, gate);  // NaN stays
    up = blend(up > most, most, blend(up < least, least, up));
    return through_bf16(silu(gate)) * up;
}

static void silu_and_mul_rows(const void *arg, int thread, int num_threads) {
    const silu_and_mul_t *a = arg;
    const int64_t whole = a->size / 16 * 16, rest = a->size - whole;
    for (int64_t row = a->rows * thread / num_threads; row < a->rows * (thread + 1) / num_threads; row++) {
        const bf16 *gate = a->gate_up + row * a->stride, *up = gate + a->size;
        bf16 *out = a->out + row * a->size;
        for (int64_t i = 0; i < whole; i += 16)
            store_bf16(out + i, gated(load_bf16(gate + i), load_bf16(up + i), a->limit));
        if (rest)
            store_some(out + whole, gated(load_some(gate + whole, rest), load_some(up + whole, rest), a->limit), rest);
    }
}

void ISA(silu_and_mul)(const bf16 *gate_up, int64_t stride, bf16 *out, int64_t rows, int64_t size, float limit,
                       int threads) {
    const silu_and_mul_t a = {gate_up, out, rows, size, stride, limit};
    rorqual_parallel(silu_and_mul_rows, &a, threads);
}

typedef struct {
    const bf16 *x;
    bf16 *out;  // x itself, or heads without gaps
    int64_t heads, token_stride, head_stride;
} rope_heads_t;

typedef struct {
    rope_heads_t tensors[2];  // query and key
    const void *positions;
    const float *cos_sin;
    int64_t tokens, width, offset, head_dim;
    int flags;
} rope_t;

enum { ROPE_INTERLEAVED = 1, ROPE_CONJUGATE = 2, ROPE_INT32_POSITIONS = 4 };

INLINE int64_t rope_position(const rope_t *a, int64_t token) {
    return a->flags & ROPE_INT32_POSITIONS ? ((const int32_t *)a->positions)[token]
                                           : ((const int64_t *)a->positions)[token];
}

// The products of each sum stand in the reference's order: the compiler fuses the first with the sum where it can.
INLINE void rope_halves(const bf16 *x, bf16 *out, const float *cos, const float *sin, int64_t half, float sign) {
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
        const f32x16 x0 = load_bf16(x + i), x1 = load_bf16(x + half + i), c = load(cos + i), s = load(sin + i) * sign;
        store_bf16(out + i, x0 * c - x1 * s);
        store_bf16(out + half + i, x1 * c + x0 * s);
    }
    for (; i < half; i++) {
        const float x0 = widen(x[i]), x1 = widen(x[half + i]), c = cos[i], s = sin[i] * sign;
        out[i] = narrow(x0 * c - x1 * s);
        out[half + i] = narrow(x1 * c + x0 * s);
    }
}

INLINE void rope_neighbours(const bf16 *x, bf16 *out, const float *cos, const float *sin, int64_t half, float sign) {
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
        const u32x16 pairs = *(const u32x16_mem *)(x + 2 * i);
        const f32x16 x0 = (f32x16)(pairs << 16), x1 = (f32x16)(pairs & 0xffff0000u);
        const f32x16 c = load(cos + i), s = load(sin + i) * sign;
        *(u32x16_mem *)(out + 2 * i) = pair_bf16(x0 * c - x1 * s, x1 * c + x0 * s);
    }
    for (; i < half; i++) {
        const float x0 = widen(x[2 * i]), x1 = widen(x[2 * i + 1]), c = cos[i], s = sin[i] * sign;
        out[2 * i] = narrow(x0 * c - x1 * s);
        out[2 * i + 1] = narrow(x1 * c + x0 * s);
    }
}

static void rope_tokens(const void *arg, int thread, int num_threads) {
    const rope_t *a = arg;
    const int64_t half = a->width / 2, end = a->offset + a->width, stop = a->tokens * (thread + 1) / num_threads;
    const float sign = a->flags & ROPE_CONJUGATE ? -1.0f : 1.0f;
    for (int64_t token = a->tokens * thread / num_threads; token < stop; token++) {
        const float *cos = a->cos_sin + rope_position(a, token) * a->width, *sin = cos + half;
        for (const rope_heads_t *heads = a->tensors; heads < a->tensors + 2; heads++) {
            for (int64_t head = 0; head < heads->heads; head++) {
                const bf16 *x = heads->x + token * heads->token_stride + head * heads->head_stride;
                bf16 *out =
                    heads->out == heads->x ? (bf16 *)x : heads->out + (token * heads->heads + head) * a->head_dim;
                if (a->flags & ROPE_INTERLEAVED) rope_neighbours(x + a->offset, out + a->offset, cos, sin, half, sign);
                else rope_halves(x + a->offset, out + a->offset, cos, sin, half, sign);
                if (out == x || a->width == a->head_dim) continue;
                __builtin_memcpy(out, x, (size_t)a->offset * sizeof *x);
                __builtin_memcpy(out + end, x + end, (size_t)(a->head_dim - end) * sizeof *x);
            }
        }
    }
}

// Returns 1, and does nothing, where a position is no row of the table.
int ISA(rope)(const bf16 *query, bf16 *query_out, int64_t heads, int64_t query_token_stride, int64_t query_head_stride,
              const bf16 *key, bf16 *key_out, int64_t kv_heads, int64_t key_token_stride, int64_t key_head_stride,
              const void *positions, const float *cos_sin, int64_t rows, int64_t width, int64_t offset,
              int64_t head_dim, int64_t tokens, int flags, int threads) {
    const rope_t a = {{{query, query_out, heads, query_token_stride, query_head_stride},
                       {key, key_out, kv_heads, key_token_stride, key_head_stride}},
                      positions,
                      cos_sin,
                      tokens,
                      width,
                      offset,
                      head_dim,
                      flags};
    for (int64_t token = 0; token < tokens; token++)
        if (rope_position(&a, token) < 0 || rope_position(&a, token) >= rows) return 1;
    rorqual_parallel(rope_tokens, &a, threads);
    return 0;
}
