"""`rorqual bench`: the workload, the table, the floor, and the JSON."""

import json
import random

import pytest

from rorqual.cli import bench_report
from rorqual.cli.bench import draw_workload
from rorqual.cli.bench_workload import parse_range
from rorqual.engine.roofline import Limits, ModelCost, workload_floor

COST = ModelCost(dense_bytes=1000, dense_values=500, head_bytes=200, head_values=100, attention=(), experts=())
LIMITS = Limits(bytes_per_s=1e6, flops_per_s=1e7)


@pytest.fixture(autouse=True)
def _no_machine(monkeypatch):
    """The fake LLM has no model, and runs nowhere."""
    monkeypatch.setattr(bench_report, "counted_cost", lambda _llm, _config: COST)
    monkeypatch.setattr(bench_report, "measured_limits", lambda _resolved: LIMITS)


def test_workload_is_drawn_in_nano_vllms_order_and_depends_on_the_seed_only():
    got = draw_workload(num_seqs=3, input_len=(2, 9), output_len=(1, 5), vocab_size=50, seed=4)
    draw = random.Random(4)
    prompts = [[draw.randint(0, 49) for _ in range(draw.randint(2, 9))] for _ in range(3)]
    assert got == (prompts, [draw.randint(1, 5) for _ in range(3)])
    assert got != draw_workload(num_seqs=3, input_len=(2, 9), output_len=(1, 5), vocab_size=50, seed=5)


def test_workload_covers_the_whole_range_and_vocabulary():
    load = draw_workload(num_seqs=300, input_len=(1, 3), output_len=(2, 4), vocab_size=4, seed=0)
    assert {len(p) for p in load.prompts} == {1, 2, 3}
    assert {token for p in load.prompts for token in p} == {0, 1, 2, 3}
    assert set(load.output_lens) == {2, 3, 4}


@pytest.mark.parametrize(("text", "ends"), [("100:1024", (100, 1024)), ("7", (7, 7)), (" 1:1 ", (1, 1))])
def test_length_is_a_number_or_a_range(text, ends):
    assert parse_range(text, origin="--input-len") == ends


@pytest.mark.parametrize("text", ["0", "5:4", "a", "1:", ":3", "1:2:3", "-1", ""])
def test_wrong_length_names_its_flag(text):
    with pytest.raises(ValueError, match="--input-len must be a number or LOW:HIGH"):
        parse_range(text, origin="--input-len")


SMALL = ("bench", "throughput", "--num-seqs", "4", "--input-len", "5:20", "--output-len", "3:8")


def test_table_shows_rates_floor_and_stages(rorqual, llm_class):
    code, out, _ = rorqual(*SMALL)
    assert code == 0
    rows = ("requests      4", "total time", "prompt", "output", "first token", "then", "steps", "floor", "reached")
    for row in (*rows, "schedule", "forward", "other"):
        assert f"\n{row}" in f"\n{out}"
    made = llm_class.made[-1]
    load = draw_workload(num_seqs=4, input_len=(5, 20), output_len=(3, 8), vocab_size=128, seed=0)
    warmup, workload = made.asked[:4], made.asked[4:]
    assert [ids for ids, _ in warmup] == [ids for ids, _ in workload] == load.prompts
    assert [p.max_tokens for _, p in warmup] == [min(4, n) for n in load.output_lens]
    assert [p.max_tokens for _, p in workload] == load.output_lens
    assert all(p.ignore_eos and p.temperature == 0.6 and p.seed is not None for _, p in workload)
    assert not any(p.detokenize for _, p in workload)


def test_no_warmup_runs_the_workload_alone(rorqual, llm_class):
    rorqual(*SMALL, "--no-warmup", "--temperature", "0", "--load-format", "dummy")
    made = llm_class.made[-1]
    assert len(made.asked) == 4
    assert made.asked[0][1].temperature == 0
    assert made.config.load_format == "dummy"


@pytest.mark.parametrize(
    ("command", "requests", "prompt", "output", "rounds"),
    [("latency", 1, 50, 50, 3), ("prefill", 64, 99, 1, 3), ("throughput", 256, None, None, 1)],
)
def test_each_command_has_its_own_workload(rorqual, llm_class, monkeypatch, command, requests, prompt, output, rounds):
    lengths = ("--input-len", str(prompt or 40)) if command != "prefill" else ("--input-len", "99")
    lengths += ("--output-len", str(output or 40)) if command != "prefill" else ()
    code, out, err = rorqual("bench", command, *lengths, "--no-warmup")
    assert (code, f"\nrequests      {requests}\n" in f"\n{out}") == (0, True), err
    asked = llm_class.made[-1].asked
    assert len(asked) == requests * rounds
    assert {len(ids) for ids, _ in asked} == {prompt or 40}
    assert {p.max_tokens for _, p in asked} == {output or 40}


@pytest.mark.parametrize("command", ["throughput", "latency", "prefill"])
def test_defaults_are_those_of_the_published_comparison(rorqual, llm_class, monkeypatch, command):
    monkeypatch.setattr(llm_class, "max_model_len", 4096)
    rorqual("bench", command, "--no-warmup", "--rounds", "1")
    asked = llm_class.made[-1].asked
    shape = len(asked), {len(ids) for ids, _ in asked}, {p.max_tokens for _, p in asked}
    if command == "throughput":
        assert shape[0] == 256
        assert all(100 <= length <= 1024 for lengths in shape[1:] for length in lengths)
    else:
        assert shape == ((1, {1024}, {256}) if command == "latency" else (64, {2048}, {1}))


def test_json_has_counts_floor_options_and_environment(rorqual, llm_class, tmp_path):
    file = tmp_path / "deep" / "r.json"
    code, _, _ = rorqual(*SMALL, "--seed", "3", "--json", file)
    assert code == 0
    result = json.loads(file.read_text())
    load = draw_workload(num_seqs=4, input_len=(5, 20), output_len=(3, 8), vocab_size=128, seed=3)
    prompt, output = sum(map(len, load.prompts)), sum(load.output_lens)
    assert (result["prompt_tokens"], result["output_tokens"], result["num_requests"]) == (prompt, output, 4)
    assert result["output_tokens_per_s"] == pytest.approx(output / result["total_s"])
    assert result["mean_tokens_per_step"] == pytest.approx((prompt + output - 4) / result["num_steps"])
    assert sum(result["stage_s"].values()) == pytest.approx(result["total_s"])
    assert (result["first_token_ms"], result["between_tokens_ms"]) == (250, 500)  # as the fake says
    floor = workload_floor(
        COST, LIMITS, [*map(len, load.prompts)], load.output_lens, max_num_seqs=8, max_num_batched_tokens=64
    )
    assert result["floor"]["total_s"] == pytest.approx(floor.total_s)
    assert result["floor"]["decode"]["num_bytes"] == 1200 * (max(load.output_lens) - 1)
    assert result["floor"]["limits"] == LIMITS._asdict()
    assert result["start_s"] > 0
    assert result["options"]["engine"]["seed"] == 3
    assert result["options"]["bench"]["num_seqs"] == 4
    assert {"date", "versions", "machine", "commit"} <= set(result["environment"])


def test_the_round_with_the_median_time_is_shown(rorqual, llm_class, tmp_path, monkeypatch):
    clock = iter([0, 1, 10, 15, 20, 22, 30, 33, 40, 44])  # start_s, then rounds of 5, 2, 3 and 4 seconds
    monkeypatch.setattr("rorqual.cli.bench.time.perf_counter", lambda: next(clock))
    code, out, _ = rorqual(*SMALL, "--rounds", "4", "--no-warmup", "--json-out", tmp_path / "r.json", "-q")
    assert code == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["rounds_s"], result["total_s"]) == ([5, 2, 3, 4], 3)
    assert "total time    3.000 s, the median of 2.000, 3.000, 4.000, 5.000" in out


def test_lengths_beyond_the_context_are_refused(rorqual, llm_class):
    code, _, err = rorqual("bench", "throughput", "--input-len", "1:60", "--output-len", "41")
    assert code == 2
    assert "up to 60 and --output-len up to 41 make 101 tokens, but max_model_len is 100" in err
    assert rorqual("bench", "throughput", "--num-seqs", "1", "--input-len", "60", "--output-len", "40")[0] == 0


def test_wrong_range_in_a_variable_names_it(rorqual, llm_class, monkeypatch):
    monkeypatch.setenv("RORQUAL_INPUT_LEN", "5:1")
    code, _, err = rorqual("bench", "latency")
    assert code == 2
    assert "RORQUAL_INPUT_LEN must be a number or LOW:HIGH" in err
    assert llm_class.made == []


def test_a_file_that_cannot_be_written_is_one_line(rorqual, llm_class, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = rorqual(*SMALL, "--json", tmp_path / "file" / "r.json", "-q")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot write --json-out" in err
