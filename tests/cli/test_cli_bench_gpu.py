"""`rorqual bench` on a GPU: CUDA graphs, kernels in the profile, and limits of the device."""

import json

import pytest

pytestmark = pytest.mark.gpu

CONFIG = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 1024,
}


@pytest.fixture
def run(rorqual, tmp_path):
    """Run a bench command on a small model: what it printed and its JSON."""

    def run(command, *typed, **changes):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
        model = ("--model", tmp_path, "--load-format", "dummy", "--dtype", "bfloat16", "-q")
        code, out, err = rorqual("bench", command, *model, *typed, "--json", tmp_path / "r.json")
        assert code == 0, err
        return out, json.loads((tmp_path / "r.json").read_text())

    return run


SERVE = ("--num-kv-blocks", "512", "--max-model-len", "1024", "--skip-tokenizer-init")


@pytest.mark.parametrize("command", ["latency", "prefill"])
def test_profile_sees_kernels_launches_and_gaps(run, tmp_path, command):
    lengths = ("--input-len", "300", "--output-len", "30") if command == "latency" else ("--input-len", "500")
    out, result = run(command, *lengths, *SERVE, "--profile", "--profile-out", tmp_path / "t.json.gz")
    profile = result["profile"]
    assert 0 < profile["busy_us"] <= profile["span_us"]
    assert profile["launches"]["num"] > 0
    ranges = {"engine step", "forward", "schedule", "attention_block", "linear"}
    assert profile["top"]
    assert not ranges & {each["name"] for each in profile["top"]}
    assert "device busy" in out
    assert 0 < result["floor"]["total_s"] < result["total_s"]


def test_kernels_are_timed_in_graphs(run):
    _, result = run("kernels", "--batch-size", "16", "--context-len", "256", "--prompt-len", "256")
    for step in result["steps"].values():
        timed = {op["op"]: op for op in step["ops"]}
        assert timed["paged_attention"]["in_graph"]
        assert timed["linear"]["in_graph"]
        assert all(op["us"] > 0 for op in step["ops"])
    assert result["limits"]["bytes_per_s"] > 1e11


def test_experts_are_timed_too(run):
    experts = {"model_type": "qwen3_moe", "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
    _, result = run("kernels", "--batch-size", "16", "--context-len", "256", "--prompt-len", "256", **experts)
    assert {"fused_experts", "route_softmax"} <= {op["op"] for op in result["steps"]["decode"]["ops"]}
