// integer.h's products of many rows, by the tiles of AMX.
//
// A panel of the weight is unpacked into the cache, and rows pass by, up to 16 at a time. A tile's sums are those of
// one group; from there on all is as for few rows. Sums go through memory, where they are turned into float32, scaled
// and added: while that is done for one group, the sums of the next one are stored and those of the one after the
// next are computed, instruction by instruction in turn. Done one after the other, each would wait for the one before:
// what a processor looks ahead is little more than one group.

#define PREFETCH_BYTES 3072

// Rows from which on tiles are faster, for groups of 32 and of 16 columns.
#define TILE_ROWS_32 13
#define TILE_ROWS_16 32
#define UNPACKED_BYTES (1 << 18)

// A block column of the weight: signed codes [in_features / 4][16][4], and scales and minima [groups][16].
typedef struct {
    int8_t *codes;
    float *scales, *minima;
} unpacked_t;

static void unpack_integers(const operand_t *w, const uint8_t *p, const unpacked_t *to) {
    const layout_t layout = layout_of(w);
    const __m512i low = _mm512_set1_epi8(15), offset = _mm512_set1_epi8((char)w->offset);
    const int64_t halves = INTEGER_BLOCK_INPUTS / w->group;
    for (int64_t g = 0; g < w->in_features / INTEGER_BLOCK_INPUTS; g++, p += w->block_bytes) {
        int8_t *codes = to->codes + 512 * g;
        for (int64_t line = 0; line < layout.code_bytes + 64; line += 64) __builtin_prefetch(p + PREFETCH_BYTES + line);
        if (w->bits == 4)
            for (int j = 0; j < 4; j++) {
                const __m512i both = _mm512_loadu_si512(p + 64 * j);
                __m512i first = _mm512_and_si512(both, low), last = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                if (w->offset) {
                    first = _mm512_sub_epi8(first, offset);
                    last = _mm512_sub_epi8(last, offset);
                }
                _mm512_storeu_si512(codes + 128 * j, first);
                _mm512_storeu_si512(codes + 128 * j + 64, last);
            }
        else
            for (int j = 0; j < 8; j++)
                _mm512_storeu_si512(codes + 64 * j, _mm512_sub_epi8(_mm512_loadu_si512(p + 64 * j), offset));
        for (int64_t half = 0; half < halves; half++) {
            const int64_t from = half * layout.factor_bytes, at = 16 * (g * halves + half);
            store(to->scales + at, load_factors(p + layout.code_bytes + from, w->wide_scales));
            if (w->has_minima) store(to->minima + at, load_factors(p + layout.minima + from, w->wide_scales));
        }
    }
}

// Tiles 0 to 3: sums; 4 and 5: inputs; 6 and 7: codes.
INLINE void configure_integer_tiles(int rows, int group) {
    tile_config_t config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = tile < 6 ? rows : group / 4;
        config.bytes[tile] = tile == 4 || tile == 5 ? group : 64;
    }
    _tile_loadconfig(&config);
}

// Some rows' part of one array of an input [rows][groups], as [groups][16].
INLINE void gather_rows(const float *from, int64_t groups, int rows, float *to) {
    for (int64_t g = 0; g < groups; g++)
        for (int i = 0; i < rows; i++) to[16 * g + i] = from[i * groups + g];
}

// What passes by a panel: up to 16 rows, with the scales and sums that `gather_rows` made. Where these are all rows,
// what the next panel is unpacked from is fetched meanwhile, so many bytes for each group of a block.
typedef struct {
    const int8_t *q;
    const float *scales, *sums;
    int64_t features;
    const uint8_t *ahead;
    int64_t ahead_step;
} tile_input_t;

typedef int32_t dots_t[16][16] __attribute__((aligned(64)));

// What the sums of group g add to the answers of rows first .. first + count - 1.
INLINE void scale_dots(f32x16 *sums, const dots_t dots, f32x16 scale, f32x16 x_scales, const int first,
                       const int count) {
#pragma GCC unroll 4
    for (int i = first; i < first + count; i++) {
        const f32x16 x_scale = (f32x16)_mm512_permutexvar_ps(_mm512_set1_epi32(i), (__m512)x_scales);
        sums[i] = multiply_add(scale * x_scale, to_floats(*(const ints_t *)dots[i]), sums[i]);
    }
}

#define LOAD_TILES(x, weight, g)                                  \
    do {                                                          \
        _tile_loadd(x, in->q + (g) * group, features);            \
        _tile_loadd(weight, block->codes + (g) * 16 * group, 64); \
    } while (0)

#define MULTIPLY_TILES(sum, x, weight) \
    do {                               \
        _tile_zero(sum);               \
        _tile_dpbssd(sum, x, weight);  \
    } while (0)

// The first three groups of a block.
INLINE void begin_block(const tile_input_t *in, const unpacked_t *block, dots_t *dots, const int group) {
    const int64_t features = in->features, tiles = features / group;
    LOAD_TILES(4, 6, 0);
    MULTIPLY_TILES(0, 4, 6);
    if (tiles > 1) {
        LOAD_TILES(5, 7, 1);
        MULTIPLY_TILES(1, 5, 7);
    }
    if (tiles > 2) {
        LOAD_TILES(4, 6, 2);
        MULTIPLY_TILES(2, 4, 6);
    }
    _tile_stored(0, dots[0], 64);
}

// Scales group g + j, stores the sums of the next one, and multiplies the third from it.
#define SCALE_GROUP(j, stored, sum, x, weight)                                     \
    do {                                                                           \
        const int64_t now = g + j;                                                 \
        if (now >= tiles) break;                                                   \
        const f32x16 scale = load(block->scales + 16 * now);                       \
        const f32x16 x_scales = load(in->scales + now * group / INPUT_GROUP * 16); \
        scale_dots(sums, dots[j % 2], scale, x_scales, 0, rows / 4);               \
        if (now + 1 < tiles) _tile_stored(stored, dots[(j + 1) % 2], 64);          \
        scale_dots(sums, dots[j % 2], scale, x_scales, rows / 4, rows / 4);        \
        if (now + 3 < tiles) LOAD_TILES(x, weight, now + 3);                       \
        scale_dots(sums, dots[j % 2], scale, x_scales, rows / 2, rows / 4);        \
        for (int64_t line = 0; line < in->ahead_step; line += 64)                  \
            __builtin_prefetch(ahead + now * in->ahead_step + line, 0, 2);         \
        if (now + 3 < tiles) MULTIPLY_TILES(sum, x, weight);                       \
        scale_dots(sums, dots[j % 2], scale, x_scales, rows / 4 * 3, rows / 4);    \
    } while (0)

// What minima add to the answers of some rows, [block][16 rows][16]. For all blocks before the first tile: near one, a
// core has but one of its two units for multiply-adds.
INLINE void tile_minima(const tile_input_t *in, const unpacked_t *blocks, int64_t count, float (*to)[16][16],
                        const int rows) {
    for (int64_t block = 0; block < count; block++) {
        f32x16 sums[16];
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) sums[i] = (f32x16){0};
        for (int64_t g = 0; g < in->features / INPUT_GROUP; g++) {
            const f32x16 least = load(blocks[block].minima + 16 * g);
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) sums[i] = multiply_add(least, splat(in->sums[16 * g + i]), sums[i]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) store(to[block][i], sums[i]);
    }
}

// Rows by a block whose first groups `begin_block` has multiplied; it does the same for the next block, if there is
// one. `minima` may be NULL. Of `rows`, 12 or 16, the last may not be there: they are computed from whatever is in
// memory, and not written.
INLINE void tile_block(const tile_input_t *in, const unpacked_t *block, const unpacked_t *next,
                       const float (*minima)[16], const uint8_t *ahead, dots_t *dots, const target_t *to, int64_t m,
                       int there, const int rows, const int group) {
    const int64_t features = in->features, tiles = features / group;
    f32x16 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        sums[i] = (f32x16){0};
        if (i < there) __builtin_prefetch(to->out + (m + i) * to->stride, 1);
    }
    for (int64_t g = 0; g < tiles; g += 4) {
        SCALE_GROUP(0, 1, 3, 5, 7);
        SCALE_GROUP(1, 2, 0, 4, 6);
        SCALE_GROUP(2, 3, 1, 5, 7);
        SCALE_GROUP(3, 0, 2, 4, 6);
    }
    if (next) begin_block(in, next, dots, group);
    if (minima) {
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) sums[i] += load(minima[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
        if (i < there) finish_integers(to, m + i, sums[i]);
}

INLINE void tile_blocks(const tile_input_t *in, const unpacked_t *blocks, int64_t count, float (*minima)[16][16],
                        const target_t *to, int64_t m, int there, const int rows, const int group) {
    const int64_t tiles = in->features / group;
    dots_t dots[2];
    if (minima) tile_minima(in, blocks, count, minima, rows);
    begin_block(in, blocks, dots, group);
    for (int64_t i = 0; i < count; i++) {
        const target_t part = {to->out + 16 * i, to->stride, to->bias ? to->bias + 16 * i : NULL};
        tile_block(in, blocks + i, i + 1 < count ? blocks + i + 1 : NULL, minima ? minima[i] : NULL,
                   in->ahead + i * tiles * in->ahead_step, dots, &part, m, there, rows, group);
    }
}

static void integer_tiles(const operand_t *w, const input_t *in, const target_t *to, int64_t first, int64_t last) {
    const int64_t features = w->in_features, groups = features / w->group, steps = features / INPUT_GROUP;
    const int64_t code_bytes = 16 * features, factors = 16 * groups, block_bytes = code_bytes + 8 * factors;
    // All tiles have as many rows. The last one begins where it has as many, with some rows again: the same answers.
    const int64_t tiles = (in->rows + 15) / 16;
    const int rows = (int)((in->rows + 4 * tiles - 1) / (4 * tiles) * 4), there = (int)min64(rows, in->rows);
    // All rows at once pass a few blocks. More of them panels of one size.
    const int64_t most = max64(1, min64(tiles == 1 ? 4 : last - first, UNPACKED_BYTES / block_bytes));
    const int64_t panels = (last - first + most - 1) / most, panel = (last - first + panels - 1) / panels;
    const int64_t minima_bytes = w->has_minima ? panel * 16 * 16 * (int64_t)sizeof(float) : 0;
    void *memory = thread_scratch(SCRATCH_WEIGHT, (size_t)(panel * block_bytes + minima_bytes + 128 * steps));
    float (*minima)[16][16] = w->has_minima ? memory : NULL;
    float *scales = (float *)((int8_t *)memory + minima_bytes), *sums = scales + 16 * steps;
    int8_t *unpacked = (int8_t *)(sums + 16 * steps);
    const int group = (int)w->group;
    configure_integer_tiles(there, group);
    int64_t gathered = -1;
    for (int64_t left = first; left < last; left += panel) {
        const int64_t count = min64(last - left, panel);
        unpacked_t blocks[UNPACKED_BYTES / (16 * INPUT_GROUP)];
        for (int64_t i = 0; i < count; i++) {
            int8_t *codes = unpacked + i * block_bytes;
            float *factor = (float *)(codes + code_bytes);
            blocks[i] = (unpacked_t){codes, factor, factor + factors};
            unpack_integers(w, block_at(w, left + i), &blocks[i]);
        }
        const target_t part = {to->out + 16 * left, to->stride, to->bias ? to->bias + 16 * left : NULL};
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t m = min64(tile * rows, in->rows - there);
            if (m != gathered) {
                gather_rows(in->scales + m * steps, steps, there, scales);
                if (w->has_minima) gather_rows(in->sums + m * steps, steps, there, sums);
                gathered = m;
            }
            const tile_input_t of = {
                .q = in->q + m * features,
                .scales = scales,
                .sums = sums,
                .features = features,
                .ahead = block_at(w, left + count),
                .ahead_step = tiles == 1 ? w->block_bytes * group / INTEGER_BLOCK_INPUTS : 0,
            };
            if (group == 16) tile_blocks(&of, blocks, count, minima, &part, m, there, 16, 16);
            else if (rows == 16) tile_blocks(&of, blocks, count, minima, &part, m, there, 16, 32);
            else tile_blocks(&of, blocks, count, minima, &part, m, there, 12, 32);
        }
    }
    _tile_release();
}
