"""DeepSeek-V4 against transformers in float32, and what each of its parts must not get wrong."""

from __future__ import annotations

import functools
import json
import math
import shutil
from array import array
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rorqual import SamplingParams
from rorqual.cache.paging import Retention
from rorqual.cache.spec import group_caches
from rorqual.cache.storage import KVStorage
from rorqual.engine.batch_builder import build_batch
from rorqual.loader.weights import wanted_tensors
from rorqual.sequence import Chunk, Sequence
from tests.engine.engines import tiny_llm
from tests.models.scattered import CPU, MAX_LEN, loaded_model, logits_by_chunks, tokens
from tests.tiny import checkpoint_folder, reference_greedy, reference_logits

NAMES = ["deepseek_v4", "deepseek_v4_window"]
LENGTH = 402
"""More than three entries of 128 tokens and three windows."""


@functools.cache
def model_of(name: str, **options: Any) -> Any:
    with torch.inference_mode(mode=False):
        return loaded_model(checkpoint_folder(name), **options)


@pytest.mark.parametrize("chunk_size", [64, 128, 129, LENGTH])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name, chunk_size):
    """1e-5 to 2e-5 apart on logits of up to 9."""
    token_ids = tokens(LENGTH)
    got = logits_by_chunks(model_of(name), token_ids, chunk_size)
    assert (got - reference_logits(name, token_ids)).abs().max() < 5e-5


@pytest.mark.parametrize(
    "at_once", [range(10, 374), pytest.param(range(0), marks=pytest.mark.slow)], ids=["ends", "all along"]
)
@pytest.mark.parametrize("chunk_size", [1, 3, 7])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_small_chunks_equal_transformers(name, chunk_size, at_once):
    """At both ends of the text: nothing is cached yet, and a third entry of 128 tokens becomes full."""
    token_ids = tokens(LENGTH)
    got = logits_by_chunks(model_of(name), token_ids, chunk_size, at_once=at_once)
    assert (got - reference_logits(name, token_ids)).abs().max() < 5e-5


@pytest.mark.parametrize("num_prompt", [1, 127, 385])
@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_cached_decode_equal_transformers(name, num_prompt):
    """Chunks of 100, with the tokens of an answer each a sequence of its own."""
    token_ids = tokens(LENGTH)
    got = logits_by_chunks(model_of(name), token_ids, 100, num_prompt=num_prompt)
    assert (got - reference_logits(name, token_ids)).abs().max() < 5e-5


@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_blocks_of_any_size_hold_the_same(block_size):
    """Blocks of entries grow to whole rows: 128 tokens, and 384 for blocks of 48."""
    token_ids = tokens(LENGTH)
    got = logits_by_chunks(model_of("deepseek_v4"), token_ids, 64, block_size=block_size)
    assert (got - reference_logits("deepseek_v4", token_ids)).abs().max() < 5e-5


@torch.inference_mode()
def test_batch_mates_of_other_lengths_change_nothing():
    """Nothing is padded: entries of one text pool no token of another. To the bit for rows that products see alike."""
    model, lengths = model_of("deepseek_v4"), (130, 3, 261)
    groups = group_caches(model.kv_specs)
    paging = [group.paging(4) for group in groups]
    kv = KVStorage(groups, [3 * lie.blocks_for(MAX_LEN) for lie in paging], block_size=4, device=CPU)
    for memory in kv.tensors():
        memory.fill_(float("nan"))
    chunks = []
    for i, length in enumerate(lengths):
        seq = Sequence(i, tokens(length, seed=i), length, MAX_LEN)
        seq.block_tables = [array("i", range(i, 3 * lie.blocks_for(MAX_LEN), 3)) for lie in paging]
        chunks.append(Chunk(seq, 0, length))
    batch, _ = build_batch(chunks, [True] * len(chunks), paging=paging, device=CPU)
    found = model.compute_logits(model(batch, kv)[batch.logits_indices])
    for i, (length, got) in enumerate(zip(lengths, found.split(lengths), strict=True)):
        assert (got - reference_logits("deepseek_v4", tokens(length, seed=i))).abs().max() < 5e-5


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(name):
    prompts = [tuple(tokens(length, seed=length)) for length in (1, 5, 33, 121, 300)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with tiny_llm(name, max_model_len=384, max_num_batched_tokens=48, num_kv_blocks=480) as llm:
        outputs = llm.generate([list(p) for p in prompts], params, use_tqdm=False)
    assert [out.token_ids for out in outputs] == [reference_greedy(name, prompt, 12) for prompt in prompts]


# --- what is kept


def test_each_kind_of_cache_is_a_group_of_its_own():
    """Windows of all layers; entries of 4 tokens with index keys, their states; entries of 128 and their states."""
    groups = group_caches(model_of("deepseek_v4").kv_specs)
    kept = [(g.caches, g.spec.tokens_per_row, g.spec.retention, [p.width for p in g.spec.parts]) for g in groups]
    assert kept == [
        ((0, 1, 4, 7, 10), 1, Retention(127), [32]),
        ((2, 8), 4, None, [32, 16]),
        ((3, 9), 1, Retention(4, 4), [4 * 32, 4 * 16]),
        ((5,), 128, None, [32]),
        ((6,), 1, Retention(0, 128), [2 * 32]),
    ]
    assert all(part.dtype == torch.float32 for g in (groups[2], groups[4]) for part in g.spec.parts)


@torch.inference_mode()
def test_what_the_retention_lets_go_is_read_by_nobody():
    """Before each step, rows that the caches' retention gives up are filled with NaN."""
    model, token_ids = model_of("deepseek_v4_window"), tokens(300)
    groups = group_caches(model.kv_specs)
    paging = [group.paging(1) for group in groups]
    counts = [lie.blocks_for(len(token_ids)) for lie in paging]
    kv = KVStorage(groups, counts, block_size=1, device=CPU)
    seq = Sequence(0, list(token_ids), len(token_ids), MAX_LEN)
    seq.block_tables = [array("i", range(count)) for count in counts]
    found, start = [], 0
    for stop in (5, 6, 130, 131, 132, 256, 257, 300):
        for group in groups:
            if group.spec.retention is not None:
                for part in (part for number in group.caches for part in kv.rows(number)):
                    part.data[: group.spec.retention.first_kept(start)] = float("nan")
        batch, _ = build_batch([Chunk(seq, start, stop)], [True], paging=paging, device=CPU)
        found.append(model.compute_logits(model(batch, kv)))
        start = stop
    want = reference_logits("deepseek_v4_window", token_ids)
    assert (torch.cat(found) - want).abs().max() < 5e-5


# --- positions


def test_only_compressing_layers_are_interpolated():
    """Layers with windows alone keep rope_theta and plain frequencies; the others' cosines carry no factor."""
    model = model_of("deepseek_v4")
    tables = [layer.attn.cos_sin for layer in model.layers]
    assert tables[0] is tables[4]
    assert tables[1] is tables[2] is tables[3]
    frequencies = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(tables[0][1], torch.cat((frequencies.cos(), frequencies.sin())))
    half = tables[1].shape[1] // 2
    norms = tables[1][:, :half].square() + tables[1][:, half:].square()
    torch.testing.assert_close(norms, torch.ones_like(norms))  # 1.277 squared if YaRN's factor were applied
    # theta 160000, dimension 8: ramp from 0 to 3, so pair 0 is kept and pair 3 slowed by 16.
    slowest = 1.6e5 ** -(6 / 8) / 16
    assert math.isclose(math.atan2(float(tables[1][1, -1]), float(tables[1][1, half - 1])), slowest, rel_tol=1e-4)


# --- the checkpoint's names and dtypes


def copied(tmp_path, name: str, edit) -> Any:
    """A copy of a tiny checkpoint with other tensors."""
    folder = tmp_path / name
    shutil.copytree(checkpoint_folder(name), folder)
    (file,) = folder.glob("*.safetensors")
    save_file({k: v.clone() for k, v in edit(load_file(file)).items()}, file, metadata={"format": "pt"})
    return folder


def official(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers writes, under DeepSeek's names."""
    made = {}
    for name, tensor in tensors.items():
        ours = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        made[ours.replace(".attn.norm.", ".attn.kv_norm.").replace("lm_head.", "head.")] = tensor
    return made


def test_official_and_resaved_names_are_the_same_model(tmp_path):
    want = model_of("deepseek_v4")
    folder = copied(tmp_path, "deepseek_v4", official)
    got = loaded_model(folder)
    names = set(official(load_file(next(folder.glob("*.safetensors")))))
    assert names == set(wanted_tensors(got))  # DeepSeek's are the model's own
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.0.hc_attn_scale"} < names
    assert {"layers.1.attn.indexer.compressor.ape", "layers.0.attn.kv_norm.weight", "layers.0.attn.attn_sink"} < names
    (resaved,) = checkpoint_folder("deepseek_v4").glob("*.safetensors")
    assert "model.layers.0.attn.norm.weight" in load_file(resaved)
    for one, other in zip(got.parameters(), want.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda t: t | {"mtp_x.weight": torch.ones(1)}, r"1 left over: mtp_x\.weight"),
        (lambda t: t | {"layers.0.ffn.gate.bias": torch.ones(8)}, r"left over: layers\.0\.ffn\.gate\.bias"),
        (lambda t: t | {"layers.0.attn.norm.weight": torch.ones(32)}, "kv_norm.weight and .*which are the same"),
        (lambda t: {k: v for k, v in t.items() if k != "layers.2.attn.compressor.ape"}, "1 missing: .*compressor.ape"),
        (lambda t: {k: v for k, v in t.items() if k != "layers.0.ffn.gate.tid2eid"}, "1 missing: .*tid2eid"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path, edit, sentence):
    folder = copied(tmp_path, "deepseek_v4", lambda tensors: edit(official(tensors)))
    with pytest.raises(ValueError, match=sentence):
        loaded_model(folder)


def test_experts_of_tokens_may_be_int32(tmp_path):
    """Released as int64; the released code reads int32."""

    def narrowed(tensors):
        assert tensors["model.layers.0.ffn.gate.tid2eid"].dtype == torch.int64
        assert "model.layers.0.ffn.gate.bias" not in tensors
        return {k: v.int() if k.endswith("tid2eid") else v for k, v in tensors.items()}

    model = loaded_model(copied(tmp_path, "deepseek_v4", narrowed))
    token_ids = tokens(20)
    assert torch.equal(logits_by_chunks(model, token_ids, 20), logits_by_chunks(model_of("deepseek_v4"), token_ids, 20))


def test_parameters_of_streams_gates_and_sinks_stay_float32():
    """In a bfloat16 model too, as released; and the compressor's products give float32."""
    model = model_of("deepseek_v4", dtype=torch.bfloat16)
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    wanted = {"fn", "base", "scale", "attn_sink.weight", "ape.weight", "correction_bias"}
    assert {name.split("hc_")[-1].rpartition(".")[2] for name in kept if ".hc_" in name or "hc_head" in name} == {
        "fn", "base", "scale",
    }  # fmt: skip
    assert all(name.endswith(tuple(wanted)) for name in kept)
    x = torch.ones(1, 48, dtype=torch.bfloat16)
    assert model.layers[1].attn.compressor.value_and_gate(x).dtype == torch.float32
    assert model.layers[1].attn.indexer.weights_proj(x).dtype == torch.float32


def test_bfloat16_stays_near_float32():
    """Tokens before a router or an index chooses otherwise; the mean over all, which are some units apart then."""
    token_ids = tokens(200)
    got = logits_by_chunks(model_of("deepseek_v4", dtype=torch.bfloat16), token_ids, 64).float()
    assert (got - reference_logits("deepseek_v4", token_ids)).abs().median() < 0.15


def test_the_config_that_transformers_writes_has_no_word_of_the_official_one():
    """What the tests above read is the re-saved form."""
    config = json.loads((checkpoint_folder("deepseek_v4") / "config.json").read_text())
    assert "compress_ratios" not in config
    assert "num_hash_layers" not in config
    assert config["rope_parameters"]["compress"]["attention_factor"] == 1.0
