// The paged cache in memory: keys [block][head][offset][dim]; values the same, or, for AMX, which multiplies values
// from the left, [block][head][dim][offset].

typedef struct {
    const bf16 *key, *value;
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    bf16 *key_cache, *value_cache;
    const int64_t *slots;
    int64_t tokens, heads, head_dim, block_size;
} store_t;

static void store_tokens(const void *arg, int thread, int num_threads) {
    const store_t *a = arg;
    const int64_t page = a->block_size * a->head_dim;
    for (int64_t token = a->tokens * thread / num_threads; token < a->tokens * (thread + 1) / num_threads; token++) {
        const int64_t slot = a->slots[token];
        if (slot < 0) continue;
        const int64_t block = slot / a->block_size, offset = slot % a->block_size;
        for (int64_t head = 0; head < a->heads; head++) {
            const bf16 *key = a->key + token * a->key_token_stride + head * a->key_head_stride;
            const bf16 *value = a->value + token * a->value_token_stride + head * a->value_head_stride;
            bf16 *keys = a->key_cache + (block * a->heads + head) * page;
            bf16 *values = a->value_cache + (block * a->heads + head) * page;
            __builtin_memcpy(keys + offset * a->head_dim, key, 2 * a->head_dim);
#ifdef USE_AMX
            for (int64_t i = 0; i < a->head_dim; i++) values[i * a->block_size + offset] = value[i];
#else
            __builtin_memcpy(values + offset * a->head_dim, value, 2 * a->head_dim);
#endif
        }
    }
}

void ISA(store_kvcache)(const bf16 *key, int64_t key_token_stride, int64_t key_head_stride, const bf16 *value,
                        int64_t value_token_stride, int64_t value_head_stride, bf16 *key_cache, bf16 *value_cache,
                        const int64_t *slots, int64_t tokens, int64_t heads, int64_t head_dim, int64_t block_size,
                        int threads) {
    const store_t a = {
        .key = key,
        .value = value,
        .key_token_stride = key_token_stride,
        .key_head_stride = key_head_stride,
        .value_token_stride = value_token_stride,
        .value_head_stride = value_head_stride,
        .key_cache = key_cache,
        .value_cache = value_cache,
        .slots = slots,
        .tokens = tokens,
        .heads = heads,
        .head_dim = head_dim,
        .block_size = block_size,
    };
    rorqual_parallel(store_tokens, &a, threads);
}
