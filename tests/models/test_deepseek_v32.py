"""DeepSeek-V3.2 against transformers in float32, its index cache, and what its configs may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.distributed.mesh import Mesh
from rorqual.layers.decoder import Placement
from rorqual.models.registry import build_model, read_model_config
from tests.engine.engines import TINY_OPTIONS, tiny_llm
from tests.models.scattered import loaded_model, logits_by_chunks, tokens
from tests.models.test_deepseek_v3 import V3
from tests.tiny import DEEPSEEK_CONFIGS, checkpoint_folder, random_deepseek, reference_greedy, reference_logits

NAME, LENGTH = "deepseek_v32", 210
TOP_K = DEEPSEEK_CONFIGS[NAME][1]["index_topk"]


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 64, 128, 129, LENGTH])
def test_logits_equal_transformers(chunk_size):
    """2e-5 to 4e-5 apart; from position 24 on tokens attend to 24 of those before them."""
    token_ids = tokens(LENGTH)
    got = logits_by_chunks(loaded_model(checkpoint_folder(NAME)), token_ids, chunk_size)
    assert (got - reference_logits(NAME, token_ids)).abs().max() < 5e-5


@pytest.mark.parametrize("num_prompt", [1, 100, 209])
def test_prompt_and_cached_decode_equal_transformers(num_prompt):
    token_ids = tokens(LENGTH)
    model = loaded_model(checkpoint_folder(NAME))
    got = logits_by_chunks(model, token_ids, 64, num_prompt=num_prompt)
    assert (got - reference_logits(NAME, token_ids)).abs().max() < 5e-5


def test_greedy_tokens_equal_transformers():
    prompts = [tuple(tokens(length, seed=length)) for length in (1, 5, 16, 33, 150)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options = {"max_model_len": 192, "max_num_batched_tokens": 16, "num_kv_blocks": 100}
    with tiny_llm(NAME, **options) as llm:
        outputs = llm.generate([list(p) for p in prompts], params, use_tqdm=False)
    assert [out.token_ids for out in outputs] == [reference_greedy(NAME, prompt, 24) for prompt in prompts]


def test_tokens_see_only_what_the_indexer_chooses():
    """Up to as many tokens as it takes, it changes nothing; then everything."""
    token_ids = tokens(2 * TOP_K)
    model = loaded_model(checkpoint_folder(NAME))
    sparse = logits_by_chunks(model, token_ids, len(token_ids))
    for layer in model.model.layers:
        layer.self_attn.indexer = None
    dense = logits_by_chunks(model, token_ids, len(token_ids))
    apart = (sparse - dense).abs().amax(-1)
    assert apart[:TOP_K].max() < 5e-5
    assert apart[TOP_K:].min() > 1e-3


def test_the_indexer_rotates_in_halves_and_in_front():
    """Interleaved, as the attention does, or behind, as the latents are, is another model."""
    token_ids = tokens(100)
    want = reference_logits(NAME, token_ids)
    for wrong in ({"interleaved": True}, {"offset": 8}):
        model = loaded_model(checkpoint_folder(NAME))
        for layer in model.model.layers:
            vars(layer.self_attn.indexer.rotary).update(wrong)
        got = logits_by_chunks(model, token_ids, 64)
        assert (got - want)[:TOP_K].abs().max() < 5e-5
        assert (got - want)[TOP_K:].abs().max() > 0.1


# --- what the index cache holds


@pytest.fixture(scope="module")
def wide_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose index keys are as wide as the published ones'."""
    folder = tmp_path_factory.mktemp("wide_index")
    model_type, options = DEEPSEEK_CONFIGS[NAME]
    random_deepseek(model_type, options | {"index_head_dim": 128}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "num_bytes", "worst"), [("fp8", 132, 2), ("fp4", 68, 6)])
def test_index_keys_in_few_bits(wide_index, kind, num_bytes, worst):
    """Of 24 tokens, other ones than without rounding are at most 2 (FP8) or 6 (FP4) in the first layer, and some are:
    nothing else in that layer depends on the format.
    """
    token_ids = tokens(100)
    chosen = {}
    for format in ("plain", kind):
        model = loaded_model(wide_index, index_cache_format=format)
        chosen[format] = first_choices(model, token_ids)
    assert model.kv_specs[0].parts[1].bytes == num_bytes
    missed = [len(set(plain) - set(few)) for plain, few in zip(chosen["plain"], chosen[kind], strict=True)]
    assert missed[:TOP_K] == [0] * TOP_K
    assert 0 < max(missed) <= worst


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_chunks_do_not_matter_to_index_keys_in_few_bits(wide_index, kind, chunk_size):
    """But for a number that lies between two, which the last bit before it is rounded sends to the other one."""
    token_ids = tokens(100)
    model = loaded_model(wide_index, index_cache_format=kind)
    whole, cut = (first_choices(model, token_ids, size) for size in (len(token_ids), chunk_size))
    assert sum(a != b for a, b in zip(whole, cut, strict=True)) <= 2


@pytest.mark.parametrize(("kind", "num_bytes"), [("auto", 512), ("fp8", 132), ("fp4", 68)])
def test_the_engine_keeps_index_keys_as_it_is_told(wide_index, kind, num_bytes):
    """Where 24 tokens are all that there is, whatever they are rounded to."""
    prompt, params = tokens(8), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(str(wide_index), **(TINY_OPTIONS | {"index_cache_dtype": kind})) as llm:
        (group,) = llm.engine.resolved.groups
        assert [part.bytes for part in group.spec.parts] == [4 * 40, num_bytes]
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    model = loaded_model(wide_index)
    want = logits_by_chunks(model, prompt + output.token_ids, 4, num_prompt=8).argmax(-1)
    assert output.token_ids == want[7:-1].tolist()


def first_choices(model: Any, token_ids: list[int], chunk_size: int = 1000) -> list[list[int]]:
    """The slots that the first layer's indexer chooses for each token."""
    found: list[list[int]] = []
    indexer = model.model.layers[0].self_attn.indexer
    handle = indexer.register_forward_hook(lambda _module, _args, rows: found.extend(rows.slots.tolist()))
    logits_by_chunks(model, token_ids, chunk_size)
    handle.remove()
    return [[slot for slot in slots if slot >= 0] for slots in found]


# --- what config.json may say

V32: dict[str, Any] = V3 | {
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "quantization_config": V3["quantization_config"] | {"scale_fmt": "ue8m0"},
}


def read(**changes: Any) -> Any:
    return read_model_config({key: value for key, value in (V32 | changes).items() if value is not None})


def test_published_config_is_read():
    config = read()
    assert (config.index.n_heads, config.index.head_dim, config.index.topk) == (64, 128, 2048)
    assert config.dense_layers == {0, 1, 2}


def test_configs_that_transformers_saved_are_read():
    kinds = {"layer_types": ["indexed_attention"] * 61, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58}
    assert read(**kinds, head_dim=64, qk_head_dim=192, mlp_bias=False) == read()
    assert read(**kinds | {"layer_types": ["deepseek_sparse_attention"] * 61}) == read()  # of another version
    assert read(**kinds, first_k_dense_replace=None) == read()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q_lora_rank": None}, r"q_lora_rank must be a number for model_type 'deepseek_v32'"),
        ({"index_topk": None}, r"lacks index_topk"),
        ({"index_head_dim": 32}, r"index_head_dim \(32\) must be at least qk_rope_head_dim \(64\)"),
        ({"layer_types": ["full_attention"] * 61}, r"layer_types may hold indexed_attention, .*, got 'full_attention'"),
        ({"layer_types": ["indexed_attention"] * 60}, r"layer_types has 60 entries for 61 layers"),
        ({"mlp_layer_types": ["sparse"] * 61}, r"first_k_dense_replace = 3 and mlp_layer_types with dense layers \[\]"),
        ({"first_k_dense_replace": None}, r"lacks first_k_dense_replace or mlp_layer_types"),
        ({"mlp_bias": True}, r"mlp_bias must be False"),
        ({"scoring_func": "softmax"}, r"scoring_func must be 'sigmoid'"),
        ({"indexer_types": ["full"]}, r"does not honour here: indexer_types"),
    ],
)
def test_values_that_are_not_honoured_are_refused_by_name(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(**changes)


@pytest.mark.parametrize(("kind", "num_bytes"), [("plain", 1152 + 256), ("fp8", 1152 + 132), ("fp4", 1152 + 68)])
def test_what_is_cached_per_token(kind, num_bytes):
    config = V32 | {"num_hidden_layers": 2, "n_routed_experts": 8}
    place = Placement(Mesh.single(), torch.bfloat16, torch.device("meta"), torch.bfloat16, 8, index_cache_format=kind)
    assert [spec.bytes_per_row() for spec in build_model(config, place).kv_specs] == [num_bytes] * 2
