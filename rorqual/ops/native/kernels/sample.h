// The largest of each row of logits, bfloat16 or float32, and the first place that has it: -1 if it is not finite.

typedef struct {
    const void *logits;
    int64_t stride, rows, size;
    int is_wide;  // float32
    float *values;
    int64_t *ids;
} row_max_t;

INLINE float logit_at(const void *row, int64_t i, const int is_wide) {
    return is_wide ? ((const float *)row)[i] : widen(((const bf16 *)row)[i]);
}

INLINE void largest_of_row(const void *row, int64_t size, float *value, int64_t *id, const int is_wide) {
    const int64_t whole = size / 16 * 16;
    f32x16 best = splat(-__builtin_inff());
    i32x16 starts = {0}, nan = {0};  // of the sixteen that each lane's best is among
    for (int64_t i = 0; i < whole; i += 16) {
        const f32x16 v = is_wide ? load((const float *)row + i) : load_bf16((const bf16 *)row + i);
        const i32x16 above = v > best;
        best = blend(above, v, best);
        starts = (starts & ~above) | (above & (int32_t)i);
        nan |= v != v;
    }
    float largest = best[0];
    int64_t at = starts[0];
    int has_nan = nan[0];
    for (int lane = 1; lane < 16; lane++) {
        const int64_t i = starts[lane] + lane;
        if (best[lane] > largest || (best[lane] == largest && i < at)) {
            largest = best[lane];
            at = i;
        }
        has_nan |= nan[lane];
    }
    for (int64_t i = whole; i < size; i++) {
        const float v = logit_at(row, i, is_wide);
        if (v > largest) {
            largest = v;
            at = i;
        }
        has_nan |= v != v;
    }
    *value = has_nan ? __builtin_nanf("") : largest;
    *id = *value - *value == 0 ? at : -1;
}

static void row_max_rows(const void *arg, int part, int parts) {
    const row_max_t *a = arg;
    for (int64_t row = a->rows * part / parts; row < a->rows * (part + 1) / parts; row++) {
        if (a->is_wide)
            largest_of_row((const float *)a->logits + row * a->stride, a->size, a->values + row, a->ids + row, 1);
        else largest_of_row((const bf16 *)a->logits + row * a->stride, a->size, a->values + row, a->ids + row, 0);
    }
}

void ISA(row_max)(const void *logits, int64_t stride, int64_t rows, int64_t size, int is_wide, float *values,
                  int64_t *ids, int threads) {
    const row_max_t a = {logits, stride, rows, size, is_wide, values, ids};
    rorqual_parallel(row_max_rows, &a, threads);
}
