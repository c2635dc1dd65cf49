"""`rorqual bench` with the real engine on a tiny model: profile, steady steps and kernels."""

import gzip
import json
from types import SimpleNamespace

import pytest
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import Interval

from rorqual.cli.bench_profile import (
    Span,
    Timeline,
    Total,
    busy_and_gaps,
    device_spans,
    largest,
    profile_steps,
)
from rorqual.cli.bench_steady import long_enough, running, seconds_per_step, step_until_decoding
from rorqual.cli.bench_workload import draw_workload
from tests.engine.engines import tiny_llm
from tests.tiny import checkpoint_folder

TINY = ("--dtype", "float32", "--threads", "1", "--block-size", "4", "--skip-tokenizer-init", "-q")


@pytest.fixture
def run(rorqual, monkeypatch):
    """Run a bench command on a tiny model, on a machine whose limits take no time to measure."""
    monkeypatch.setattr("rorqual.engine.device_timing._COPIED_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr("rorqual.engine.device_timing._MATRIX_SIZE", {"cpu": 64})

    def run(command, *typed, model="llama"):
        code, out, err = rorqual("bench", command, "--model", checkpoint_folder(model), *TINY, *typed)
        assert code == 0, err
        return out

    return run


SERVE = ("--max-model-len", "64", "--num-kv-blocks", "64")


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "qwen2_windows"])
def test_floor_of_a_real_model_stands_beside_its_time(run, tmp_path, model):
    file = tmp_path / "r.json"
    lengths = ("--num-seqs", "3", "--input-len", "2:8", "--output-len", "5", "--rounds", "2")
    run("throughput", *lengths, *SERVE, "--json", file, model=model)
    result = json.loads(file.read_text())
    assert result["floor"]["decode"]["num_steps"] == 4
    assert result["floor"]["total_s"] > 0
    assert result["floor"]["limits"]["flops_per_s"] > 0
    assert len(result["rounds_s"]) == 2
    assert result["cached_tokens"] == 0  # the second round finds nothing of the first


def test_latency_profile_shows_stages_and_ops_and_writes_a_trace(run, tmp_path):
    trace, file = tmp_path / "t.json.gz", tmp_path / "r.json"
    lengths = ("--input-len", "9", "--output-len", "6", "--rounds", "1")
    out = run("latency", *lengths, *SERVE, "--profile", "--profile-out", trace, "--json", file)
    assert "profile of 10 decode steps" in out
    assert f"trace written to {trace}" in out
    for stage in ("schedule", "build", "forward", "sample", "update"):
        assert f"\n  host: {stage}" in out
    profile = json.loads(file.read_text())["profile"]
    assert profile["num_steps"] == 10
    ops = {each["name"]: each["num"] for each in profile["top"]}
    assert ops["paged_attention"] == 30  # three layers, ten steps
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {"engine step", "forward", "paged_attention"} <= {event.get("name") for event in events}


def test_prefill_profiles_steps_of_prompts(run, tmp_path):
    trace = tmp_path / "t.json"
    sizes = ("--num-seqs", "6", "--input-len", "16", "--max-num-batched-tokens", "32", "--max-num-seqs", "8")
    out = run("prefill", *sizes, *SERVE, "--rounds", "1", "--profile", "--profile-out", trace)
    assert "profile of 3 prompt steps" in out
    assert "prompt        96 tokens" in out
    assert trace.exists()


def test_profile_of_a_context_without_room_says_so(run, rorqual, tmp_path):
    code, out, err = rorqual(
        *("bench", "throughput", "--model", checkpoint_folder("llama"), *TINY, *SERVE, "--num-seqs", "2"),
        *("--input-len", "60", "--output-len", "4", "--profile", "--profile-out", tmp_path / "t.json"),
    )
    assert code == 2
    assert "requests      2" in out
    assert "lower --input-len or raise --max-model-len" in err


def test_engine_is_as_before_after_a_profile(tmp_path):
    with tiny_llm() as llm:
        load = draw_workload(num_seqs=2, input_len=(3, 5), output_len=(9, 9), vocab_size=199, seed=0)
        stats = llm.engine.stats
        timeline = profile_steps(llm, load, str(tmp_path / "t.json"), temperature=0.0)
        assert llm.engine.stats is stats
        assert not llm.engine.has_work
        assert (timeline.kind, timeline.busy_us, timeline.launches.num) == ("decode", 0.0, 0)
        assert sum(timeline.stages.values()) <= timeline.wall_us


def test_steady_steps_decode_every_sequence_once():
    with tiny_llm() as llm:
        load = draw_workload(num_seqs=4, input_len=(9, 9), output_len=(2, 2), vocab_size=199, seed=0)
        engine = llm.engine
        load = long_enough(engine, load, 5)
        with running(engine, load, temperature=0.0):
            step_until_decoding(engine)
            before = engine.stats.num_output_tokens
            assert seconds_per_step(engine, 5) > 0
            assert engine.stats.num_output_tokens - before == 5 * 4
        assert not engine.has_work


def test_kernels_times_the_ops_of_both_steps(run, tmp_path):
    file = tmp_path / "k.json"
    sizes = ("--batch-size", "2", "--context-len", "6", "--prompt-len", "8", "--num-prompts", "2")
    out = run("kernels", *sizes, "--json", file)
    assert "decode step: 2 x 1 tokens that see up to 6 keys" in out
    assert "prompt step: 2 x 8 tokens that see up to 8 keys" in out
    result = json.loads(file.read_text())
    (attention,) = [op for op in result["steps"]["decode"]["ops"] if op["op"] == "paged_attention"]
    assert attention["num_calls"] == result["used_layers"] == 3
    floor_us = attention["work"]["num_bytes"] / result["limits"]["bytes_per_s"] * 1e6
    assert attention["of_copy"] == pytest.approx(floor_us / attention["us"])
    assert attention["us"] > 0
    assert f" {attention['op']} ({attention['backend']}" in out


def test_device_time_is_the_union_and_gaps_are_what_is_longer_than_a_microsecond():
    spans = [Span("a", 10, 20), Span("b", 15, 18), Span("a", 20.5, 30), Span("c", 40, 41), Span("c", 40.5, 43)]
    busy, gaps = busy_and_gaps(spans)
    assert busy == 10 + 9.5 + 3
    assert (gaps.num, gaps.us) == (1, 10)
    assert [tuple(total) for total in largest(spans)] == [("a", 2, 19.5), ("c", 2, 3.5), ("b", 1, 3)]


def event(name, start, end, device, *, own=False):
    return SimpleNamespace(name=name, device_type=device, time_range=Interval(start, end), is_user_annotation=own)


def test_ranges_of_our_own_are_no_device_time_and_launches_are_the_hosts():
    cpu, cuda = DeviceType.CPU, DeviceType.CUDA
    events = [
        event("forward", 0, 90, cpu),
        event("cudaLaunchKernelExC", 1, 3, cpu),
        event("cudaGraphLaunch", 5, 9, cpu),
        event("cudaEventSynchronize", 9, 50, cpu),
        event("forward", 10, 90, cuda),
        event("something", 10, 90, cuda, own=True),
        event("gemm", 10, 30, cuda),
        event("gemm", 40, 50, cuda),
    ]
    spans, launches = device_spans(events, {"forward"})
    assert spans == [Span("gemm", 10, 30), Span("gemm", 40, 50)]
    assert (launches.num, launches.us) == (2, 6)


def test_table_of_a_device_is_per_step():
    timeline = Timeline(
        kind="decode", num_steps=2, wall_us=4000.0, stages={"forward": 1000.0}, launches=Total("launches", 8, 600.0),
        busy_us=3000.0, span_us=3800.0, gaps=Total("gaps", 4, 700.0), top=[Total("gemm", 20, 2400.0)],
    )  # fmt: skip
    lines = {line[:22].strip(): line[22:].split() for line in timeline.table().splitlines()[1:] if " ms" in line[22:]}
    assert {name: words[0] for name, words in lines.items()} == {
        "step": "2.000", "host: forward": "0.500", "host: launches": "0.300", "device busy": "1.500",
        "device gaps": "0.350", "device small gaps": "0.050",
    }  # fmt: skip
    assert "75.0% of the step" in timeline.table()
    assert "    1.200  80.0%    10.0    120.00  gemm" in timeline.table()
