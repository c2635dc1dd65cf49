"""`rorqual plan`: topologies in order, the one that is asked for, tables, JSON, and a line for what does not go."""

import json

import pytest

from rorqual.cli.plan import PlanOptions
from tests.unit.test_topology_plan import DENSE, MOE


@pytest.fixture
def model(tmp_path):
    """A folder with a config alone."""

    def made(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return made


@pytest.fixture
def planned(rorqual):
    """The JSON of a command line."""

    def run(*typed):
        code, out, err = rorqual("plan", *typed, "--context", "100", "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def names(found):
    return {each["name"] for each in found["topologies"]}


def test_all_sensible_topologies_the_fastest_first(planned, model):
    found = planned(model(MOE), "--gpus", "4")
    assert names(found) == {"DP4", "TP2 DP2", "TP4", "DP4 EP4", "TP2 DP2 EP4", "TP4 EP4"}
    assert found["refused"] == {}
    rates = [each["decode"][-1]["tokens_per_s"] for each in found["topologies"]]
    assert rates == sorted(rates, reverse=True)
    assert [step["batch"] for step in found["topologies"][0]["decode"]] == [1, 4 * 32, 4 * 128]


def test_a_dense_model_has_no_expert_parallel_topologies(planned, model):
    found = planned(model(DENSE), "--gpus", "8", "--gpus-per-host", "2")
    assert names(found) == {"DP8", "TP2 DP4"}
    assert found["topologies"][0]["memory"]["experts"] == 0


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (["--gpus", "4", "--tensor-parallel-size", "2"], "TP2 DP2"),
        (["--gpus", "4", "--data-parallel-size", "4", "--enable-expert-parallel"], "DP4 EP4"),
        (["-tp", "2", "--data-parallel-size", "2", "--enable-expert-parallel"], "TP2 DP2 EP4"),
        ([], "one GPU"),
    ],
)
def test_the_topology_that_is_asked_for(planned, model, typed, name):
    assert names(planned(model(MOE), *typed)) == {name}


def test_expert_parallelism_alone_leaves_the_rest_open(planned, model):
    found = planned(model(MOE), "--gpus", "4", "--enable-expert-parallel")
    assert names(found) == {"DP4 EP4", "TP2 DP2 EP4", "TP4 EP4"}


def test_json_has_what_the_tables_have(planned, rorqual, model):
    typed = (model(MOE), "--gpus", "4", "--data-parallel-size", "2", "--batch", "6,2", "--enable-expert-parallel")
    (found,) = planned(*typed)["topologies"]
    assert sum(found["memory"].values()) == 2 * found["memory"]["total"]
    assert found["kv_cache"]["tokens_in_all"] == 2 * found["kv_cache"]["tokens"]
    few, many = found["decode"]
    assert (few["batch"], many["batch"], many["running"]) == (2, 6, 6)
    assert many["tokens_per_s"] == pytest.approx(6 / many["expected_s"])
    assert many["tokens_per_s_each"] == pytest.approx(1 / many["expected_s"])
    assert many["tokens_per_s_per_gpu"] == pytest.approx(1.5 / many["expected_s"])
    assert many["roofline_tokens_per_s"] > many["tokens_per_s"]
    assert many["all_reduce"]["num_bytes"] > 0 < many["all_to_all"]["num_bytes"]
    code, out, _ = rorqual("plan", *typed, "--context", "100")
    assert code == 0
    assert out.splitlines()[0].endswith("on 4 x h200, decoding after 100 tokens")
    assert "\nTP2 DP2 EP4\n  memory of a rank: 139.8 GiB: dense 0.0" in out
    assert f"{found['kv_cache']['tokens']:,} tokens a rank, {2 * found['kv_cache']['tokens']:,} in all" in out
    last = out.splitlines()[-1].split()
    assert last[:2] == ["6", "6"]
    assert last[4] == f"{many['tokens_per_s']:,.0f}"
    assert last[-1] == many["bound"]


def test_topologies_that_do_not_go_say_why_below_the_others(rorqual, model):
    code, out, _ = rorqual("plan", model(MOE), "--gpus", "8", "--context", "100")
    assert code == 0
    ranking = out.split("\n\n")[1].splitlines()
    assert {line.split("  ")[0] for line in ranking[1:]} == {"DP8", "TP2 DP4", "TP4 DP2"}
    assert "\nnot TP8: num_attention_heads (4) cannot be split over 8 ranks" in out
    assert "\nnot DP8 EP8: 4 experts cannot be shared by 8 ranks: plan with --num-redundant-experts 4" in out
    code, out, _ = rorqual("plan", model(MOE), "--gpus", "8", "--context", "100", "--num-redundant-experts", "4")
    assert "\nDP8 EP8\n" in out


def test_every_number_of_a_gpu_can_be_replaced(planned, model):
    numbers = {
        "gpu_memory": ("10GiB", "memory_bytes", 10 << 30),
        "hbm_rate": (100, "bytes_per_s", 1e11),
        "bf16_rate": (2, "bf16_flops_per_s", 2e12),
        "fp8_rate": (3, "fp8_flops_per_s", 3e12),
        "link_rate": (4, "link_bytes_per_s", 4e9),
        "network_rate": (5, "network_bytes_per_s", 5e9),
        "link_latency": (6, "link_latency_s", 6e-6),
        "network_latency": (7, "network_latency_s", 7e-6),
    }
    typed = [part for name, (value, *_) in numbers.items() for part in (f"--{name.replace('_', '-')}", value)]
    gpu = planned(model(DENSE), "--gpu", "A100", *typed)["gpu"]
    assert gpu == {"name": "a100"} | {field: pytest.approx(value) for _, field, value in numbers.values()}


def test_other_exchanges_take_other_times(planned, model):
    typed = (model(MOE), "--gpus", "4", "-tp", "1", "--enable-expert-parallel")
    bytes_of = {
        kind: planned(*typed, "--exchange", kind)["topologies"][0]["decode"][-1]["all_to_all"]["num_bytes"]
        for kind in ("buffers", "rows")
    }
    assert bytes_of["rows"] == pytest.approx(bytes_of["buffers"] / 2)  # half the ranks hold none of a token's experts


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--gpu", "h300"], "unknown GPU 'h300': did you mean 'h800'?"),
        (["--gpus", "12"], "12 GPUs do not fill hosts of 8"),
        (["--gpus", "0"], "--gpus must be greater than or equal to 1"),
        (["--gpus", "4", "-tp", "3"], "tensor_parallel_size 3 times data_parallel_size 1 is not the 4 of --gpus"),
        (["--gpus", "3", "-tp", "3"], "num_attention_heads (4) cannot be split over 3 ranks"),
        (["--gpu-memory", "500MiB"], "there is no way to share the model: one GPU: a rank's weights take"),
        (["--gpus", "2", "--enable-expert-parallel"], "there is no way to share the model: DP2 EP2: the model has no"),
        (["--context", "257"], "--context 257 is more than the 256 tokens of the model"),
        (["--batch", "0"], "--batch"),
        (["--exchange", "all"], "--exchange must be 'buffers' or 'rows'"),
        (["--quantization", "int4"], "quantization 'int4' is for device 'cpu'"),
        (["other", "more"], "unexpected argument"),
    ],
)
def test_a_mistake_is_one_line(rorqual, model, typed, said):
    code, out, err = rorqual("plan", model(DENSE), *typed, *([] if "--context" in typed else ["--context", "100"]))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err


def test_a_gguf_file_is_planned_in_the_numbers_that_a_gpu_makes_of_it(monkeypatch, planned, model):
    folder = model(DENSE)
    plain = planned(folder)
    from rorqual.loader import checkpoint
    from rorqual.quantization.integer import Q8_0

    opened = checkpoint.open_checkpoint(folder, load_format="dummy")
    opened.integer_formats = {"model.layers.0.mlp.up_proj.weight": Q8_0}
    monkeypatch.setattr(checkpoint, "open_checkpoint", lambda *_, **__: opened)
    assert planned(folder)["topologies"] == plain["topologies"]


def test_options_name_their_defaults():
    assert PlanOptions().facts().name == "h200"
