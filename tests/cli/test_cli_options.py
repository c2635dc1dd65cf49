"""Flags, variables and config files: names, precedence, and one line when something is wrong."""

import re

import pytest

from rorqual.cli import bench, bench_kernels, chat, collect_env, generate, options
from rorqual.cli.main import commands
from rorqual.config import EngineConfig
from rorqual.sampling_params import SamplingParams


def built(llm_class):
    return llm_class.made[-1].config


def params(llm_class):
    return llm_class.made[-1].asked[-1][1]


def test_every_engine_field_has_a_flag_with_its_docstring(rorqual):
    _, text, _ = rorqual("generate", "--help")
    flat = " ".join(text.split())
    for name, field in EngineConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert " ".join(field.description.split())[:40] in flat


def test_every_sampling_field_has_a_flag_or_is_listed_as_left_out(rorqual):
    _, text, _ = rorqual("generate", "--help")
    flags = {f for f in SamplingParams.model_fields if re.search(rf"--{f.replace('_', '-')}\b(?!-)", text)}
    assert flags | options.SAMPLING_NOT_FLAGS == set(SamplingParams.model_fields)


def test_tables_of_names_match_real_fields():
    fields = {o.name for c in commands().values() for o in c.options()}
    grouped = {name for names in options._GROUPS.values() for name in names}
    assert grouped <= set(EngineConfig.model_fields)
    assert set(options.ALIASES) | set(options.INVERSE_ALIASES) <= fields
    assert set(SamplingParams.model_fields) >= options.SAMPLING_NOT_FLAGS


@pytest.mark.parametrize("command", [" ".join(words) for words in commands()])
def test_every_option_of_every_command_is_explained_and_named_once(command):
    known = commands()[tuple(command.split())]
    spellings = [s for o in known.options() for s in (*o.flags, *o.off_flags)]
    assert len(spellings) == len(set(spellings))
    assert all(o.help for o in known.options())


def test_help_has_groups(rorqual):
    code, text, _ = rorqual("generate", "-h")
    assert code == 0
    for heading in ("command:", "sampling:", "model:", "memory and scheduling:", "device and numerics:", "general:"):
        assert f"\n{heading}\n" in text


@pytest.mark.parametrize(
    ("typed", "field", "value"),
    [
        (["--max-model-len", "32"], "max_model_len", 32),
        (["--max-model-len=2k"], "max_model_len", 2000),
        (["--max-model-len", "2K"], "max_model_len", 2048),
        (["--context-length", "32"], "max_model_len", 32),
        (["-c", "32"], "max_model_len", 32),
        (["--max-num-seqs", "4"], "max_num_seqs", 4),
        (["--max-running-requests", "4"], "max_num_seqs", 4),
        (["-np", "4"], "max_num_seqs", 4),
        (["--chunked-prefill-size", "64"], "max_num_batched_tokens", 64),
        (["--page-size", "8"], "block_size", 8),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--disable-radix-cache"], "enable_prefix_caching", False),
        (["--enable-prefix-caching"], "enable_prefix_caching", True),
        (["--tp", "1"], "tensor_parallel_size", 1),
        (["--tp-size", "1"], "tensor_parallel_size", 1),
        (["-tp", "1"], "tensor_parallel_size", 1),
        (["-dp", "1"], "data_parallel_size", 1),
        (["--disable-cuda-graph"], "enforce_eager", True),
        (["--enforce-eager"], "enforce_eager", True),
        (["--mem-fraction-static", "0.5"], "gpu_memory_utilization", 0.5),
        (["--model-path", "m"], "model", "m"),
        (["-m", "m"], "model", "m"),
        (["--kv-cache-memory", "1GiB"], "kv_cache_memory", 2**30),
        (["--hf-overrides", '{"rope_theta": 5}'], "hf_overrides", {"rope_theta": 5}),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--kv-cache-dtype", "fp8"], "kv_cache_dtype", "fp8"),
        (["--seed", "7"], "seed", 7),
    ],
)
def test_c2_flags_and_aliases_set_the_engine_option(rorqual, llm_class, typed, field, value):
    code, _, err = rorqual("generate", "x", *typed)
    assert code == 0, err
    assert getattr(built(llm_class), field) == value


def test_sampling_flags_arrive_typed(rorqual, llm_class):
    typed = [
        "--temperature",
        "0.5",
        "--top-k",
        "3",
        "--max-tokens",
        "5",
        "--stop",
        "a,b",
        "--stop",
        "c",
        "--ignore-eos",
    ]
    typed += ["--stop-token-ids", "1,2", "--stop-token-ids", "[3]", "--logit-bias", '{"50": 1.5}', "--min-p", "1"]
    assert rorqual("generate", "x", *typed)[0] == 0
    got = params(llm_class)
    assert (got.temperature, got.top_k, got.max_tokens, got.ignore_eos, got.min_p) == (0.5, 3, 5, True, 1.0)
    assert got.stop == ("a,b", "c")
    assert got.stop_token_ids == [1, 2, 3]
    assert got.logit_bias == {50: 1.5}


def test_flag_beats_variable_beats_file_beats_default(rorqual, llm_class, monkeypatch, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("max-num-seqs: 1\nblock_size: 1\nmax_model_len: 1k\n")
    monkeypatch.setenv("RORQUAL_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("RORQUAL_BLOCK_SIZE", "2")
    assert rorqual("generate", "x", "--config", file, "--max-num-seqs", "3")[0] == 0
    got = built(llm_class)
    assert (got.max_num_seqs, got.block_size, got.max_model_len, got.max_num_batched_tokens) == (3, 2, 1000, None)


def test_config_file_can_come_from_its_variable(rorqual, llm_class, monkeypatch, tmp_path):
    (tmp_path / "c.yaml").write_text("page-size: 4\ndisable-radix-cache: true\nstop: END\nstop-token-ids: [1]\n")
    monkeypatch.setenv("RORQUAL_CONFIG", str(tmp_path / "c.yaml"))
    assert rorqual("generate", "x")[0] == 0
    assert (built(llm_class).block_size, built(llm_class).enable_prefix_caching) == (4, False)
    assert (params(llm_class).stop, params(llm_class).stop_token_ids) == (("END",), [1])


@pytest.mark.parametrize(("text", "value"), [("true", True), ("0", False), ("off", False), ("YES", True), ("", True)])
def test_c3_variable_of_a_bool_reads_words_and_empty_is_unset(rorqual, llm_class, monkeypatch, text, value):
    monkeypatch.setenv("RORQUAL_ENABLE_PREFIX_CACHING", text)
    assert rorqual("generate", "x")[0] == 0
    assert built(llm_class).enable_prefix_caching is value


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--max-num-seq", "4"], "unknown option --max-num-seq: did you mean '--max-num-seqs'?"),
        (["--max-num", "4"], "unknown option --max-num"),
        (["--enable-prefix-cachin"], "did you mean '--enable-prefix-caching'?"),
        (["--max-model-len"], "--max-model-len needs a value"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be greater than or equal to 1, got 0"),
        (["-np", "0"], "-np must be greater than or equal to 1, got 0"),
        (["--max-num-seqs", "four"], "--max-num-seqs must be a valid integer"),
        (["--dtype", "float8"], "--dtype must be 'auto', 'float32', 'bfloat16' or 'float16', got 'float8'"),
        (["--hf-overrides", "{"], "--hf-overrides must be a JSON object, got '{'"),
        (["--temperature", "-1"], "--temperature must be greater than or equal to 0, got -1"),
        (["--temperature", "hot"], "--temperature must be a valid number, got 'hot'"),
        (["--top-p", "nan"], "--top-p must be a finite number"),
        (["--min-tokens", "5", "--max-tokens", "2"], "min_tokens (5) must be at most max_tokens (2)"),
        (["--ep-size", "2"], "unknown option --ep-size: experts are shared by all ranks or by none"),
        (["--enforce-eager=1"], "ignored explicit argument"),
        (["-z"], "unknown option -z: see rorqual generate --help"),
    ],
)
def test_c2_wrong_flags_are_one_line_and_exit_2(rorqual, llm_class, typed, said):
    code, out, err = rorqual("generate", "x", *typed)
    assert (code, out) == (2, "")
    assert err.startswith("rorqual: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert llm_class.made == []


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("RORQUAL_MAX_NUM_SEQS", "0", "RORQUAL_MAX_NUM_SEQS must be greater than or equal to 1, got 0"),
        ("RORQUAL_MAX_NUM_SEQS", "many", "RORQUAL_MAX_NUM_SEQS must be a valid integer"),
        ("RORQUAL_ENFORCE_EAGER", "maybe", "RORQUAL_ENFORCE_EAGER must be true or false, got 'maybe'"),
        ("RORQUAL_HF_OVERRIDES", "x", "RORQUAL_HF_OVERRIDES must be a JSON object, got 'x'"),
        ("RORQUAL_TEMPERATURE", "-1", "RORQUAL_TEMPERATURE must be greater than or equal to 0"),
    ],
)
def test_c3_error_names_the_variable(rorqual, llm_class, monkeypatch, name, text, said):
    monkeypatch.setenv(name, text)
    code, _, err = rorqual("generate", "x")
    assert code == 2
    assert said in err


def test_fault_of_two_options_names_where_the_hidden_one_was_set(rorqual, llm_class, monkeypatch):
    monkeypatch.setenv("RORQUAL_MAX_NUM_SEQS", "8")
    code, _, err = rorqual("generate", "x", "--max-num-batched-tokens", "4")
    assert code == 2
    assert "(set by RORQUAL_MAX_NUM_SEQS)" in err


def test_misspelt_variable_is_pointed_out_and_a_strange_one_is_not(rorqual, llm_class, monkeypatch):
    monkeypatch.setenv("RORQUAL_MAX_NUM_SEQ", "4")
    monkeypatch.setenv("RORQUAL_SERVICE_HOST", "10.0.0.1")
    code, _, err = rorqual("generate", "x", "--quiet")
    assert code == 0
    said = "environment variable RORQUAL_MAX_NUM_SEQ is not an option: did you mean RORQUAL_MAX_NUM_SEQS?"
    assert err == f"rorqual: warning: {said}\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("max-num-seq: 4", "unknown key 'max-num-seq' in {file}: did you mean 'max-num-seqs'?"),
        ("block_size: 0", "block_size in {file} must be greater than or equal to 1, got 0"),
        ("block_size: 4\npage-size: 8", "page-size in {file} sets what block_size in {file} has set already"),
        ("disable-radix-cache: 3", "disable-radix-cache in {file} must be true or false, got 3"),
        ("- a", "must hold keys and values, got a list"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_wrong_config_file_is_one_line_that_names_it(rorqual, llm_class, tmp_path, content, said):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    code, _, err = rorqual("generate", "x", "--config", file)
    assert code == 2
    assert err.count("\n") == 1
    assert said.format(file=file) in err


def test_missing_config_file_is_an_error(rorqual, tmp_path):
    code, _, err = rorqual("generate", "x", "--config", tmp_path / "none.yaml")
    assert code == 2
    assert "cannot read the config file" in err


def test_empty_config_file_and_empty_keys_say_nothing(rorqual, llm_class, tmp_path):
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert rorqual("generate", "x", "--config", tmp_path / "c.yaml")[0] == 0
    (tmp_path / "c.yaml").write_text("block-size:\n")
    assert rorqual("generate", "x", "--config", tmp_path / "c.yaml")[0] == 0
    assert built(llm_class).block_size == EngineConfig().block_size


def test_own_options_of_commands_have_variables_too(rorqual, llm_class, monkeypatch):
    monkeypatch.setenv("RORQUAL_QUIET", "1")
    assert rorqual("generate", "x")[2] == ""


def test_options_of_a_command_are_models():
    benches = (bench.ThroughputOptions, bench.LatencyOptions, bench.PrefillOptions, bench_kernels.KernelsOptions)
    for model in (generate.GenerateOptions, chat.ChatOptions, *benches, collect_env.CollectEnvOptions):
        assert all(field.description for field in model.model_fields.values())
