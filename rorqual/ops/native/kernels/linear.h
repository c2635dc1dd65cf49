// out[m, n] = sum_k x[m, k] w[n, k] + bias[n] in bfloat16 or float32, accumulated in float32 in the same order whatever
// m is.
//
// The weight is laid out as [n / 16][k / 2][16][2]: 64 bytes hold two neighbouring k of sixteen n, which is what a
// bfloat16 dot-product instruction wants in a register and, sixteen such rows long, what AMX wants in a tile.

typedef struct {
    const bf16 *x;
    int64_t x_stride;
    const bf16 *weight;
    const bf16 *bias;  // or NULL
    bf16 *out;
    int64_t out_stride;
    int64_t rows, out_features, in_features;
    int wide;  // out is float32
} linear_t;

// A block's share of the answer, [16 columns] of row m, from its float32 sums.
INLINE void finish_row(const linear_t *a, int64_t m, int64_t block, f32x16 sum) {
    if (a->bias) sum += load_bf16(a->bias + 16 * block);
    const int64_t at = m * a->out_stride + 16 * block;
    if (a->wide) store((float *)a->out + at, sum);
    else store_bf16(a->out + at, sum);
}

#ifdef USE_AMX

#define PANEL_BYTES (1 << 20)

// Two blocks at once: a whole cache line, which would otherwise be fetched twice, rows being far apart.
INLINE void finish_pair(const linear_t *a, int64_t m, int64_t block, f32x16 first, f32x16 second) {
    if (a->wide) {
        finish_row(a, m, block, first);
        finish_row(a, m, block + 1, second);
        return;
    }
    if (a->bias) {
        first += load_bf16(a->bias + 16 * block);
        second += load_bf16(a->bias + 16 * block + 16);
    }
    _mm512_storeu_si512(a->out + m * a->out_stride + 16 * block,
                        (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

// Tiles 0-3 hold sums, 4 and 5 rows of x, 6 and 7 blocks of the weight.
INLINE void configure_tiles(int rows_a, int rows_b) {
    tile_config_t config = {.palette = 1};
    const int rows[8] = {rows_a, rows_a, rows_b, rows_b, rows_a, rows_b, 16, 16};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = rows[tile] ? rows[tile] : 1;
        config.bytes[tile] = 64;
    }
    _tile_loadconfig(&config);
}

// Up to 32 rows by two blocks.
INLINE void tiles_2x2(const linear_t *a, int64_t m, int rows_a, int rows_b, int64_t block, int blocks) {
    const int64_t k_tiles = a->in_features / 32, x_bytes = 2 * a->x_stride;
    const bf16 *xa = a->x + m * a->x_stride, *xb = xa + (rows_b ? 16 : 0) * a->x_stride;
    const bf16 *wa = a->weight + block * k_tiles * 512, *wb = wa + (blocks - 1) * k_tiles * 512;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < rows_a + rows_b; i++) __builtin_prefetch(a->out + (m + i) * a->out_stride + 16 * block, 1);
    for (int64_t k = 0; k < k_tiles; k++) {
        _tile_loadd(4, xa + 32 * k, x_bytes);
        _tile_loadd(6, wa + 512 * k, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, wb + 512 * k, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, xb + 32 * k, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float sums[4][16][16] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int i = 0; i < rows_a + rows_b; i++) {
        const float *first = sums[i / 16 * 2][i % 16], *second = sums[i / 16 * 2 + 1][i % 16];
        if (blocks == 2) finish_pair(a, m + i, block, load(first), load(second));
        else finish_row(a, m + i, block, load(first));
    }
}

// Up to 16 rows by one block after the other: the weight streams by once.
INLINE void tiles_1x1(const linear_t *a, int64_t m, int rows, int64_t first, int64_t last) {
    const int64_t k_tiles = a->in_features / 32, x_bytes = 2 * a->x_stride;
    const bf16 *x = a->x + m * a->x_stride;
    float sums[16][16] __attribute__((aligned(64)));
    for (int64_t block = first; block < last; block++) {
        const bf16 *w = a->weight + block * k_tiles * 512;
        _tile_zero(0);
        for (int64_t k = 0; k < k_tiles; k++) {
            for (int line = 0; line < 16; line++) __builtin_prefetch(w + 512 * (k + PREFETCH_TILES) + 32 * line);
            _tile_loadd(4, x + 32 * k, x_bytes);
            _tile_loadd(6, w + 512 * k, 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, sums, 64);
        for (int i = 0; i < rows; i++) finish_row(a, m + i, block, load(sums[i]));
    }
}

static void linear_blocks(const linear_t *a, int64_t first, int64_t last) {
    if (a->rows <= 16) {
        configure_tiles((int)a->rows, 0);
        tiles_1x1(a, 0, (int)a->rows, first, last);
    } else {
        // A panel of the weight stays in the second-level cache while the rows pass by, 32 at a time.
        const int64_t panel = max64(2, PANEL_BYTES / (32 * a->in_features) / 2 * 2), whole = a->rows / 32 * 32;
        const int rows_a = (int)min64(16, a->rows - whole), rows_b = (int)(a->rows - whole) - rows_a;
        for (int64_t left = first; left < last; left += panel) {
            const int64_t right = min64(last, left + panel);
            configure_tiles(16, 16);
            for (int64_t m = 0; m < whole; m += 32)
                for (int64_t block = left; block < right; block += 2)
                    tiles_2x2(a, m, 16, 16, block, (int)min64(2, right - block));
            if (whole == a->rows) continue;
            configure_tiles(rows_a, rows_b);
            for (int64_t block = left; block < right; block += 2)
                tiles_2x2(a, whole, rows_a, rows_b, block, (int)min64(2, right - block));
        }
    }
    _tile_release();
}

#else

// Registers of a block's sixteen features, and sums that there are registers for beside what is added to them.
#define PIECES (16 / LANES)
#if defined(__AVX512F__)
#define MOST_SUMS 16
#else
#define MOST_SUMS 8
#endif
#define MOST_ROWS_AT_ONCE 4
#define PANEL_BYTES (1 << 16)

// sums [rows][blocks][16]. Not inlined: what rounding takes in registers is missing in the loop above otherwise.
static __attribute__((noinline)) void finish_rows(const linear_t *a, int64_t m, int rows, int64_t block, int blocks,
                                                  const float *sums) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < blocks; j++, sums += 16) finish_row(a, m + i, block + j, load(sums));
}

// Some rows by some blocks. `wide` has the rows in float32, [rows][in_features], where there is no instruction for
// pairs of bfloat16.
INLINE void rows_by_blocks(const linear_t *a, const float *wide, int64_t m, const int rows, int64_t block,
                           const int blocks) {
    const int64_t features = a->in_features;
    const bf16 *w = a->weight + block * 16 * features;
    const int columns = blocks * PIECES;
    lanes_t sums[MOST_SUMS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * columns; i++) sums[i] = (lanes_t){0};
    for (int64_t k = 0; k < features; k += 2) {
        bits_t pairs[8];
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            pairs[j] = *(const bits_mem *)(w + j / PIECES * 16 * features + 16 * k + j % PIECES * 2 * LANES);
#ifdef __AVX512BF16__
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            int32_t x;
            __builtin_memcpy(&x, a->x + (m + i) * a->x_stride + k, sizeof x);
#pragma GCC unroll 8
            for (int j = 0; j < columns; j++) {
                const __m512 sum = (__m512)sums[i * columns + j];
                sums[i * columns + j] =
                    (lanes_t)_mm512_dpbf16_ps(sum, (__m512bh)pairs[j], (__m512bh)_mm512_set1_epi32(x));
            }
        }
#else
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) {
                const lanes_t x = wide[i * features + k + odd] - (lanes_t){0};
#pragma GCC unroll 8
                for (int j = 0; j < columns; j++)
                    sums[i * columns + j] += (lanes_t)(odd ? pairs[j] & 0xffff0000 : pairs[j] << 16) * x;
            }
#endif
    }
    finish_rows(a, m, rows, block, blocks, (const float *)sums);
}

// The fewer rows, the more blocks at once: a sum is not to wait for its last addition.
INLINE void rows_by_panel(const linear_t *a, int64_t m, const int rows, int64_t first, int64_t last) {
    const int blocks = rows * PIECES >= MOST_SUMS ? 1 : MOST_SUMS / PIECES / rows < 4 ? MOST_SUMS / PIECES / rows : 4;
    float *wide = NULL;
#ifndef __AVX512BF16__
    wide = thread_scratch(SCRATCH_ROWS, (size_t)(MOST_ROWS_AT_ONCE * a->in_features) * sizeof *wide);
    for (int i = 0; i < rows; i++)
        for (int64_t k = 0; k < a->in_features; k += 16)
            store(wide + i * a->in_features + k, load_bf16(a->x + (m + i) * a->x_stride + k));
#endif
    int64_t block = first;
    for (; block + blocks <= last; block += blocks) rows_by_blocks(a, wide, m, rows, block, blocks);
    for (; block < last; block++) rows_by_blocks(a, wide, m, rows, block, 1);
}

static void linear_blocks(const linear_t *a, int64_t first, int64_t last) {
    // A panel of the weight stays in the cache while the rows pass by.
    const int64_t panel = a->rows <= MOST_ROWS_AT_ONCE ? last - first : max64(4, PANEL_BYTES / (32 * a->in_features));
    for (int64_t left = first; left < last; left += panel) {
        const int64_t right = min64(last, left + panel);
        int64_t m = 0;
        if (4 * PIECES <= MOST_SUMS)
            for (; m + 4 <= a->rows; m += 4) rows_by_panel(a, m, 4, left, right);
        for (; m + 2 <= a->rows; m += 2) rows_by_panel(a, m, 2, left, right);
        if (m < a->rows) rows_by_panel(a, m, 1, left, right);
    }
}

#endif
