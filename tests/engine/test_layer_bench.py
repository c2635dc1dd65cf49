"""The ops of a layer, recorded and timed; and the work that is counted for their calls."""

import pytest
import torch

from rorqual.batch import Batch, CacheView
from rorqual.config import EngineConfig
from rorqual.engine.layer_bench import LayerBench, StepShape, made_up_batch
from rorqual.engine.op_work import op_work
from rorqual.engine.roofline import model_cost
from rorqual.loader.checkpoint import open_checkpoint
from rorqual.ops.attention import paged_attention
from rorqual.ops.decoder_blocks import Rotation, rotate_and_store
from rorqual.ops.gated_linear import gated_linear
from rorqual.ops.linear import linear
from rorqual.ops.moe import ExpertWeights, Routing, fused_experts
from rorqual.ops.registry import OPS, around
from rorqual.ops.rms_norm import rms_norm
from rorqual.ops.store_kvcache import LayerKV
from tests.tiny import checkpoint_folder

DECODE, PROMPT = StepShape(3, 1, 9), StepShape(2, 10, 10)


def bench_of(name, **options):
    options = {"dtype": "float32", "threads": 1, "block_size": 4} | options
    config = EngineConfig(model=str(checkpoint_folder(name)), **options)
    return LayerBench(config, [DECODE, PROMPT])


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """One round of each call: the tests ask for what is timed, not how long it takes."""
    monkeypatch.setattr("rorqual.engine.layer_bench.call_us", timed_once)


def timed_once(_device, calls):
    for call in calls:
        call()
    return 1.0 * len(calls), False


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2_windows", "qwen3_moe"])
@pytest.mark.parametrize("shape", [DECODE, PROMPT])
def test_parts_do_the_work_of_the_whole_step(name, shape):
    bench = bench_of(name)
    timings = bench.time_step(shape)
    parts = [each for each in timings if each.role == "part"]
    assert {"linear", "paged_attention", "store_kvcache", "rotary_embedding"} <= {each.op for each in parts}
    cost = model_cost(open_checkpoint(checkpoint_folder(name)).config, bench.resolved)
    assert bench.used_layers == bench.num_layers == 3
    whole = cost.decode_step([9] * 3) if shape is DECODE else cost.prefill([10, 10])
    flops = sum(each.num_calls * each.work.flops for each in parts if each.work)
    assert flops == whole.flops
    assert not [each.op for each in parts if each.work is None]


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "deepseek_v4"])
@pytest.mark.parametrize("shape", [StepShape(3, 1, 300), StepShape(2, 10, 10)])
def test_parts_of_layers_over_rows_do_the_work_of_the_whole_step(name, shape):
    """All but streams and pooling, which the model's cost leaves out."""
    config = EngineConfig(model=str(checkpoint_folder(name)), dtype="float32", threads=1, block_size=4)
    bench = LayerBench(config, [shape])
    timings = bench.time_step(shape)
    assert not [each.op for each in timings if each.work is None]
    left_out = {"merge_streams", "compress_rows"}
    parts = [each for each in timings if each.role == "part" and each.op not in left_out]
    cost = model_cost(open_checkpoint(checkpoint_folder(name)).config, bench.resolved)
    whole = cost.decode_step([shape.context] * 3) if shape.length == 1 else cost.prefill([10, 10])
    assert sum(each.num_calls * each.work.flops for each in parts) == whole.flops


def test_calls_alike_in_all_layers_are_one_line_and_take_turns():
    timings = bench_of("llama").time_step(DECODE)
    (down,) = [each for each in timings if each.op == "linear" and each.shapes.startswith("3x80")]
    assert (down.num_calls, down.us) == (3, 3.0)  # one call of each layer
    assert down.work.num_bytes == 4 * (3 * 80 + 80 * 48 + 3 * 48)
    blocks = [each for each in timings if each.op == "gated_mlp_block"]
    assert blocks
    assert {each.role for each in blocks} == {"whole"}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_blocks_count_what_their_parts_do(name):
    timings = bench_of(name).time_step(PROMPT)
    blocks = sum(t.num_calls * t.work.flops for t in timings if t.op.endswith("_block"))
    parts = sum(t.num_calls * t.work.flops for t in timings if t.role == "part")
    (head,) = [t for t in timings if t.op == "linear" and t.shapes.endswith("2x199")]
    assert blocks == parts - head.work.flops


def test_attention_reads_keys_once_and_multiplies_what_each_query_sees():
    for window, length, context in ((None, 1, 9), (None, 4, 9), (3, 1, 9), (3, 4, 9), (20, 4, 9)):
        cache = torch.zeros(3, 4, 2, 8)
        batch = Batch(
            *(torch.zeros(0) for _ in range(4)), (), torch.zeros(0), (length,), (context,)
        )  # its host's numbers alone count
        query = torch.zeros(length, 4, 8)
        args = (query, cache, cache, batch, torch.zeros(1, 3, dtype=torch.int32))
        work = op_work(paged_attention, args, {"scale": 1.0, "sliding_window": window}, query)
        sees = [[k for k in range(q + 1) if window is None or k > q - window] for q in range(context - length, context)]
        read = len({key for keys in sees for key in keys})
        assert work.num_bytes == read * 2 * 2 * 8 * 4 + 2 * query.nbytes
        assert work.flops == 4 * 4 * 8 * sum(map(len, sees))


def test_linear_counts_its_weight_bias_and_rows():
    x, weight, bias = torch.zeros(5, 16), torch.zeros(24, 16), torch.zeros(24)
    work = op_work(linear, (x, weight, bias), {}, linear(x, weight, bias))
    assert work == (4 * (5 * 16 + 24 * 16 + 24 + 5 * 24), 2 * 5 * 16 * 24)
    norm = op_work(rms_norm, (x, torch.ones(16)), {"eps": 1e-6}, rms_norm(x, torch.ones(16), eps=1e-6))
    assert norm == (4 * (2 * 5 * 16 + 16), 0)


def test_experts_count_the_choices_that_are_here():
    """Expert 0 for the first token, both for the second; the first's other choice and the third's are elsewhere."""
    weights = ((torch.zeros(24, 16),) * 2, (torch.zeros(16, 12),) * 2)
    routing = Routing(torch.tensor([[0, -3], [1, 0], [2, 7]]), torch.ones(3, 2))
    x, some = torch.zeros(3, 16), ExpertWeights(*weights, num_everywhere=12)
    values = 24 * 16 + 16 * 12
    work = op_work(fused_experts, (x, some, routing), {}, fused_experts(x, some, routing))
    assert work == (4 * (2 * values + 2 * 3 * 16), 2 * 3 * values)


def test_fused_ops_count_what_they_stand_for():
    x, weight = torch.zeros(5, 16), torch.zeros(2 * 12, 16)
    gated = op_work(gated_linear, (x, weight), {}, gated_linear(x, weight))
    assert gated == (4 * (5 * 16 + 24 * 16 + 5 * 12), 2 * 5 * 16 * 24)
    caches = LayerKV(0, *(torch.zeros(3, 4, 2, 8, dtype=torch.bfloat16) for _ in "kv"))
    positions = torch.arange(5)
    view = CacheView(torch.arange(5), torch.zeros(1, 3, dtype=torch.int32))
    ends = torch.tensor([0, 5], dtype=torch.int32)
    batch = Batch(positions, positions, ends, ends[1:], (view,), positions[-1:], (5,), (5,))
    qkv, rotation = torch.zeros(5, 4 + 2 * 2, 8), Rotation(torch.zeros(9, 8), interleaved=False, offset=0)
    named = {"num_heads": 4, "rotation": rotation}
    work = op_work(rotate_and_store, (qkv, batch, caches), named, rotate_and_store(qkv, batch, caches, **named))
    assert work == (4 * 5 * (8 * 8 + 4 * 8) + 2 * 2 * 5 * 2 * 8 + 4 * 5 * 8 + 2 * 8 * 5, 0)


def test_ops_that_are_not_counted_say_so():
    assert op_work(OPS["row_max"], (torch.zeros(1, 2),), {}, None) is None


def test_batch_is_what_the_engine_would_build():
    bench = bench_of("llama")
    batch = made_up_batch(bench.resolved, PROMPT, vocab_size=199)
    assert batch.query_lens == batch.context_lens_host == (10, 10)
    assert batch.positions.tolist() == [*range(10), *range(10)]
    (view,) = batch.caches
    assert view.block_tables.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert view.slot_mapping.tolist() == [*range(10), *range(12, 22)]
    assert batch.logits_indices.tolist() == [9, 19]
    assert batch.cu_seqlens_q.tolist() == [0, 10, 20]


def test_around_runs_every_call_and_ends_with_its_block():
    x, seen = torch.ones(2, 4), []

    def run(op, fn, args, kwargs):
        seen.append(op.name)
        return fn(*args, **kwargs)

    with around(run):
        inside = rms_norm(x, torch.ones(4), eps=0.0).out
    outside = rms_norm(x, torch.ones(4), eps=0.0).out
    assert seen == ["rms_norm"]
    assert torch.equal(inside, outside)
