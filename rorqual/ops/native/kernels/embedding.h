// Rows of a table of integers in one of three layouts:
//
// - rows: as `IntegerWeight` keeps it: codes row by row, two to a byte if they have 4 bits, the even column in the
// lower
//   half; scales and minima [rows][columns / group];
// - packed: as integer.h multiplies by it;
// - blocks: as GGML stores it, see blocks.h.

// Sixteen codes of one group to out.
INLINE void dequantise(const uint8_t *codes, int64_t offset, float scale, const float *minimum, bf16 *out) {
    f32x16 row = __builtin_convertvector((i32x16)bytes_at(codes) - (int32_t)offset, f32x16) * scale;
    if (minimum) row += *minimum;
    store_bf16(out, row);
}

static int any_outside(const int64_t *ids, int64_t count, int64_t rows) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= rows) return 1;
    return 0;
}

// --- rows

typedef struct {
    const int64_t *ids;
    int64_t count;
    const uint8_t *codes, *scales, *minima;  // minima may be NULL
    int64_t columns, bits, group, offset, wide;
    bf16 *out;
} embedding_t;

INLINE float factor_at(const uint8_t *factors, int64_t at, int64_t wide) {
    return wide ? ((const float *)factors)[at] : half_at(factors + 2 * at);
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
                dequantise(values, a->offset, scale, a->minima ? &least : NULL, a->out + i * a->columns + k);
            }
        }
    }
}

// This and the others return 1, and do nothing, where an id is no row of the table.
int ISA(embedding)(const int64_t *ids, int64_t count, const uint8_t *codes, const uint8_t *scales,
                   const uint8_t *minima, int64_t rows, int64_t columns, int64_t bits, int64_t group, int64_t offset,
                   int wide, bf16 *out, int threads) {
    if (any_outside(ids, count, rows)) return 1;
    const embedding_t a = {ids, count, codes, scales, minima, columns, bits, group, offset, wide, out};
    rorqual_parallel(embedding_rows, &a, threads);
    return 0;
}

// --- packed

typedef struct {
    const int64_t *ids;
    int64_t count;
    const operand_t *table;
    bf16 *out;
} embedding_packed_t;

static void embedding_packed_rows(const void *arg, int thread, int num_threads) {
    const embedding_packed_t *a = arg;
    const operand_t *w = a->table;
    const layout_t at = layout_of(w);
    for (int64_t i = a->count * thread / num_threads; i < a->count * (thread + 1) / num_threads; i++) {
        const int64_t lane = a->ids[i] % 16;
        const uint8_t *block = block_at(w, a->ids[i] / 16);
        for (int64_t c = 0; c < w->in_features; c += INTEGER_BLOCK_INPUTS, block += w->block_bytes) {
            uint8_t codes[INTEGER_BLOCK_INPUTS];
            for (int64_t j = 0; j < w->bits; j++) {
                const uint8_t *four = block + 64 * j + 4 * lane;
                if (w->bits == 8) __builtin_memcpy(codes + 4 * j, four, 4);
                else halves(four, 4, codes + 8 * j);
            }
            for (int64_t k = 0; k < INTEGER_BLOCK_INPUTS; k += 16) {
                const int64_t factor = k / w->group * 16 + lane;
                const float scale = factor_at(block + at.code_bytes, factor, w->wide_scales);
                const float least = w->has_minima ? factor_at(block + at.minima, factor, w->wide_scales) : 0.0f;
                bf16 *out = a->out + i * w->in_features + c + k;
                dequantise(codes + k, w->offset, scale, w->has_minima ? &least : NULL, out);
            }
        }
    }
}

int ISA(embedding_packed)(const int64_t *ids, int64_t count, const operand_t *table, bf16 *out, int threads) {
    if (any_outside(ids, count, table->out_features)) return 1;
    const embedding_packed_t a = {ids, count, table, out};
    rorqual_parallel(embedding_packed_rows, &a, threads);
    return 0;
}

// --- blocks

typedef struct {
    const int64_t *ids;
    int64_t count, kind;
    const uint8_t *blocks;
    int64_t columns;
    bf16 *out;
} embedding_blocks_t;

static void embedding_blocks_rows(const void *arg, int thread, int num_threads) {
    const embedding_blocks_t *a = arg;
    const block_format_t f = block_format(a->kind);
    const int64_t per_row = a->columns / f.values;
    for (int64_t i = a->count * thread / num_threads; i < a->count * (thread + 1) / num_threads; i++) {
        const uint8_t *block = a->blocks + a->ids[i] * per_row * f.bytes;
        for (int64_t c = 0; c < a->columns; c += f.values, block += f.bytes) {
            uint8_t codes[BLOCK_VALUES];
            float scales[16], minima[16];
            block_codes(a->kind, block, codes);
            block_factors(a->kind, block, scales, minima);
            for (int64_t k = 0; k < f.values; k += 16) {
                const float *minimum = f.has_minima ? minima + k / f.group : NULL;
                dequantise(codes + k, f.offset, scales[k / f.group], minimum, a->out + i * a->columns + c + k);
            }
        }
    }
}

int ISA(embedding_blocks)(const int64_t *ids, int64_t count, int64_t kind, const uint8_t *blocks, int64_t rows,
                          int64_t columns, bf16 *out, int threads) {
    if (any_outside(ids, count, rows)) return 1;
    const embedding_blocks_t a = {ids, count, kind, blocks, columns, out};
    rorqual_parallel(embedding_blocks_rows, &a, threads);
    return 0;
}
