"""What implementations of DeepSeek's models got wrong elsewhere, where no other test says it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.models.registry import read_model_config
from rorqual.ops.registry import load_backends
from rorqual.ops.row_attention import RowRange, RowSource, row_attention
from rorqual.ops.row_cache import read_rows, store_rows
from tests.models.scattered import loaded_model, logits_by_chunks, tokens
from tests.models.test_deepseek_v3 import V3
from tests.ops.row_attention_cases import row_attention_case
from tests.ops.test_parity import moved
from tests.tiny import DEEPSEEK_CONFIGS, checkpoint_folder, random_deepseek

LENGTH = 150


def changed(name: str, folder: Path, **changes: Any) -> tuple[Any, Any]:
    """(the model, transformers' one) of a tiny config with other values."""
    model_type, options = DEEPSEEK_CONFIGS[name]
    theirs = random_deepseek(model_type, options | changes)
    theirs.save_pretrained(folder)
    return loaded_model(folder), theirs


def test_each_epsilon_is_in_its_place(tmp_path):
    """rms_norm_eps in all norms and in the root that streams' weights are divided by, hc_eps elsewhere: both large."""
    ours, theirs = changed("deepseek_v4", tmp_path, rms_norm_eps=0.3, hc_eps=0.07)
    with torch.inference_mode():
        want = theirs(input_ids=torch.tensor([tokens(LENGTH)]), use_cache=False).logits[0]
    assert (logits_by_chunks(ours, tokens(LENGTH), 64) - want).abs().max() < 5e-5


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "deepseek_v4"])
def test_routers_score_in_float32_beside_bfloat16(name):
    """What a bfloat16 score would round away decides between experts."""
    model = loaded_model(checkpoint_folder(name), dtype=torch.bfloat16)
    gates = [module for path, module in model.named_modules() if path.endswith((".mlp.gate", ".ffn.gate"))]
    assert gates
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    for gate in gates:
        scores = gate(x)
        assert scores.dtype == torch.float32
        assert not torch.equal(scores, scores.bfloat16().float())


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_index_scores_that_are_all_zero_choose_the_same_in_every_chunking(name, chunk_size, tmp_path):
    """One head, and a relu: about half of the scores are exactly zero, and equal. The first of equals are taken."""
    model, _ = changed(name, tmp_path, index_n_heads=1)
    whole, cut = (logits_by_chunks(model, tokens(LENGTH), size) for size in (LENGTH, chunk_size))
    assert (whole - cut).abs().max() < 5e-4  # rounding makes up to 1e-4, by the processor


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v4_window"])
def test_nobody_sees_a_later_token(name):
    """Neither by the indexer nor by an entry that is not complete, in one chunk: later tokens change nothing before."""
    model, text = loaded_model(checkpoint_folder(name)), tokens(LENGTH)
    want = logits_by_chunks(model, text, LENGTH)
    for kept in (30, 127, 128, 131):
        other = logits_by_chunks(model, text[:kept] + tokens(LENGTH - kept, seed=5), LENGTH)
        assert (other[:kept] - want[:kept]).abs().max() < 5e-5
        assert (other[kept:] - want[kept:]).abs().max() > 0.1


def test_a_rope_theta_that_is_missing_is_told(caplog):
    """10000 is what transformers takes then."""
    config = read_model_config({key: value for key, value in V3.items() if key != "rope_theta"})
    assert config.rope.theta == 10000
    assert "gives no rope_theta" in caplog.text


def test_an_entry_is_seen_by_the_very_token_that_completes_it():
    """Its last token's logits depend on what entries are made of, and those of the one before do not."""
    model, text = loaded_model(checkpoint_folder("deepseek_v4")), tokens(8)
    want = logits_by_chunks(model, text, 8)
    for layer in model.layers:
        if layer.attn.kind.ratio == 4:
            layer.attn.compressor.ape.weight.data.mul_(-3)
    got = logits_by_chunks(model, text, 8)
    changes = (got - want).abs().amax(1)
    assert changes[:3].max() < 5e-5
    assert changes[3] > 1e-2


@pytest.mark.parametrize(
    ("device", "num_blocks"), [("cpu", 100), pytest.param("cuda", 1_100_000_000 // 576, marks=pytest.mark.gpu)]
)
def test_rows_lie_further_than_32_bits_reach(device, num_blocks):
    """A cache of more than 2^32 numbers, 8 GiB on a GPU: what lies at its end is stored, read and attended to alike."""
    load_backends(*(["triton"] if device == "cuda" else []))
    case = row_attention_case([1, 3], [9, 40], dtype=torch.bfloat16, width=576, value_dim=512)
    (query, (source,), batch), options = moved(case, device)
    near, which = source
    far = near._replace(data=torch.empty(num_blocks, *near.data.shape[1:], dtype=torch.bfloat16, device=device))
    offset = num_blocks - len(near.data)
    rows = near.data.flatten(0, 1)
    slots = torch.arange(len(rows), device=device) + offset * near.rows_per_block
    store_rows(rows, far, slots)
    assert torch.equal(read_rows(far, slots).isnan(), rows.isnan())
    assert torch.equal(far.data[offset:].nan_to_num(), near.data.nan_to_num())
    shifted = RowRange((which.block_tables + offset).int(), *which[1:])
    want = row_attention(query, [source], batch, **options)
    assert torch.equal(row_attention(query, [RowSource(far, shifted)], batch, **options), want)
    assert not want.isnan().any()
