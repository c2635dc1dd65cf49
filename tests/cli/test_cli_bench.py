"""`rorqual bench throughput`: the workload, the table and the JSON."""

import json
import random

import pytest

from rorqual.cli.bench import draw_workload, parse_range


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


def test_table_shows_rates_and_stages(rorqual, llm_class):
    code, out, _ = rorqual(*SMALL)
    assert code == 0
    for row in ("requests      4", "total time", "prompt", "output", "steps", "schedule", "forward", "other"):
        assert f"\n{row}" in f"\n{out}"
    made = llm_class.made[-1]
    workload = made.asked[2:]  # after the two warm-up requests
    assert len(workload) == 4
    assert all(p.ignore_eos and p.temperature == 0.6 and p.seed is not None for _, p in workload)
    load = draw_workload(num_seqs=4, input_len=(5, 20), output_len=(3, 8), vocab_size=128, seed=0)
    assert [ids for ids, _ in workload] == load.prompts
    assert [p.max_tokens for _, p in workload] == load.output_lens


def test_no_warmup_runs_the_workload_alone(rorqual, llm_class):
    rorqual(*SMALL, "--no-warmup", "--temperature", "0", "--load-format", "dummy")
    made = llm_class.made[-1]
    assert len(made.asked) == 4
    assert made.asked[0][1].temperature == 0
    assert made.config.load_format == "dummy"


def test_json_out_has_counts_options_and_environment(rorqual, llm_class, tmp_path):
    file = tmp_path / "deep" / "r.json"
    code, _, _ = rorqual(*SMALL, "--seed", "3", "--json-out", file)
    assert code == 0
    result = json.loads(file.read_text())
    load = draw_workload(num_seqs=4, input_len=(5, 20), output_len=(3, 8), vocab_size=128, seed=3)
    prompt, output = sum(map(len, load.prompts)), sum(load.output_lens)
    assert (result["prompt_tokens"], result["output_tokens"], result["num_requests"]) == (prompt, output, 4)
    assert result["output_tokens_per_s"] == pytest.approx(output / result["total_s"])
    assert result["mean_tokens_per_step"] == pytest.approx((prompt + output - 4) / result["num_steps"])
    assert sum(result["stage_s"].values()) == pytest.approx(result["total_s"])
    assert result["options"]["engine"]["seed"] == 3
    assert result["options"]["bench"]["num_seqs"] == 4
    assert {"date", "versions", "machine", "commit"} <= set(result["environment"])


def test_lengths_beyond_the_context_are_refused(rorqual, llm_class):
    code, _, err = rorqual("bench", "throughput", "--input-len", "1:60", "--output-len", "41")
    assert code == 2
    assert "up to 60 and --output-len up to 41 make 101 tokens, but max_model_len is 100" in err
    assert rorqual("bench", "throughput", "--num-seqs", "1", "--input-len", "60", "--output-len", "40")[0] == 0


def test_wrong_range_in_a_variable_names_it(rorqual, llm_class, monkeypatch):
    monkeypatch.setenv("RORQUAL_INPUT_LEN", "5:1")
    code, _, err = rorqual("bench", "throughput")
    assert code == 2
    assert "RORQUAL_INPUT_LEN must be a number or LOW:HIGH" in err
    assert llm_class.made == []
