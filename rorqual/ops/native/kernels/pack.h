// Integer weights laid out as integer.h reads them, from rows of codes and factors as `IntegerWeight` keeps them: two
// codes of 4 bits to a byte, the even column in the lower half.

typedef struct {
    const uint8_t *codes, *scales, *minima;            // minima may be NULL
    int64_t code_stride, scale_stride, minima_stride;  // bytes from row to row
    int64_t rows, columns, bits, group, factor_bytes;  // of one scale or minimum
    uint8_t *out;                                      // [rows / 16][columns / 32][bytes of a block]
} pack_t;

// From pairs of neighbours, (0, 1) (2, 3) (4, 5) (6, 7), to columns four apart, (0, 4) (1, 5) (2, 6) (3, 7).
INLINE u32x16 pair_columns(u32x16 v) {
    const u32x16 first = (v & 0xff) | (v & 0xff00) << 8, last = (v >> 16 & 0xff) | (v >> 8 & 0xff0000);
    const u32x16 even = (first & 0x000f000f) | (last & 0x000f000f) << 4;
    const u32x16 odd = (first >> 4 & 0x000f000f) | (last & 0x00f000f0);
    return even | odd << 8;
}

// Numbers [16 rows][count] -> [count][16].
INLINE uint8_t *pack_factors(const uint8_t *from, int64_t stride, int64_t count, uint8_t *to, const int size) {
    for (int64_t i = 0; i < count; i++)
        for (int row = 0; row < 16; row++, to += size) __builtin_memcpy(to, from + row * stride + i * size, size);
    return to;
}

INLINE void pack_blocks(const pack_t *a, int64_t block, const int bits, const int size) {
    const int64_t steps = a->columns / INTEGER_BLOCK_INPUTS, count = INTEGER_BLOCK_INPUTS / a->group;
    const int64_t block_bytes = 64 * bits + 16 * size * count * (a->minima ? 2 : 1);
    uint8_t *to = a->out + block * steps * block_bytes;
    for (int64_t g = 0; g < steps; g++) {
        const uint8_t *codes = a->codes + 16 * block * a->code_stride + 4 * bits * g;
        for (int row = 0; row < 16; row++)
            for (int j = 0; j < bits; j++)
                __builtin_memcpy(to + 64 * j + 4 * row, codes + row * a->code_stride + 4 * j, 4);
        if (bits == 4) {
            u32x16_mem *vectors = (u32x16_mem *)to;
            for (int j = 0; j < 4; j++) vectors[j] = pair_columns(vectors[j]);
        }
        to += 64 * bits;
        const int64_t from = g * count * size;
        to = pack_factors(a->scales + 16 * block * a->scale_stride + from, a->scale_stride, count, to, size);
        if (a->minima)
            to = pack_factors(a->minima + 16 * block * a->minima_stride + from, a->minima_stride, count, to, size);
    }
}

static void pack_share(const void *arg, int part, int parts) {
    const pack_t *a = arg;
    const int64_t blocks = a->rows / 16;
    for (int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts; block++) {
        if (a->bits == 4 && a->factor_bytes == 2) pack_blocks(a, block, 4, 2);
        else if (a->bits == 4) pack_blocks(a, block, 4, 4);
        else if (a->factor_bytes == 2) pack_blocks(a, block, 8, 2);
        else pack_blocks(a, block, 8, 4);
    }
}

void ISA(pack_integers)(const uint8_t *codes, int64_t code_stride, const uint8_t *scales, int64_t scale_stride,
                        const uint8_t *minima, int64_t minima_stride, int64_t rows, int64_t columns, int64_t bits,
                        int64_t group, int64_t factor_bytes, uint8_t *out, int threads) {
    const pack_t a = {codes, scales,  minima, code_stride, scale_stride, minima_stride,
                      rows,  columns, bits,   group,       factor_bytes, out};
    rorqual_parallel(pack_share, &a, threads);
}
