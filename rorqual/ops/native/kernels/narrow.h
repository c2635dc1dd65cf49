// Where min_p, top_k and top_p cut the order of a row's tokens: to the bit what the reference says.
//
// Nothing is sorted. Logits fall into buckets, each with the number of its tokens or the sum of their masses; the
// bucket that holds the cut is then taken apart, by the bits of its logits, until one value is left. Masses are
// integers, so that threads may add them up in any order.

#define BUCKETS 1024
#define REST BUCKETS  // tokens below the buckets
#define ROOM (BUCKETS + STEP)
#define STEP (2 * LANES)
#define WHOLE_STEP ((uint32_t)((1ull << STEP) - 1))
#define NEGLIGIBLE (-32.0)   // exp of this is less than half a mass
#define TOP_K_RANGE 8.0f     // how far below the best logit a top_k's cut is looked for first
#define PART_FROM (1 << 14)  // tokens that are worth waking a thread for
typedef double f64_t __attribute__((vector_size(4 * LANES)));
typedef uint64_t u64_t __attribute__((vector_size(4 * LANES)));
typedef uint16_t bf16_lanes_mem __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

// --- lanes

#if defined(__AVX512F__)
INLINE uint32_t at_least(lanes_t v, float least) {
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(least), _CMP_GE_OQ);
}
INLINE uint32_t equal_to(bits_t v, uint32_t x) {
    return _mm512_cmpeq_epi32_mask((__m512i)v, _mm512_set1_epi32((int)x));
}
INLINE bits_t at_most(bits_t v, uint32_t most) {
    return (bits_t)_mm512_min_epu32((__m512i)v, _mm512_set1_epi32((int)most));
}
INLINE f64_t half_of(lanes_t v, const int upper) {
    return (f64_t)_mm512_cvtps_pd(upper ? _mm512_extractf32x8_ps((__m512)v, 1) : _mm512_castps512_ps256((__m512)v));
}
INLINE f64_t f64_max(f64_t x, double least) { return (f64_t)_mm512_max_pd((__m512d)x, _mm512_set1_pd(least)); }
INLINE f64_t floor_onto(f64_t x, double base) {
    return (f64_t)_mm512_add_round_pd((__m512d)x, _mm512_set1_pd(base), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
#elif defined(__AVX2__)
INLINE uint32_t at_least(lanes_t v, float least) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(least), _CMP_GE_OQ));
}
INLINE uint32_t equal_to(bits_t v, uint32_t x) {
    return (uint32_t)_mm256_movemask_ps((__m256)_mm256_cmpeq_epi32((__m256i)v, _mm256_set1_epi32((int)x)));
}
INLINE bits_t at_most(bits_t v, uint32_t most) {
    return (bits_t)_mm256_min_epu32((__m256i)v, _mm256_set1_epi32((int)most));
}
INLINE f64_t half_of(lanes_t v, const int upper) {
    return (f64_t)_mm256_cvtps_pd(upper ? _mm256_extractf128_ps((__m256)v, 1) : _mm256_castps256_ps128((__m256)v));
}
INLINE f64_t f64_max(f64_t x, double least) { return (f64_t)_mm256_max_pd((__m256d)x, _mm256_set1_pd(least)); }
INLINE f64_t floor_onto(f64_t x, double base) { return (f64_t)_mm256_floor_pd((__m256d)x) + base; }
#else
INLINE uint32_t mask_of(bits_t truth) {
    uint32_t mask = 0;
    for (int lane = 0; lane < LANES; lane++) mask |= (truth[lane] & 1) << lane;
    return mask;
}
INLINE uint32_t at_least(lanes_t v, float least) { return mask_of((bits_t)(v >= least)); }
INLINE uint32_t equal_to(bits_t v, uint32_t x) { return mask_of((bits_t)(v == x)); }
INLINE bits_t at_most(bits_t v, uint32_t most) {
    const bits_t above = (bits_t)(v > most);
    return (v & ~above) | (above & most);
}
INLINE f64_t half_of(lanes_t v, const int upper) {
    f64_t half;
    for (int lane = 0; lane < LANES / 2; lane++) half[lane] = v[lane + upper * LANES / 2];
    return half;
}
INLINE f64_t f64_max(f64_t x, double least) {
    const u64_t above = (u64_t)(x > least);
    return (f64_t)(((u64_t)x & above) | ((u64_t)(least - (f64_t){0}) & ~above));
}
INLINE f64_t floor_onto(f64_t x, double base) {
    const f64_t nearest = (x + 0x1.8p52) - 0x1.8p52;
    return nearest - (f64_t)((u64_t)(nearest > x) & (u64_t)(1.0 - (f64_t){0})) + base;
}
#endif

// From i on; -inf behind the end.
INLINE lanes_t lanes_at(const void *values, int64_t i, int64_t end, const int is_wide) {
    if (i + LANES <= end) {
        if (is_wide) return *(const lanes_mem *)((const float *)values + i);
        return (lanes_t)(__builtin_convertvector(*(const bf16_lanes_mem *)((const bf16 *)values + i), bits_t) << 16);
    }
    lanes_t v = -__builtin_inff() - (lanes_t){0};
    for (int64_t lane = 0; lane < end - i; lane++) v[lane] = logit_at(values, i + lane, is_wide);
    return v;
}

// Masks of STEP tokens.
INLINE uint32_t first_of_step(int64_t count) { return count >= STEP ? WHOLE_STEP : (1u << count) - 1; }

INLINE uint32_t pair_at_least(const lanes_t v[2], float least) {
    return at_least(v[0], least) | at_least(v[1], least) << LANES;
}

// The order of floats as that of unsigned integers. -0.0 is 0.0.
INLINE uint32_t key_of(float x) {
    uint32_t bits;
    x += 0.0f;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

INLINE bits_t keys_of(lanes_t v) {
    const bits_t bits = (bits_t)(v + 0.0f), negative = -(bits >> 31);
    return bits ^ (negative | 0x80000000u);
}

INLINE float value_of(uint32_t key) { return bits_to_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// --- masses

// A product that the compiler will not fuse with the sum around it, which would round once instead of twice.
INLINE f64_t rounded(f64_t product) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(product));
#elif defined(__x86_64__)
    __asm__("" : "+x"(product));
#elif defined(__aarch64__)
    __asm__("" : "+w"(product));
#else
    __asm__("" : "+m"(product));
#endif
    return product;
}

// The reference's `masses`, operation by operation; several vectors at a time, since each operation waits for the last.
INLINE void masses_of(const lanes_t v[2], double temperature, double highest, u64_t masses[4]) {
    static const double terms[] = {1. / 362880, 1. / 40320, 1. / 5040, 1. / 720, 1. / 120, 1. / 24, 1. / 6, .5, 1, 1};
    f64_t x[4], onto[4], whole[4], value[4];
#define EACH for (int j = 0; j < 4; j++)
    EACH x[j] = half_of(v[j / 2], j % 2) / temperature - highest;
    EACH x[j] = f64_max(x[j], -40.0);
    EACH onto[j] = floor_onto(rounded(x[j] * 1.4426950408889634) + 0.5, 0x1.8p52);
    EACH whole[j] = onto[j] - 0x1.8p52;
    EACH x[j] = x[j] - rounded(whole[j] * 0.693147180369123816490);
    EACH x[j] = x[j] - rounded(whole[j] * 1.90821492927058770002e-10);
    EACH value[j] = 1. / 3628800 - (f64_t){0};
#pragma GCC unroll 10
    for (int k = 0; k < 10; k++) EACH value[j] = rounded(value[j] * x[j]) + terms[k];
    // Beside 1.5 * 2^52, a small integer is the lowest bits; here it becomes the exponent.
    EACH value[j] = rounded(value[j] * (f64_t)(((u64_t)onto[j] << 52) + ((44ull + 1023) << 52)));
    EACH masses[j] = (u64_t)floor_onto(value[j] + 0.5, 0x1p52) - 0x4330000000000000ull;
#undef EACH
}

INLINE uint64_t mass_of(float x, double temperature, double highest) {
    const lanes_t v[2] = {x - (lanes_t){0}, x - (lanes_t){0}};
    u64_t masses[4];
    masses_of(v, temperature, highest, masses);
    return masses[0][0];
}

// --- buckets

// Tokens of which some are counted: those that are `least` or more.
typedef struct {
    const void *values;   // float32 or bfloat16
    const uint32_t *ids;  // NULL: their places
    int64_t size;
    float least;
    double temperature, highest;  // highest: divided by the temperature
    // Buckets of equal width from `low` up to `high`, or of 2^shift neighbouring keys down from `high_key`.
    float low, high, scale;
    uint32_t high_key;
    int shift;
} tokens_t;

INLINE bits_t buckets_of(const tokens_t *t, lanes_t v, const int by_key) {
    if (by_key) return (t->high_key - keys_of(v)) >> t->shift;
    typedef int32_t integers_t __attribute__((vector_size(4 * LANES)));
    return at_most((bits_t) __builtin_convertvector((t->high - v) * t->scale, integers_t), BUCKETS - 1);
}

// Where lanes outside the buckets add: behind them, each to a place of its own, so that no sum waits for another.
INLINE bits_t outside_places(int j) {
    bits_t places;
    for (int lane = 0; lane < LANES; lane++) places[lane] = (uint32_t)(BUCKETS + j * LANES + lane);
    return places;
}

// Tokens on their way to their buckets. They are added one step late, while the next one's masses are computed.
typedef struct {
    uint64_t weights[STEP];
    uint32_t places[STEP], inside;
} __attribute__((aligned(64))) counted_t;

INLINE void add_step(uint64_t *buckets, const counted_t *step, const int by_mass, const int by_key) {
    uint32_t inside = step->inside;
    if (by_key ? inside == WHOLE_STEP : __builtin_popcount(inside) > STEP / 4) {
#pragma GCC unroll 32
        for (int lane = 0; lane < STEP; lane++) buckets[step->places[lane]] += by_mass ? step->weights[lane] : 1;
    } else {
        for (; inside; inside &= inside - 1) {
            const int lane = __builtin_ctz(inside);
            buckets[step->places[lane]] += by_mass ? step->weights[lane] : 1;
        }
    }
}

// Adds tokens from `begin` to `end` to their buckets; returns what all of them weigh, inside the buckets or not.
INLINE uint64_t tally(const tokens_t *t, int64_t begin, int64_t end, uint64_t *buckets, const int is_wide,
                      const int by_mass, const int by_key) {
    u64_t sums = {0};
    uint64_t total = 0;
    counted_t steps[2] = {{.inside = 0}, {.inside = 0}};
    int turn = 0;
    for (int64_t i = begin; i < end; i += STEP) {
        lanes_t v[2] = {lanes_at(t->values, i, end, is_wide), lanes_at(t->values, i + LANES, end, is_wide)};
        const uint32_t counted = pair_at_least(v, t->least) & first_of_step(end - i);
        if (!counted) continue;
        counted_t *step = &steps[turn];
        if (by_mass) {
            for (int j = 0; j < 2; j++) {
                const bits_t there = (bits_t)(v[j] >= t->least);
                v[j] = (lanes_t)(((bits_t)v[j] & there) | (~there & 0xff800000u));  // -inf has no mass
            }
            u64_t *masses = (u64_t *)step->weights;
            masses_of(v, t->temperature, t->highest, masses);
            sums += (masses[0] + masses[1]) + (masses[2] + masses[3]);
        } else total += (uint64_t)__builtin_popcount(counted);
        const uint32_t inside = by_key ? counted : counted & pair_at_least(v, t->low);
        if (!inside) continue;
        for (int j = 0; j < 2; j++) {
            bits_t place = buckets_of(t, v[j], by_key);
            if (!by_key) {
                const bits_t there = (bits_t)(v[j] >= t->low);
                place = (place & there) | (outside_places(j) & ~there);
            }
            *(bits_t *)(step->places + j * LANES) = place;
        }
        step->inside = inside;
        turn ^= 1;
        add_step(buckets, &steps[turn], by_mass, by_key);
    }
    add_step(buckets, &steps[turn ^ 1], by_mass, by_key);
    for (int lane = 0; lane < LANES / 2; lane++) total += sums[lane];
    return total;
}

// The tokens of one bucket, in order of their ids; may replace those that it reads. Returns how many there are.
INLINE int64_t gather(const tokens_t *t, uint32_t bucket, float *values, uint32_t *ids, const int is_wide,
                      const int by_key) {
    int64_t count = 0;
    for (int64_t i = 0; i < t->size; i += STEP) {
        const lanes_t v[2] = {lanes_at(t->values, i, t->size, is_wide),
                              lanes_at(t->values, i + LANES, t->size, is_wide)};
        uint32_t chosen = pair_at_least(v, t->least) & first_of_step(t->size - i);
        if (!by_key && bucket == REST) chosen &= ~pair_at_least(v, t->low);
        else {
            if (!by_key) chosen &= pair_at_least(v, t->low);
            if (chosen)
                chosen &= equal_to(buckets_of(t, v[0], by_key), bucket) | equal_to(buckets_of(t, v[1], by_key), bucket)
                                                                              << LANES;
        }
        if (!chosen) continue;
        float copy[STEP] __attribute__((aligned(64)));
        for (int j = 0; j < 2; j++) *(lanes_t *)(copy + j * LANES) = v[j];
        for (; chosen; chosen &= chosen - 1) {
            const int lane = __builtin_ctz(chosen);
            values[count] = copy[lane];
            ids[count++] = t->ids ? t->ids[i + lane] : (uint32_t)(i + lane);
        }
    }
    return count;
}

typedef struct {
    const tokens_t *tokens;
    int is_wide, by_mass;
    uint64_t *buckets, *totals;  // of each part
} tally_t;

static void tally_part(const void *arg, int part, int parts) {
    const tally_t *a = arg;
    const int64_t steps = (a->tokens->size + STEP - 1) / STEP;
    const int64_t begin = steps * part / parts * STEP;
    const int64_t end = min64(steps * (part + 1) / parts * STEP, a->tokens->size);
    uint64_t *buckets = a->buckets + part * ROOM, *total = a->totals + part;
    __builtin_memset(buckets, 0, BUCKETS * sizeof *buckets);
    if (a->is_wide) {
        if (a->by_mass) *total = tally(a->tokens, begin, end, buckets, 1, 1, 0);
        else *total = tally(a->tokens, begin, end, buckets, 1, 0, 0);
    } else {
        if (a->by_mass) *total = tally(a->tokens, begin, end, buckets, 0, 1, 0);
        else *total = tally(a->tokens, begin, end, buckets, 0, 0, 0);
    }
}

// --- the cut

typedef struct {
    const void *logits;
    int64_t stride, rows, size;
    int is_wide, threads;  // threads: for each row
    const float *highest;
    const double *temperature, *log_min_p;
    const int64_t *top_k;
    const double *top_p;
    float *values;
    int64_t *ids;
} narrow_t;

// Of the tokens with one value, the first `kept` of all `equal` ones; `mass` is that of each.
typedef struct {
    float value;
    uint32_t id;
    uint64_t kept, equal, mass;
} cut_t;

// The least float32, up to best, whose relative logit reaches x.
static float least_reaching(double x, float best, double temperature) {
    const double highest = (double)best / temperature;
    uint32_t below = key_of(-__builtin_inff()) - 1, reaching = key_of(best);
    while (reaching - below > 1) {
        const uint32_t middle = below + (reaching - below) / 2;
        if ((double)value_of(middle) / temperature - highest >= x) reaching = middle;
        else below = middle;
    }
    return value_of(reaching);
}

// The bucket in which the sum from the first one on reaches the limit; REST if none.
static uint32_t bucket_reaching(const uint64_t *buckets, uint64_t limit, uint64_t *before) {
    uint32_t bucket = 0;
    while (bucket < BUCKETS && *before + buckets[bucket] < limit) *before += buckets[bucket++];
    return bucket;
}

// The token with which the weights reach the limit, given what each bucket weighs.
static cut_t cut_at(const tokens_t *row, int is_wide, int by_mass, uint64_t *buckets, uint64_t limit) {
    float *values = thread_scratch(SCRATCH_ROWS, (size_t)row->size * (sizeof(float) + sizeof(uint32_t)));
    uint32_t *ids = (uint32_t *)(values + row->size);
    uint64_t before = 0;
    const uint32_t first = bucket_reaching(buckets, limit, &before);
    int64_t count = is_wide ? gather(row, first, values, ids, 1, 0) : gather(row, first, values, ids, 0, 0);
    if (!count) return (cut_t){row->least, (uint32_t)(row->size - 1), 0, 0, 0};  // NaN, or another row's best
    for (;;) {
        uint32_t low = key_of(values[0]), high = low;
        for (int64_t i = 1; i < count; i++) {
            const uint32_t key = key_of(values[i]);
            low = key < low ? key : low;
            high = key > high ? key : high;
        }
        if (low == high) break;
        const int bits = 32 - __builtin_clz(high - low);
        tokens_t t = *row;
        t.values = values, t.ids = ids, t.size = count, t.least = -__builtin_inff();
        t.high_key = high, t.shift = bits > 10 ? bits - 10 : 0;
        __builtin_memset(buckets, 0, BUCKETS * sizeof *buckets);
        if (by_mass) tally(&t, 0, count, buckets, 1, 1, 1);
        else tally(&t, 0, count, buckets, 1, 0, 1);
        uint32_t bucket = bucket_reaching(buckets, limit, &before);
        if (bucket == REST) bucket = (high - low) >> t.shift;
        count = gather(&t, bucket, values, ids, 1, 1);
    }
    const uint64_t mass = mass_of(values[0], row->temperature, row->highest), each = by_mass ? mass : 1;
    const uint64_t missing = limit - before;
    uint64_t kept = each ? missing / each + (missing % each > 0) : 1;
    if (kept > (uint64_t)count) kept = (uint64_t)count;
    return (cut_t){values[0] + 0.0f, ids[kept - 1], kept, (uint64_t)count, mass};
}

// Sums up what the row's tokens weigh. Returns the buckets.
static uint64_t *tally_row(tokens_t *row, const narrow_t *a, int by_mass, float low, uint64_t *total) {
    const int parts = parts_for(a->threads);
    uint64_t *buckets = thread_scratch(SCRATCH_ROOM, (size_t)parts * (ROOM + 1) * sizeof *buckets);
    uint64_t *totals = buckets + (int64_t)parts * ROOM;
    low = low > row->high - 1e38f ? low : row->high - 1e38f;  // where it lies is a guess; it must be finite
    row->low = low > row->least ? low : row->least;
    row->scale = BUCKETS / (row->high - row->low);
    const tally_t shared = {row, a->is_wide, by_mass, buckets, totals};
    rorqual_parallel(tally_part, &shared, a->threads);
    *total = totals[0];
    for (int part = 1; part < parts; part++) {
        *total += totals[part];
        for (int i = 0; i < BUCKETS; i++) buckets[i] += buckets[part * ROOM + i];
    }
    return buckets;
}

static void narrow_row(const narrow_t *a, int64_t i) {
    const float best = a->highest[i];
    const double temperature = a->temperature[i], log_min_p = a->log_min_p[i], top_p = a->top_p[i];
    const int64_t top_k = a->top_k[i];
    const int is_cut = log_min_p > -__builtin_inf() || top_k < a->size;
    cut_t cut = {-__builtin_inff(), (uint32_t)(a->size - 1), 0, 0, 0};
    if ((is_cut || top_p < 1) && best - best == 0) {
        const char *start = (const char *)a->logits + i * a->stride * (a->is_wide ? 4 : 2);
        tokens_t row = {.values = start,
                        .size = a->size,
                        .least = cut.value,
                        .high = best,
                        .temperature = temperature,
                        .highest = (double)best / temperature};
        uint64_t total;
        if (is_cut) {
            row.least = least_reaching(log_min_p, best, temperature);
            uint64_t *buckets = NULL, limit = 0;
            for (float range = TOP_K_RANGE; range < 1000; range *= 8) {
                buckets = tally_row(&row, a, 0, best - range, &total);
                limit = (uint64_t)min64(max64(top_k, 1), (int64_t)total);
                uint64_t before = 0;
                if (bucket_reaching(buckets, limit, &before) != REST) break;
            }
            cut = cut_at(&row, a->is_wide, 0, buckets, limit);
            row.least = cut.value;
        }
        if (top_p < 1) {
            // Below exp(x) = (1 - top_p) / size, the sum of all is less than what is left out: the cut lies higher.
            double x = -1;
            for (double share = (1 - top_p) / (double)a->size; share < 1; share *= 2) x -= 0.6931472;
            const float low = least_reaching(x > NEGLIGIBLE ? x : NEGLIGIBLE, best, temperature);
            const float least = least_reaching(NEGLIGIBLE, best, temperature);
            if (least > row.least) row.least = least;
            uint64_t *buckets = tally_row(&row, a, 1, low, &total);
            total -= (cut.equal - cut.kept) * cut.mass;
            const double aim = top_p * (double)total;
            uint64_t limit = (uint64_t)aim;
            limit += (double)limit < aim;
            limit = limit < total ? limit : total;
            cut = cut_at(&row, a->is_wide, 1, buckets, limit ? limit : 1);
        }
    }
    a->values[i] = cut.value;
    a->ids[i] = cut.id;
}

static void narrow_rows(const void *arg, int part, int parts) {
    const narrow_t *a = arg;
    for (int64_t row = a->rows * part / parts; row < a->rows * (part + 1) / parts; row++) narrow_row(a, row);
}

void ISA(narrow)(const void *logits, int64_t stride, int64_t rows, int64_t size, int is_wide, const float *highest,
                 const double *temperature, const double *log_min_p, const int64_t *top_k, const double *top_p,
                 float *values, int64_t *ids, int threads) {
    const int by_rows = rows >= threads;
    const int64_t most = max64(size / PART_FROM, 1);
    narrow_t a = {logits,  stride,      rows,      size,  is_wide, by_rows ? 1 : (int)min64(threads, most),
                  highest, temperature, log_min_p, top_k, top_p,   values,
                  ids};
    if (by_rows) rorqual_parallel(narrow_rows, &a, threads);
    else narrow_rows(&a, 0, 1);
}
