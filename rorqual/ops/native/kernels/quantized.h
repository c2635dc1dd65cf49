// linear.h's product with a weight of few bits, and the rounding of its inputs to e4m3.
//
// Each thread decodes some blocks of the weight to bfloat16, into its cache, and multiplies them from there. Codes lie
// as the bfloat16 values do in linear.h: [n / 16][k / 2][16] pairs, of two bytes (e4m3) or two halves of a byte (e2m1,
// k even in the lower one). Scales lie as [n / 16][k / width][16], UE8M0 bytes or float32.

#define DECODED_BYTES (1 << 19)

typedef uint8_t u8x16_mem __attribute__((vector_size(16), aligned(1), may_alias));

typedef struct {
    linear_t product;  // whose weight is decoded here
    const uint8_t *codes;
    const void *scales;
    int64_t width;
    int is_e2m1, is_ue8m0;
} quantized_t;

// The bits of an e4m3 where a float32 has them make a number 2^120 times too small.
INLINE f32x16 e4m3_bits(u32x16 codes) { return (f32x16)(((codes & 0x80) << 24) | ((codes & 0x7f) << 20)); }

// An e2m1 code as a number.
#ifdef __AVX512F__
INLINE f32x16 e2m1_values(u32x16 codes) {
    const f32x16 values = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return (f32x16)_mm512_permutexvar_ps((__m512i)codes, (__m512)values);  // by the lowest four bits
}
#else
INLINE f32x16 e2m1_values(u32x16 codes) {
    const u32x16 size = codes & 7, bits = size << 22;
    const f32x16 normal = (f32x16)(bits + (126u << 23)), below_one = (f32x16)(bits + (127u << 23)) - 1.0f;
    return (f32x16)((u32x16)blend((i32x16)(size < 2), below_one, normal) | ((codes & 8) << 28));
}
#endif

// In two steps, each of which is one instruction; of both at once the compiler makes sixteen.
INLINE u32x16 bytes_at(const uint8_t *p) {
    return __builtin_convertvector(__builtin_convertvector(*(const u8x16_mem *)p, u16x16), u32x16);
}

// Products with powers of two are bfloat16 as they are; others are rounded.
INLINE u32x16 pair_of(f32x16 first, f32x16 second, const int exact) {
    return exact ? ((u32x16)first >> 16) | ((u32x16)second & 0xffff0000) : pair_bf16(first, second);
}

INLINE void decode_block(const quantized_t *q, int64_t block, bf16 *to, const int is_e2m1, const int is_ue8m0) {
    const int64_t groups = q->product.in_features / q->width, pairs = q->width / 2, step = is_e2m1 ? 16 : 32;
    const uint8_t *codes = q->codes + block * groups * pairs * step;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (block * groups + g) * 16;
        const f32x16 lacking = splat(is_e2m1 ? 1.0f : 0x1p120f);
        const f32x16 scale = is_ue8m0 ? (f32x16)(bytes_at((const uint8_t *)q->scales + at) << 23) * lacking
                                      : load((const float *)q->scales + at) * lacking;
        for (int64_t p = 0; p < pairs; p++, codes += step, to += 32) {
            f32x16 first, second;
            if (is_e2m1) {
                const u32x16 both = bytes_at(codes);
                first = e2m1_values(both);
                second = e2m1_values(both >> 4);
            } else {
                const u32x16 both = __builtin_convertvector(*(const u16x16_mem *)codes, u32x16);
                first = e4m3_bits(both);
                second = e4m3_bits(both >> 8);
            }
            *(u32x16_mem *)to = pair_of(first * scale, second * scale, is_ue8m0);
        }
    }
}

static void decode_blocks(const quantized_t *q, int64_t first, int64_t last, bf16 *to) {
    for (int64_t block = first; block < last; block++, to += 16 * q->product.in_features) {
        if (q->is_e2m1 && q->is_ue8m0) decode_block(q, block, to, 1, 1);
        else if (q->is_e2m1) decode_block(q, block, to, 1, 0);
        else if (q->is_ue8m0) decode_block(q, block, to, 0, 1);
        else decode_block(q, block, to, 0, 0);
    }
}

static void quantized_share(const void *arg, int thread, int num_threads) {
    const quantized_t *q = arg;
    const int64_t blocks = q->product.out_features / 16, block_bytes = 32 * q->product.in_features;
    const int64_t last = blocks * (thread + 1) / num_threads, at_once = max64(2, DECODED_BYTES / block_bytes / 2 * 2);
    bf16 *decoded = aligned_alloc(64, (size_t)(at_once * block_bytes));
    if (decoded == NULL) abort();
    for (int64_t left = blocks * thread / num_threads, right; left < last; left = right) {
        right = min64(last, left + at_once);
        decode_blocks(q, left, right, decoded);
        linear_t part = q->product;
        part.weight = decoded;
        part.out += 16 * left;
        if (part.bias) part.bias += 16 * left;
        linear_blocks(&part, 0, right - left);
    }
    free(decoded);
}

void ISA(linear_quantized)(const bf16 *x, int64_t x_stride, const uint8_t *codes, const void *scales, const bf16 *bias,
                           bf16 *out, int64_t out_stride, int64_t rows, int64_t out_features, int64_t in_features,
                           int64_t width, int is_e2m1, int is_ue8m0, int threads) {
    if (rows == 0) return;
    const linear_t product = {x, x_stride, NULL, bias, out, out_stride, rows, out_features, in_features};
    const quantized_t q = {product, codes, scales, width, is_e2m1, is_ue8m0};
    rorqual_parallel(quantized_share, &q, threads);
}

// --- inputs

typedef struct {
    const bf16 *x;
    int64_t x_stride;
    bf16 *out;
    int64_t rows, features, width;
    int power;
} round_t;

// The nearest multiple of e4m3's step, ties to even, up to 448; NaN stays NaN.
INLINE f32x16 round_e4m3(f32x16 v) {
    v = blend(v > 448.0f, splat(448.0f), v);
    v = blend(v < -448.0f, splat(-448.0f), v);
    const u32x16 bits = (u32x16)v;
    const f32x16 normal = (f32x16)((bits + 0x7ffff + ((bits >> 20) & 1)) & 0xfff00000);
    const f32x16 small = (v + 24576.0f) - 24576.0f;  // 1.5 * 2^14, whose step is 2^-9
    const f32x16 size = (f32x16)(bits & 0x7fffffff);
    const f32x16 rounded = blend((i32x16)(size < 0x1p-6f), small, normal);
    return blend((i32x16)(v != v), v, rounded);
}

INLINE float largest_of(f32x16 v) {
    float largest = 0;
    for (int i = 0; i < 16; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
}

static void round_rows(const round_t *a, int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++)
        for (int64_t start = 0; start < a->features; start += a->width) {
            const bf16 *x = a->x + m * a->x_stride + start;
            bf16 *out = a->out + m * a->features + start;
            f32x16 size = splat(0.0f);
            for (int64_t k = 0; k < a->width; k += 16) {
                const f32x16 each = (f32x16)((u32x16)load_bf16(x + k) & 0x7fffffff);
                size = blend((i32x16)(each > size), each, size);  // NaN is never larger
            }
            float amax = largest_of(size);
            amax = amax > 3.4028235e38f ? 3.4028235e38f : amax;  // infinity counts as the largest number
            amax = amax < 1e-4f ? 1e-4f : amax;
            float scale = amax / 448.0f, factor = 448.0f / amax;
            if (a->power) {
                uint32_t bits;
                __builtin_memcpy(&bits, &scale, sizeof bits);
                const uint32_t exponent = ((bits - 1) >> 23) + 1;
                scale = bits_to_float(exponent << 23);
                factor = bits_to_float((254 - exponent) << 23);
            }
            for (int64_t k = 0; k < a->width; k += 16)
                store_bf16(out + k, round_e4m3(load_bf16(x + k) * factor) * scale);
        }
}

static void round_share(const void *arg, int thread, int num_threads) {
    const round_t *a = arg;
    round_rows(a, a->rows * thread / num_threads, a->rows * (thread + 1) / num_threads);
}

void ISA(round_to_e4m3)(const bf16 *x, int64_t x_stride, bf16 *out, int64_t rows, int64_t features, int64_t width,
                        int power, int threads) {
    const round_t a = {x, x_stride, out, rows, features, width, power};
    rorqual_parallel(round_share, &a, threads);
}
