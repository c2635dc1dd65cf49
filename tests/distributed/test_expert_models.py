"""Models whose experts ranks share: the logits of one rank, of weights that each rank reads for itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.batch import Batch, CacheView, ExchangeSize
from rorqual.cache.spec import group_caches
from rorqual.cache.storage import KVStorage
from rorqual.distributed.mesh import Mesh
from rorqual.loader.safetensors import SafetensorsCheckpoint
from rorqual.loader.weights import fill_with_dummy_weights
from rorqual.ops.registry import load_backends
from tests.distributed.ranks import connect, on_ranks
from tests.models.scattered import CPU, loaded_model, logits_by_chunks, steps, tokens
from tests.tiny import checkpoint_folder

load_backends("native", "cpu")
MODELS = {"qwen3_moe": 8, "deepseek_v3": 16, "deepseek_v4": 8}
"""And their numbers of experts."""
TEXTS = [tokens(40, seed=1), tokens(9, seed=2)]
"""Of each replica; the second has nothing to do after a while."""
NUM_PROMPT, CHUNK = 6, 3
WITHIN = 1e-4


def _idle(model: Any) -> tuple[Batch, KVStorage]:
    """A step without tokens."""
    groups, none = group_caches(model.kv_specs), torch.zeros(0, dtype=torch.int64)
    caches = tuple(CacheView(none, torch.zeros(0, 1, dtype=torch.int32)) for _ in groups)
    start, lens = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    batch = Batch(none, none, start, lens, caches, none, query_lens=(), context_lens_host=(), num_answer_tokens=0)
    return batch, KVStorage(groups, [1] * len(groups), block_size=4, device=CPU)


def _batches(model: Any, replica: int, num_replicas: int) -> Iterator[tuple[Batch, KVStorage]]:
    """A replica's steps, and without tokens those in which only others have some; buffers of both kinds in turn."""
    mine = ((step.batch, step.kv) for step in steps(model, TEXTS[replica], CHUNK, num_prompt=NUM_PROMPT))
    if num_replicas == 1:
        yield from mine
        return
    sizes = itertools.zip_longest(*([len(text[i : i + CHUNK]) for i in range(0, len(text), CHUNK)] for text in TEXTS))
    for i, counts in enumerate(sizes):
        size = ExchangeSize(max(count or 0 for count in counts), fixed=i % 2 == 0)
        batch, kv = next(mine, None) or _idle(model)
        yield replace(batch, exchange=size), kv


def _logits(rank: int, store: Any, tp: int, dp: int, folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    """Those of this rank's replica."""
    mesh = connect(rank, store, tp=tp, dp=dp, expert_parallel=True)
    found = {}
    for name, folder in folders.items():
        model = loaded_model(folder, mesh=mesh)
        parts = []
        for batch, kv in _batches(model, mesh.dp_rank, dp):
            with torch.inference_mode():
                parts.append(model.compute_logits(model(batch, kv)[batch.logits_indices]))
        found[name] = torch.cat(parts)
    return found


@pytest.mark.parametrize(
    ("tp", "dp"),
    [
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_one_rank(tp, dp):
    folders = {name: checkpoint_folder(name) for name in MODELS}
    by_rank = on_ranks(tp * dp, _logits, tp, dp, folders)
    for name, folder in folders.items():
        alone = loaded_model(folder)
        for replica in range(dp):
            want = logits_by_chunks(alone, TEXTS[replica], CHUNK, num_prompt=NUM_PROMPT)
            first, *others = (found[name] for found in by_rank[replica * tp : (replica + 1) * tp])
            assert first.shape == want.shape
            assert (first - want).abs().max() < WITHIN, name
            assert all(torch.equal(first, other) for other in others), name


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_reads_its_own_experts_alone(name, monkeypatch):
    """The rest of the checkpoint is read by every rank, whole experts by one."""
    folder, load = checkpoint_folder(name), SafetensorsCheckpoint.load
    read: list[str] = []
    monkeypatch.setattr(
        SafetensorsCheckpoint, "load", lambda self, name, *rows: read.append(name) or load(self, name, *rows)
    )
    loaded_model(folder)
    every, by_rank = set(read), []
    for rank in range(2):
        read.clear()
        loaded_model(folder, mesh=Mesh.of_rank(rank, dp_size=2, expert_parallel=True))
        assert len(read) == len(set(read))
        by_rank.append(set(read))
    experts = {name for name in every if ".experts." in name}
    assert by_rank[0] | by_rank[1] == every
    assert by_rank[0] & by_rank[1] == every - experts
    numbers = [{int(name.partition(".experts.")[2].partition(".")[0]) for name in names & experts} for names in by_rank]
    half = MODELS[name] // 2
    assert numbers == [set(range(half)), set(range(half, 2 * half))]


def test_what_is_nobodys_is_left_over(tmp_path):
    """Other ranks' experts are known by their names; no more are there than the config has."""
    from safetensors.torch import load_file, save_file

    source = checkpoint_folder("qwen3_moe")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.experts.8.up_proj.weight"] = tensors["model.layers.0.mlp.experts.7.up_proj.weight"]
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 left over: model\.layers\.0\.mlp\.experts\.8\.up_proj\.weight$"):
        loaded_model(tmp_path, mesh=Mesh.of_rank(0, dp_size=2, expert_parallel=True))


def test_made_up_experts_are_those_of_one_rank():
    """By their numbers among all, wherever they are."""
    folder = checkpoint_folder("qwen3_moe")
    alone = loaded_model(folder)
    fill_with_dummy_weights(alone, seed=3)
    for rank in range(2):
        model = loaded_model(folder, mesh=Mesh.of_rank(rank, dp_size=2, expert_parallel=True))
        fill_with_dummy_weights(model, seed=3)
        experts = {name: tensor for name, tensor in model.named_parameters() if ".experts." in name}
        assert len(experts) == 2 * 2 * 4  # gate_up and down in two layers
        whole = dict(alone.named_parameters())
        assert all(torch.equal(tensor, whole[name]) for name, tensor in experts.items())


def test_replicas_that_share_experts_must_have_agreed():
    model = loaded_model(checkpoint_folder("qwen3_moe"), mesh=Mesh.of_rank(0, dp_size=2, expert_parallel=True))
    step = next(steps(model, TEXTS[0], CHUNK))
    with pytest.raises(ValueError, match="must agree on a number of tokens"):
        model(step.batch, step.kv)
