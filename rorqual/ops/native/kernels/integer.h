// Products with weights of 4- or 8-bit integers, with inputs rounded to integers as well or in bfloat16.
//
// A block of 16 output by 32 input features: its codes, its scales [32 / group][16], and its minima, if the format has
// any, like the scales. Codes of 8 bits are 8 vectors of 64 bytes: vector j holds, for each output feature, columns
// 4 j .. 4 j + 3. Codes of 4 bits are 4 vectors: vector j holds columns 8 j .. 8 j + 3 in the lower halves of its bytes
// and 8 j + 4 .. 8 j + 7 in the upper ones. Four bytes of one output feature beside four of the next are what the dot
// products of bytes want, of registers and of tiles.
//
// With rounded inputs (dynamic), of a row m and an output feature n, for each group g in ascending order:
//
//     acc  = fma(scale_x[m, g] * scale[n, g], sum over k of (code[n, k] - offset) * q[m, k], acc)
//     acc2 = fma(minimum[n, g], scale_x[m, g] * sum over k of q[m, k], acc2)          where there are minima
//
// and the answer is acc + acc2 + bias. Sums of integers are exact and everything else has this one order: wherever
// there is a fused multiply-add, answers are equal to the bit.

#define INPUT_GROUP 32
#define INTEGER_BLOCK_INPUTS 32

// --- inputs

INLINE float largest_size(f32x16 a, f32x16 b) {
    // As integers sizes have the order of the numbers, and NaN is above all of them.
    const i32x16 x = (i32x16)a & 0x7fffffff, y = (i32x16)b & 0x7fffffff;
#ifdef __AVX512F__
    return bits_to_float((uint32_t)_mm512_reduce_max_epi32(_mm512_max_epi32((__m512i)x, (__m512i)y)));
#else
    i32x16 most = (x & (x > y)) | (y & ~(x > y));
    int32_t largest = 0;
    for (int i = 0; i < 16; i++) largest = most[i] > largest ? most[i] : largest;
    return bits_to_float((uint32_t)largest);
#endif
}

// Rounds 16 values of at most 127 to the nearest integers, ties to even. Returns their sum.
INLINE int32_t round_to_int8(f32x16 v, int8_t *q) {
#ifdef __AVX512F__
    const __m128i rounded = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)v));
    _mm_storeu_si128((__m128i *)q, rounded);
    // The only sums of bytes that one instruction makes are of unsigned ones: add 128 to each of the sixteen.
    const __m128i halves = _mm_sad_epu8(_mm_xor_si128(rounded, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(halves) + _mm_extract_epi32(halves, 2) - 16 * 128;
#else
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) {
        q[i] = (int8_t)__builtin_lrintf(v[i]);
        sum += q[i];
    }
    return sum;
#endif
}

// Columns 32 g .. 32 g + 31 of a row. A group with an infinity or NaN has a scale of NaN, and so have its row's
// answers.
INLINE void quantise_group(const bf16 *x, int8_t *q, float *scale, float *sum, int32_t *int_sums) {
    const f32x16 a = load_bf16(x), b = load_bf16(x + 16);
    const float largest = largest_size(a, b), factor = 127.0f / largest;
    if (factor > 0.0f && factor <= 3.4028235e38f) {
        int_sums[0] = round_to_int8(a * factor, q);
        int_sums[1] = round_to_int8(b * factor, q + 16);
        *scale = largest / 127.0f;
    } else {  // also where the largest is 0, or so small that there is no factor
        __builtin_memset(q, 0, 32);
        int_sums[0] = int_sums[1] = 0;
        *scale = largest < 1.0f ? largest / 127.0f : bits_to_float(0x7fc00000);
    }
    *sum = *scale * (float)(int_sums[0] + int_sums[1]);
}

static void quantise_rows(const bf16 *x, int64_t stride, int64_t first, int64_t last, int64_t features, int8_t *q,
                          float *scales, float *sums, int32_t *int_sums) {
    const int64_t groups = features / INPUT_GROUP;
    for (int64_t m = first; m < last; m++)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = m * groups + g;
            quantise_group(x + m * stride + 32 * g, q + 32 * at, scales + at, sums + at, int_sums + 2 * at);
        }
}

// --- blocks

INLINE f32x16 half_to_float(u16x16 half) {
#ifdef __AVX512F__
    return (f32x16)_mm512_cvtph_ps((__m256i)half);
#else
    const u32x16 bits = __builtin_convertvector(half, u32x16);
    return (f32x16)((bits & 0x7fff) << 13) * 0x1p112f * (f32x16)(0x3f800000 | ((bits & 0x8000) << 16));
#endif
}

// Sixteen of a block's scales or minima.
INLINE f32x16 load_factors(const uint8_t *p, int64_t wide) {
    return wide ? load((const float *)p) : half_to_float(*(const u16x16_mem *)p);
}

typedef struct {
    int64_t groups;        // along the inputs, of `group` columns
    int64_t code_bytes;    // of a block
    int64_t factor_bytes;  // of sixteen scales
    int64_t minima;        // where a block's minima are
} layout_t;

INLINE layout_t layout_of(const operand_t *w) {
    const int64_t code_bytes = 64 * w->bits, factor_bytes = w->wide_scales ? 64 : 32;
    return (layout_t){w->in_features / w->group, code_bytes, factor_bytes,
                      code_bytes + factor_bytes * (INTEGER_BLOCK_INPUTS / w->group)};
}

INLINE const uint8_t *block_at(const operand_t *w, int64_t block) {
    return (const uint8_t *)w->data + block * (w->in_features / INTEGER_BLOCK_INPUTS) * w->block_bytes;
}

typedef struct {
    bf16 *out;  // [rows][16 or more]
    int64_t stride;
    const bf16 *bias;  // [16] or NULL
} target_t;

INLINE void finish_integers(const target_t *to, int64_t m, f32x16 sum) {
    if (to->bias) sum += load_bf16(to->bias);
    store_bf16(to->out + m * to->stride, sum);
}

// --- dot products of bytes

// The lanes that one instruction handles. `dot4` adds, in each lane, the products of four codes and four inputs.
#if defined(__AVX512F__)
#define LANES 16
typedef u32x16 codes_t;
typedef i32x16 ints_t;
typedef f32x16 floats_t;
INLINE codes_t load_codes(const uint8_t *p) { return (codes_t)_mm512_loadu_si512(p); }
INLINE ints_t splat_ints(int32_t x) { return (ints_t)_mm512_set1_epi32(x); }
INLINE floats_t to_floats(ints_t x) { return (floats_t)_mm512_cvtepi32_ps((__m512i)x); }
INLINE floats_t multiply_add(floats_t a, floats_t b, floats_t c) {
    return (floats_t)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
INLINE floats_t load_lanes(const uint8_t *p, int lane, int64_t wide) { return load_factors(p, wide); }
#ifdef __AVX512VNNI__
#define HALF_BYTES 0
INLINE ints_t dot4(ints_t sum, codes_t codes, int32_t inputs, const int times) {
    return (ints_t)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(inputs));
}
#else
#define HALF_BYTES 1  // whole ones, in pairs, would not fit in 16 bits
INLINE ints_t dot4(ints_t sum, codes_t codes, int32_t inputs, const int times) {
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(inputs));
    return sum + (ints_t)_mm512_madd_epi16(pairs, _mm512_set1_epi16((int16_t)times));
}
#endif
#elif defined(__AVX2__)
#define LANES 8
#define HALF_BYTES 1
typedef uint32_t codes_t __attribute__((vector_size(32)));
typedef int32_t ints_t __attribute__((vector_size(32)));
typedef float floats_t __attribute__((vector_size(32)));
INLINE codes_t load_codes(const uint8_t *p) { return (codes_t)_mm256_loadu_si256((const __m256i *)p); }
INLINE ints_t splat_ints(int32_t x) { return (ints_t)_mm256_set1_epi32(x); }
INLINE floats_t to_floats(ints_t x) { return (floats_t)_mm256_cvtepi32_ps((__m256i)x); }
INLINE floats_t multiply_add(floats_t a, floats_t b, floats_t c) {
    return (floats_t)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
INLINE floats_t load_lanes(const uint8_t *p, int lane, int64_t wide) {
    if (wide) return (floats_t)_mm256_loadu_ps((const float *)p + lane);
    return (floats_t)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 2 * lane)));
}
INLINE ints_t dot4(ints_t sum, codes_t codes, int32_t inputs, const int times) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(inputs));
    return sum + (ints_t)_mm256_madd_epi16(pairs, _mm256_set1_epi16((int16_t)times));
}
#else
#define LANES 16
#define HALF_BYTES 0
typedef u32x16 codes_t;
typedef i32x16 ints_t;
typedef f32x16 floats_t;
INLINE codes_t load_codes(const uint8_t *p) { return *(const u32x16_mem *)p; }
INLINE ints_t splat_ints(int32_t x) { return x - (ints_t){0}; }
INLINE floats_t to_floats(ints_t x) { return __builtin_convertvector(x, floats_t); }
INLINE floats_t multiply_add(floats_t a, floats_t b, floats_t c) { return a * b + c; }
INLINE floats_t load_lanes(const uint8_t *p, int lane, int64_t wide) { return load_factors(p, wide); }
INLINE ints_t dot4(ints_t sum, codes_t codes, int32_t inputs, const int times) {
    int8_t q[4];
    __builtin_memcpy(q, &inputs, 4);
    for (int i = 0; i < 4; i++) sum += (ints_t)((codes >> (8 * i)) & 255) * (int32_t)q[i];
    return sum;
}
#endif

// Four columns of some rows into each row's sum.
INLINE void dot_rows(ints_t *dots, codes_t codes, const int8_t *q, int64_t stride, const int rows, const int times) {
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        int32_t inputs;
        __builtin_memcpy(&inputs, q + i * stride, sizeof inputs);
        dots[i] = dot4(dots[i], codes, inputs, times);
    }
}

#define PREFETCH_BYTES 3072

// Some rows by the block at `data`, one sum for each row and lane. Codes are unpacked once for all rows.
INLINE void integer_rows(const operand_t *w, const input_t *in, int64_t m, const int rows, const uint8_t *data,
                         const target_t *to, const int bits, const int group, const int minima) {
    const int64_t steps = w->in_features / INPUT_GROUP, stride = w->in_features;
    const layout_t layout = layout_of(w);
    f32x16 answers[8];
#pragma GCC unroll 2
    for (int lane = 0; lane < 16; lane += LANES) {
        floats_t sums[8], others[8];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) sums[i] = others[i] = (floats_t){0};
        const uint8_t *p = data;
        for (int64_t g = 0; g < steps; g++, p += w->block_bytes) {
            if (lane == 0) {
                for (int64_t line = 0; line < layout.code_bytes + 64; line += 64)
                    __builtin_prefetch(p + PREFETCH_BYTES + line);
            }
            const int8_t *q = in->q + m * stride + 32 * g;
#pragma GCC unroll 2
            for (int half = 0; half < 32 / group; half++) {
                ints_t dots[8];
#pragma GCC unroll 8
                for (int i = 0; i < rows; i++) {
                    const int32_t *s = in->int_sums + (m + i) * 2 * steps + 2 * g;
                    dots[i] = minima ? splat_ints(0)
                                     : splat_ints(-(int32_t)w->offset * (group == 32 ? s[0] + s[1] : s[half]));
                }
#pragma GCC unroll 8
                for (int j = half * bits * group / 32; j < (half + 1) * bits * group / 32; j++) {
                    const codes_t codes = load_codes(p + 64 * j + 4 * lane);
                    if (bits == 4) {
                        dot_rows(dots, codes & 0x0f0f0f0f, q + 8 * j, stride, rows, 1);
                        dot_rows(dots, (codes >> 4) & 0x0f0f0f0f, q + 8 * j + 4, stride, rows, 1);
                    } else if (HALF_BYTES) {
                        dot_rows(dots, codes & 0x0f0f0f0f, q + 4 * j, stride, rows, 1);
                        dot_rows(dots, (codes >> 4) & 0x0f0f0f0f, q + 4 * j, stride, rows, 16);
                    } else {
                        dot_rows(dots, codes, q + 4 * j, stride, rows, 1);
                    }
                }
                const floats_t scales =
                    load_lanes(p + layout.code_bytes + half * layout.factor_bytes, lane, w->wide_scales);
#pragma GCC unroll 8
                for (int i = 0; i < rows; i++)
                    sums[i] = multiply_add(scales * in->scales[(m + i) * steps + g], to_floats(dots[i]), sums[i]);
            }
            if (minima) {
                const floats_t least = load_lanes(p + layout.minima, lane, w->wide_scales);
#pragma GCC unroll 8
                for (int i = 0; i < rows; i++) {
                    const floats_t sum = in->sums[(m + i) * steps + g] - (floats_t){0};
                    others[i] = multiply_add(least, sum, others[i]);
                }
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const floats_t whole = minima ? sums[i] + others[i] : sums[i];
            __builtin_memcpy((char *)&answers[i] + 4 * lane, &whole, sizeof whole);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) finish_integers(to, m + i, answers[i]);
}

// Rows whose sums fit in the registers.
#if defined(__AVX512F__)
#define MOST_ROWS 8
#elif defined(__AVX2__)
#define MOST_ROWS 4
#else
#define MOST_ROWS 1
#endif

INLINE void integer_all_rows(const operand_t *w, const input_t *in, int64_t m, const uint8_t *data, const target_t *to,
                             const int bits, const int group, const int minima) {
    if (MOST_ROWS >= 8)
        for (; m + 8 <= in->rows; m += 8) integer_rows(w, in, m, 8, data, to, bits, group, minima);
    if (MOST_ROWS >= 4)
        for (; m + 4 <= in->rows; m += 4) integer_rows(w, in, m, 4, data, to, bits, group, minima);
    if (MOST_ROWS >= 2)
        for (; m + 2 <= in->rows; m += 2) integer_rows(w, in, m, 2, data, to, bits, group, minima);
    for (; m < in->rows; m++) integer_rows(w, in, m, 1, data, to, bits, group, minima);
}

// The rows from m on.
static void integer_block(const operand_t *w, const input_t *in, int64_t m, const uint8_t *data, const target_t *to) {
    if (w->bits == 4 && w->has_minima) integer_all_rows(w, in, m, data, to, 4, 32, 1);
    else if (w->bits == 4) integer_all_rows(w, in, m, data, to, 4, 32, 0);
    else if (w->has_minima) integer_all_rows(w, in, m, data, to, 8, 32, 1);
    else if (w->group == 32) integer_all_rows(w, in, m, data, to, 8, 32, 0);
    else integer_all_rows(w, in, m, data, to, 8, 16, 0);
}

#ifdef USE_AMX

// Rows from which on tiles are faster, for groups of 32 and of 16 columns.
#define TILE_ROWS_32 8
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
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                _mm512_storeu_si512(codes + 128 * j, _mm512_sub_epi8(_mm512_and_si512(both, low), offset));
                _mm512_storeu_si512(codes + 128 * j + 64, _mm512_sub_epi8(high, offset));
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

// What the sums of group g add to the answers of up to 16 rows.
INLINE void scale_dots(f32x16 *sums, const int32_t (*dots)[16], const float *scales, const float *x_scales, int64_t g,
                       const int whole, int rows, const int group) {
    const f32x16 scale = load(scales + 16 * g);
    const float *x = x_scales + g * group / INPUT_GROUP * 16;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        if (!whole && i >= rows) break;
        sums[i] = multiply_add(scale * x[i], to_floats(*(const ints_t *)dots[i]), sums[i]);
    }
}

// The dot products of tile number g, of a block by rows, in tile registers of their own.
#define MULTIPLY_TILE(sum, x, weight, g)                 \
    do {                                                 \
        const int64_t at = min64(g, tiles - 1) * group;  \
        _tile_loadd(weight, block->codes + 16 * at, 64); \
        _tile_loadd(x, q + at, features);                \
        _tile_zero(sum);                                 \
        _tile_dpbssd(sum, x, weight);                    \
    } while (0)

// Up to 16 rows by an unpacked block; scales and sums are those of `gather_rows`. While the sums of two groups are
// scaled, the tiles of the next two are multiplied: products in the same registers would wait for each other. Minima
// come after the codes: the sums of both at once would not fit in the registers.
INLINE void tile_rows(const operand_t *w, const int8_t *q, const float *scales, const float *x_sums,
                      const unpacked_t *block, const target_t *to, int64_t m, const int whole, int rows,
                      const int group) {
    const int64_t features = w->in_features, tiles = features / group;
    int32_t dots[4][16][16] __attribute__((aligned(64)));
    f32x16 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        sums[i] = (f32x16){0};
        if (whole) __builtin_prefetch(to->out + (m + i) * to->stride, 1);
    }
    MULTIPLY_TILE(0, 4, 6, 0);
    MULTIPLY_TILE(1, 5, 7, 1);
    for (int64_t g = 0;; g += 4) {
        _tile_stored(0, dots[0], 64);
        _tile_stored(1, dots[1], 64);
        MULTIPLY_TILE(2, 4, 6, g + 2);
        MULTIPLY_TILE(3, 5, 7, g + 3);
        scale_dots(sums, dots[0], block->scales, scales, g, whole, rows, group);
        if (g + 1 >= tiles) break;
        scale_dots(sums, dots[1], block->scales, scales, g + 1, whole, rows, group);
        if (g + 2 >= tiles) break;
        _tile_stored(2, dots[2], 64);
        _tile_stored(3, dots[3], 64);
        MULTIPLY_TILE(0, 4, 6, g + 4);
        MULTIPLY_TILE(1, 5, 7, g + 5);
        scale_dots(sums, dots[2], block->scales, scales, g + 2, whole, rows, group);
        if (g + 3 >= tiles) break;
        scale_dots(sums, dots[3], block->scales, scales, g + 3, whole, rows, group);
        if (g + 4 >= tiles) break;
    }
    if (w->has_minima) {
        f32x16 others[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) others[i] = (f32x16){0};
        for (int64_t g = 0; g < tiles; g++) {
            const f32x16 least = load(block->minima + 16 * g);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                if (!whole && i >= rows) break;
                others[i] = multiply_add(least, splat(x_sums[16 * g + i]), others[i]);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) sums[i] += others[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        if (!whole && i >= rows) break;
        finish_integers(to, m + i, sums[i]);
    }
}

// A panel of the weight is unpacked into the cache, and rows pass by, 16 at a time; few rows by one block after the
// other.
INLINE void integer_tiles(const operand_t *w, const input_t *in, const target_t *to, int64_t first, int64_t last,
                          const int group) {
    const int64_t features = w->in_features, groups = features / group, steps = features / INPUT_GROUP;
    const int64_t code_bytes = 16 * features, factors = 16 * groups, block_bytes = code_bytes + 8 * factors;
    const int64_t panel = in->rows <= 16 ? 1 : max64(1, min64(last - first, UNPACKED_BYTES / block_bytes));
    float *scales = thread_scratch(SCRATCH_WEIGHT, (size_t)(panel * block_bytes + 128 * steps));
    float *sums = scales + 16 * steps;
    int8_t *unpacked = (int8_t *)(sums + 16 * steps);
    const int tile = (int)min64(16, in->rows);
    int64_t gathered = -1;
    configure_integer_tiles(tile, group);
    for (int64_t left = first; left < last; left += panel) {
        const int64_t right = min64(last, left + panel);
        unpacked_t blocks[UNPACKED_BYTES / (16 * INPUT_GROUP)];
        for (int64_t block = left; block < right; block++) {
            int8_t *codes = unpacked + (block - left) * block_bytes;
            float *factor = (float *)(codes + code_bytes);
            blocks[block - left] = (unpacked_t){codes, factor, factor + factors};
            unpack_integers(w, block_at(w, block), &blocks[block - left]);
        }
        for (int64_t m = 0; m < in->rows; m += tile) {
            if (in->rows - m < tile) {
                if (in->rows - m < TILE_ROWS_32) break;
                m = in->rows - tile;  // some rows again: the same answers, and no tiles of another size
            }
            if (m != gathered) {
                gather_rows(in->scales + m * steps, steps, tile, scales);
                if (w->has_minima) gather_rows(in->sums + m * steps, steps, tile, sums);
                gathered = m;
            }
            for (int64_t block = left; block < right; block++) {
                const target_t part = {to->out + 16 * block, to->stride, to->bias ? to->bias + 16 * block : NULL};
                const unpacked_t *of = &blocks[block - left];
                const int8_t *q = in->q + m * features;
                if (tile == 16) tile_rows(w, q, scales, sums, of, &part, m, 1, 16, group);
                else tile_rows(w, q, scales, sums, of, &part, m, 0, tile, group);
            }
        }
        if (in->rows % tile == 0 || in->rows % tile >= TILE_ROWS_32) continue;
        for (int64_t block = left; block < right; block++) {
            const target_t part = {to->out + 16 * block, to->stride, to->bias ? to->bias + 16 * block : NULL};
            integer_block(w, in, in->rows - in->rows % tile, block_at(w, block), &part);
        }
    }
    _tile_release();
}

#endif

// out[:, 16 first .. 16 last] of an operand of kind OPERAND_DYNAMIC.
static void integer_blocks(const operand_t *w, const input_t *in, bf16 *out, int64_t stride, int64_t first,
                           int64_t last) {
#ifdef USE_AMX
    if (in->rows >= (w->group == 32 ? TILE_ROWS_32 : TILE_ROWS_16)) {
        const target_t to = {out, stride, w->bias};
        if (w->group == 32) integer_tiles(w, in, &to, first, last, 32);
        else integer_tiles(w, in, &to, first, last, 16);
        return;
    }
#endif
    for (int64_t block = first; block < last; block++) {
        const target_t to = {out + 16 * block, stride, w->bias ? w->bias + 16 * block : NULL};
        integer_block(w, in, 0, block_at(w, block), &to);
    }
}

// --- inputs in bfloat16

// Two columns of a block as linear.h has them. Their codes are `first` and `second` in the lowest bits of each lane.
INLINE u32x16 decode_pair(u32x16 first, u32x16 second, int32_t mask, int32_t offset, f32x16 scale, f32x16 least,
                          const int minima) {
    f32x16 a = __builtin_convertvector((i32x16)(first & mask) - offset, f32x16) * scale;
    f32x16 b = __builtin_convertvector((i32x16)(second & mask) - offset, f32x16) * scale;
    if (minima) {
        a += least;
        b += least;
    }
    return pair_bf16(a, b);
}

INLINE void decode_integers(const operand_t *w, int64_t block, bf16 *to, const int bits, const int minima) {
    const layout_t layout = layout_of(w);
    const uint8_t *p = block_at(w, block);
    const int32_t mask = bits == 4 ? 15 : 255, offset = (int32_t)w->offset;
    for (int64_t g = 0; g < w->in_features / INTEGER_BLOCK_INPUTS; g++, p += w->block_bytes)
        for (int j = 0; j < bits; j++) {
            const u32x16 codes = *(const u32x16_mem *)(p + 64 * j);
            const int64_t from = j * (32 / bits) / w->group * layout.factor_bytes;
            const f32x16 scale = load_factors(p + layout.code_bytes + from, w->wide_scales);
            const f32x16 least = minima ? load_factors(p + layout.minima + from, w->wide_scales) : splat(0.0f);
#pragma GCC unroll 2
            for (int shift = 0; shift < 8; shift += bits, to += 64) {
                const u32x16 v = codes >> shift;
                *(u32x16_mem *)to = decode_pair(v, v >> 8, mask, offset, scale, least, minima);
                *(u32x16_mem *)(to + 32) = decode_pair(v >> 16, v >> 24, mask, offset, scale, least, minima);
            }
        }
}

// The same of an operand of kind OPERAND_WEIGHT_ONLY: each thread decodes some blocks into its cache.
static void decoded_blocks(const operand_t *w, const input_t *in, bf16 *out, int64_t stride, int64_t first,
                           int64_t last) {
    const int64_t block_bytes = 32 * w->in_features, at_once = max64(2, DECODED_BYTES / block_bytes / 2 * 2);
    bf16 *decoded = thread_scratch(SCRATCH_WEIGHT, (size_t)(at_once * block_bytes));
    for (int64_t left = first, right; left < last; left = right) {
        right = min64(last, left + at_once);
        for (int64_t block = left; block < right; block++) {
            bf16 *to = decoded + (block - left) * 16 * w->in_features;
            if (w->bits == 4 && w->has_minima) decode_integers(w, block, to, 4, 1);
            else if (w->bits == 4) decode_integers(w, block, to, 4, 0);
            else if (w->has_minima) decode_integers(w, block, to, 8, 1);
            else decode_integers(w, block, to, 8, 0);
        }
        const linear_t part = {in->x,           in->stride, decoded,  w->bias ? w->bias + 16 * left : NULL,
                               out + 16 * left, stride,     in->rows, 16 * (right - left),
                               w->in_features};
        linear_blocks(&part, 0, right - left);
    }
}
