// GGML's quantised blocks taken apart, as rorqual/quantization/gguf_blocks.py does it: a code per byte in the order of
// the columns, and scales and minima.
//
//     value = (code - offset) * scale + minimum
//
// Kinds have GGML's numbers. A block is 32 values, of the K formats 256.

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };
#define BLOCK_VALUES 256

typedef struct {
    int64_t values, bytes, group;
    int32_t offset, bits;
    int wide, has_minima;  // scales and minima are float32 products; in a block they are float16 otherwise
} block_format_t;

INLINE block_format_t block_format(int64_t kind) {
    switch (kind) {
        case Q4_0:
            return (block_format_t){32, 18, 32, 8, 4, 0, 0};
        case Q4_1:
            return (block_format_t){32, 20, 32, 0, 4, 0, 1};
        case Q5_0:
            return (block_format_t){32, 22, 32, 16, 8, 0, 0};
        case Q5_1:
            return (block_format_t){32, 24, 32, 0, 8, 0, 1};
        case Q8_0:
            return (block_format_t){32, 34, 32, 128, 8, 0, 0};
        case Q4_K:
            return (block_format_t){256, 144, 32, 0, 4, 1, 1};
        case Q5_K:
            return (block_format_t){256, 176, 32, 0, 8, 1, 1};
        default:
            return (block_format_t){256, 210, 16, 32, 8, 1, 0};
    }
}

INLINE float half_at(const uint8_t *p) {
    uint16_t half;
    __builtin_memcpy(&half, p, 2);
    return half_to_float((u16x16){half})[0];
}

// Half-bytes: first every low one, then every high one.
INLINE void halves(const uint8_t *bytes, int64_t count, uint8_t *codes) {
    for (int64_t j = 0; j < count; j++) {
        codes[j] = bytes[j] & 15;
        codes[count + j] = bytes[j] >> 4;
    }
}

// The same two to a byte, the even value in the lower half. `count` is a multiple of 16.
INLINE void paired_halves(const uint8_t *bytes, int64_t count, uint8_t *pairs) {
    typedef uint16_t u16x8_mem __attribute__((vector_size(16), aligned(1), may_alias));
    typedef uint8_t u8x8_mem __attribute__((vector_size(8), aligned(1), may_alias));
    for (int64_t j = 0; j < count; j += 16) {
        const u16x8_mem both = *(const u16x8_mem *)(bytes + j), low = both & 0x0f0f, high = both >> 4 & 0x0f0f;
        *(u8x8_mem *)(pairs + j / 2) = __builtin_convertvector(low | low >> 4, u8x8_mem);
        *(u8x8_mem *)(pairs + (count + j) / 2) = __builtin_convertvector(high | high >> 4, u8x8_mem);
    }
}

// A bit for each of 32 values, in their order.
INLINE void add_fifth_bits(const uint8_t *bits, uint8_t *codes) {
    uint32_t word;
    __builtin_memcpy(&word, bits, sizeof word);
    for (int j = 0; j < 32; j++) codes[j] |= (uint8_t)((word >> j & 1) << 4);
}

INLINE void block_codes(int64_t kind, const uint8_t *b, uint8_t *codes) {
    switch (kind) {
        case Q4_0:
            halves(b + 2, 16, codes);
            break;
        case Q4_1:
            halves(b + 4, 16, codes);
            break;
        case Q5_0:
            halves(b + 6, 16, codes);
            add_fifth_bits(b + 2, codes);
            break;
        case Q5_1:
            halves(b + 8, 16, codes);
            add_fifth_bits(b + 4, codes);
            break;
        case Q8_0:  // signed there; the top bit is turned
            for (int j = 0; j < 32; j++) codes[j] = b[2 + j] ^ 0x80;
            break;
        case Q4_K:
            for (int i = 0; i < 4; i++) halves(b + 16 + 32 * i, 32, codes + 64 * i);
            break;
        case Q5_K:  // bit i of fifth byte j is of run i, value j
            for (int i = 0; i < 4; i++) halves(b + 48 + 32 * i, 32, codes + 64 * i);
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 32; j++) codes[32 * i + j] |= (uint8_t)((b[16 + j] >> i & 1) << 4);
            break;
        default:  // bits 2 i and 2 i + 1 of byte j are of run i, value j
            for (int half = 0; half < 2; half++) {
                uint8_t *run = codes + 128 * half;
                halves(b + 64 * half, 64, run);
                for (int i = 0; i < 4; i++)
                    for (int j = 0; j < 32; j++)
                        run[32 * i + j] |= (uint8_t)((b[128 + 32 * half + j] >> 2 * i & 3) << 4);
            }
    }
}

// Of a format of 4 bits, two codes to a byte.
INLINE void block_pairs(int64_t kind, const uint8_t *b, uint8_t *pairs) {
    switch (kind) {
        case Q4_0:
            paired_halves(b + 2, 16, pairs);
            break;
        case Q4_1:
            paired_halves(b + 4, 16, pairs);
            break;
        default:  // Q4_K
            for (int i = 0; i < 4; i++) paired_halves(b + 16 + 32 * i, 32, pairs + 32 * i);
    }
}

INLINE void block_factors(int64_t kind, const uint8_t *b, float *scales, float *minima) {
    const float unit = half_at(b + (kind == Q6_K ? 208 : 0)), minimum_unit = half_at(b + 2);
    if (kind == Q6_K) {
        for (int g = 0; g < 16; g++) scales[g] = unit * (float)(int8_t)b[192 + g];
    } else if (kind == Q4_K || kind == Q5_K) {
        // Twelve bytes: four with the low 6 bits of scales 0-3, four of minima 0-3, and four with the low 4 bits of
        // scales and minima 4-7, whose upper 2 bits are the top bits of the first eight. GGML subtracts its minima.
        const uint8_t *s = b + 4;
        for (int g = 0; g < 4; g++) {
            scales[g] = unit * (float)(s[g] & 63);
            minima[g] = -(minimum_unit * (float)(s[4 + g] & 63));
            scales[4 + g] = unit * (float)((s[8 + g] & 15) | (s[g] >> 2 & 0x30));
            minima[4 + g] = -(minimum_unit * (float)(s[8 + g] >> 4 | (s[4 + g] >> 2 & 0x30)));
        }
    } else {
        scales[0] = unit;
        minima[0] = minimum_unit;
    }
}

// --- a matrix as `IntegerWeight` keeps it

typedef struct {
    int64_t kind, count;
    const uint8_t *blocks;
    uint8_t *codes, *scales, *minima;  // codes of 4 bits two to a byte, the even column in the lower half
} split_t;

INLINE void split_kind(const split_t *a, int64_t kind, int64_t first, int64_t last) {
    const block_format_t f = block_format(kind);
    const int64_t groups = f.values / f.group, factor_bytes = groups * (f.wide ? 4 : 2);
    for (int64_t i = first; i < last; i++) {
        const uint8_t *block = a->blocks + i * f.bytes;
        uint8_t *to = a->codes + i * f.values * f.bits / 8;
        if (f.bits == 4) block_pairs(kind, block, to);
        else block_codes(kind, block, to);
        if (f.wide) {
            float scales[16], minima[16];
            block_factors(kind, block, scales, minima);
            __builtin_memcpy(a->scales + i * factor_bytes, scales, (size_t)factor_bytes);
            if (f.has_minima) __builtin_memcpy(a->minima + i * factor_bytes, minima, (size_t)factor_bytes);
        } else {
            __builtin_memcpy(a->scales + 2 * i, block, 2);
            if (f.has_minima) __builtin_memcpy(a->minima + 2 * i, block + 2, 2);
        }
    }
}

static void split_some(const void *arg, int thread, int num_threads) {
    const split_t *a = arg;
    const int64_t first = a->count * thread / num_threads, last = a->count * (thread + 1) / num_threads;
    switch (a->kind) {  // a loop for each, so that the compiler knows all sizes
        case Q4_0:
            split_kind(a, Q4_0, first, last);
            break;
        case Q4_1:
            split_kind(a, Q4_1, first, last);
            break;
        case Q5_0:
            split_kind(a, Q5_0, first, last);
            break;
        case Q5_1:
            split_kind(a, Q5_1, first, last);
            break;
        case Q8_0:
            split_kind(a, Q8_0, first, last);
            break;
        case Q4_K:
            split_kind(a, Q4_K, first, last);
            break;
        case Q5_K:
            split_kind(a, Q5_K, first, last);
            break;
        default:
            split_kind(a, Q6_K, first, last);
    }
}

int ISA(split_blocks)(int64_t kind, const uint8_t *blocks, int64_t count, uint8_t *codes, uint8_t *scales,
                      uint8_t *minima, int threads) {
    const split_t a = {kind, count, blocks, codes, scales, minima};
    rorqual_parallel(split_some, &a, threads);
    return 0;
}
