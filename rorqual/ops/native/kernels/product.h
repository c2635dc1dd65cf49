// x W^T + b with a weight of any kind: what the op `linear` calls, and what a kernel of several products is made of.
//
// `prepare_input` says where an input is and goes, `read_rows` fills it, `multiply` computes some output features for
// all rows. Threads share the rows and, when all are read, the output features; or, of an input that is not worth the
// wait, each reads all rows into memory of its own.

INLINE int has_dynamic(const operand_t *w) {
    for (; w != NULL; w = w->next)
        if (w->kind == OPERAND_DYNAMIC) return 1;
    return 0;
}

// Bytes of memory that an input takes beside x, for an operand of any kind.
INLINE size_t input_bytes(int64_t rows, int64_t features) {
    return (size_t)(rows * (features + features / INPUT_GROUP * 16));
}

// An input over x [rows][features]. `memory` may be NULL if the weight has no operand of kind OPERAND_DYNAMIC.
INLINE input_t prepare_input(const bf16 *x, int64_t stride, int64_t rows, int64_t features, void *memory) {
    input_t in = {.x = x, .stride = stride, .rows = rows};
    if (memory == NULL) return in;
    const int64_t groups = rows * (features / INPUT_GROUP);
    in.int_sums = memory;
    in.scales = (const float *)(in.int_sums + 2 * groups);
    in.sums = in.scales + groups;
    in.q = (const int8_t *)(in.sums + groups);
    return in;
}

// Fills in some rows from x, if there is anything to fill in.
static void read_rows(const input_t *in, int64_t features, int64_t first, int64_t last) {
    if (in->q == NULL) return;
    quantise_rows(in->x, in->stride, first, last, features, (int8_t *)in->q, (float *)in->scales, (float *)in->sums,
                  (int32_t *)in->int_sums);
}

// out[:, 16 first .. 16 last], where features count through all chained operands, of all rows.
static void multiply(const operand_t *w, const input_t *in, bf16 *out, int64_t out_stride, int64_t first,
                     int64_t last) {
    for (; w != NULL && last > 0; w = w->next) {
        const int64_t blocks = w->out_features / 16, left = max64(first, 0), right = min64(last, blocks);
        if (left < right && w->kind == OPERAND_DYNAMIC) {
            integer_blocks(w, in, out, out_stride, left, right);
        } else if (left < right && w->kind == OPERAND_WEIGHT_ONLY) {
            decoded_blocks(w, in, out, out_stride, left, right);
        } else if (left < right) {
            const linear_t part = {in->x,      in->stride, w->data,         w->bias,       out,
                                   out_stride, in->rows,   w->out_features, w->in_features};
            linear_blocks(&part, left, right);
        }
        out += w->out_features;
        first -= blocks;
        last -= blocks;
    }
}

// Rows and, for each thread that shares them, blocks of features that are worth being a part of the work.
#define PART_ROWS 256
#define PART_BLOCKS 16

// One of the parts that threads take. Where there are few features for many rows, they share the rows as well: what
// is done once for rows, or once for features, is done for as many of the others as there can be.
static void multiply_part(const operand_t *w, const input_t *in, bf16 *out, int64_t out_features, int64_t part,
                          int64_t parts) {
    const int64_t blocks = out_features / 16, features = w->in_features, groups = features / INPUT_GROUP;
    int64_t row_parts = 1;
    while (blocks * row_parts < PART_BLOCKS * parts && parts % (2 * row_parts) == 0 &&
           in->rows >= 2 * row_parts * PART_ROWS)
        row_parts *= 2;
    const int64_t columns = parts / row_parts, column = part % columns, row_part = part / columns;
    const int64_t first = in->rows * row_part / row_parts, last = in->rows * (row_part + 1) / row_parts;
    input_t rows = *in;
    rows.x += first * in->stride;
    rows.rows = last - first;
    if (in->q) {
        rows.q += first * features;
        rows.scales += first * groups;
        rows.sums += first * groups;
        rows.int_sums += 2 * first * groups;
    }
    multiply(w, &rows, out + first * out_features, out_features, blocks * column / columns,
             blocks * (column + 1) / columns);
}

// Values of an input that each thread rather rounds by itself.
#define SHARED_INPUT 8192

typedef struct {
    const operand_t *weight;
    input_t input;
    bf16 *out;
    int64_t out_features;
    int parts;
    int dynamic, shared;  // the input is to be rounded; by all threads together
    phase_t *reading, *multiplying;
} product_t;

static void product_region(const void *arg) {
    const product_t *a = arg;
    const int64_t rows = a->input.rows, features = a->weight->in_features;
    input_t in = a->input;
    if (a->shared) {
        for (int64_t part; (part = phase_take(a->reading)) < a->parts;) {
            read_rows(&in, features, rows * part / a->parts, rows * (part + 1) / a->parts);
            phase_finish(a->reading);
        }
        phase_wait(a->reading, a->parts);
    } else if (a->dynamic) {
        in = prepare_input(in.x, in.stride, rows, features, thread_scratch(SCRATCH_INPUT, input_bytes(rows, features)));
        read_rows(&in, features, 0, rows);
    }
    for (int64_t part; (part = phase_take(a->multiplying)) < a->parts;)
        multiply_part(a->weight, &in, a->out, a->out_features, part, a->parts);
}

// out [rows][out_features of all chained operands], without gaps.
void ISA(linear)(const operand_t *weight, const bf16 *x, int64_t x_stride, int64_t rows, bf16 *out, int threads) {
    if (rows == 0) return;
    const int64_t features = weight->in_features;
    const int dynamic = has_dynamic(weight), shared = dynamic && rows * features > SHARED_INPUT;
    void *memory = shared ? thread_scratch(SCRATCH_INPUT, input_bytes(rows, features)) : NULL;
    phase_t reading = {0}, multiplying = {0};
    const product_t a = {
        .weight = weight,
        .input = prepare_input(x, x_stride, rows, features, memory),
        .out = out,
        .out_features = all_out_features(weight),
        .parts = parts_for(threads),
        .dynamic = dynamic,
        .shared = shared,
        .reading = &reading,
        .multiplying = &multiplying,
    };
    rorqual_region(product_region, &a, threads);
}

static void wide_share(const void *arg, int part, int parts) {
    const linear_t *a = arg;
    const int64_t blocks = a->out_features / 16;
    linear_blocks(a, blocks * part / parts, blocks * (part + 1) / parts);
}

// out [rows][out_features] in float32, by a weight of kind OPERAND_BF16.
void ISA(linear_float32)(const operand_t *weight, const bf16 *x, int64_t x_stride, int64_t rows, float *out,
                         int threads) {
    if (rows == 0) return;
    const linear_t a = {.x = x,
                        .x_stride = x_stride,
                        .weight = weight->data,
                        .bias = weight->bias,
                        .out = (bf16 *)out,
                        .out_stride = weight->out_features,
                        .rows = rows,
                        .out_features = weight->out_features,
                        .in_features = weight->in_features,
                        .wide = 1};
    rorqual_parallel(wide_share, &a, threads);
}
