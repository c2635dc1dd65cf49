// The two halves of a decoder layer, each in one parallel region, in which the steps follow one another: what the
// single kernels compute, to the bit, without gathering threads for each of them.

// Made once for each layer; Python has the same fields.
typedef struct {
    const bf16 *norm;
    const operand_t *qkv, *out;
    const bf16 *query_norm, *key_norm;  // or NULL
    const float *cos_sin;
    bf16 *key_cache, *value_cache;
    int64_t hidden_size, heads, kv_heads, head_dim, block_size, window;
    int64_t rotary_width, rotary_offset, rotary_flags;
    float eps, query_eps, key_eps, scale;
} attention_block_t;

typedef struct {
    const bf16 *norm;
    const operand_t *gate_up, *down;
    int64_t hidden_size;
    float eps;
} gated_mlp_block_t;

// A step's tokens in one cache group, made once for all of its layers.
typedef struct {
    const int64_t *positions, *slots;
    const int32_t *cu_seqlens, *context_lens, *block_tables;
    int64_t tokens, num_seqs, max_blocks, threads;
} step_t;

typedef struct {
    rms_norm_t norm;
    input_t normed;
    const operand_t *weight;
    bf16 *out;
    int64_t out_features;
} norm_product_t;  // norm(x + residual) times a weight

// Memory for one call, handed out in order.
typedef struct {
    uint8_t *at;
} room_t;

// The thread's until it asks again: memory that came and went with each call would leave holes between activations.
static room_t make_room(int64_t bytes) { return (room_t){thread_memory(SCRATCH_ROOM, (size_t)bytes)}; }

static void *take(room_t *room, int64_t bytes) {
    void *taken = room->at;
    room->at += (bytes + 63) / 64 * 64;
    return taken;
}

// The input of a product, with room for its integers if the weight wants them.
static input_t take_input(const operand_t *weight, const bf16 *x, int64_t rows, room_t *room) {
    const int64_t features = weight->in_features;
    void *memory = has_dynamic(weight) ? take(room, (int64_t)input_bytes(rows, features)) : NULL;
    return prepare_input(x, features, rows, features, memory);
}

// norm(x + residual) times a weight. `sum` gets x + residual, and is not touched without a residual.
static norm_product_t norm_product(const bf16 *x, const bf16 *residual, bf16 *sum, const bf16 *norm, float eps,
                                   const operand_t *weight, int64_t rows, int64_t size, room_t *room) {
    bf16 *normed = take(room, 2 * rows * size);
    const int64_t features = all_out_features(weight);
    return (norm_product_t){
        .norm = {x, residual, norm, normed, sum, rows, 1, size, size, 0, size, eps},
        .normed = take_input(weight, normed, rows, room),
        .weight = weight,
        .out = take(room, 2 * rows * features),
        .out_features = features,
    };
}

// For each part of a phase that this thread gets; ends when all threads' parts are done. Parts are shares of rows,
// features or tokens.
#define EACH_PART(phase, parts) \
    for (int64_t part; (part = phase_take(phase)) < (parts) || (phase_wait(phase, parts), 0); phase_finish(phase))

INLINE void read_part(const operand_t *weight, const input_t *in, int64_t part, int64_t parts) {
    read_rows(in, weight->in_features, in->rows * part / parts, in->rows * (part + 1) / parts);
}

static void norm_and_multiply(const norm_product_t *a, phase_t *norming, phase_t *multiplying, int parts) {
    const int row_parts = (int)min64(parts, a->norm.rows);
    EACH_PART (norming, row_parts) {
        rms_norm_rows(&a->norm, (int)part, row_parts);
        read_part(a->weight, &a->normed, part, row_parts);
    }
    EACH_PART (multiplying, parts) {
        multiply_part(a->weight, &a->normed, a->out, a->out_features, part, parts);
    }
}

// --- attention

typedef struct {
    const attention_block_t *block;
    norm_product_t qkv;
    rms_norm_t head_norms[2];  // of query and key heads
    rope_t rope;
    store_t store;
    attention_t attention;
    input_t attended;
    bf16 *out;
    int parts;
    struct {
        phase_t norm, qkv, head_norms, store, read, out;
    } *phases;
} attention_run_t;

static void attention_block_region(const void *arg) {
    const attention_run_t *a = arg;
    const operand_t *weight = a->block->out;
    const int row_parts = (int)min64(a->parts, a->store.tokens);
    norm_and_multiply(&a->qkv, &a->phases->norm, &a->phases->qkv, a->parts);
    if (a->block->query_norm) {
        EACH_PART (&a->phases->head_norms, a->parts) {
            for (int i = 0; i < 2; i++) rms_norm_rows(&a->head_norms[i], (int)part, a->parts);
        }
    }
    EACH_PART (&a->phases->store, row_parts) {
        rope_tokens(&a->rope, (int)part, row_parts);
        store_tokens(&a->store, (int)part, row_parts);
    }
    attention_region(&a->attention);
    phase_wait(a->attention.adding, a->attention.num_tasks);
    if (a->attended.q) {
        EACH_PART (&a->phases->read, row_parts) {
            read_part(weight, &a->attended, part, row_parts);
        }
    }
    EACH_PART (&a->phases->out, a->parts) {
        multiply_part(weight, &a->attended, a->out, all_out_features(weight), part, a->parts);
    }
}

// Returns 0, 1 where there is no memory, or 2 where a position is no row of the rotary table.
int ISA(attention_block)(const attention_block_t *block, const step_t *step, int64_t rotary_rows, const bf16 *hidden,
                         const bf16 *residual, bf16 *out, bf16 *sum) {
    const int64_t tokens = step->tokens, size = block->hidden_size, dim = block->head_dim;
    const int64_t heads = block->heads, kv_heads = block->kv_heads, row = (heads + 2 * kv_heads) * dim;
    if (tokens == 0) return 0;
    for (int64_t token = 0; token < tokens; token++)
        if (step->positions[token] < 0 || step->positions[token] >= rotary_rows) return 2;
    const int64_t bytes = 2 * tokens * (size + row + (2 * heads + kv_heads) * dim) +
                          (int64_t)(input_bytes(tokens, size) + input_bytes(tokens, heads * dim)) + 8 * 64;
    room_t room = make_room(bytes);
    if (room.at == NULL) return 1;
    attention_run_t a = {.block = block, .out = out, .parts = parts_for((int)step->threads)};
    __typeof__(*a.phases) phases = {{0, 0}};
    a.phases = &phases;
    a.qkv = norm_product(hidden, residual, sum, block->norm, block->eps, block->qkv, tokens, size, &room);
    bf16 *query = a.qkv.out, *key = query + heads * dim, *value = key + kv_heads * dim;
    int64_t query_stride = row, key_stride = row;
    if (block->query_norm) {
        bf16 *plain[2] = {query, key};
        query = take(&room, 2 * tokens * heads * dim);
        key = take(&room, 2 * tokens * kv_heads * dim);
        query_stride = heads * dim;
        key_stride = kv_heads * dim;
        a.head_norms[0] = (rms_norm_t){plain[0], NULL, block->query_norm, query, NULL, tokens * heads, heads, dim, row,
                                       dim,      0,    block->query_eps};
        a.head_norms[1] = (rms_norm_t){
            plain[1], NULL, block->key_norm, key, NULL, tokens * kv_heads, kv_heads, dim, row, dim, 0, block->key_eps};
    }
    a.rope = (rope_t){{{query, query, heads, query_stride, dim}, {key, key, kv_heads, key_stride, dim}},
                      step->positions,
                      block->cos_sin,
                      tokens,
                      block->rotary_width,
                      block->rotary_offset,
                      dim,
                      (int)block->rotary_flags};
    a.store = (store_t){
        .key = key,
        .value = value,
        .key_token_stride = key_stride,
        .key_head_stride = dim,
        .value_token_stride = row,
        .value_head_stride = dim,
        .key_cache = block->key_cache,
        .value_cache = block->value_cache,
        .slots = step->slots,
        .tokens = tokens,
        .heads = kv_heads,
        .head_dim = dim,
        .block_size = block->block_size,
    };
    bf16 *attended = take(&room, 2 * tokens * heads * dim);
    a.attention = (attention_t){
        .query = query,
        .query_token_stride = query_stride,
        .query_head_stride = dim,
        .key_cache = block->key_cache,
        .value_cache = block->value_cache,
        .cu_seqlens = step->cu_seqlens,
        .context_lens = step->context_lens,
        .block_tables = step->block_tables,
        .max_blocks = step->max_blocks,
        .num_seqs = step->num_seqs,
        .heads = heads,
        .kv_heads = kv_heads,
        .head_dim = dim,
        .block_size = block->block_size,
        .scale = block->scale,
        .window = block->window,
        .out = attended,
    };
    a.attended = take_input(block->out, attended, tokens, &room);
    attention_plan_t plan;
    const int failed = begin_attention(&a.attention, &plan, (int)step->threads);
    if (!failed) rorqual_region(attention_block_region, &a, (int)step->threads);
    end_attention(&plan);
    return failed;
}

// --- gated feed-forward block

typedef struct {
    const gated_mlp_block_t *block;
    norm_product_t gate_up;
    input_t activated;
    bf16 *out;
    int parts;
    struct {
        phase_t norm, gate_up, activate, down;
    } *phases;
} gated_mlp_run_t;

// silu(gate) times up, within a limit, and the integers of the result where the weight wants them: in pieces of 32
// columns of one row, so that threads share a single row too. gate_up [in->rows][2 * size]; in->x is written, and may
// be where the gate is.
static void activate_part(const bf16 *gate_up, int64_t size, float limit, const input_t *in, int64_t part,
                          int64_t parts) {
    const int64_t pieces = size / 32, all = in->rows * pieces;
    for (int64_t i = all * part / parts; i < all * (part + 1) / parts; i++) {
        const int64_t row = i / pieces, column = i % pieces * 32;
        const bf16 *gate = gate_up + row * 2 * size + column, *up = gate + size;
        bf16 *out = (bf16 *)in->x + row * in->stride + column;
        for (int j = 0; j < 32; j += 16) store_bf16(out + j, gated(load_bf16(gate + j), load_bf16(up + j), limit));
        if (in->q)
            quantise_group(out, (int8_t *)in->q + 32 * i, (float *)in->scales + i, (float *)in->sums + i,
                           (int32_t *)in->int_sums + 2 * i);
    }
}

static void gated_mlp_block_region(const void *arg) {
    const gated_mlp_run_t *a = arg;
    const operand_t *down = a->block->down;
    norm_and_multiply(&a->gate_up, &a->phases->norm, &a->phases->gate_up, a->parts);
    EACH_PART (&a->phases->activate, a->parts) {
        activate_part(a->gate_up.out, a->gate_up.out_features / 2, __builtin_inff(), &a->activated, part, a->parts);
    }
    EACH_PART (&a->phases->down, a->parts) {
        multiply_part(down, &a->activated, a->out, all_out_features(down), part, a->parts);
    }
}

// Returns 0, or 1 where there is no memory.
int ISA(gated_mlp_block)(const gated_mlp_block_t *block, const bf16 *hidden, const bf16 *residual, bf16 *out, bf16 *sum,
                         int64_t tokens, int threads) {
    if (tokens == 0) return 0;
    const int64_t size = block->hidden_size, features = all_out_features(block->gate_up);
    const int64_t bytes = 2 * tokens * (size + features + features / 2) +
                          (int64_t)(input_bytes(tokens, size) + input_bytes(tokens, features / 2)) + 6 * 64;
    room_t room = make_room(bytes);
    if (room.at == NULL) return 1;
    gated_mlp_run_t a = {.block = block, .out = out, .parts = parts_for(threads)};
    __typeof__(*a.phases) phases = {{0, 0}};
    a.phases = &phases;
    a.gate_up = norm_product(hidden, residual, sum, block->norm, block->eps, block->gate_up, tokens, size, &room);
    a.activated = take_input(block->down, take(&room, tokens * features), tokens, &room);
    rorqual_region(gated_mlp_block_region, &a, threads);
    return 0;
}

// --- layers

typedef struct {
    const attention_block_t *attention;
    const gated_mlp_block_t *feed_forward;
    int64_t group;  // of its cache
    int64_t rotary_rows;
} decoder_layer_t;

// One layer after the other, then a norm by so many threads; `steps` by cache group. out and sum are where the stream
// lies behind each of them: a layer reads both before it writes. Returns what the attention block that fails returns,
// or 1 where there is no memory.
int ISA(decoder_layers)(const decoder_layer_t *layers, int64_t count, const bf16 *norm, float eps, int threads,
                        const step_t *const *steps, const bf16 *hidden, bf16 *out, bf16 *sum) {
    const bf16 *stream = hidden, *residual = NULL;
    const int64_t size = layers->attention->hidden_size, tokens = steps[layers->group]->tokens;
    for (const decoder_layer_t *layer = layers; layer < layers + count; layer++) {
        const step_t *step = steps[layer->group];
        int failed = ISA(attention_block)(layer->attention, step, layer->rotary_rows, stream, residual, out, sum);
        if (failed) return failed;
        residual = residual ? sum : hidden;
        failed = ISA(gated_mlp_block)(layer->feed_forward, out, residual, out, sum, step->tokens, (int)step->threads);
        if (failed) return failed;
        stream = out;
        residual = sum;
    }
    ISA(rms_norm)(out, size, 0, sum, size, norm, out, sum, tokens, 1, size, eps, threads);
    return 0;
}
