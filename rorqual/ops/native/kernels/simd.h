// Sixteen lanes in the compiler's vector types: one AVX-512 register, two AVX2 ones, four NEON ones.
#pragma once

#include <stdint.h>

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
// The same in memory: any address, any type beneath.
typedef float f32x16_mem __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u32x16_mem __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t u16x16_mem __attribute__((vector_size(32), aligned(2), may_alias));

// A register's worth of lanes: the compiler keeps wider vectors in memory.
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float lanes_t __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits_t __attribute__((vector_size(4 * LANES)));
typedef float lanes_mem __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits_mem __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))
#define LOG2_E 1.44269504f

INLINE float bits_to_float(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float widen(bf16 x) { return bits_to_float((uint32_t)x << 16); }

INLINE f32x16 splat(float x) { return x - (f32x16){0}; }

INLINE f32x16 load(const float *p) { return *(const f32x16_mem *)p; }

INLINE void store(float *p, f32x16 v) { *(f32x16_mem *)p = v; }

// Round to nearest even; NaN stays NaN.
#ifdef __AVX512BF16__
INLINE u16x16 to_bf16(f32x16 v) { return (u16x16)_mm512_cvtneps_pbh((__m512)v); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
INLINE __m256i rounded_bits(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v),
                  odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256 is_nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256i nan = _mm256_set1_epi32(0x7fc00000);
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(is_nan)), 16);
}

INLINE u16x16 to_bf16(f32x16 v) {
    const __m256 *halves = (const __m256 *)&v;
    // Packed within halves of a register: the four quarters are in the order 0, 2, 1, 3 then.
    const __m256i packed = _mm256_packus_epi32(rounded_bits(halves[0]), rounded_bits(halves[1]));
    return (u16x16)_mm256_permute4x64_epi64(packed, 0xd8);
}
#else
INLINE u16x16 to_bf16(f32x16 v) {
    u32x16 bits = (u32x16)v;
    const u32x16 nan = (u32x16)(v != v);
    bits += 0x7fff + ((bits >> 16) & 1);
    return __builtin_convertvector(((bits & ~nan) | (nan & 0x7fc00000)) >> 16, u16x16);
}
#endif

INLINE f32x16 from_bf16(u16x16 v) { return (f32x16)(__builtin_convertvector(v, u32x16) << 16); }

INLINE f32x16 load_bf16(const bf16 *p) { return from_bf16(*(const u16x16_mem *)p); }

INLINE void store_bf16(bf16 *p, f32x16 v) { *(u16x16_mem *)p = to_bf16(v); }

// The value that is left after rounding to bfloat16.
INLINE f32x16 through_bf16(f32x16 v) { return from_bf16(to_bf16(v)); }

// Each lane of a and b in one of 16 pairs of bfloat16, a's in the lower half.
INLINE u32x16 pair_bf16(f32x16 a, f32x16 b) {
    return __builtin_convertvector(to_bf16(a), u32x16) | (__builtin_convertvector(to_bf16(b), u32x16) << 16);
}

INLINE bf16 narrow(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A lane of b where the mask is all ones, else of a.
INLINE f32x16 blend(i32x16 mask, f32x16 b, f32x16 a) {
    return (f32x16)(((u32x16)b & (u32x16)mask) | ((u32x16)a & ~(u32x16)mask));
}

INLINE f32x16 max16(f32x16 a, f32x16 b) {
#ifdef __AVX512F__
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return blend(b > a, b, a);
#endif
}

#ifdef __clang__
#define SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define SHUFFLE(v, ...) __builtin_shuffle(v, (i32x16){__VA_ARGS__})
#endif

INLINE float sum16(f32x16 v) {
    v += SHUFFLE(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
}

// 2^x within 2 ulp for x <= 0, by a polynomial on [-0.5, 0.5]; 0 where that is far below 2^-126.
INLINE f32x16 exp2_16(f32x16 x) {
#ifdef __AVX512F__
    const f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const i32x16 vanished = x < -126.0f;
    x = blend(vanished, splat(0.0f), x);
    const f32x16 shifted = x + shift, n = shifted - shift;
#endif
    const f32x16 r = x - n;
    f32x16 p = r * 1.5403530e-4f + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
#ifdef __AVX512F__
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return blend(vanished, splat(0.0f), p * (f32x16)(((u32x16)shifted - 0x4b400000u + 127u) << 23));
#endif
}

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
