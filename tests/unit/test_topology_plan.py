"""Plans for several GPUs, against numbers counted by hand and steps that were measured."""

import dataclasses
import itertools
import math

import pytest
import torch

from benchmarks.plan_estimates import measured_memory, measured_steps, planned_memory, planned_steps
from rorqual.config import EngineConfig
from rorqual.distributed.expert_exchange import ROWS_TOGETHER
from rorqual.engine.gpu_facts import GPUS, gpu_facts
from rorqual.engine.memory import SLACK
from rorqual.engine.roofline import model_cost
from rorqual.engine.topology import Hosts, Topology, sensible_topologies
from rorqual.engine.topology_plan import PRODUCT_S, Planner, chance_of_a_choice, resolve_for_gpu
from rorqual.models.registry import build_model
from tests.tiny import DEEPSEEK_CONFIGS

DENSE = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "attention_bias": False,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
TABLES = 2 * 128 * 32 * 2
"""Bytes of embedding and head."""
EXPERT = 3 * 8 * 32 * 2
"""Bytes of one expert."""
DEEPSEEK = {name: {"model_type": kind, **rest, "vocab_size": 200} for name, (kind, rest) in DEEPSEEK_CONFIGS.items()}
H200 = gpu_facts("h200")


def planner(config, num_gpus=1, per_host=8, gpu=H200, *, exchange="buffers", redundant=0, max_num_seqs=None, **options):
    resolved = resolve_for_gpu(EngineConfig(**options), config)
    return Planner(
        config,
        resolved,
        gpu,
        Hosts(num_gpus, per_host),
        max_num_seqs=max_num_seqs,
        num_redundant_experts=redundant,
        exchange=exchange,
    )


def step_of(config, topology, batch, context=100, **options):
    (step,) = planner(config, topology.num_gpus, **options).plan(topology, [batch], context).steps
    return step


@pytest.mark.parametrize("config", [DENSE, MOE, *DEEPSEEK.values()])
def test_one_gpu_reads_and_multiplies_what_the_roofline_says(config):
    cost = model_cost(config, resolve_for_gpu(EngineConfig(), config))
    work = cost.decode_step([20] * 3)
    step = step_of(config, Topology(1, 1), 3, context=20)
    assert (step.memory_bytes, step.flops) == pytest.approx(work)
    assert step.memory_s == pytest.approx(work.num_bytes / H200.bytes_per_s)
    assert step.starting_s == cost.num_products * PRODUCT_S
    assert step.all_reduce.calls == step.all_to_all.calls == 0
    assert step.expected_s == pytest.approx(max(step.memory_s, step.compute_s) + step.starting_s)


@pytest.mark.parametrize("config", [DENSE, MOE, *DEEPSEEK.values()])
def test_weights_of_one_gpu_are_those_of_the_model(config):
    resolved = resolve_for_gpu(EngineConfig(), config)
    memory = planner(config).plan(Topology(1, 1), [1], 20).memory
    model = build_model(config, resolved.placement(torch.device("meta"), 1))
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert memory.dense + memory.tables + memory.experts == pytest.approx(held, rel=0.02)  # MLA's halves are unpacked


def test_products_are_counted_once_a_step():
    per_layer = 4  # queries, keys and values; out; gate and up; down
    assert planner(DENSE).share(Topology(1, 1)).cost.num_products == 2 * per_layer + 1
    assert planner(MOE).share(Topology(1, 1)).cost.num_products == 2 * (per_layer + 1) + 1  # the router


def test_ranks_of_a_replica_have_their_part_of_each_matrix_and_all_norms():
    whole, half = (planner(DENSE, 2).plan(Topology(size, 1), [1], 100).memory for size in (1, 2))
    norms = 5 * 32 * 2
    assert half.dense == (whole.dense - norms) // 2 + norms
    assert half.tables == whole.tables // 2 == TABLES // 2
    assert whole.total == half.total == sum(half[1:])
    assert half.workspaces > whole.workspaces  # buffers for the exchange


def test_heads_of_keys_are_split_and_then_repeated():
    per_token = [planner(DENSE, 4).plan(Topology(size, 1), [1], 100).cache.bytes_per_token for size in (1, 2, 4)]
    one = 2 * 2 * 2 * 8 * 2  # layers, key and value, heads, channels, bytes
    assert per_token == [one, one / 2, one / 2]


@pytest.mark.parametrize("name", DEEPSEEK)
def test_latents_and_compressed_rows_lie_on_every_rank_of_a_replica(name):
    config = DEEPSEEK[name]
    one, two = (planner(config, 2).plan(Topology(size, 1), [1], 20).cache for size in (1, 2))
    assert one.bytes_per_token == two.bytes_per_token
    assert one.bytes_per_sequence == two.bytes_per_sequence


def test_replicas_share_the_batch_and_the_busiest_counts():
    alone, shared = step_of(DENSE, Topology(1, 1), 3), step_of(DENSE, Topology(1, 4), 9)
    assert shared.memory_bytes == alone.memory_bytes
    assert shared.expected_s == alone.expected_s
    assert shared.tokens_per_s == 3 * alone.tokens_per_s


@pytest.mark.parametrize("size", [2, 4])
def test_sums_over_a_replica(size):
    step = step_of(DENSE, Topology(size, 1), 6)
    rows, logits = 2 * 2 + 1, 128 // size
    assert step.all_reduce.calls == rows + 1
    assert step.all_reduce.num_bytes == (size - 1) * 6 * (rows * 32 + logits) * 2
    assert step.all_reduce.seconds == pytest.approx(step.all_reduce.num_bytes / H200.link_bytes_per_s)
    assert step.all_reduce.start_s == pytest.approx((rows + 1) * H200.link_latency_s)
    assert step.all_reduce.over == "link"


def test_a_replica_of_two_hosts_sums_over_the_network():
    near, far = (step_of(DENSE, Topology(4, 1), 6, per_host=count) for count in (4, 2))
    assert far.all_reduce.num_bytes == near.all_reduce.num_bytes
    # Each host gets the rows of two ranks, and each of its two GPUs the half of them.
    assert far.all_reduce.seconds == pytest.approx(near.all_reduce.num_bytes / 3 / H200.network_bytes_per_s)
    assert far.all_reduce.over == "network"


@pytest.mark.parametrize(("held", "count", "top_k"), [(1, 4, 2), (2, 6, 3), (3, 8, 1), (4, 6, 4)])
def test_chance_that_a_rank_is_wanted(held, count, top_k):
    choices = list(itertools.combinations(range(count), top_k))
    wanted = sum(min(choice) < held for choice in choices)
    assert chance_of_a_choice(held, count, top_k) == pytest.approx(wanted / len(choices))


def test_experts_are_shared_whole_by_all_ranks():
    whole, shared = (planner(MOE, 4).plan(topology, [4], 100) for topology in (Topology(1, 4), Topology(1, 4, True)))
    assert whole.memory.experts == 2 * 4 * EXPERT
    assert shared.memory.experts == 2 * EXPERT
    assert shared.memory.dense == whole.memory.dense
    split = planner(MOE, 4).plan(Topology(4, 1), [4], 100)
    assert split.memory.experts == shared.memory.experts
    assert planner(MOE, 4).plan(Topology(4, 1, True), [4], 100).memory.experts == shared.memory.experts


def test_ranks_read_their_part_of_the_experts_that_all_tokens_choose():
    alone, shared = (step_of(MOE, topology, 4) for topology in (Topology(1, 4), Topology(1, 4, True)))
    one, four = (4 * (1 - (1 - 2 / 4) ** tokens) for tokens in (1, 4))
    assert alone.memory_bytes - shared.memory_bytes == pytest.approx(2 * EXPERT * (one - four / 4))
    assert alone.flops == pytest.approx(shared.flops)  # each computes as many choices


def test_buffers_go_to_every_rank():
    step = step_of(MOE, Topology(2, 2, True), 12)  # 6 a replica, 3 rows from each of its ranks
    assert step.all_to_all.calls == 2 * 3
    assert step.all_to_all.num_bytes == 3 * 2 * 3 * (2 * 32 * 2 + 2 * 8)
    assert step.all_to_all.seconds == pytest.approx(step.all_to_all.num_bytes / H200.link_bytes_per_s)
    rows = ROWS_TOGETHER // 4 + 1
    assert step_of(MOE, Topology(1, 4, True), 4 * rows, context=1).all_to_all.calls == 2 * 3 * 2


def test_rows_go_to_the_ranks_that_hold_their_experts():
    step = step_of(MOE, Topology(1, 4, True), 12, exchange="rows")
    assert step.all_to_all.calls == 2 * 2
    assert step.all_to_all.num_bytes == pytest.approx(3 * 0.5 * 2 * 3 * (2 * 32 * 2 + 2 * 8))


def test_a_replica_alone_exchanges_no_tokens():
    step = step_of(MOE, Topology(4, 1, True), 12)
    assert step.all_to_all.calls == 0
    assert step.all_reduce == step_of(MOE, Topology(4, 1), 12).all_reduce


def test_between_hosts_the_network_bounds():
    rows, buffers = (step_of(MOE, Topology(1, 4, True), 12, per_host=2, exchange=each) for each in ("rows", "buffers"))
    assert rows.all_to_all.seconds == pytest.approx(rows.all_to_all.num_bytes * 2 / 3 / H200.network_bytes_per_s)
    # There, each of a host's two GPUs takes a half of what the others have; back, everything goes by itself.
    layer = 3 * (32 * 2 + 2 * 8), 3 * 32 * 2
    assert buffers.all_to_all.seconds == pytest.approx(2 * (layer[0] + 2 * layer[1]) / H200.network_bytes_per_s)
    assert rows.all_to_all.over == buffers.all_to_all.over == "network"
    assert rows.all_to_all.start_s == pytest.approx(rows.all_to_all.calls * H200.network_latency_s)
    slow = dataclasses.replace(H200, network_bytes_per_s=1e3)
    bound = step_of(MOE, Topology(1, 4, True), 12, per_host=2, gpu=slow)
    assert bound.bound == "network"
    assert bound.roofline_s == bound.all_to_all.seconds < bound.expected_s


def test_what_bounds():
    fast = dataclasses.replace(H200, link_latency_s=1e-12)
    assert step_of(DENSE, Topology(1, 1), 1).bound == "overhead"
    slow = {"memory": "bytes_per_s", "compute": "bf16_flops_per_s", "link": "link_bytes_per_s"}
    for resource, rate in slow.items():
        assert step_of(DENSE, Topology(2, 1), 8, gpu=dataclasses.replace(fast, **{rate: 1e6})).bound == resource


def test_redundant_experts_are_held_and_read_less_often_each():
    plain = planner(MOE, 4).plan(Topology(1, 4, True), [4], 100)
    more = planner(MOE, 4, redundant=4).plan(Topology(1, 4, True), [4], 100)
    assert more.memory.experts == 2 * plain.memory.experts
    hit = [count * (1 - (1 - 2 / count) ** 4) for count in (4, 8)]
    extra = more.steps[0].memory_bytes - plain.steps[0].memory_bytes
    assert extra == pytest.approx(2 * EXPERT * (hit[1] - hit[0]) / 4)
    assert planner(MOE, 4, redundant=4).plan(Topology(4, 1), [4], 100).memory.experts == plain.memory.experts
    for redundant in (1, 3):  # an engine has as many places on every rank
        rounded = planner(MOE, 4, redundant=redundant).plan(Topology(1, 4, True), [4], 100)
        assert rounded.memory.experts == more.memory.experts


def test_quantised_weights_multiply_at_their_rate():
    config = DEEPSEEK["deepseek_v4"] | {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
    }
    fp8, weights_alone = (
        step_of(config, Topology(1, 1), 8, context=20, activation_quantization=each) for each in ("auto", "none")
    )
    assert fp8.flops == weights_alone.flops
    assert fp8.compute_s < weights_alone.compute_s == pytest.approx(fp8.flops / H200.bf16_flops_per_s)


def gpu_with_room_for(num_tokens):
    """Beside DENSE's weights and steps."""
    memory = planner(DENSE).plan(Topology(1, 1), [1], 100).memory
    used = sum(memory[1:]) - memory.unused - memory.kv_cache
    per_token = 2 * 2 * 2 * 8 * 2
    return dataclasses.replace(H200, memory_bytes=math.ceil((used + SLACK + num_tokens * per_token) / 0.9))


def test_more_sequences_than_fit_wait():
    few, many = planner(DENSE, 2, gpu=gpu_with_room_for(3 * 64)).plan(Topology(1, 2), [4, 256], 64).steps
    assert (few.running, few.batch) == (4, 4)
    assert (many.running, many.batch) == (2 * 3, 256)
    (capped,) = planner(DENSE, 2, max_num_seqs=5).plan(Topology(1, 2), [256], 64).steps
    assert capped.running == 2 * 5


def test_what_does_not_go_is_one_sentence():
    with pytest.raises(ValueError, match=r"num_attention_heads \(4\) cannot be split over 3 ranks"):
        planner(DENSE, 3).plan(Topology(3, 1), [1], 100)
    with pytest.raises(ValueError, match="4 experts cannot be shared by 8 ranks: plan with --num-redundant-experts 4"):
        planner(MOE, 8).plan(Topology(1, 8, True), [1], 100)
    with pytest.raises(ValueError, match="the model has no routed experts to share"):
        planner(DENSE, 2).plan(Topology(1, 2, True), [1], 100)
    with pytest.raises(ValueError, match=r"a rank's weights take .* GiB and a step .* GiB of the .* GiB"):
        planner(DENSE, gpu=dataclasses.replace(H200, memory_bytes=1 << 28)).plan(Topology(1, 1), [1], 100)
    with pytest.raises(ValueError, match="12 GPUs do not fill hosts of 8"):
        planner(DENSE, 12)
    with pytest.raises(ValueError, match="unknown GPU 'H300': did you mean 'h800'"):
        gpu_facts("H300")
    with pytest.raises(ValueError, match="quantization 'int8' is for device 'cpu'"):
        planner(DENSE, quantization="int8")


def test_too_little_room_for_one_sequence():
    tight = planner(DENSE, gpu=gpu_with_room_for(64))
    with pytest.raises(ValueError, match="64 tokens: less than one sequence of 256: share the model among more ranks"):
        tight.plan(Topology(1, 1), [1], 256)
    assert tight.plan(Topology(1, 1), [1], 64).cache.sequences == 1


def test_topologies_of_hosts():
    found = sensible_topologies(16, 8, has_experts=True)
    assert [str(each) for each in found] == [
        *("DP16", "TP2 DP8", "TP4 DP4", "TP8 DP2"),
        *("DP16 EP16", "TP2 DP8 EP16", "TP4 DP4 EP16", "TP8 DP2 EP16"),
    ]
    assert [each[:2] for each in sensible_topologies(6, 8, has_experts=False)] == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert sensible_topologies(1, 8, has_experts=True) == [Topology(1, 1)]
    assert str(Topology(1, 1)) == "one GPU"
    assert {each.expert_parallel for each in sensible_topologies(8, 8, has_experts=True, expert_parallel=True)} == {
        True
    }


def test_gpus_are_ordered_as_their_data_sheets_say():
    assert GPUS["h200"].bytes_per_s == pytest.approx(4.28e12)
    assert GPUS["h200"].bf16_flops_per_s == pytest.approx(763e12)
    assert GPUS["h200"].bf16_flops_per_s == GPUS["h100"].bf16_flops_per_s < GPUS["b200"].bf16_flops_per_s
    assert GPUS["a100"].fp8_flops_per_s == GPUS["a100"].bf16_flops_per_s
    assert gpu_facts("H200", bytes_per_s=1.0) == dataclasses.replace(H200, bytes_per_s=1.0)


@pytest.mark.slow
def test_planned_steps_are_near_those_measured_and_never_past_the_roofline():
    """Within a fifth, where the roofline alone is off by up to 3.5 times."""
    measured = measured_steps()
    assert {each.model for each in measured} == {"qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "v4-flash-cut"}
    reached = []
    for each, step in zip(measured, planned_steps(measured), strict=True):
        assert 1 / 1.2 < step.expected_s / each.seconds < 1.2, each
        reached.append(step.roofline_s / each.seconds)
    assert 0.25 < min(reached) < 0.35 < 0.85 < max(reached) < 1


@pytest.mark.parametrize("name", measured_memory())
def test_planned_memory_is_near_what_engines_held(name):
    measured, planned = measured_memory()[name], planned_memory(name)
    measured["workspaces"] += measured["CUDA graphs"]
    for part, gib in planned.items():
        assert gib == pytest.approx(measured[part], abs=0.3), part
    assert planned["KV cache"] == pytest.approx(measured["KV cache"], rel=0.01)
