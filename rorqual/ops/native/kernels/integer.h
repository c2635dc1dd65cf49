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
#elif defined(__AVX2__)
    const __m256i *a8 = (const __m256i *)&x, *b8 = (const __m256i *)&y;
    const __m256i eight = _mm256_max_epi32(_mm256_max_epi32(a8[0], a8[1]), _mm256_max_epi32(b8[0], b8[1]));
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
    return bits_to_float((uint32_t)_mm_cvtsi128_si32(most));
#else
    i32x16 most = (x & (x > y)) | (y & ~(x > y));
    int32_t largest = 0;
    for (int i = 0; i < 16; i++) largest = most[i] > largest ? most[i] : largest;
    return bits_to_float((uint32_t)largest);
#endif
}

// Rounds 16 values of at most 127 to the nearest integers, ties to even. Returns their sum.
INLINE int32_t round_to_int8(f32x16 v, int8_t *q) {
#ifdef __AVX2__
#ifdef __AVX512F__
    const __m128i rounded = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)v));
#else
    const __m256 *halves = (const __m256 *)&v;
    const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(halves[0]), _mm256_cvtps_epi32(halves[1]));
    const __m256i pairs = _mm256_permute4x64_epi64(mixed, 0xd8);
    const __m128i rounded = _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
#endif
    _mm_storeu_si128((__m128i *)q, rounded);
    // The only sums of bytes that one instruction makes are of unsigned ones: add 128 to each of the sixteen.
    const __m128i sums = _mm_sad_epu8(_mm_xor_si128(rounded, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
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

// Not inlined: what rounding takes in registers is missing in the loops above otherwise.
static __attribute__((noinline)) void finish_integer_rows(const target_t *to, int64_t m, int rows,
                                                          const float (*sums)[16]) {
    for (int i = 0; i < rows; i++) finish_integers(to, m + i, load(sums[i]));
}

// --- dot products of bytes

// The lanes that one instruction handles. `dot4` adds the products of four codes and four inputs in each lane: as 32
// bits, or as two sums of 16 bits (HALF_BYTES), which hold the products of half a byte of 32 columns and no more;
// whole bytes are multiplied in halves then.
#if defined(__AVX512F__)
#define DOT_LANES 16
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
INLINE ints_t dot4(ints_t sum, codes_t codes, int32_t inputs) {
    return (ints_t)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(inputs));
}
#else
#define HALF_BYTES 1
INLINE ints_t dot4(ints_t sum, codes_t codes, int32_t inputs) {
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(inputs));
    return (ints_t)_mm512_add_epi16((__m512i)sum, pairs);
}
INLINE ints_t join_pairs(ints_t sum, const int times) {
    return (ints_t)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16((int16_t)times));
}
#endif
#elif defined(__AVX2__)
#define DOT_LANES 8
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
INLINE ints_t dot4(ints_t sum, codes_t codes, int32_t inputs) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(inputs));
    return (ints_t)_mm256_add_epi16((__m256i)sum, pairs);
}
INLINE ints_t join_pairs(ints_t sum, const int times) {
    return (ints_t)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16((int16_t)times));
}
#else
#define DOT_LANES 16
#define HALF_BYTES 0
typedef u32x16 codes_t;
typedef i32x16 ints_t;
typedef f32x16 floats_t;
INLINE codes_t load_codes(const uint8_t *p) { return *(const u32x16_mem *)p; }
INLINE ints_t splat_ints(int32_t x) { return x - (ints_t){0}; }
INLINE floats_t to_floats(ints_t x) { return __builtin_convertvector(x, floats_t); }
INLINE floats_t multiply_add(floats_t a, floats_t b, floats_t c) { return a * b + c; }
INLINE floats_t load_lanes(const uint8_t *p, int lane, int64_t wide) { return load_factors(p, wide); }
INLINE ints_t dot4(ints_t sum, codes_t codes, int32_t inputs) {
    int8_t q[4];
    __builtin_memcpy(q, &inputs, 4);
    for (int i = 0; i < 4; i++) sum += (ints_t)((codes >> (8 * i)) & 255) * (int32_t)q[i];
    return sum;
}
#endif

// Four columns of some rows into the sums of each row and block.
INLINE void dot_rows(ints_t (*dots)[8], const codes_t *codes, const int8_t *q, int64_t stride, const int rows,
                     const int blocks) {
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        int32_t inputs;
        __builtin_memcpy(&inputs, q + i * stride, sizeof inputs);
#pragma GCC unroll 2
        for (int b = 0; b < blocks; b++) dots[b][i] = dot4(dots[b][i], codes[b], inputs);
#if HALF_BYTES
        __asm__("" : "+x"(dots[0][i]));  // one after the other: as a tree, sums take more registers than there are
#endif
    }
}

// The dot products of one group of one or two blocks, at p and so many bytes behind, with some rows; `start` is what
// they begin with.
INLINE void dot_group(const uint8_t *p, int64_t apart_bytes, const int8_t *q, int64_t stride, const ints_t *start,
                      ints_t (*dots)[8], const int rows, const int blocks, const int bits, const int columns) {
    const codes_t low = (codes_t)splat_ints(0x0f0f0f0f);
    ints_t highs[1][8];  // of the upper halves of bytes
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        highs[0][i] = splat_ints(0);
#pragma GCC unroll 2
        for (int b = 0; b < blocks; b++) dots[b][i] = HALF_BYTES ? splat_ints(0) : start[i];
    }
#pragma GCC unroll 8
    for (int j = 0; j < bits * columns / 32; j++) {
        codes_t codes[2], lows[2], uppers[2];
#pragma GCC unroll 2
        for (int b = 0; b < blocks; b++) {
            codes[b] = load_codes(p + b * apart_bytes + 64 * j);
            lows[b] = codes[b] & low;
            uppers[b] = (codes[b] >> 4) & low;
        }
        if (bits == 4) {
            dot_rows(dots, lows, q + 8 * j, stride, rows, blocks);
            dot_rows(dots, uppers, q + 8 * j + 4, stride, rows, blocks);
        } else if (HALF_BYTES) {
            dot_rows(dots, lows, q + 4 * j, stride, rows, blocks);
            dot_rows(highs, uppers, q + 4 * j, stride, rows, blocks);
        } else {
            dot_rows(dots, codes, q + 4 * j, stride, rows, blocks);
        }
    }
#if HALF_BYTES
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        dots[0][i] = start[i] + join_pairs(dots[0][i], 1);
        if (bits == 8) dots[0][i] += join_pairs(highs[0][i], 16);
    }
#endif
}

#define MOST_AHEAD (32 << 10)

// Adds what minima of one group make of some rows, whose sums are given, to theirs.
INLINE void add_minima(floats_t *sums, const uint8_t *p, const float *of_rows, const int rows, int lane, int64_t wide) {
    const floats_t least = load_lanes(p, lane, wide);
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) sums[i] = multiply_add(least, of_rows[i] - (floats_t){0}, sums[i]);
}

// Rows whose sums fit in the registers, by how many blocks.
#if defined(__AVX512VNNI__) && !defined(USE_AMX)
#define MOST_ROWS 4
#define MOST_BLOCKS 2
#elif defined(__AVX512F__)
#define MOST_ROWS 8
#define MOST_BLOCKS 1
#elif defined(__AVX2__)
#define MOST_ROWS 4
#define MOST_BLOCKS 1
#else
#define MOST_ROWS 1
#define MOST_BLOCKS 1
#endif

INLINE int rows_of_tile(int64_t left) {
    return MOST_ROWS >= 8 && left >= 8 ? 8 : MOST_ROWS >= 4 && left >= 4 ? 4 : MOST_ROWS >= 2 && left >= 2 ? 2 : 1;
}

// What each group of an input is multiplied with, of rows m .. last in the tiles in which they are computed:
// [groups][2] [rows of the tile], scales and sums. One address is enough for all of them, where rows of their own would
// take more than there are registers for.
static const float *tile_factors(const input_t *in, int64_t steps, int64_t m, int64_t last) {
    float *factors = thread_scratch(SCRATCH_ROWS, (size_t)((last - m) * 2 * steps) * sizeof(float)), *to = factors;
    for (int rows; m < last; m += rows) {
        rows = rows_of_tile(last - m);
        const float *scales = in->scales + m * steps, *sums = in->sums + m * steps;
        for (int64_t g = 0; g < steps; g++, to += 2 * rows)
            for (int i = 0; i < rows; i++) {
                to[i] = scales[i * steps + g];
                to[rows + i] = sums[i * steps + g];
            }
    }
    return factors;
}

// What is read once is kept out of the outer caches: there lies what Python needs between two steps.
INLINE void fetch_codes(const uint8_t *p, const int once) {
    if (once) __builtin_prefetch(p, 0, 0);
    else __builtin_prefetch(p);
}

// Some rows by the block at `data` and, of two `blocks`, the next one, one sum for each row and lane. Codes are
// unpacked once for all rows, and inputs broadcast once for both blocks.
INLINE void integer_rows(const operand_t *w, const input_t *in, const float *factors, int64_t m, const int rows,
                         const uint8_t *data, const target_t *to, const int blocks, const int bits, const int group,
                         const int minima) {
    const int64_t steps = w->in_features / INPUT_GROUP, stride = w->in_features, apart_bytes = steps * w->block_bytes;
    const layout_t layout = layout_of(w);
    const int apart = HALF_BYTES && rows >= 4;  // minima, when all else is done: there are no registers for both
    // What comes behind these blocks is fetched while they are multiplied, by the first rows in turns: each has more to
    // compute for a byte than memory takes for it.
    const int64_t ahead = min64(blocks * apart_bytes, MOST_AHEAD), turn = m / MOST_ROWS;
    const int64_t turns = in->rows >= 4 * MOST_ROWS ? 4 : in->rows >= 2 * MOST_ROWS ? 2 : 1;
    float answers[2][8][16] __attribute__((aligned(64)));
#pragma GCC unroll 2
    for (int lane = 0; lane < 16; lane += DOT_LANES) {
        floats_t sums[2][8], others[2][8];
#pragma GCC unroll 2
        for (int b = 0; b < blocks; b++)
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) sums[b][i] = others[b][i] = (floats_t){0};
        const uint8_t *p = data;
        const int8_t *q = in->q + m * stride;
        const float *f = factors;
        for (int64_t g = 0; g < steps; g++, p += w->block_bytes, q += INPUT_GROUP, f += 2 * rows) {
            if (lane == 0 && turn < turns && (g & (turns - 1)) == turn) {
#pragma GCC unroll 2
                for (int b = 0; b < blocks; b++)
                    for (int64_t line = 0; line < layout.code_bytes + 64; line += 64)
                        fetch_codes(p + b * apart_bytes + ahead + line, rows == 1);
            }
#pragma GCC unroll 2
            for (int half = 0; half < 32 / group; half++) {
                ints_t start[8], dots[2][8];
#pragma GCC unroll 8
                for (int i = 0; i < rows; i++) {
                    const int32_t *s = in->int_sums + (m + i) * 2 * steps + 2 * g;
                    start[i] = minima ? splat_ints(0)
                                      : splat_ints(-(int32_t)w->offset * (group == 32 ? s[0] + s[1] : s[half]));
                }
                dot_group(p + half * 32 * bits + 4 * lane, apart_bytes, q + 16 * half, stride, start, dots, rows,
                          blocks, bits, group);
#pragma GCC unroll 2
                for (int b = 0; b < blocks; b++) {
                    const floats_t scales = load_lanes(
                        p + b * apart_bytes + layout.code_bytes + half * layout.factor_bytes, lane, w->wide_scales);
#pragma GCC unroll 8
                    for (int i = 0; i < rows; i++)
                        sums[b][i] = multiply_add(scales * f[i], to_floats(dots[b][i]), sums[b][i]);
                }
            }
            if (minima && !apart)
#pragma GCC unroll 2
                for (int b = 0; b < blocks; b++)
                    add_minima(others[b], p + b * apart_bytes + layout.minima, f + rows, rows, lane, w->wide_scales);
        }
        if (minima && apart) {
            p = data;
            f = factors;
            for (int64_t g = 0; g < steps; g++, p += w->block_bytes, f += 2 * rows)
#pragma GCC unroll 2
                for (int b = 0; b < blocks; b++)
                    add_minima(others[b], p + b * apart_bytes + layout.minima, f + rows, rows, lane, w->wide_scales);
        }
#pragma GCC unroll 2
        for (int b = 0; b < blocks; b++)
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                const floats_t whole = minima ? sums[b][i] + others[b][i] : sums[b][i];
                __builtin_memcpy(answers[b][i] + lane, &whole, sizeof whole);
            }
    }
    for (int b = 0; b < blocks; b++) {
        const target_t at = {to->out + 16 * b, to->stride, to->bias ? to->bias + 16 * b : NULL};
        finish_integer_rows(&at, m, rows, answers[b]);
    }
}

INLINE void integer_all_rows(const operand_t *w, const input_t *in, const float *factors, int64_t m, int64_t last,
                             const uint8_t *data, const target_t *to, const int blocks, const int bits, const int group,
                             const int minima) {
    const int64_t each = w->in_features / INPUT_GROUP * 2;
    for (int rows; m < last; m += rows, factors += rows * each) {
        rows = rows_of_tile(last - m);
        if (MOST_ROWS >= 8 && rows == 8) integer_rows(w, in, factors, m, 8, data, to, blocks, bits, group, minima);
        else if (MOST_ROWS >= 4 && rows == 4) integer_rows(w, in, factors, m, 4, data, to, blocks, bits, group, minima);
        else if (MOST_ROWS >= 2 && rows == 2) integer_rows(w, in, factors, m, 2, data, to, blocks, bits, group, minima);
        else integer_rows(w, in, factors, m, 1, data, to, blocks, bits, group, minima);
    }
}

INLINE void integer_any(const operand_t *w, const input_t *in, const float *factors, int64_t m, int64_t last,
                        const uint8_t *data, const target_t *to, const int blocks) {
    if (w->bits == 4 && w->has_minima) integer_all_rows(w, in, factors, m, last, data, to, blocks, 4, 32, 1);
    else if (w->bits == 4) integer_all_rows(w, in, factors, m, last, data, to, blocks, 4, 32, 0);
    else if (w->has_minima) integer_all_rows(w, in, factors, m, last, data, to, blocks, 8, 32, 1);
    else if (w->group == 32) integer_all_rows(w, in, factors, m, last, data, to, blocks, 8, 32, 0);
    else integer_all_rows(w, in, factors, m, last, data, to, blocks, 8, 16, 0);
}

// Rows m .. last by one block, or by two that lie one after the other. Not inlined: each is a large function.
static __attribute__((noinline)) void integer_block(const operand_t *w, const input_t *in, const float *factors,
                                                    int64_t m, int64_t last, const uint8_t *data, const target_t *to,
                                                    int64_t blocks) {
    if (MOST_BLOCKS >= 2 && blocks == 2) integer_any(w, in, factors, m, last, data, to, 2);
    else integer_any(w, in, factors, m, last, data, to, 1);
}

#ifdef USE_AMX
#include "integer_tiles.h"
#endif

#define ROWS_AT_ONCE 32

// out[:, 16 first .. 16 last] of an operand of kind OPERAND_DYNAMIC.
static void integer_blocks(const operand_t *w, const input_t *in, bf16 *out, int64_t stride, int64_t first,
                           int64_t last) {
#ifdef USE_AMX
    if (in->rows >= (w->group == 32 ? TILE_ROWS_32 : TILE_ROWS_16)) {
        const target_t to = {out, stride, w->bias};
        integer_tiles(w, in, &to, first, last);
        return;
    }
#endif
    // Few rows at a time: two blocks fill a cache line of the answers, which has to be there for both.
    for (int64_t m = 0; m < in->rows; m += ROWS_AT_ONCE) {
        const int64_t stop = min64(m + ROWS_AT_ONCE, in->rows);
        const float *factors = tile_factors(in, w->in_features / INPUT_GROUP, m, stop);
        for (int64_t block = first, blocks; block < last; block += blocks) {
            const target_t to = {out + 16 * block, stride, w->bias ? w->bias + 16 * block : NULL};
            blocks = min64(MOST_BLOCKS, last - block);
            integer_block(w, in, factors, m, stop, block_at(w, block), &to, blocks);
        }
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
