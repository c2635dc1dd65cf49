// Rows of a table of integers as `IntegerWeight` keeps it: codes row by row, two to a byte if they have 4 bits, the
// even column in the lower half; scales and minima [rows][columns / group].

typedef struct {
    const int64_t *ids;
    int64_t count;
    const uint8_t *codes, *scales, *minima;  // minima may be NULL
    int64_t columns, bits, group, offset, wide;
    bf16 *out;
} embedding_t;

INLINE float factor_at(const uint8_t *factors, int64_t at, int64_t wide) {
    if (wide) return ((const float *)factors)[at];
    return half_to_float((u16x16){((const uint16_t *)factors)[at]})[0];
}

static void embedding_rows(const void *arg, int thread, int num_threads) {
    const embedding_t *a = arg;
    const int64_t row_bytes = a->columns * a->bits / 8, groups = a->columns / a->group;
    for (int64_t i = a->count * thread / num_threads; i < a->count * (thread + 1) / num_threads; i++) {
        const uint8_t *codes = a->codes + a->ids[i] * row_bytes;
        for (int64_t g = 0; g < groups; g++) {
            const float scale = factor_at(a->scales, a->ids[i] * groups + g, a->wide);
            const float least = a->minima ? factor_at(a->minima, a->ids[i] * groups + g, a->wide) : 0.0f;
            for (int64_t k = g * a->group; k < (g + 1) * a->group; k += 16) {
                uint8_t values[16];
                for (int j = 0; j < 16; j += 2) {
                    const uint8_t *pair = codes + (k + j) * a->bits / 8;
                    values[j] = a->bits == 4 ? *pair & 15 : pair[0];
                    values[j + 1] = a->bits == 4 ? *pair >> 4 : pair[1];
                }
                const i32x16 wide = (i32x16)bytes_at(values) - (int32_t)a->offset;
                f32x16 row = __builtin_convertvector(wide, f32x16) * scale;
                if (a->minima) row += least;
                store_bf16(a->out + i * a->columns + k, row);
            }
        }
    }
}

// Returns 1, and does nothing, where an id is no row of the table.
int ISA(embedding)(const int64_t *ids, int64_t count, const uint8_t *codes, const uint8_t *scales,
                   const uint8_t *minima, int64_t rows, int64_t columns, int64_t bits, int64_t group, int64_t offset,
                   int wide, bf16 *out, int threads) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= rows) return 1;
    const embedding_t a = {ids, count, codes, scales, minima, columns, bits, group, offset, wide, out};
    rorqual_parallel(embedding_rows, &a, threads);
    return 0;
}
