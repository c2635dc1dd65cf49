"""The floor of a model's work, against numbers counted by hand."""

import numpy as np
import pytest
import torch

from rorqual.config import EngineConfig
from rorqual.engine.model_runner import resolve
from rorqual.engine.roofline import (
    AttentionCost,
    ExpertsCost,
    Limits,
    ModelCost,
    Seen,
    Work,
    model_cost,
    visible_keys,
    workload_floor,
)
from tests.tiny import DEEPSEEK_CONFIGS

DENSE = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
# A layer: q 32x32, k and v 16x32, o 32x32, gate and up 48x32, down 32x48 = 7680 values; five norms of 32 in all.
LAYER = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 48 * 32
NORMS = 5 * 32
HEAD = 100 * 32
KV = 2 * 2 * 8 * 2
"""Bytes of a layer's key and value for one token, in bfloat16."""
PER_KEY = 4 * 32
"""Operations for each key that a query sees: 4 heads of 8 channels, twice, a multiplication and an addition."""
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "attention_bias": False,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
}
EXPERT = 3 * 8 * 32


def counted(config, **options):
    options = {"dtype": "bfloat16", "device": "cpu", "num_kv_blocks": 32} | options
    resolved = resolve(EngineConfig(**options), config)
    return model_cost(config, resolved), resolved


def test_sizes_of_a_dense_model_with_a_tied_head():
    cost, _ = counted(DENSE)
    assert cost.dense_values == 2 * LAYER == 15360
    assert cost.dense_bytes == 2 * (2 * LAYER + NORMS) == 31040
    assert (cost.head_values, cost.head_bytes) == (HEAD, 2 * HEAD)
    (attention,) = cost.attention
    assert attention == AttentionCost(2, (Seen(KV, PER_KEY),))
    assert cost.experts == ()


def test_a_decode_step_reads_weights_once_and_each_sequences_keys():
    cost, _ = counted(DENSE)
    keys = 5 + 9
    step = cost.decode_step([5, 9])
    assert step.num_bytes == 31040 + 2 * HEAD + 2 * KV * keys == 39232
    assert step.flops == 2 * (2 * 2 * LAYER + 2 * HEAD) + 2 * PER_KEY * keys == 77824


def test_prompts_multiply_every_token_see_a_triangle_and_write_their_keys():
    cost, _ = counted(DENSE)
    keys = (1 + 2 + 3) + (1 + 2)
    work = cost.prefill([3, 2])
    assert work.num_bytes == 31040 + 2 * HEAD + 2 * KV * 5
    assert work.flops == 2 * (5 * 2 * LAYER + 2 * HEAD) + 2 * PER_KEY * keys
    assert cost.prefill([3, 2], num_steps=3) == (work.num_bytes + 2 * 31040, work.flops)


def test_a_window_bounds_what_is_seen():
    cost, _ = counted(DENSE | {"model_type": "mistral", "sliding_window": 6})
    assert cost.decode_step([5, 9]).num_bytes == 31040 + 2 * HEAD + 2 * KV * (5 + 6)
    whole, _ = counted(DENSE)
    lost = (7 + 8) - (6 + 6)
    assert whole.prefill([8]).flops - cost.prefill([8]).flops == 2 * PER_KEY * lost


def test_layers_with_and_without_window_are_counted_each():
    config = DENSE | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    }
    cost, _ = counted(config)
    assert [(kind.num_layers, kind.seen[0].window) for kind in cost.attention] == [(1, None), (1, 4)]
    whole, _ = counted(config | {"use_sliding_window": False})
    assert whole.decode_step([10]).num_bytes - cost.decode_step([10]).num_bytes == KV * 6


@pytest.mark.parametrize("window", [None, 1, 3, 7, 20])
def test_visible_keys_is_the_sum_over_tokens(window):
    for length in range(12):
        assert visible_keys(length, window) == sum(min(i + 1, window or 99) for i in range(length))


def test_cache_dtype_halves_the_keys_and_nothing_else():
    plain, fp8 = (counted(DENSE, kv_cache_dtype=kind)[0].decode_step([100]) for kind in ("auto", "fp8"))
    assert plain.num_bytes - fp8.num_bytes == 2 * KV // 2 * 100
    assert plain.flops == fp8.flops


def test_a_mixture_of_experts_reads_the_experts_that_tokens_choose():
    cost, _ = counted(MOE)
    (kind,) = cost.experts
    assert kind == ExpertsCost(1, 4, 2, 2 * EXPERT, EXPERT)
    router, dense_mlp = 4 * 32, 3 * 48 * 32
    attention = LAYER - dense_mlp
    assert cost.dense_values == 2 * attention + dense_mlp + router
    assert kind.expected_experts(1) == pytest.approx(2)
    assert kind.expected_experts(2) == pytest.approx(3)  # each is missed by both with probability 1/4
    one, two = cost.decode_step([1]), cost.decode_step([1, 1])
    assert two.num_bytes - one.num_bytes == pytest.approx(2 * EXPERT + 2 * KV)
    assert two.flops - one.flops == 2 * (cost.dense_values + 2 * EXPERT + HEAD) + 2 * PER_KEY


def test_expected_experts_is_what_random_choices_hit():
    draw, kind = np.random.default_rng(0), ExpertsCost(1, 16, 3, 0, 0)
    hit = [len({int(e) for _ in range(7) for e in draw.choice(16, 3, replace=False)}) for _ in range(2000)]
    assert np.mean(hit) == pytest.approx(kind.expected_experts(7), rel=0.02)


@pytest.mark.parametrize("config", [DENSE, DENSE | {"tie_word_embeddings": False}, MOE])
@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"quantization": "int8"}])
def test_parts_add_up_to_the_memory_of_all_weights(config, options):
    cost, resolved = counted(config, **options)
    experts = sum(kind.num_layers * kind.num_experts * kind.bytes_per_expert for kind in cost.experts)
    embedding = cost.head_bytes  # of the same shape and format as the head
    assert cost.dense_bytes + cost.head_bytes + embedding + experts == resolved.weight_bytes


def test_floor_runs_prompts_then_a_step_per_token_as_places_become_free():
    cost, _ = counted(DENSE)
    limits = Limits(bytes_per_s=1e4, flops_per_s=1e9)
    floor = workload_floor(cost, limits, [3, 4, 5], [4, 2, 3], max_num_seqs=2, max_num_batched_tokens=7)
    assert floor.prefill == cost.prefill([3, 4, 5], num_steps=2)
    steps = [[4, 5], [5, 6], [6, 7]]  # the third starts when the second has given its other token
    works = [cost.decode_step(contexts) for contexts in steps]
    assert floor.num_decode_steps == 3
    assert floor.decode == Work(sum(w.num_bytes for w in works), sum(w.flops for w in works))
    assert floor.decode_s == pytest.approx(sum(w.num_bytes for w in works) / 1e4)
    assert floor.total_s == pytest.approx(floor.prefill_s + floor.decode_s)


def test_floor_of_one_token_each_has_no_decode_steps():
    cost, _ = counted(DENSE)
    floor = workload_floor(cost, Limits(1e9, 1e6), [8] * 3, [1] * 3, max_num_seqs=8, max_num_batched_tokens=64)
    assert (floor.num_decode_steps, floor.decode_s, floor.decode) == (0, 0.0, (0.0, 0.0))
    assert floor.total_s == floor.prefill.flops / 1e6


def test_a_step_takes_the_longer_of_reading_and_computing():
    limits = Limits(bytes_per_s=10, flops_per_s=100)
    assert limits.seconds(Work(50, 100)) == 5
    assert limits.seconds(Work(5, 200)) == 2


def test_published_sizes():
    qwen = {
        "model_type": "qwen3", "hidden_act": "silu", "vocab_size": 151936, "hidden_size": 1024, "head_dim": 128,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": True, "attention_bias": False,
    }  # fmt: skip
    cost, resolved = counted(qwen)
    assert isinstance(cost, ModelCost)
    assert resolved.dtype == torch.bfloat16
    assert cost.dense_values + cost.head_values == pytest.approx(0.6e9, rel=0.01)  # Qwen3-0.6B
    (attention,) = cost.attention
    assert attention.num_layers * attention.seen[0].bytes_per_row == 112 * 1024  # a token's keys and values


def test_latents_are_read_whole_or_by_index_and_prompts_may_expand_them():
    """Rank 32 and 8 rotated channels for 4 heads of 16 + 8, values of 12; 16 index heads of 16 choose 24 tokens."""
    absorbed, expanded = 2 * 4 * (2 * 32 + 8), 2 * 4 * (16 + 8 + 12)
    for name, most, index in (("deepseek_v3", None, ()), ("deepseek_v32", 24, (Seen(16 * 2, 2 * 16 * 17),))):
        model_type, options = DEEPSEEK_CONFIGS[name]
        cost, resolved = counted({"model_type": model_type, **options})
        latent = Seen(40 * 2, absorbed, most=most, prompt_flops_per_row=expanded)
        assert cost.attention == (AttentionCost(3, (latent, *index)),)
        assert [(kind.num_layers, kind.num_experts, kind.top_k) for kind in cost.experts] == [(2, 16, 4)]
        (group,) = resolved.groups
        assert group.bytes_per_row() == 3 * sum(part.bytes_per_row for part in (latent, *index))


def test_entries_stand_for_several_tokens_and_states_move_besides():
    """Heads of 32 over a window of 128; ratio 4 with 16 entries of the index's choice, ratio 128 with all."""
    model_type, options = DEEPSEEK_CONFIGS["deepseek_v4"]
    cost, _ = counted({"model_type": model_type, **options})
    window = Seen(64, 4 * 4 * 32, window=128)
    sparse = Seen(64, 4 * 4 * 32, tokens_per_row=4, most=16)
    keys = Seen(32, 2 * 16 * 17, tokens_per_row=4)
    heavy = Seen(64, 4 * 4 * 32, tokens_per_row=128)
    assert cost.attention == (
        AttentionCost(2, (window,)),
        AttentionCost(2, (window, sparse, keys), bytes_per_token=3 * 4 * (4 * 32 + 4 * 16)),
        AttentionCost(1, (window, heavy), bytes_per_token=2 * 4 * 2 * 32),
    )
    contexts = np.array([300, 5])
    assert [part.rows(contexts) for part in (window, sparse, keys, heavy)] == [128 + 5, 16 + 1, 75 + 1, 2]
