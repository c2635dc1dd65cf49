// x W^T + b with a weight of any kind: what the op `linear` calls, and what a kernel of several products is made of.
//
// In a parallel region: one thread calls `prepare_input`, each calls `read_rows` for its share of the rows, and, after
// a barrier, `multiply` for its share of the output features.

// An input over x; no memory is needed but x.
INLINE input_t prepare_input(const bf16 *x, int64_t stride, int64_t rows) {
    return (input_t){.x = x, .stride = stride, .rows = rows};
}

// out[:, 16 first .. 16 last], where features count through all chained operands, of all rows.
static void multiply(const operand_t *w, const input_t *in, bf16 *out, int64_t out_stride, int64_t first,
                     int64_t last) {
    for (int64_t start = 0; w != NULL; w = w->next) {
        const int64_t blocks = w->out_features / 16, left = max64(first - start, 0),
                      right = min64(last - start, blocks);
        if (left < right) {
            const linear_t part = {in->x,      in->stride, w->data,         w->bias,       out + 16 * start,
                                   out_stride, in->rows,   w->out_features, w->in_features};
            linear_blocks(&part, left, right);
        }
        start += blocks;
    }
}

typedef struct {
    const operand_t *weight;
    input_t input;
    bf16 *out;
    int64_t out_features;
} product_t;

static void product_share(const void *arg, int thread, int num_threads) {
    const product_t *a = arg;
    const int64_t blocks = a->out_features / 16;
    multiply(a->weight, &a->input, a->out, a->out_features, blocks * thread / num_threads,
             blocks * (thread + 1) / num_threads);
}

// out [rows][out_features of all chained operands], without gaps.
void ISA(linear)(const operand_t *weight, const bf16 *x, int64_t x_stride, int64_t rows, bf16 *out, int threads) {
    if (rows == 0) return;
    const product_t a = {weight, prepare_input(x, x_stride, rows), out, all_out_features(weight)};
    rorqual_parallel(product_share, &a, threads);
}
