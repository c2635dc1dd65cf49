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
            store_bf16(out + i, through_bf16(load_bf16(x + i) * scale) * load_bf16(a->weight + i));
        if (rest)
            store_some(out + whole, through_bf16(load_some(x + whole, rest) * scale) * load_some(a->weight + whole, rest), rest);
    }
}

void ISA(rms_norm)(const bf16 *x, int64_t outer_stride, int64_t inner_stride, const bf16 *residual, int64_t residual_stride,
                   const bf16 *weight, bf16 *out, bf16 *sum, int64_t rows, int64_t inner, int64_t size, float eps,
                   int threads) {
    const rms_norm_t a = {x, residual, weight, out, sum, rows, inner, size, outer_stride, inner_stride, residual_stride, eps};
    rorqual_parallel(rms_norm_rows, &a, threads);
}

typedef struct {
    const bf16 *gate_up;
    bf16 *out;
    int64_t rows, size, stride;
} silu_and_mul_t;

INLINE f32x16 silu(f32x16 x) {
    // exp2_16 wants its argument below zero: silu(x) = x e / (1 + e) with e = exp(x), or x / (1 + exp(-x)).
    const i32x16 negative = x < 0.0f;
    const f32x16 e = exp2_16(blend(negative, x, -x) * LOG2_E);
    return x * blend(negative, e, splat(1.0f)) / (1.0f + e);
}

static void silu_and_mul_rows(const void *arg, int thread, int num_threads) {
    const silu_and_mul_t *a = arg;
    const int64_t whole = a->size / 16 * 16, rest = a->size - whole;
    for (int64_t row = a->rows * thread / num_threads; row < a->rows * (thread + 1) / num_threads; row++) {
        const bf16 *gate = a->gate_up + row * a->stride, *up = gate + a->size;
        bf16 *out = a->out + row * a->size;
        for (int64_t i = 0; i < whole; i += 16)
            store_bf16(out + i, through_bf16(silu(load_bf16(gate + i))) * load_bf16(up + i));
        if (rest)
            store_some(out + whole, through_bf16(silu(load_some(gate + whole, rest))) * load_some(up + whole, rest), rest);
    }
}

void ISA(silu_and_mul)(const bf16 *gate_up, int64_t stride, bf16 *out, int64_t rows, int64_t size, int threads) {
    const silu_and_mul_t a = {gate_up, out, rows, size, stride};
    rorqual_parallel(silu_and_mul_rows, &a, threads);
}

typedef struct {
    const bf16 *x;
    const int64_t *positions;
    const float *cos_sin;
    bf16 *out;
    int64_t tokens, heads, head_dim, width, token_stride, head_stride;
} rope_t;

static void rope_tokens(const void *arg, int thread, int num_threads) {
    const rope_t *a = arg;
    const int64_t half = a->width / 2;
    for (int64_t token = a->tokens * thread / num_threads; token < a->tokens * (thread + 1) / num_threads; token++) {
        const float *cos = a->cos_sin + a->positions[token] * a->width, *sin = cos + half;
        for (int64_t head = 0; head < a->heads; head++) {
            const bf16 *x = a->x + token * a->token_stride + head * a->head_stride;
            bf16 *out = a->out + (token * a->heads + head) * a->head_dim;
            int64_t i = 0;
            for (; i + 16 <= half; i += 16) {
                const f32x16 first = load_bf16(x + i), second = load_bf16(x + half + i);
                store_bf16(out + i, first * load(cos + i) - second * load(sin + i));
                store_bf16(out + half + i, second * load(cos + i) + first * load(sin + i));
            }
            for (; i < half; i++) {
                const float first = widen(x[i]), second = widen(x[half + i]);
                out[i] = narrow(first * cos[i] - second * sin[i]);
                out[half + i] = narrow(second * cos[i] + first * sin[i]);
            }
            for (i = a->width; i < a->head_dim; i++) out[i] = x[i];
        }
    }
}

void ISA(rope)(const bf16 *x, int64_t token_stride, int64_t head_stride, const int64_t *positions, const float *cos_sin,
               int64_t width, bf16 *out, int64_t tokens, int64_t heads, int64_t head_dim, int threads) {
    const rope_t a = {x, positions, cos_sin, out, tokens, heads, head_dim, width, token_stride, head_stride};
    rorqual_parallel(rope_tokens, &a, threads);
}
