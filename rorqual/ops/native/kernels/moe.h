// Mixture of experts: which of them a token uses, their feed-forward blocks and their weighted sum, in one parallel
// region.
//
// Rows of input are gathered expert by expert, so that each weight passes by once for all of its rows. Parts of the
// products are shares of the output features of all experts together: a single token keeps all threads busy too. What a
// token gets depends on its own row alone: its experts' answers are added in the order in which it chose them.

// --- routing

typedef struct {
    const bf16 *logits;
    int64_t tokens, num_experts, stride, top_k, renormalize;
    int64_t *expert_ids;
    bf16 *weights;  // both [tokens][top_k]
} route_t;

// Sixteen of exp(x - largest), where x may be far below it.
INLINE f32x16 exp_below(f32x16 x, float largest) {
    const f32x16 below = x - largest;
    return exp2_16(blend(below < -200.0f, splat(-200.0f), below) * LOG2_E);
}

// The top_k experts with the largest logits, best first, the lowest number first among equals; and their shares of the
// softmax over all experts.
static void route_token(const route_t *a, int64_t token) {
    const bf16 *logits = a->logits + token * a->stride;
    int64_t *ids = a->expert_ids + token * a->top_k, count = 0;
    bf16 *weights = a->weights + token * a->top_k;
    for (int64_t e = 0; e < a->num_experts; e++) {
        const float logit = widen(logits[e]);
        int64_t at = count;
        while (at > 0 && logit > widen(logits[ids[at - 1]])) at--;
        if (at == a->top_k) continue;
        if (count < a->top_k) count++;
        for (int64_t i = count - 1; i > at; i--) ids[i] = ids[i - 1];
        ids[at] = e;
    }
    const float largest = widen(logits[ids[0]]);
    const int64_t whole = a->num_experts / 16 * 16, rest = a->num_experts - whole;
    f32x16 sums = {0};
    for (int64_t e = 0; e < whole; e += 16) sums += exp_below(load_bf16(logits + e), largest);
    float sum = sum16(sums), chosen = 0;
    for (int64_t e = 0; e < rest; e++) sum += exp_below(splat(widen(logits[whole + e])), largest)[0];
    for (int64_t i = 0; i < a->top_k; i++) chosen += exp_below(splat(widen(logits[ids[i]])), largest)[0] / sum;
    for (int64_t i = 0; i < a->top_k; i++) {
        const float share = exp_below(splat(widen(logits[ids[i]])), largest)[0] / sum;
        weights[i] = narrow(a->renormalize ? share / chosen : share);
    }
}

static void route_tokens(const void *arg, int part, int parts) {
    const route_t *a = arg;
    for (int64_t token = a->tokens * part / parts; token < a->tokens * (part + 1) / parts; token++)
        route_token(a, token);
}

void ISA(route_softmax)(const bf16 *logits, int64_t stride, int64_t tokens, int64_t num_experts, int64_t top_k,
                        int renormalize, int64_t *expert_ids, bf16 *weights, int threads) {
    const route_t a = {logits, tokens, num_experts, stride, top_k, renormalize, expert_ids, weights};
    rorqual_parallel(route_tokens, &a, threads);
}

// --- experts

// What the inputs of some products are wanted as; of several experts, perhaps both.
enum { INPUT_PLAIN = 1, INPUT_INTEGERS = 2 };

// Made once for each layer; Python has the same fields.
typedef struct {
    const operand_t *const *gate_up, *const *down;  // of each expert
    int64_t num_experts, hidden_size, inner_size;
    int64_t gate_up_inputs, down_inputs;
    float limit;  // of silu_and_mul; perhaps infinity
    int some;     // whether others are elsewhere: choices of numbers that are not here are skipped
} experts_t;

typedef struct {
    int64_t expert, first, rows;
} expert_rows_t;

typedef struct {
    phase_t read, sort, gather, gate_up, activate, down, add;
} experts_phases_t;

typedef struct {
    const experts_t *experts;
    const int64_t *expert_ids;
    const void *weights;  // both [tokens][top_k], these in bfloat16 or float32
    int wide_weights;
    bf16 *out;  // [tokens][hidden_size]
    int64_t tokens, top_k;
    input_t tokens_input, gathered, activated;
    bf16 *rows;               // [tokens * top_k][hidden_size]: inputs, and then answers
    bf16 *gate_up;            // [tokens * top_k][2 * inner_size]
    int32_t *source, *place;  // the choice that each row is of, and the row of each choice; -1 where it is skipped
    int32_t *starts;          // [num_experts + 1]
    expert_rows_t *runs;      // of the experts that some token chose
    int64_t num_runs, num_rows;
    int parts;
    experts_phases_t *phases;
} experts_run_t;

// Some rows of an input.
INLINE input_t some_rows(const input_t *in, int64_t features, int64_t first, int64_t rows) {
    const int64_t groups = features / INPUT_GROUP;
    input_t some = {.x = in->x + first * in->stride, .stride = in->stride, .rows = rows};
    if (in->q == NULL) return some;
    some.q = in->q + first * features;
    some.scales = in->scales + first * groups;
    some.sums = in->sums + first * groups;
    some.int_sums = in->int_sums + 2 * first * groups;
    return some;
}

INLINE int is_here(const experts_t *experts, int64_t id) { return id >= 0 && id < experts->num_experts; }

// Sorts the tokens' choices by expert. One thread does it: `a` is written.
static void sort_choices(experts_run_t *a) {
    const int64_t choices = a->tokens * a->top_k, num_experts = a->experts->num_experts;
    int32_t *starts = a->starts;
    __builtin_memset(starts, 0, (size_t)(num_experts + 1) * sizeof *starts);
    for (int64_t i = 0; i < choices; i++)
        if (is_here(a->experts, a->expert_ids[i])) starts[a->expert_ids[i] + 1]++;
    a->num_runs = 0;
    for (int64_t e = 0; e < num_experts; e++) {
        const int64_t rows = starts[e + 1];
        if (rows) a->runs[a->num_runs++] = (expert_rows_t){e, starts[e], rows};
        starts[e + 1] += starts[e];
    }
    a->num_rows = a->activated.rows = starts[num_experts];
    for (int64_t i = 0; i < choices; i++) {
        a->place[i] = -1;
        if (!is_here(a->experts, a->expert_ids[i])) continue;
        const int32_t row = starts[a->expert_ids[i]]++;
        a->source[row] = (int32_t)i;
        a->place[i] = row;
    }
}

static void gather_inputs(const experts_run_t *a, int64_t first, int64_t last) {
    const int64_t features = a->experts->hidden_size, groups = features / INPUT_GROUP;
    for (int64_t row = first; row < last; row++) {
        const input_t from = some_rows(&a->tokens_input, features, a->source[row] / a->top_k, 1);
        const input_t to = some_rows(&a->gathered, features, row, 1);
        if (a->experts->gate_up_inputs & INPUT_PLAIN) __builtin_memcpy((bf16 *)to.x, from.x, (size_t)(2 * features));
        if (to.q == NULL) continue;
        __builtin_memcpy((int8_t *)to.q, from.q, (size_t)features);
        __builtin_memcpy((float *)to.scales, from.scales, (size_t)(4 * groups));
        __builtin_memcpy((float *)to.sums, from.sums, (size_t)(4 * groups));
        __builtin_memcpy((int32_t *)to.int_sums, from.int_sums, (size_t)(8 * groups));
    }
}

// Reading a block of a weight takes as long as multiplying it by about so many rows.
#define ROWS_PER_READ 8

// A part of the products of all rows with their experts' weights, cut so that parts take equally long.
static void multiply_experts(const experts_run_t *a, const operand_t *const *weights, const input_t *in, bf16 *out,
                             int64_t in_features, int64_t out_features, int64_t part) {
    const int64_t blocks = out_features / 16;
    const int64_t all = blocks * (a->num_rows + ROWS_PER_READ * a->num_runs);
    const int64_t from = all * part / a->parts, to = all * (part + 1) / a->parts;
    for (int64_t i = 0; i < a->num_runs; i++) {
        const expert_rows_t *run = &a->runs[i];
        const int64_t cost = run->rows + ROWS_PER_READ, start = blocks * (run->first + ROWS_PER_READ * i);
        const int64_t left = max64(from - start, 0) / cost, right = min64(to - start, blocks * cost) / cost;
        if (from - start >= blocks * cost || left >= right) continue;
        const input_t rows = some_rows(in, in_features, run->first, run->rows);
        multiply(weights[run->expert], &rows, out + run->first * out_features, out_features, left, right);
    }
}

INLINE float share_of(const experts_run_t *a, int64_t choice) {
    return a->wide_weights ? ((const float *)a->weights)[choice] : widen(((const bf16 *)a->weights)[choice]);
}

// Each token's answers by their weights, in pieces of sixteen columns. Products of two bfloat16 are exact.
static void add_answers(const experts_run_t *a, int64_t part) {
    const int64_t size = a->experts->hidden_size, pieces = size / 16, all = a->tokens * pieces;
    for (int64_t i = all * part / a->parts; i < all * (part + 1) / a->parts; i++) {
        const int64_t token = i / pieces, column = i % pieces * 16;
        f32x16 sum = {0};
        for (int64_t choice = token * a->top_k; choice < (token + 1) * a->top_k; choice++) {
            if (a->place[choice] < 0) continue;
            sum += load_bf16(a->rows + a->place[choice] * size + column) * share_of(a, choice);
        }
        store_bf16(a->out + token * size + column, sum);
    }
}

static void experts_region(const void *arg) {
    const experts_run_t *a = arg;
    const experts_t *e = a->experts;
    if (a->tokens_input.q) {
        const int64_t parts = min64(a->parts, a->tokens);
        EACH_PART (&a->phases->read, parts) {
            read_rows(&a->tokens_input, e->hidden_size, a->tokens * part / parts, a->tokens * (part + 1) / parts);
        }
    }
    EACH_PART (&a->phases->sort, 1) {
        sort_choices((experts_run_t *)a);
    }
    EACH_PART (&a->phases->gather, a->parts) {
        gather_inputs(a, a->num_rows * part / a->parts, a->num_rows * (part + 1) / a->parts);
    }
    EACH_PART (&a->phases->gate_up, a->parts) {
        multiply_experts(a, e->gate_up, &a->gathered, a->gate_up, e->hidden_size, 2 * e->inner_size, part);
    }
    EACH_PART (&a->phases->activate, a->parts) {
        activate_part(a->gate_up, e->inner_size, e->limit, &a->activated, part, a->parts);
    }
    EACH_PART (&a->phases->down, a->parts) {
        multiply_experts(a, e->down, &a->activated, a->rows, e->inner_size, e->hidden_size, part);
    }
    EACH_PART (&a->phases->add, a->parts) {
        add_answers(a, part);
    }
}

// Tokens at once: they bound the memory, and are enough for each weight to be worth reading.
#define MOST_TOKENS 1024

static int64_t experts_bytes(const experts_t *e, int64_t tokens, int64_t top_k) {
    const int64_t rows = tokens * top_k;
    int64_t bytes = 2 * rows * (e->hidden_size + 2 * e->inner_size) + 8 * rows;
    if (e->gate_up_inputs & INPUT_INTEGERS)
        bytes += (int64_t)(input_bytes(tokens, e->hidden_size) + input_bytes(rows, e->hidden_size));
    if (e->down_inputs & INPUT_INTEGERS) bytes += (int64_t)input_bytes(rows, e->inner_size);
    return bytes + e->num_experts * (int64_t)(sizeof(expert_rows_t) + sizeof(int32_t)) + 10 * 64;
}

static experts_run_t take_experts(const experts_t *e, const bf16 *x, int64_t x_stride, const int64_t *expert_ids,
                                  const void *weights, int wide_weights, int64_t tokens, int64_t top_k, bf16 *out,
                                  room_t *room) {
    const int64_t rows = tokens * top_k, size = e->hidden_size, inner = e->inner_size;
    const int integers = (e->gate_up_inputs & INPUT_INTEGERS) != 0;
    const int inner_integers = (e->down_inputs & INPUT_INTEGERS) != 0;
    experts_run_t a = {
        .experts = e, .weights = weights, .wide_weights = wide_weights, .expert_ids = expert_ids, .out = out};
    a.tokens = tokens;
    a.top_k = top_k;
    a.rows = take(room, 2 * rows * size);
    a.gate_up = take(room, 4 * rows * inner);
    a.source = take(room, 4 * rows);
    a.place = take(room, 4 * rows);
    a.runs = take(room, e->num_experts * (int64_t)sizeof *a.runs);
    a.starts = take(room, (e->num_experts + 1) * (int64_t)sizeof *a.starts);
    void *of_tokens = integers ? take(room, (int64_t)input_bytes(tokens, size)) : NULL;
    void *of_rows = integers ? take(room, (int64_t)input_bytes(rows, size)) : NULL;
    void *of_inner = inner_integers ? take(room, (int64_t)input_bytes(rows, inner)) : NULL;
    a.tokens_input = prepare_input(x, x_stride, tokens, size, of_tokens);
    a.gathered = prepare_input(a.rows, size, rows, size, of_rows);
    a.activated = prepare_input(a.gate_up, 2 * inner, rows, inner, of_inner);  // in the place of the gate
    return a;
}

// Returns 0, 1 where there is no memory, or 2 where a token chose an expert that is not there.
int ISA(fused_experts)(const experts_t *experts, const bf16 *x, int64_t x_stride, const int64_t *expert_ids,
                       const void *weights, int wide_weights, int64_t tokens, int64_t top_k, bf16 *out, int threads) {
    const int64_t weight_bytes = wide_weights ? sizeof(float) : sizeof(bf16);
    for (int64_t i = 0; !experts->some && i < tokens * top_k; i++)
        if (!is_here(experts, expert_ids[i])) return 2;
    room_t room = make_room(experts_bytes(experts, min64(tokens, MOST_TOKENS), top_k));
    if (room.at == NULL) return 1;
    for (int64_t first = 0; first < tokens; first += MOST_TOKENS) {
        room_t rest = room;
        experts_phases_t phases = {{0, 0}};
        experts_run_t a =
            take_experts(experts, x + first * x_stride, x_stride, expert_ids + first * top_k,
                         (const char *)weights + first * top_k * weight_bytes, wide_weights,
                         min64(MOST_TOKENS, tokens - first), top_k, out + first * experts->hidden_size, &rest);
        a.phases = &phases;
        a.parts = parts_for(threads);
        rorqual_region(experts_region, &a, threads);
    }
    return 0;
}

// --- all of a layer's second half

// Made once for each layer; Python has the same fields.
typedef struct {
    const bf16 *norm;
    const operand_t *router;
    const experts_t *experts;
    int64_t top_k, renormalize;
    float eps;
} sparse_moe_block_t;

typedef struct {
    norm_product_t router;
    route_t route;
    experts_run_t *experts;
    struct {
        phase_t norm, router, route;
    } *phases;
} sparse_moe_run_t;

static void sparse_moe_region(const void *arg) {
    const sparse_moe_run_t *a = arg;
    const int parts = a->experts->parts, row_parts = (int)min64(parts, a->route.tokens);
    norm_and_multiply(&a->router, &a->phases->norm, &a->phases->router, parts);
    EACH_PART (&a->phases->route, row_parts) {
        route_tokens(&a->route, (int)part, row_parts);
    }
    experts_region(a->experts);
}

// Returns 0, or 1 where there is no memory.
int ISA(sparse_moe_block)(const sparse_moe_block_t *block, const bf16 *hidden, const bf16 *residual, bf16 *out,
                          bf16 *sum, int64_t tokens, int threads) {
    const experts_t *e = block->experts;
    const int64_t size = e->hidden_size, top_k = block->top_k, most = min64(tokens, MOST_TOKENS);
    const int64_t router_size = all_out_features(block->router);
    room_t room = make_room(experts_bytes(e, most, top_k) + 2 * most * (size + router_size) +
                            (int64_t)input_bytes(most, size) + 10 * most * top_k + 5 * 64);
    if (room.at == NULL) return 1;
    for (int64_t first = 0; first < tokens; first += MOST_TOKENS) {
        const int64_t rows = min64(MOST_TOKENS, tokens - first), at = first * size;
        room_t rest = room;
        sparse_moe_run_t a = {.router = norm_product(hidden + at, residual ? residual + at : NULL, sum + at,
                                                     block->norm, block->eps, block->router, rows, size, &rest)};
        int64_t *expert_ids = take(&rest, 8 * rows * top_k);
        bf16 *weights = take(&rest, 2 * rows * top_k);
        a.route =
            (route_t){a.router.out, rows, e->num_experts, router_size, top_k, block->renormalize, expert_ids, weights};
        experts_phases_t phases = {{0, 0}};
        experts_run_t experts =
            take_experts(e, a.router.normed.x, size, expert_ids, weights, 0, rows, top_k, out + at, &rest);
        experts.phases = &phases;
        experts.parts = parts_for(threads);
        a.experts = &experts;
        __typeof__(*a.phases) own_phases = {{0, 0}};
        a.phases = &own_phases;
        rorqual_region(sparse_moe_region, &a, threads);
    }
    return 0;
}
