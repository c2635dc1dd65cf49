// The two sides of a product: a weight as it was laid out, and rows of input as kernels read them.
//
// Both are made once and passed on as they are: Python makes operands (`Operand` in library.py has the same fields),
// `prepare_input` and `read_rows` in product.h make inputs.

enum { OPERAND_BF16 = 0, OPERAND_DYNAMIC = 1, OPERAND_WEIGHT_ONLY = 2 };

// A weight. All kinds are cut in blocks of 16 output features, which lie one after the other.
typedef struct operand {
    int64_t kind;
    int64_t out_features, in_features;  // multiples of 16 and 32; of this operand alone
    const void *data;                   // bfloat16 as in linear.h, or integers as in integer.h
    const bf16 *bias;                   // [out_features], or NULL
    // Of integers only:
    int64_t block_bytes;  // of 16 output by 32 input features
    int64_t bits, group, offset, has_minima, wide_scales;
    const struct operand *next;  // more output features, perhaps of another kind; or NULL
} operand_t;

// Rows of input. What is behind `rows` is there, and used, for operands of kind OPERAND_DYNAMIC only.
typedef struct {
    const bf16 *x;
    int64_t stride, rows;
    const int8_t *q;          // [rows][in_features], in groups of 32
    const float *scales;      // [rows][in_features / 32]
    const float *sums;        // [rows][in_features / 32]: scale times the sum of a group's integers
    const int32_t *int_sums;  // [rows][in_features / 16]: the sum of the integers of half a group
} input_t;

INLINE int64_t all_out_features(const operand_t *w) {
    int64_t features = 0;
    for (; w != NULL; w = w->next) features += w->out_features;
    return features;
}
